"""What paceline's wrapping costs a training, against plain DistributedDataParallel in the same processes.

    .venv/bin/paceline run -H localhost:2 benchmarks/overhead.py              two ranks of one host
    .venv/bin/paceline run -H localhost,127.0.0.1 benchmarks/overhead.py      two hosts, one rank each

Both train the model of examples/gpt.py on the same batches, a step each in turns, and each pair of turns gives a
ratio of samples per second: a busy machine slows both down alike. The last line has the median of all pairs, and
between what the median of ever more pairs would lie, 19 times in 20.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import CONTEXT, GPT  # an example, not a package

BATCH = 4


def trainer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[torch.Tensor], None]
) -> Callable[[torch.Tensor], None]:
    """One step on a batch."""

    def step(batch: torch.Tensor) -> None:
        backward(model(batch))
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds_of(step: Callable[[torch.Tensor], None], batches: list[torch.Tensor]) -> float:
    """Until the last rank has done its steps."""
    dist.barrier()
    began_s = time.perf_counter()
    for batch in batches:
        step(batch)
    dist.barrier()
    return time.perf_counter() - began_s


def bounds_of_median(values: list[float]) -> tuple[float, float]:
    """Order statistics between which the median of the distribution lies in 95 of 100 cases: half of the values lie
    below it, give or take 0.98 times the root of their number."""
    reach = round(0.98 * len(values) ** 0.5)
    middle = len(values) // 2
    return sorted(values)[max(0, middle - reach)], sorted(values)[min(len(values) - 1, middle + reach)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=800, help="turns of each (800)")
    parser.add_argument("--steps", type=int, default=1, help="in each turn (1)")
    args = parser.parse_args()

    run = paceline.init()
    torch.manual_seed(0)
    plain, ours = (GPT(width=128, layers=4, heads=4).to(run.device) for _ in range(2))
    ddp = DistributedDataParallel(plain, device_ids=[run.device] if run.device.type == "cuda" else None)
    prepared, optimizer = run.prepare(ours, torch.optim.AdamW(ours.parameters(), lr=1e-4))
    steps = (
        trainer(ddp, torch.optim.AdamW(plain.parameters(), lr=1e-4), torch.Tensor.backward),
        trainer(prepared, optimizer, run.backward),
    )
    batches = [torch.randint(256, (BATCH, CONTEXT + 1), device=run.device) for _ in range(args.steps)]
    ratios = []
    for pair in range(-1, args.pairs):
        first = pair % 2  # who begins
        times_s = {which: seconds_of(steps[which], batches) for which in (first, 1 - first)}
        if pair >= 0:  # the turns before it warm up
            ratios.append(times_s[0] / times_s[1])
    if run.rank == 0:
        low, high = bounds_of_median(ratios)
        print(
            f"paceline's samples per second over plain DDP's: {statistics.median(ratios):.3f} "
            f"({low:.3f} to {high:.3f}; {len(ratios)} pairs)"
        )


if __name__ == "__main__":
    main()
