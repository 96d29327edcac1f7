"""The examination as a whole: every check is heard, and none of them can end it."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from made_up_hosts import make_gpu_state, make_state
from paceline.checks import details, examine, host_states, quick
from paceline.checks.examine import CheckOptions
from paceline.checks.findings import CHECKS
from paceline.checks.host_states import HostState
from paceline.checks.quick import check_states, quick_findings
from paceline.checks.results import Result, catch_crash
from paceline.cluster.spec import Host, parse_hosts
from paceline.errors import HostError
from paceline.launch.errands import Reply
from paceline.launch.facts import gather_facts
from paceline.launch.hosts import Hosts, InterruptedEarlyError, open_hosts
from paceline.network.candidates import parse_nic
from paceline.network.wires import Wire


def test_two_healthy_hosts() -> None:
    findings, rows = check_states([make_gpu_state("alice"), make_gpu_state("bob")])
    assert {finding.status for finding in findings} == {"ok"}
    assert {row.what for row in rows} >= {"Python", "torch", "GPU models", "NCCL", "numpy", "clock"}
    assert {finding.where for finding in findings} == {"alice", "bob", ""}


def test_a_check_that_breaks_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(state: HostState) -> Iterator[Result]:
        raise RuntimeError("first line\nlast line")

    load = CHECKS["load"]
    monkeypatch.setitem(CHECKS, "load", type(load)(name="load", title="", sections={}, function=look))
    monkeypatch.setattr(quick, "HOST_CHECKS", (look,))
    findings, _ = check_states([make_state()])
    broken = [finding for finding in findings if finding.status == "crashed"]
    assert [(finding.check, finding.where, finding.text) for finding in broken] == [
        ("load", "bob", "the check itself broke: RuntimeError: last line")
    ]
    assert "encoding" in {finding.check for finding in findings}


def test_a_larger_part_that_breaks() -> None:
    def breaks() -> list[object]:
        raise KeyError("x")

    [finding] = catch_crash("wires", breaks)  # type: ignore[arg-type]
    assert (finding.check, finding.status) == ("wires", "crashed") and "KeyError" in finding.text

    def interrupted() -> list[object]:
        raise InterruptedEarlyError(2)

    with pytest.raises(InterruptedEarlyError):
        catch_crash("wires", interrupted)  # type: ignore[arg-type]


def test_the_clock_lies_between_question_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked at 1000 s by the driver's wall clock; the host's own monotonic clock narrows the answer's time down."""
    hosts = Hosts(parse_hosts("alice,bob"), queue.SimpleQueue())
    hosts.clock_offset_s = [-400.0, -400.0]
    monotonic = iter([50.0, 58.0])
    monkeypatch.setattr(host_states.time, "time", lambda: 1000.0)
    monkeypatch.setattr(host_states.time, "monotonic", lambda: next(monotonic))
    right = make_state(wall_s=1001.0, monotonic_s=451.0).details.as_dict()
    monkeypatch.setattr(host_states, "run_errands", lambda *_, **__: [Reply(value=right), Reply(problem="it hung")])
    alice, bob = host_states.read_details(hosts, host_states.DetailsQuery())
    assert alice.clock_ahead_s == pytest.approx((0.0, 1.0)), "not -7 to 1, as the time of all answers would say"
    assert bob.details is None and bob.problem == "it hung"


def test_slots_that_can_not_be() -> None:
    facts = gather_facts().replace(gpus=["A", "B"], visible_gpus=None)
    assert examine._choose_slots(Host(name="alice"), facts)[:2] == (2, 2)
    assert "has 2 GPUs" in examine._choose_slots(Host(name="alice", gpus=(5,)), facts)[3]


@pytest.mark.parametrize(
    ("results", "status", "text", "remedy"),
    [
        (examine.check_reachable(Host(name="bob"), None), "ok", "the agent work", ""),
        (
            examine.check_reachable(Host(name="bob"), HostError("bob: ssh refused the key", hint="ssh-copy-id bob")),
            "failure",
            "ssh",
            "ssh-",
        ),
        (quick.check_details("bob", "/py", ""), "ok", "could be read", ""),
        (quick.check_details("bob", "/py", "no answer within 5 s"), "failure", "no answer", "On bob:  /py -c"),
        (examine.check_slots("2 slots: one per GPU", ""), "ok", "2 slots", ""),
        (examine.check_slots("", "gpus=5 was asked for"), "failure", "gpus=5", "hostfile"),
        (
            examine.check_wires(["alice", "bob"], [Wire(address="10.0.0.1", interface="eth0", reason="")] * 2),
            "ok",
            "eth0 on alice, eth0 on bob",
            "",
        ),
    ],
)
def test_its_own_checks(results: Iterator[Result], status: str, text: str, remedy: str) -> None:
    [result] = results
    assert result.status == status and text in result.text and remedy in result.remedy


@pytest.mark.launcher
class TestHere:
    """With real agents on this machine."""

    def test_the_hosts_that_can_be_opened(self) -> None:
        hosts = (Host(name="localhost"), Host(name="127.0.0.1", python="/no/such/python"))
        found = examine.examine(CheckOptions(hosts=hosts, depth="quick"))
        assert [state.name for state in found.states] == ["localhost"]
        failures = [finding for finding in found.findings if finding.status == "failure"]
        assert [(finding.check, finding.where) for finding in failures] == [("reachable", "127.0.0.1")]
        assert "there is no Python at /no/such/python" in failures[0].text and "--python PATH" in failures[0].remedy

    def test_a_script(self, tmp_path: Path) -> None:
        """What is wrong in it, and what it imports that is not there."""
        script = tmp_path / "train.py"
        script.write_text("import no_such_module\nimport torch\nprint('hello'\n")
        options = CheckOptions(hosts=(Host(name="localhost"),), depth="quick", script=script)
        found = [finding for finding in examine.examine(options).findings if finding.status == "failure"]
        assert [(finding.check, finding.where) for finding in found] == [("unreadable-script", "train.py:3")]
        script.write_text("import no_such_module\nimport torch\n")
        [lacking] = [finding for finding in examine.examine(options).findings if finding.status == "failure"]
        assert lacking.text == "the script imports no_such_module, which no host has"

    def test_a_script_that_needs_gpus(self, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        made = "import sys\nimport torch.distributed as dist\n{}dist.init_process_group('nccl')\n"
        options = CheckOptions(hosts=(Host(name="localhost"),), depth="quick", script=script)
        script.write_text(made.format(""))
        [lacking] = [finding for finding in examine.examine(options).findings if finding.check == "backend"]
        assert lacking.status == "failure" and lacking.text.startswith("train.py:3 asks for NCCL, and no rank on loc")
        script.write_text(made.format("if len(sys.argv) > 1: "))
        assert not [finding for finding in examine.examine(options).findings if finding.check == "backend"]

    def test_modules_of_a_project_too_large_to_read(self, tmp_path: Path) -> None:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text("")
            for number in range(150):
                (tmp_path / name / f"m{number}.py").write_text("")
        script = tmp_path / "train.py"
        names = [f"import {name}.m{number}\n" for name in ("first", "second") for number in range(150)]
        script.write_text("".join(names))
        options = CheckOptions(hosts=(Host(name="localhost"),), depth="quick", script=script, project=tmp_path)
        assert not [finding for finding in examine.examine(options).findings if finding.status == "failure"]

    def test_a_network_that_is_not_there(self) -> None:
        """Also with one host, which needs none."""
        options = CheckOptions(hosts=(Host(name="localhost"),), depth="quick", nic=parse_nic("nonic0"))
        [found] = [finding for finding in examine.examine(options).findings if finding.status == "failure"]
        assert found.check == "wires" and "nonic0" in found.text

    def test_none_can_be_opened(self) -> None:
        options = CheckOptions(hosts=(Host(name="localhost"),), python="/no/such/python")
        found = examine.examine(options)
        assert not found.states and [finding.status for finding in found.findings] == ["failure"]

    def test_findings_for_the_start_of_a_run(self) -> None:
        with open_hosts(parse_hosts("localhost"), queue.SimpleQueue()) as hosts:
            facts = hosts.open("quick", [sys.executable], grace_s=0.1)
            findings = quick_findings(hosts, facts, [(1, 0)], imports=["torch", "no_such_module"])
        [lacking] = [finding for finding in findings if finding.status == "failure"]
        assert lacking.text == "the script imports no_such_module, which no host has"
        assert findings[0] is lacking, "the worst first"

    def test_details_of_this_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NCCL_ALGO", "Tree")
        before = threading.active_count()
        found = details.Details(**details.main({"run": "", "imports": ["json"], "data": None, "resolve_limit_s": 3.0}))
        assert found.variables["NCCL_ALGO"] == "Tree" and found.imports["json"]["found"]
        assert found.memory["total"] > 0 and found.disks["state"]["total"] > 0 and found.limits["nofile"][0] != 0
        assert found.hostname and found.boot_id and found.packages["pytest"]
        assert threading.active_count() == before
