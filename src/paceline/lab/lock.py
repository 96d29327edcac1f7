"""The lock on a lab's folder. Each process 1 of the lab holds it, so it tells the living from the dead."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path

_POLL_S = 0.01


@contextlib.contextmanager
def lock(folder: Path, *, timeout_s: float) -> Generator[int | None, None, None]:
    """The locked descriptor, or None if another still holds it after `timeout_s`. Raises OSError.

    The lock goes with the last copy of the descriptor: a process that inherits it keeps it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + timeout_s
    try:
        while not (is_ours := _try_to_lock(descriptor)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield descriptor if is_ours else None
    finally:
        os.close(descriptor)


def _try_to_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
