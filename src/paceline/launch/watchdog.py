"""The watchdog: a small process beside the agent that ends the run on this host if the agent itself is killed.

It reads the pids of the ranks, and waits for the pipe to close. Standard library only: this module runs on every host.
"""

from __future__ import annotations

import os
import select
import signal
import time

from paceline.launch.process import close_inherited, find_family, find_marked, send_signal

_SIGTERM_S = 2.0
_GIVE_UP_S = 12.0
_ALL_IS_WELL = b"done\n"
_BEAT = b"0\n"
_SILENCE_LIMIT_S = 20.0
"""An agent that was stopped (SIGSTOP) for so long has lost its driver: ranks must not outlive it."""


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

    def beat(self) -> None:
        """The agent is alive, and not merely there."""
        os.write(self._fd, _BEAT)

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
        os.dup2(read_fd, 0)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        close_inherited()
        sessions, is_well = _listen()
        if not is_well:
            _sweep(lease, sessions)
    finally:
        os._exit(0)


def _listen() -> tuple[set[int], bool]:
    """Until the agent's end, or its silence: the sessions that are left, and whether all is well."""
    sessions: set[int] = set()
    rest = b""
    while True:
        limit_s = _SILENCE_LIMIT_S if sessions else None
        if not select.select([0], [], [], limit_s)[0]:
            return sessions, False
        data = os.read(0, 4096)
        if not data:
            return sessions, False
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line + b"\n" == _ALL_IS_WELL:
                return sessions, True
            number = int(line)
            if number > 0:
                sessions.add(number)
            else:
                sessions.discard(-number)


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
