"""What `paceline run` says of its own, at 80 columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import render
from paceline.events import CheckpointSaved
from paceline.launch.environment import HostPlan, RunPlan
from paceline.launch.facts import Facts
from paceline.launch.failures import Failure
from paceline.launch.prepare import Prepared
from paceline.launch.reasons import Reason
from paceline.launch.run import Result
from paceline.launch.supervisor import Outcome
from paceline.network.wires import Wire
from paceline.watch.fold import RunView

WIDTH = 80
FOLDER = Path("/home/u/.local/state/paceline/runs/20260101-120000-abcd")
RUNTIME = "/home/u/.local/state/paceline/runtime/0123456789abcdef0123"
VIEW = RunView(hosts=("alice", "bob"), num_ranks=3)
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    boom()\nValueError: no\n'


def facts(name: str) -> Facts:
    return Facts(
        hostname=name,
        python_path="/usr/bin/python3",
        python_version="3.11.7",
        torch_version="2.13.0+cpu",
        cuda_version=None,
        has_safetensors=True,
        gpus=[],
        visible_gpus=None,
        num_cores=8,
        machine="x86_64",
        state_folder="/home/u/.local/state/paceline",
        free_bytes=1 << 40,
        interfaces=[],
    )


def host(name: str, slots: int, env: dict[str, str]) -> HostPlan:
    return HostPlan(
        name=name,
        slots=slots,
        num_cores=8,
        interface="eth0",
        gpus=None,
        python="/usr/bin/python3",
        cwd="/home/u/p",
        python_path=(RUNTIME,),
        env=env,
    )


@pytest.fixture
def prepared() -> Prepared:
    env = {"WANDB_API_KEY": "secret", "LR": "0.1"}
    plan = RunPlan(
        run_id="20260101-120000-abcd",
        hosts=(host("alice", 1, env), host("bob", 2, env)),
        master_addr="10.0.0.5",
        max_restarts=0,
    )
    command = ["/usr/bin/python3", "-c", "from paceline.train.worker import main; main()", "script", "train.py"]
    return Prepared(
        plan=plan,
        facts=(facts("alice"), facts("bob")),
        wires=(Wire(address="10.0.0.5", interface="eth0", reason="eth0 10.0.0.5: reaches bob"),) * 2,
        reasons=(Reason(what="hosts", why="from -H"), Reason(what="slots on alice", why="1: asked for in -H")),
        summary=(Reason(what="wires", why="eth0 on alice, bob; every pair of hosts was tried"),),
        commands=(command, command),
    )


def result(prepared: Prepared, folder: Path, outcome: Outcome, log_problem: str | None = None) -> Result:
    return Result(
        outcome=outcome,
        prepared=prepared,
        folder=folder,
        log_paths={rank: folder / f"rank-{rank}.stderr.log" for rank in range(3)},
        duration_s=12.3,
        log_problem=log_problem,
    )


def failure(rank: int | None, what: str, *, traceback: str = "", is_consequence: bool = False) -> Failure:
    return Failure(
        at_s=1.0,
        host=0 if rank == 0 else 1,
        rank=rank,
        exit_code=1,
        what=what,
        traceback=traceback,
        is_consequence=is_consequence,
    )


CLOSED = "exit code 1: RuntimeError: Connection closed by peer"
OUTCOMES = {
    "success": Outcome(exit_code=0),
    "raised": Outcome(
        exit_code=1,
        failures=(
            failure(1, "exit code 1: ValueError: no", traceback=TRACEBACK),
            failure(2, "exit code 1: ValueError: no", traceback=TRACEBACK),
            failure(0, CLOSED, traceback="Traceback\nRuntimeError\n", is_consequence=True),
        ),
    ),
    "killed": Outcome(exit_code=1, failures=(failure(2, "signal 9 (SIGKILL): killed from outside"),)),
    "host-gone": Outcome(exit_code=1, failures=(failure(None, "bob has not been heard for 7 s"),)),
    "many": Outcome(exit_code=1, failures=tuple(failure(rank % 3, "exit code 3") for rank in range(12))),
    "interrupted": Outcome(exit_code=130, interrupted_by=2),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_last_lines(prepared: Prepared, golden: Callable[[str, str], None], tmp_path: Path, name: str) -> None:
    for rank in range(3):
        (tmp_path / f"rank-{rank}.stderr.log").write_text("oh")
    lines = render.closing(result(prepared, tmp_path, OUTCOMES[name]), VIEW, WIDTH)
    golden(f"closing-{name}.txt", "\n".join(lines).replace(str(tmp_path), str(FOLDER)) + "\n")


@pytest.mark.parametrize("name", ["success", "raised", "interrupted"])
def test_the_newest_checkpoint_is_named_however_it_ended(prepared: Prepared, tmp_path: Path, name: str) -> None:
    checkpoint = CheckpointSaved(step=400, path="/home/u/p/checkpoints/00400", num_bytes=1000)
    view = RunView(hosts=VIEW.hosts, num_ranks=3, checkpoint=checkpoint)
    lines = list(render.closing(result(prepared, tmp_path, OUTCOMES[name]), view, WIDTH))
    assert len([line for line in lines if "/home/u/p/checkpoints/00400" in line]) == 1


def test_logs_that_are_not_complete_are_said_to_be_so(prepared: Prepared, tmp_path: Path) -> None:
    problem = "No space left on device: /state"
    first, *_ = render.closing(result(prepared, tmp_path, OUTCOMES["success"], problem), VIEW, WIDTH)
    assert first == "paceline: the log files are not complete: No space left on device: /state"


def test_the_first_lines(prepared: Prepared, golden: Callable[[str, str], None]) -> None:
    golden("opening.txt", "\n".join(render.opening(prepared, WIDTH)) + "\n")
    assert render.prefixes(prepared) == ["[alice:0]", "[bob:1]", "[bob:2]"]


def test_a_dry_run_as_text(prepared: Prepared, golden: Callable[[str, str], None]) -> None:
    golden("plan.txt", render.plan_text(prepared) + "\n")


def test_a_dry_run_as_json_hides_secrets(prepared: Prepared) -> None:
    text = render.plan_json(prepared)
    assert "secret" not in text and "secret" not in render.plan_text(prepared)
    record = json.loads(text)
    assert [rank["rank"] for rank in record["ranks"]] == [0, 1, 2]
    assert [rank["host"] for rank in record["ranks"]] == ["alice", "bob", "bob"]
    env = record["ranks"][2]["env"]
    assert (env["RANK"], env["LOCAL_RANK"], env["LR"]) == ("2", "1", "0.1")
    assert env["WANDB_API_KEY"] == "(hidden)"
    assert record["reasons"][0] == {"what": "hosts", "why": "from -H"}
