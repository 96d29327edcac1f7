"""Forks: an errand's process on its host, which is the agent's own interpreter once more.

To start another Python takes a core for a tenth of a second, which is most of what a short errand needs. Standard
library only: this module runs on every host.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

from paceline.launch.process import LEASE_VARIABLE, RankProcess, rank_environment

_NUM_DESCRIPTORS = 1024


class ForkedProcess:
    """A child of ours, with what subprocess.Popen has of methods and the agent uses."""

    stdout = stderr = None
    """Its pipes are plain descriptors."""

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


def start_errand(number: int, module: str, argument: Any, *, lease: str, cwd: str) -> RankProcess:
    """Run `module.main(argument)` in a fork: in a session of its own, without stdin; its value is the last line.

    To be called with no other thread alive: a fork has none of them, and would wait for ever for a lock of theirs.
    """
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_errand(module, argument, (out_write, err_write), lease, cwd)
    os.close(out_write)
    os.close(err_write)
    streams = {out_read: "stdout", err_read: "stderr"}
    for descriptor in streams:
        os.set_blocking(descriptor, False)
    return RankProcess(number, ForkedProcess(pid), streams)


def _be_errand(module: str, argument: Any, outputs: tuple[int, int], lease: str, cwd: str) -> NoReturn:
    exit_code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for target, descriptor in enumerate(outputs, start=1):
            os.dup2(descriptor, target)
        # The channel must close when the agent dies, so no copy of its ends may live on here.
        os.closerange(3, _NUM_DESCRIPTORS)
        os.environ.update(rank_environment({LEASE_VARIABLE: lease}, os.environ, sys.executable))
        os.chdir(cwd)
        value = importlib.import_module(module).main(argument)
        print(f"\n{json.dumps(value)}", flush=True)
        exit_code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the agent's own code must not go on here
        traceback.print_exc()
    finally:
        os._exit(exit_code)
