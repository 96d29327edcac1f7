"""The three Linux calls that Python 3.10 lacks: unshare, setns and mount."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection, Generator
from pathlib import Path

NEW_MOUNTS = 0x00020000
NEW_HOSTNAME = 0x04000000
NEW_IPC = 0x08000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(kinds: int) -> None:
    """Move this process into new namespaces of these kinds (NEW_PIDS: only its children). Raises OSError."""
    _check(_libc.unshare(kinds), "unshare")


@contextlib.contextmanager
def children_in(pid_namespace: str | None) -> Generator[None, None, None]:
    """Children that this thread starts meanwhile live in that PID namespace (/proc/N/ns/pid) or in a new one.

    The process itself stays where it is, and so do the children of its other threads. Raises OSError.
    """
    own = os.open("/proc/thread-self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if pid_namespace is None:
            unshare(NEW_PIDS)
        else:
            other = os.open(pid_namespace, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _check(_libc.setns(other, NEW_PIDS), f"setns {pid_namespace}")
            finally:
                os.close(other)
        try:
            yield
        finally:
            _check(_libc.setns(own, NEW_PIDS), "setns back")
    finally:
        os.close(own)


@contextlib.contextmanager
def children_on(cores: Collection[int]) -> Generator[None, None, None]:
    """Children that this thread starts meanwhile run on these cores only. Raises OSError."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def keep_mounts_private() -> None:
    """What is mounted from now on is not seen where this namespace was copied from. Raises OSError."""
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount --make-rprivate /")


def bind(source: str | Path, target: str | Path) -> None:
    """Show `source`, with all that is mounted below it, at `target` too. Raises OSError."""
    result = _libc.mount(os.fsencode(source), os.fsencode(target), None, _MS_BIND | _MS_REC, None)
    _check(result, f"mount --rbind {source} {target}")


def mount(kind: str, target: str | Path, options: str = "") -> None:
    """Mount a file system of this kind (proc, sysfs, tmpfs) that has no device. Raises OSError."""
    result = _libc.mount(kind.encode(), os.fsencode(target), kind.encode(), 0, options.encode())
    _check(result, f"mount -t {kind} {target}")
