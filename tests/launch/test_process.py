"""Processes of a run: found by their mark, their session or their adoption, and ended for good."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from paceline.launch.process import (
    LEASE_VARIABLE,
    Ending,
    RankProcess,
    find_marked,
    is_alive,
    kernel_says,
    rank_environment,
    send_signal,
    start_rank,
)

pytestmark = pytest.mark.launcher

LEASE = f"test-{os.getpid()}/0"


def wait_until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.fixture
def start() -> Iterator[Callable[[str], RankProcess]]:
    """Starts `python -c CODE` as a rank; all descriptors are closed afterwards."""
    ranks: list[RankProcess] = []

    def start(code: str) -> RankProcess:
        env = {LEASE_VARIABLE: LEASE}
        argv = [sys.executable, "-c", code]
        rank = start_rank({"rank": len(ranks), "argv": argv, "env": env, "cwd": "/"})
        ranks.append(rank)
        return rank

    yield start
    for rank in ranks:
        send_signal(find_marked(LEASE), signal.SIGKILL)
        rank.process.wait()
        for descriptor in list(rank.streams):
            rank.close_stream(descriptor)


def read(rank: RankProcess) -> bytes:
    """The next words of a rank, within a limit."""
    stdout = next(descriptor for descriptor, stream in rank.streams.items() if stream == "stdout")
    words = b""
    deadline = time.monotonic() + 10
    while b"\n" not in words:
        assert select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
        words += os.read(stdout, 1000)
    return words


def begin_ending(ranks: list[RankProcess], grace_s: float, now: float) -> Ending:
    """Spares what else this process has started: pools of ranks for other tests, say, are no orphans of the run."""
    spare = {child.pid for child in psutil.Process().children()}
    return Ending(LEASE, ranks, spare=spare - {rank.pid for rank in ranks}, grace_s=grace_s, now=now)


def end(ranks: list[RankProcess], grace_s: float) -> float:
    """Run an Ending to its end; how long it took."""
    began = time.monotonic()
    ending = begin_ending(ranks, grace_s, began)
    wait_until(lambda: ending.step(time.monotonic()))
    assert find_marked(LEASE) == []
    return time.monotonic() - began


def test_a_rank_has_a_session_no_stdin_and_both_environments(start: Callable[[str], RankProcess]) -> None:
    code = (
        "import os, sys; print(os.getsid(0) == os.getpid(), sys.stdin.read() == '', "
        f"os.environ['{LEASE_VARIABLE}'], os.environ['PATH'].split(':')[0], "
        "os.fstat(int(os.environ['PACELINE_EVENT_FD'].split(':')[0])).st_mode & 0o170000 == 0o010000)"
    )
    rank = start(code)
    assert read(rank).decode().split() == ["True", "True", LEASE, os.path.dirname(sys.executable), "True"]
    rank.process.wait(10)


def test_what_cannot_start_is_an_error_that_leaves_nothing_open() -> None:
    for change in ({"argv": ["/no/such/command"]}, {"cwd": "/no/such/folder"}):
        with pytest.raises(OSError, match="/no/such"):
            start_rank({"rank": 0, "argv": [sys.executable], "env": {}, "cwd": "/", **change})


def test_a_rank_that_ends_on_term_ends_at_once(start: Callable[[str], RankProcess]) -> None:
    rank = start("import time; print('up', flush=True); time.sleep(100)")
    read(rank)
    assert find_marked(LEASE) == [rank.pid]
    assert end([rank], grace_s=30.0) < 5.0
    assert rank.process.wait(1) == -signal.SIGTERM


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"


@pytest.mark.parametrize(("grace_s", "at_least_s", "at_most_s"), [(0.0, 0.0, 3.0), (0.3, 0.3, 4.0)])
def test_a_deaf_rank_is_killed_after_the_grace(
    start: Callable[[str], RankProcess], grace_s: float, at_least_s: float, at_most_s: float
) -> None:
    rank = start(DEAF)
    read(rank)
    assert at_least_s <= end([rank], grace_s) < at_most_s
    assert rank.process.wait(1) == -signal.SIGKILL


def test_a_second_request_has_less_patience(start: Callable[[str], RankProcess]) -> None:
    rank = start(DEAF)
    read(rank)
    began = time.monotonic()
    ending = begin_ending([rank], 1000.0, began)
    assert not ending.step(began)
    ending.hasten(grace_s=2000.0, now=began)  # more patience is no reason to wait longer
    ending.hasten(grace_s=0.0, now=began)
    wait_until(lambda: ending.step(time.monotonic()))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("session", "env"), [("True", ""), ("False", "env={},"), ("False", "")])
def test_grandchildren_go_too_when_the_rank_has_ended(
    start: Callable[[str], RankProcess], session: str, env: str
) -> None:
    code = (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {DEAF!r}], {env} start_new_session={session})"
    )
    rank = start(code)
    read(rank)  # the grandchild is up
    rank.process.wait(10)
    assert end([rank], grace_s=5.0) < 4.0


def test_the_rank_is_asked_first_and_its_children_later(start: Callable[[str], RankProcess]) -> None:
    """So that it can write a checkpoint while its loader processes still live."""
    not_deaf = DEAF.replace("signal.SIG_IGN", "signal.SIG_DFL")
    code = f"""
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {not_deaf!r}], stdout=subprocess.PIPE)
child.stdout.readline()
def on_term(number, frame):
    time.sleep(0.2)
    print("child is", child.poll(), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, on_term)
print("up", flush=True)
time.sleep(100)
"""
    rank = start(code)
    read(rank)
    end([rank], grace_s=10.0)
    assert read(rank) == b"child is None\n"
    assert rank.process.wait(1) == 0


def test_zombies_are_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(lambda: not is_alive(process.pid))
    process.wait()
    assert not is_alive(process.pid) and is_alive(os.getpid())
    send_signal([process.pid], signal.SIGTERM)  # no error


def test_the_kernel_says_nothing_about_a_process_that_it_did_not_kill() -> None:
    assert kernel_says(os.getpid()) == ""


@pytest.mark.parametrize(
    ("asked", "here", "expected"),
    [
        ({}, {"PATH": "/bin"}, {"PATH": "/venv/bin:/bin"}),
        ({"PATH": "/mine"}, {"PATH": "/bin"}, {"PATH": "/venv/bin:/mine"}),
        ({}, {}, {"PATH": f"/venv/bin:{os.defpath}"}),
        ({"A": "1"}, {"A": "0", "B": "0", "PATH": ""}, {"A": "1", "B": "0", "PATH": "/venv/bin:"}),
        (
            {"PYTHONPATH": "/run"},
            {"PYTHONPATH": "/host", "PATH": "/bin"},
            {"PYTHONPATH": "/run:/host", "PATH": "/venv/bin:/bin"},
        ),
    ],
)
def test_what_the_driver_says_goes_on_top_of_what_the_host_has(
    asked: dict[str, str], here: dict[str, str], expected: dict[str, str]
) -> None:
    assert rank_environment(asked, here, "/venv/bin/python") == expected
