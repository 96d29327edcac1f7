"""`paceline run` on a lab host, as a user would start it, and what it leaves there."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from paceline.lab import Lab
from paceline.lab.lab import HostProcess

PACELINE = str(Path(sys.executable).parent / "paceline")
ALL = "h1,h2,h3,h4"
LEASE = "PACELINE_LEASE"
AGENT_SIGN = "exec(eval(f.readline()))"


class Run:
    """A `paceline run` that has been started on h1."""

    def __init__(self, lab: Lab, process: subprocess.Popen[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.lab = lab
        self.process = process
        self._stdout, self._stderr = stdout, stderr

    @property
    def stdout(self) -> str:
        return Path(self._stdout.name).read_text()

    @property
    def stderr(self) -> str:
        return Path(self._stderr.name).read_text()

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s\n{self.stdout}\n{self.stderr}") from None

    def wait_for(self, text: str, timeout_s: float = 20.0, count: int = 1) -> None:
        wait_until(lambda: self.stdout.count(text) >= count, timeout_s, lambda: f"{self.stdout}\n{self.stderr}")

    @property
    def headline(self) -> str:
        return self.stderr.rstrip("\n").split("\n")[-1]


@contextlib.contextmanager
def start(lab: Lab, *arguments: str, cwd: str, env: dict[str, str] | None = None) -> Iterator[Run]:
    """`paceline run ARGUMENTS` on h1, in `cwd` there; killed at the end if it still runs."""
    with tempfile.NamedTemporaryFile() as stdout, tempfile.NamedTemporaryFile() as stderr:
        process = lab.popen(
            "h1",
            [PACELINE, "run", *arguments],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            yield Run(lab, process, stdout, stderr)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(lab: Lab, *arguments: str, cwd: str, timeout_s: float = 40.0, env: dict[str, str] | None = None) -> Run:
    """The same, to its end."""
    with start(lab, *arguments, cwd=cwd, env=env) as started:
        started.wait(timeout_s)
        # The files are gone afterwards: keep what was written.
        kept = Run.__new__(Kept)
        kept.__dict__.update(process=started.process, text=(started.stdout, started.stderr))
        return kept


class Kept(Run):
    """A run that has ended, with what it wrote."""

    text: tuple[str, str]

    @property
    def stdout(self) -> str:
        return self.text[0]

    @property
    def stderr(self) -> str:
        return self.text[1]


def write(lab: Lab, host: str, path: str, text: str) -> str:
    """A file in a host's home, such as `project/train.py`; returns its folder as the host sees it."""
    file = lab.home(host) / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text))
    return str(Path(lab.spec.home) / Path(path).parent)


def of_runs(lab: Lab, sign: str = "\0") -> list[tuple[str, HostProcess]]:
    """Every process of any run on any host: ranks, what they left, agents, and whatever has `sign` in its command."""
    return [
        (host, process)
        for host in lab.hosts
        for process in lab.processes(host)
        if LEASE in process.environ or any(AGENT_SIGN in word or sign in word for word in process.command)
    ]


def agents(lab: Lab, host: str) -> list[int]:
    """The agent of a host, and its watchdog: the elder one first."""
    found = [process for process in lab.processes(host) if any(AGENT_SIGN in word for word in process.command[-3:])]
    return sorted(process.pid for process in found if process.command[0] != "sh")


def rank_pid(lab: Lab, host: str, rank: int) -> int:
    """The process of a rank."""
    [pid] = [
        process.pid
        for process in lab.processes(host)
        if process.environ.get("RANK") == str(rank) and "paceline.train.worker" in " ".join(process.command)
    ]
    return pid


def wait_until(condition: Callable[[], object], timeout_s: float, explain: Callable[[], object]) -> float:
    """Seconds until the condition held; fails after `timeout_s` with what `explain` says."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, explain()
        time.sleep(0.05)
    return time.monotonic() - began


def without_times(text: str) -> str:
    """For comparisons: numbers replaced."""
    return re.sub(r"\d+(\.\d+)?", "N", text)
