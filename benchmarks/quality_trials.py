"""Which trainings benchmarks/quality.py is made of, and what came out of each."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from paceline.strategy import Outer, parse_sync

LRS = {"gpt": (4e-3, 8e-3, 1.6e-2), "small-gpt": (8e-3, 1.6e-2, 3.2e-2), "digits": (2e-3, 4e-3, 8e-3)}
BATCHES = {"gpt": 16, "small-gpt": 16, "digits": 32}
NUM_STEPS = {"gpt": 600, "small-gpt": 1500, "digits": 600}  # small-gpt: 21 tokens for each parameter; gpt: 1.4
OUTER_LRS = (0.4, 0.7, 1.0)  # of those that have momentum; plain averaging has nothing to tune
NUM_SEEDS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What one training is. Two with the same fields give the same loss, whatever the machine is doing."""

    task: str
    """gpt, small-gpt or digits."""
    sync: str
    """How it is synchronised, as `--sync` has it; or ddp, PyTorch's own averaging without paceline."""
    num_hosts: int
    """One worker on each."""
    lr: float
    """The highest of the inner optimizer's learning rates."""
    seed: int
    """Of the first weights and the order of the samples."""
    num_steps: int
    batch: int
    """Samples per step, of all workers together."""
    num_evaluations: int = 6
    rate: str = ""
    """What a link between hosts carries; empty for what the machine gives."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A way to synchronise that is tuned and then measured."""

    task: str
    sync: str
    num_hosts: int
    num_steps: int
    batch: int
    lrs: tuple[float, ...]
    outer_lrs: tuple[float, ...] = OUTER_LRS
    """Empty for the one that the strategy has."""
    num_seeds: int = NUM_SEEDS

    def grid(self) -> list[Trial]:
        """The trainings among which the best is chosen."""
        return [
            Trial(
                task=self.task,
                sync=sync,
                num_hosts=self.num_hosts,
                lr=lr,
                seed=0,
                num_steps=self.num_steps,
                batch=self.batch,
            )
            for sync in self._settings()
            for lr in self.lrs
        ]

    def _settings(self) -> list[str]:
        strategy = None if self.sync == "ddp" else parse_sync(self.sync)
        if not isinstance(strategy, Outer) or not strategy.momentum or not self.outer_lrs or "lr=" in self.sync:
            return [self.sync]
        return [str(dataclasses.replace(strategy, lr=lr)) for lr in self.outer_lrs]

    def due(self, results: Results) -> list[Trial]:
        """What can be trained now: first the grid, then the other seeds of its best."""
        missing = [trial for trial in self.grid() if trial not in results.found]
        return missing or [trial for trial in self.seeds(results) if trial not in results.found]

    def best(self, results: Results) -> Trial:
        """Of the grid, which is done."""
        return min(self.grid(), key=results.loss)

    def seeds(self, results: Results) -> list[Trial]:
        """The best of the grid, with each seed."""
        return [dataclasses.replace(self.best(results), seed=seed) for seed in range(self.num_seeds)]

    def is_at_edge(self, results: Results) -> bool:
        """Whether a learning rate of the best is the highest or lowest of the grid: a better one may lie outside."""
        best, settings = self.best(results), self._settings()
        tuned = [(best.lr, self.lrs), (best.sync, settings)]
        return any(len(values) > 2 and value in (values[0], values[-1]) for value, values in tuned)


class Results:
    """What has been found, in memory and in a file that is whole at any time."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[Trial, dict[str, Any]] = {}
        self.failed: set[Trial] = set()
        if path is not None and path.exists():
            names = {field.name for field in dataclasses.fields(Trial)}
            for run in json.loads(path.read_text())["runs"]:
                trial = Trial(**{name: run.pop(name) for name in names})
                self.found[trial] = run

    def add(self, trial: Trial, found: dict[str, Any] | None) -> None:
        """None for one that failed: it is not tried again now, but it is when the benchmark is started again."""
        self.found[trial] = found or {"held_out_loss": None}
        if found is None:
            self.failed.add(trial)
        elif self.path is not None:
            done = ((trial, found) for trial, found in self.found.items() if trial not in self.failed)
            text = json.dumps({"runs": [dataclasses.asdict(trial) | found for trial, found in done]}, indent=1)
            beside = self.path.with_name(self.path.name + ".part")
            beside.write_text(text + "\n")
            beside.replace(self.path)

    def loss(self, trial: Trial) -> float:
        """Infinite for one that failed or diverged."""
        loss = self.found[trial]["held_out_loss"]
        return loss if loss is not None and math.isfinite(loss) else math.inf


def entry_of(
    text: str, *, task: str, is_quick: bool, num_steps: int | None = None, batch: int | None = None, **more: Any
) -> Entry:
    """Of TEXT or TEXT@HOSTS, at the size in which the task is measured."""
    sync, _, hosts = text.partition("@")
    batch, num_steps = batch or BATCHES[task], num_steps or NUM_STEPS[task]
    if is_quick:
        num_steps, more = num_steps // 5, more | {"lrs": LRS[task][1:2], "outer_lrs": (), "num_seeds": 1}
    size = {"num_hosts": int(hosts or 4), "num_steps": num_steps, "batch": batch}
    return Entry(task=task, sync=sync, **{"lrs": LRS[task], **size, **more})
