"""Functions that run on a host in processes of their own: what comes back, whatever they do."""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.cluster.spec import parse_hosts
from paceline.launch.errands import Errand, Reply, run_errands
from paceline.launch.forks import ERRAND_NAME
from paceline.launch.hosts import HostsError, open_hosts
from paceline.launch.process import find_marked

pytestmark = pytest.mark.launcher


def test_errands_side_by_side() -> None:
    with open_hosts(parse_hosts("localhost,127.0.0.1"), queue.SimpleQueue()) as hosts:
        hosts.open("errands", [sys.executable] * 2, grace_s=0.1)
        began_s = time.monotonic()
        found = run_errands(
            hosts,
            [
                Errand(host=0, module="operator", argument=None),
                Errand(host=1, module="calendar", argument=["2026", "1"]),
                Errand(host=1, module="no_such_module"),
                Errand(host=0, module="timeit", argument=["-n", "1", "import time; time.sleep(60)"]),
            ],
            timeout_s=3.0,
        )
    assert "no attribute 'main'" in found[0].problem
    assert found[1] == Reply(value=None), "what it has printed before its value does no harm"
    assert found[2] == Reply(problem="ModuleNotFoundError: No module named 'no_such_module'")
    assert found[3] == Reply(problem="no answer within 3 s")
    assert time.monotonic() - began_s < 30, "closing the channel has ended what was still running"


def test_hosts_that_failed_are_named_by_their_place() -> None:
    with open_hosts(parse_hosts("localhost,127.0.0.1"), queue.SimpleQueue()) as hosts:
        with pytest.raises(HostsError) as raised:
            hosts.open("errands", [sys.executable, "/no/such/python"], grace_s=0.1)
    assert list(raised.value.failures) == [1] and "no Python at /no/such/python" in str(raised.value)


MODULE = """\
import atexit, os, signal, subprocess, sys, threading, time

def main(argument):
    match argument:
        case "look":
            return {
                "lease": os.environ["PACELINE_LEASE"].partition("/")[0],
                "cwd": os.getcwd(),
                "leads a session": os.getsid(0) == os.getpid(),
                "descriptors": len([d for d in os.listdir("/proc/self/fd") if int(d) > 2]) - 1,
                "stdin": sys.stdin.read(),
                "SIGTERM": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            }
        case "exit":
            sys.exit(0)
        case "object":
            return object()
        case "interrupt":
            raise KeyboardInterrupt
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "late":
            atexit.register(print, "more")
            threading.Thread(target=lambda: (time.sleep(0.05), print("[", flush=True))).start()
            print("[", flush=True)
            os._exit(0)
        case "agent":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        case "stop":
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(60)
        case "program":
            return subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL).pid
    print("many words " * 50_000)
    return argument
"""


def test_an_errand_has_nothing_of_the_agents_but_its_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "errand_of_a_test.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    long = "x" * 300_000  # more than a command line would take
    with open_hosts(parse_hosts("localhost"), queue.SimpleQueue()) as hosts:
        [facts] = hosts.open("errands", [sys.executable], grace_s=0.1)
        asked = ["look", "exit", "object", "interrupt", "kill", "late", long]
        errands = [Errand(host=0, module="errand_of_a_test", argument=argument) for argument in asked]
        look, *others, printed = run_errands(hosts, errands, timeout_s=10.0)
    assert look.value == {
        "lease": "errands",
        "cwd": facts.state_folder,
        "leads a session": True,
        "descriptors": 0,
        "stdin": "",
        "SIGTERM": True,
    }
    assert [reply.problem for reply in others] == [
        "SystemExit: 0",
        "TypeError: Object of type object is not JSON serializable",
        "KeyboardInterrupt",
        "it ended with exit code -9 and no word",
        "its answer can't be read: [",
    ]
    assert printed.value == long


def test_nothing_of_an_errand_outlives_the_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not a program that it has started in a session of its own, nor the errand of an agent that is killed, which
    is told of at once, and of which every later errand is told at once as well."""
    (tmp_path / "errand_of_a_test.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with open_hosts(parse_hosts("localhost,127.0.0.1"), queue.SimpleQueue()) as hosts:
        hosts.open("errands", [sys.executable] * 2, grace_s=0.1)
        began_s = time.monotonic()
        errands = [
            Errand(host=host, module="errand_of_a_test", argument=argument)
            for host, argument in enumerate(["program", "agent"])
        ]
        program, killed = run_errands(hosts, errands, timeout_s=20.0)
        [again] = run_errands(hosts, errands[1:], timeout_s=20.0)
        assert "the agent there has ended" in killed.problem and again == killed
        assert time.monotonic() - began_s < 10
        assert find_marked("errands/0") == [program.value]
    until_s = time.monotonic() + 10
    while find_marked("errands/0") or session_members():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_host_that_is_not_heard_any_more_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "errand_of_a_test.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("paceline.launch.hosts.HOST_SILENCE_LIMIT_S", 2.5)
    with open_hosts(parse_hosts("localhost,127.0.0.1"), queue.SimpleQueue()) as hosts:
        hosts.open("errands", [sys.executable] * 2, grace_s=0.1)
        began_s = time.monotonic()
        errands = [Errand(host=host, module="errand_of_a_test", argument="stop" if host else "x") for host in range(2)]
        well, stopped = run_errands(hosts, errands, timeout_s=30.0)
        assert well.value == "x" and stopped.problem.startswith("127.0.0.1: not heard for 2 s")
        assert time.monotonic() - began_s < 10
        [agent] = [child for child in psutil.Process().children() if child.status() == psutil.STATUS_STOPPED]
        agent.kill()
    until_s = time.monotonic() + 10
    while session_members():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def session_members() -> list[str]:
    """Errands anywhere on this machine whose module is the test's: none may be left."""
    paths = Path("/proc").glob("[0-9]*/comm")
    found: list[str] = []
    for path in paths:
        with contextlib.suppress(OSError):
            if path.read_text().strip() == ERRAND_NAME and Path(f"{path.parent}/cwd").exists():
                found.append(str(path))
    return found
