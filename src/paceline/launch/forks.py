"""Forks: an errand's process on its host, which is the agent's own interpreter once more.

To start another Python takes a core for a tenth of a second, which is most of what a short errand needs. Standard
library only: this module runs on every host.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any, NoReturn

from paceline.launch.process import LEASE_VARIABLE, RankProcess, close_inherited, open_pipes, rank_environment

ERRAND_NAME = "paceline-errand"
"""What /proc calls it: its command line is the agent's."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ForkedProcess:
    """A child of ours, with what subprocess.Popen has of methods and the agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it lives."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing to a process that has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def start_errand(number: int, module: str, argument: Any, *, lease: str, cwd: str) -> tuple[RankProcess, int]:
    """Fork a process that will run `module.main(argument)`, in a session of its own, without stdin; its value is the
    last line that it prints. It begins when something is written to the descriptor that comes with it, so that by then
    the watchdog knows of it, and ends when that is closed before.

    Raises OSError, also where another thread is alive: a fork has none of them, and would wait for ever for a lock of
    theirs.
    """
    if threading.active_count() > 1:
        raise OSError(errno.EAGAIN, "the agent is still looking for its network")
    start_read, start_write = os.pipe()
    try:
        with open_pipes("stdout", "stderr") as (streams, ends):
            # A signal that came before the fork has set its own handlers would be the agent's, and lost.
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            try:
                pid = os.fork()
                if pid == 0:
                    _be_errand(module, argument, [start_read, *ends], lease, cwd)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    except OSError:
        os.close(start_write)
        raise
    finally:
        os.close(start_read)
    return RankProcess(number, ForkedProcess(pid), streams), start_write


def _be_errand(module: str, argument: Any, ends: list[int], lease: str, cwd: str) -> NoReturn:
    exit_code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        for target, descriptor in enumerate(ends):
            os.dup2(descriptor, target)
        close_inherited()
        if os.read(0, 1):
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            close_inherited()
            with open("/proc/self/comm", "w", encoding="ascii") as file:
                file.write(ERRAND_NAME)
            os.environ.update(rank_environment({LEASE_VARIABLE: lease}, os.environ, sys.executable))
            os.chdir(cwd)
            value = importlib.import_module(module).main(argument)
            print(f"\n{json.dumps(value)}", flush=True)
            exit_code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the agent's own code must not go on here
        traceback.print_exc()
    finally:
        os._exit(exit_code)
