"""The watchdog: a small process beside the agent that ends the run on this host if the agent itself is killed.

It reads the pids of the ranks, and waits for the pipe to close. Standard library only: this module runs on every host.
"""

from __future__ import annotations

import os
import signal
import time

from paceline.launch.process import find_family, find_marked, send_signal

_SIGTERM_S = 2.0
_GIVE_UP_S = 12.0
_ALL_IS_WELL = b"done\n"


class Watchdog:
    """The agent's end: say which ranks there are, and at the end that all is well."""

    def __init__(self, lease: str) -> None:
        read_fd, self._fd = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _watch(lease, read_fd)
        os.close(read_fd)

    def add(self, pid: int) -> None:
        """A rank has been started."""
        os.write(self._fd, f"{pid}\n".encode())

    def remove(self, pid: int) -> None:
        """A rank has ended and left nothing in its session: the number may be given to somebody else."""
        os.write(self._fd, f"-{pid}\n".encode())

    def dismiss(self) -> None:
        """Nothing is left to be ended."""
        os.write(self._fd, _ALL_IS_WELL)
        os.close(self._fd)


def _watch(lease: str, read_fd: int) -> None:
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        # The channel must close when the agent dies, so no copy of its ends may live on here.
        os.dup2(read_fd, 0)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.closerange(3, 1024)
        heard = b""
        while data := os.read(0, 4096):
            heard += data
        if not heard.endswith(_ALL_IS_WELL):
            sessions: set[int] = set()
            for word in map(int, heard.split()):
                sessions = sessions | {word} if word > 0 else sessions - {-word}
            _sweep(lease, sessions)
    finally:
        os._exit(0)


def _sweep(lease: str, sessions: set[int]) -> None:
    """`sessions`: those in which something lived when the agent last looked, so that their numbers are not free."""
    began_s = time.monotonic()
    number = signal.SIGTERM
    while time.monotonic() - began_s < _GIVE_UP_S:
        remaining = set(find_marked(lease)) | set(find_family(sessions, spare=()))
        if not remaining:
            return
        send_signal(remaining, number)
        time.sleep(0.2)
        if time.monotonic() - began_s > _SIGTERM_S:
            number = signal.SIGKILL
