"""`paceline run` on this machine, as a user would start it, and what it leaves there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACELINE = str(Path(sys.executable).parent / "paceline")
DOWN_LIMIT_S = 10.0
"""Everything of a run is gone by then, whatever has happened to it."""


def wait_until(condition: Callable[[], object], limit_s: float, explain: Callable[[], object] = str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {explain()}"
        time.sleep(0.02)


@dataclasses.dataclass
class Run:
    """A `paceline run` in a folder of its own, with a state folder of its own."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def last_line(self) -> str:
        return self.err.rstrip("\n").rpartition("\n")[2]

    def wait(self, limit_s: float = 30.0) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s} s\n{self.out}\n{self.err}") from None

    def wait_for(self, text: str, count: int = 1) -> None:
        wait_until(lambda: self.out.count(text) >= count, 20, lambda: f"{text!r}\n{self.out}\n{self.err}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def processes(self) -> dict[int, str]:
        """All living processes that inherited this run's state folder: driver, agent, watchdog, ranks and theirs."""
        mark = f"XDG_STATE_HOME={state_of(self.folder)}".encode()
        found: dict[int, str] = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                environ = Path("/proc", name, "environ").read_bytes().split(b"\0")
                if mark in environ:
                    command = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(name)] = command
        return found

    def pid_of_rank(self, rank: int) -> int:
        (pid,) = [event["pid"] for event in self.events() if event["kind"] == "rank_started" and event["rank"] == rank]
        return pid

    def pid_of_agent(self) -> int:
        """The agent is the parent of its ranks."""
        stat = Path("/proc", str(self.pid_of_rank(0)), "stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])

    @property
    def run_folder(self) -> Path:
        (folder,) = (state_of(self.folder) / "paceline" / "runs").iterdir()
        return folder

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_folder / "events.jsonl").read_text().splitlines()]

    def expect_all_gone(self, limit_s: float = DOWN_LIMIT_S) -> None:
        wait_until(lambda: not self.processes(), limit_s, self.processes)


def state_of(folder: Path) -> Path:
    return folder / "state"


@contextlib.contextmanager
def start(folder: Path, *words: str, script: str = "", **env: str) -> Iterator[Run]:
    """`paceline run WORDS` with `script` as train.py there. At the end nothing of it may be left within 10 s."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        process = subprocess.Popen(
            [PACELINE, "run", *words],
            cwd=folder,
            env={**os.environ, "XDG_STATE_HOME": str(state_of(folder)), "COLUMNS": "80", **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    run = Run(folder, process)
    try:
        yield run
        run.expect_all_gone()
    finally:
        for pid in [process.pid, *run.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def run(folder: Path, *words: str, script: str = "", **env: str) -> Run:
    """The same, to its end."""
    with start(folder, *words, script=script, **env) as started:
        started.wait()
    return started
