"""Killed at any moment, also while a checkpoint and its parts are being written, a run goes on from where it stood.

That it goes on bit for bit is shown in `tests/train/test_synchronised.py`, which kills nobody.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local_runs import Run, start, wait_until

pytestmark = [pytest.mark.launcher, pytest.mark.ranks, pytest.mark.timeout(150)]

SCRIPT = """
    import sys, torch, paceline
    run = paceline.init(timeout_s=60)
    samples = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    batches = run.batches(samples, 32)  # all of them at every step: a smooth curve
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    resumed = run.resume("kept")
    step, last = (resumed.step, resumed.step + 16) if resumed else (0, 1_000_000)
    while step < last:
        for x in batches:
            loss = (model(x) - x.flip(1)).square().mean()
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            run.checkpoint("kept", step=step)
            run.log(step=step, loss=loss)
            if step == last:
                break
    run.synchronize()
    print("weights", sum(parameter.double().sum().item() for parameter in model.parameters()))
"""

KILLS: dict[str, tuple[Callable[[Run], int], signal.Signals, str]] = {
    "driver": (lambda run: run.process.pid, signal.SIGKILL, ""),
    "ctrl-c": (lambda run: run.process.pid, signal.SIGINT, "─ paceline ─ stopped"),
    "agent": (Run.pid_of_agent, signal.SIGKILL, "paceline: host localhost failed first"),
    "rank": (lambda run: run.pid_of_rank(1), signal.SIGKILL, "paceline: rank 1 on 127.0.0.1 failed first: signal 9"),
}


@pytest.mark.parametrize(
    ("sync", "killed"),
    [
        ("every:topk=0.1:accumulate=2", "rank"),
        pytest.param("streaming:H=6:P=3:tau=2:none", "driver", marks=pytest.mark.large),
    ],
)
def test_killed_at_any_moment_it_goes_on(sync: str, killed: str, tmp_path: Path) -> None:
    words = ("-H", "localhost,127.0.0.1", "--env", "OMP_NUM_THREADS=1", "--sync", sync, "train.py")
    find, number, said = KILLS[killed]
    with start(tmp_path, *words, script=SCRIPT) as first:
        wait_until(lambda: len(losses(first)) >= 30, 60, lambda: f"{first.out}\n{first.err}")
        moment_s = random.uniform(0.0, 0.2)
        print(f"killed {moment_s:.3f} s later")
        time.sleep(moment_s)
        os.kill(find(first), number)
        assert first.wait(10) != 0
        assert said in first.err
        first.expect_all_gone()
        before = losses(first)
    newest = max(path.name for path in (tmp_path / "kept").glob("0*"))
    step = int(newest.rpartition("-")[2])

    with start(tmp_path, *words, script=SCRIPT) as again:
        assert again.wait(60) == 0, again.err
    assert f"paceline: continues from kept, step {step}\n" in again.out
    assert "without what each alone knew" not in again.out
    after = losses(again)
    assert len(before) <= step and sorted(after) == list(range(step + 1, step + 17))
    curve, goes_on = list(before.values()), list(after.values())
    start_loss, stood = mean(curve[:8]), mean(curve[-8:])
    assert mean(goes_on[-8:]) < mean(goes_on[:8]) < stood + 0.2 * (start_loss - stood), (before, after)
    weights = re.findall(r"weights (\S+)", again.out)
    assert len(weights) == 2 and weights[0] == weights[1]
    left = {path.name for path in (tmp_path / "kept").iterdir()} - {".lock", "parts"}
    assert left == {f"{int(newest[:6]) + number:06d}-step-{step + number}" for number in (15, 16)}
    assert {path.name for path in tmp_path.glob("kept/parts/*/*")} <= left


def losses(run: Run) -> dict[int, float]:
    """By step. A line that was cut short by the kill has no rate."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  loss (\S+)  ", run.out)}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
