"""The kill table: whatever dies, nothing of the run is left on any host, and the headline names the right one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from lab_runs import ALL, Run, agents, of_runs, rank_pid, start, wait_until, write

from paceline.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(90)]

GONE_WITHIN_S = 10.0
CUT_HOST_GONE_WITHIN_S = 20.0

LONG = """
    import os, signal, subprocess, sys, time
    rank = int(os.environ["RANK"])
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what in ("stubborn", "deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["setsid", "sleep", "4321"])
        subprocess.Popen(["env", "-i", "sleep", "4321"])
        subprocess.Popen(["setsid", "env", "-i", "sleep", "4321"])
    print("ready", flush=True)
    if what == "raise" and rank == 2:
        raise ValueError("rank two is unhappy")
    if what == "stubborn" and rank == 1:
        time.sleep(2)  # until the others have said that they are there
        sys.exit(3)
    time.sleep(4321)
"""


@pytest.fixture
def project(lab: Lab) -> Iterator[str]:
    folder = write(lab, "h1", "project/long.py", LONG)
    yield folder
    # What a failed test left must not fail the next one as well.
    for _, process in of_runs(lab, "4321"):
        os.kill(process.pid, signal.SIGKILL)


def all_gone(lab: Lab, hosts: tuple[str, ...] = ("h1", "h2", "h3", "h4")) -> Callable[[], bool]:
    return lambda: not [process for host, process in of_runs(lab, "4321") if host in hosts]


def started(run: Run) -> Run:
    run.wait_for("ready", count=4)
    return run


def test_sigkill_of_the_driver(lab: Lab, project: str) -> None:
    with start(lab, "-H", ALL, "long.py", cwd=project) as run:
        started(run).process.kill()
        wait_until(all_gone(lab), GONE_WITHIN_S, lambda: of_runs(lab))


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_the_driver(lab: Lab, project: str, number: signal.Signals, exit_code: int) -> None:
    with start(lab, "-H", ALL, "long.py", cwd=project) as run:
        started(run).process.send_signal(number)
        assert run.wait(GONE_WITHIN_S) == exit_code
        assert "─ paceline ─ stopped" in run.stderr
        assert all_gone(lab)(), of_runs(lab)


def test_ctrl_c_twice_does_not_wait_for_the_grace(lab: Lab, project: str) -> None:
    with start(lab, "-H", ALL, "--grace", "60", "long.py", "deaf", cwd=project) as run:
        run.wait_for("ready", count=4)
        run.process.send_signal(signal.SIGINT)
        wait_until(lambda: "once more" in run.stderr, 5, lambda: run.stderr)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(GONE_WITHIN_S) == 130
        assert all_gone(lab)(), of_runs(lab)


def test_sigkill_of_an_agent(lab: Lab, project: str) -> None:
    with start(lab, "-H", ALL, "long.py", cwd=project) as run:
        started(run)
        os.kill(agents(lab, "h3")[0], signal.SIGKILL)
        assert run.wait(GONE_WITHIN_S) == 1
        wait_until(all_gone(lab), GONE_WITHIN_S, lambda: of_runs(lab))
        assert "host h3 failed first" in run.headline and "agent" in run.headline


def test_sigkill_of_a_rank(lab: Lab, project: str) -> None:
    with start(lab, "-H", ALL, "long.py", cwd=project) as run:
        started(run)
        os.kill(rank_pid(lab, "h4", 3), signal.SIGKILL)
        assert run.wait(GONE_WITHIN_S) == 1
        assert all_gone(lab)(), of_runs(lab)
        assert "rank 3 on h4 failed first: signal 9 (SIGKILL)" in run.headline
        assert "memory" in run.headline


def test_a_rank_that_raises(lab: Lab, project: str) -> None:
    with start(lab, "-H", ALL, "long.py", "raise", cwd=project) as run:
        assert run.wait(20 + GONE_WITHIN_S) == 1
        assert all_gone(lab)(), of_runs(lab)
        assert run.headline == ("paceline: rank 2 on h3 failed first: exit code 1: ValueError: rank two is unhappy")
        assert run.stderr.count("Traceback") == 1
        assert 'File "long.py"' in run.stderr and "worker.py" not in run.stderr


def test_a_rank_that_ignores_sigterm_and_has_grandchildren(lab: Lab, project: str) -> None:
    with start(lab, "-H", ALL, "long.py", "stubborn", cwd=project) as run:
        run.wait_for("ready", count=4)
        assert run.wait(GONE_WITHIN_S) == 1
        assert all_gone(lab)(), of_runs(lab, "4321")
        assert run.headline == "paceline: rank 1 on h2 failed first: exit code 3"


def test_a_host_whose_cable_is_pulled(lab: Lab, project: str) -> None:
    with start(lab, "-H", ALL, "long.py", cwd=project) as run:
        started(run)
        try:
            lab.link("h3", up=False)
            wait_until(all_gone(lab, ("h2", "h4")), GONE_WITHIN_S, lambda: of_runs(lab))
            wait_until(all_gone(lab, ("h3",)), CUT_HOST_GONE_WITHIN_S - GONE_WITHIN_S, lambda: of_runs(lab))
            assert run.wait(GONE_WITHIN_S) == 1
            assert "host h3 failed first" in run.headline and "not been heard" in run.headline
        finally:
            lab.link("h3", up=True)
    wait_until(all_gone(lab), GONE_WITHIN_S, lambda: of_runs(lab))
