"""Training whose hosts synchronise as they are told to: stopped in the middle of a period, it goes on to the bit."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import paceline
from rank_pool import RankPool

pytestmark = pytest.mark.ranks

LIMIT_S = 20.0


def make_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(23, 6, generator=generator)
    return list(zip(x, x.sin().sum(dim=1, keepdim=True), strict=True))


class Training:
    """A small model with BatchNorm and dropout, on as many hosts as there are ranks unless `num_hosts` says so."""

    def __init__(self, sync: str, precision: str = "fp32", momentum: bool = False) -> None:
        self.run = paceline.init(sync=paceline.parse_sync(sync), precision=precision, timeout_s=LIMIT_S)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Dropout(0.2),
            torch.nn.Linear(32, 1),
        )  # fmt: skip
        self.plain = model
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model, self.optimizer = self.run.prepare(model, optimizer)
        self.batches = self.run.batches(make_data(), 4)
        self.losses: list[float] = []

    def train(self, num_steps: int) -> None:
        """Over the ends of epochs: of three steps, the last of which is uneven."""
        end = len(self.losses) + num_steps
        while len(self.losses) < end:
            for x, y in self.batches:
                self.step(x, y)
                if len(self.losses) == end:
                    break

    def step(self, x: torch.Tensor, y: torch.Tensor, overflows: bool = False) -> None:
        with self.run.autocast():
            loss = torch.nn.functional.mse_loss(self.model(x), y) / 100  # small enough for the first scale of fp16
        self.run.backward(loss)
        if overflows:
            next(self.model.parameters()).grad[0, 0] = torch.inf
        self.run.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def own_weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.plain.parameters()]).tolist()

    def shared_weights(self) -> list[float]:
        return torch.cat([value.double().flatten() for value in self.plain.state_dict().values()]).tolist()

    def result(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "own": self.own_weights(),
            "shared": self.shared_weights(),
            "scaler": self.run._precision.state_dict(),
        }


@contextlib.contextmanager
def training(sync: str, *, num_hosts: int = 0, precision: str = "fp32") -> Iterator[Training]:
    """Every rank is a host of its own, or neighbours share one of `num_hosts`."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host = f"host-{rank * (num_hosts or size) // size}"
    with mock.patch.dict(os.environ, PACELINE_HOST=host):
        one = Training(sync, precision)
    try:
        yield one
    finally:
        one.run._leave()


def go_on(sync: str, folder: str, before: int, after: int, precision: str, num_hosts: int) -> dict[str, Any]:
    with training(sync, precision=precision, num_hosts=num_hosts) as calm:
        calm.train(before)
        calm.run.checkpoint(own_folder(folder), step=before)
        calm.losses.clear()
        calm.train(after)
        return calm.result()


def come_back(sync: str, folder: str, after: int, precision: str, num_hosts: int) -> dict[str, Any]:
    output = io.StringIO()
    with training(sync, precision=precision, num_hosts=num_hosts) as again:
        with torch.no_grad():
            next(again.plain.parameters()).fill_(4.0)
        with contextlib.redirect_stdout(output):
            assert again.run.resume(own_folder(folder)) is not None
        again.train(after)
        return {**again.result(), "said": output.getvalue().splitlines()}


def own_folder(folder: str) -> str:
    """Each rank has a disk of its own."""
    return f"{folder}/disk-{os.environ['RANK']}"


STRATEGIES = [
    ("local:H=4", 7, "fp32"),
    ("local:H=4", 7, "fp16"),
    ("diloco:H=4:int8", 7, "bf16"),
    ("post-local:H=3:warmup=4", 3, "fp32"),
    ("post-local:H=3:warmup=4", 8, "fp32"),
    ("streaming:H=6:P=2:tau=2:int4", 4, "fp32"),
    ("streaming:H=6:P=2:tau=2:mix=0.5", 7, "fp32"),
    ("eager:H=4:int8", 6, "fp32"),
    ("sparseloco:H=3", 7, "fp32"),
    ("every:int8", 5, "fp32"),
    ("every:topk=0.1", 5, "fp32"),
    ("every:powersgd=1", 5, "fp32"),
    ("every:accumulate=3", 5, "fp32"),
    ("every:int8:accumulate=3", 5, "fp16"),
]


@pytest.mark.parametrize(("sync", "before", "precision"), STRATEGIES)
def test_a_resumed_run_goes_on_bit_for_bit(
    sync: str, before: int, precision: str, two_ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    """In the middle of a period, an epoch and a window, from disks of their own."""
    calm = two_ranks.run(go_on, sync, str(tmp_path), before, 10, precision, 2)
    again = two_ranks.run(come_back, sync, str(tmp_path), 10, precision, 2)
    said = [rank.pop("said") for rank in again]
    assert [len(lines) for lines in said] == [1, 0], said
    if "int8" in sync and sync.startswith("every"):  # DDP arranges its buckets anew after the first step
        for left, right in zip(calm, again, strict=True):
            assert left["losses"] == pytest.approx(right["losses"], rel=1e-2)
    else:
        assert calm == again
    assert calm[0]["losses"] != calm[1]["losses"]
    if sync.startswith("every"):
        assert calm[0]["own"] == calm[1]["own"]
    else:
        assert calm[0]["own"] != calm[1]["own"] and calm[0]["shared"] == calm[1]["shared"]
