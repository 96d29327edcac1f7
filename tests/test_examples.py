"""The examples run, learn, and resume."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.ranks


def torchrun(script: str, *args: str, cwd: pathlib.Path) -> str:
    """What two ranks print."""
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLES / script), *args],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=cwd, capture_output=True, text=True, timeout=55, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def held_out_losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"held_out_loss ([\d.]+)", output)]


def test_gpt_learns_and_resumes(tmp_path: pathlib.Path) -> None:
    small = ("--batch-size", "4", "--width", "32", "--layers", "1")
    output = torchrun("gpt.py", *small, "--steps", "30", cwd=tmp_path)
    before, after = held_out_losses(output)
    assert before > 5 and after < 4
    assert [path.name for path in (tmp_path / "checkpoints" / "gpt").glob("*-step-*")] == ["000001-step-30"]

    again = torchrun("gpt.py", *small, "--steps", "40", "--resume", cwd=tmp_path)
    at_resume, later = held_out_losses(again)
    assert at_resume == after and later < after
    assert "step 20 " not in again


def test_digits_are_learnt(tmp_path: pathlib.Path) -> None:
    output = torchrun("digits.py", cwd=tmp_path)
    accuracies = re.findall(r"([\d.]+)% of held-out digits right", output)
    assert len(accuracies) == 10 and float(accuracies[-1]) > 93
