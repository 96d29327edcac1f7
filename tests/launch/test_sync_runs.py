"""`paceline run --sync` on scripts with nothing of paceline's in them; this machine passes for two hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from local_runs import run

pytestmark = [pytest.mark.launcher, pytest.mark.ranks]

TWO_HOSTS = ("-H", "localhost,127.0.0.1", "--env", "OMP_NUM_THREADS=1")  # both have the same cores

SCRIPT = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Wrapped(DistributedDataParallel):  # as some frameworks do
        pass

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    one, two = Wrapped(nn.Linear(4, 1)), DistributedDataParallel(nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]
    try:
        for step in range(9 + 3 * rank):
            if step == FAILS_AT and rank == 1:
                raise ValueError("no such data")
            for model, optimizer in zip((one, two), optimizers):
                optimizer.zero_grad()
                model(torch.randn(5, 4)).square().mean().backward()
                optimizer.step()
    finally:
        END
    print("weights", [parameter.tolist() for model in (one, two) for parameter in model.parameters()])
"""


def test_two_models_and_an_uneven_end(tmp_path: Path) -> None:
    script = SCRIPT.replace("FAILS_AT", "-1").replace("END", "dist.destroy_process_group()")
    ended = run(tmp_path, *TWO_HOSTS, "--sync", "local:H=4", "train.py", script=script)
    assert ended.process.returncode == 0, ended.err
    assert "[localhost:0] paceline: sync local:H=4 between 2 hosts" in ended.out.splitlines()
    weights = re.findall(r"weights (.*)", ended.out)
    assert len(weights) == 2 and weights[0] == weights[1]
    summary = ended.err.splitlines()[-2]
    assert re.search(r"samples/s · \d+% of the time in synchronisation · \S+ kB sent to other hosts$", summary), summary


def test_a_failing_rank_is_not_waited_for(tmp_path: Path) -> None:
    script = SCRIPT.replace("FAILS_AT", "6").replace("END", "dist.destroy_process_group()")
    ended = run(tmp_path, *TWO_HOSTS, "--sync", "local:H=4", "train.py", script=script)
    assert ended.process.returncode == 1
    assert ended.last_line == "paceline: rank 1 on 127.0.0.1 failed first: exit code 1: ValueError: no such data"


def test_a_script_without_a_model_is_told(tmp_path: Path) -> None:
    ended = run(tmp_path, "--sync", "every:int8", "train.py", script="print('done')")
    said = "paceline: --sync every:int8 had no effect: this script made no DistributedDataParallel model"
    assert ended.process.returncode == 0
    assert ended.out.splitlines() == ["[localhost:0] done", f"[localhost:0] {said}"]
