"""`paceline.init` under the launchers that people have, in fresh processes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from paceline import InputError
from paceline.events import name_descriptor
from paceline.train.requirements import check_torch_version

SCRIPT = """
import paceline, torch
run = paceline.init(timeout_s=30)
model = torch.nn.Linear(2, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for batch in run.batches([torch.ones(2)] * 4, 1):
    run.backward(model(batch).mean())
    optimizer.step()
run.log(step=1, rank=run.rank)
"""
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "OMPI_", "SLURM_", "PACELINE_RUN", "TORCHELASTIC")


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


@pytest.fixture
def script(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.ranks
def test_alone(script: str, tmp_path: pathlib.Path) -> None:
    """Also: a rank tells the launcher what it has done, at the end at the latest."""
    told = tmp_path / "events"
    with told.open("wb") as events:
        result = subprocess.run(
            [sys.executable, "-W", "error", script],
            env=environment(PACELINE_EVENT_FD=name_descriptor(events.fileno())),
            pass_fds=[events.fileno()], capture_output=True, text=True, timeout=40, check=False,
        )  # fmt: skip
    assert result.returncode == 0, result.stderr
    first, last = result.stdout.splitlines()
    assert first.startswith("paceline: 1 rank on ") and "started by nobody (no launcher's variables are set)" in first
    assert last.startswith("step 1  rank 0  ") and last.endswith("samples/s")
    logged, *_, progress = sorted(
        map(json.loads, told.read_text().splitlines()), key=lambda event: event["kind"] == "progress"
    )
    assert logged["values"] == {"rank": 0.0}
    assert (progress["steps"], progress["samples"], progress["sync_wait_s"]) == (4, 4, None)


@pytest.mark.ranks
def test_torchrun(script: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script],
        env=environment(), capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    first, last = result.stdout.splitlines()
    assert first.startswith("paceline: 2 ranks on ")
    assert "gloo" in first and "timeout 30s" in first
    assert "started by torchrun (TORCHELASTIC_RUN_ID is set)" in first
    assert last.startswith("step 1  rank 0.5")


@pytest.mark.ranks
def test_open_mpi(script: str) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, script], stdout=subprocess.PIPE, text=True,
            env=environment(
                OMPI_COMM_WORLD_RANK=rank, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_LOCAL_RANK=rank,
                OMPI_COMM_WORLD_LOCAL_SIZE="2", PMIX_NAMESPACE=f"prterun-test-{os.getpid()}",
            ),
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=40)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "started by Open MPI" in outputs[0] and "step 1  rank 0.5" in outputs[0]
    assert outputs[1] == ""


BAD_CALLS = """
import paceline
for settings in ({"timeout_s": float("inf")}, {"timeout_s": float("nan")}, {"timeout_s": 1e12}, {"timeout_s": "9"},
                 {"timeout_s": 0}, {"seed": 1.5}, {"seed": "1"}, {"seed": True}, {"seed": 2**64}, {"seed": -2**63 - 1}):
    try:
        paceline.init(**settings)
        print("taken", settings)
    except paceline.InputError as error:
        print(error.message)
run = paceline.init(seed=2**64 - 1)
try:
    paceline.init()
except paceline.InputError as error:
    print(error.message)
"""


@pytest.mark.ranks
def test_what_init_can_not_use_and_a_second_call_are_refused() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", BAD_CALLS],
        env=environment(), capture_output=True, text=True, timeout=40, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    *lines, started, twice = result.stdout.splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        "timeout_s is inf", "timeout_s is nan", "timeout_s is 1000000000000.0", "timeout_s is '9'", "timeout_s is 0",
        "seed is 1.5", "seed is '1'", "seed is True", f"seed is {2**64}", f"seed is {-(2**63) - 1}",
    ]  # fmt: skip
    assert started.startswith("paceline: 1 rank") and twice == "paceline.init() was called twice"


def test_without_torch_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport paceline\npaceline.init"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert result.returncode == 1
    assert 'needs PyTorch 2.4 or newer, and there is none in this Python\n  pip install "torch' in result.stderr


def test_an_old_torch_is_refused() -> None:
    for good in ("2.4.0", "2.13.0+cpu", "3.0", "2.10.1rc1+cu130"):
        check_torch_version(good)
    with pytest.raises(InputError, match=r"2\.4 or newer; found 2\.3\.1\+cu121\n  pip install --upgrade"):
        check_torch_version("2.3.1+cu121")
