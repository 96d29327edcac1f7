"""Runs on each host, as the one rank there: does PyTorch itself get through? Meets the others, and adds up with them.

Needs PyTorch, which takes seconds to import: for the full depth only.
"""

from __future__ import annotations

# pyright: basic
# PyTorch's own types are too loose for strict.
import contextlib
import datetime
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

PHASES = ("start", "join", "one", "barrier", "large")
"""PyTorch is imported everywhere; the group is made; one element is added up; all wait for all; many elements."""


def main(argument: dict[str, Any]) -> dict[str, Any]:
    """Goes through PHASES up to the first that fails: {`phases`: what became of each, `large_s`}."""
    os.environ.update(argument["env"])
    member = _Member(argument)
    phases: list[dict[str, Any]] = []
    for name in PHASES:
        began_s = time.monotonic()
        try:
            member.steps[name]()
        except Exception as error:  # noqa: BLE001  # whatever the library raises is what we are here for
            words = str(error).strip().splitlines() or [type(error).__name__]
            took_s = round(time.monotonic() - began_s, 4)
            missing = member.find_missing(name)
            phases.append({"name": name, "took_s": took_s, "problem": words[0], "missing": missing})
            break
        phases.append({"name": name, "took_s": round(time.monotonic() - began_s, 4)})
    member.leave()
    return {"phases": phases, "large_s": member.large_s}


class _Member:
    """One rank of the group."""

    def __init__(self, argument: dict[str, Any]) -> None:
        self.large_s = 0.0
        self.steps: dict[str, Callable[[], None]] = {
            "start": self._start,
            "join": self._join,
            "one": self._add_one,
            "barrier": self._wait_for_all,
            "large": self._add_many,
        }
        self._rank: int = argument["rank"]
        self._num_ranks: int = argument["num_ranks"]
        self._address: str = argument["address"]
        self._port: int = argument["port"]
        self._backend: str = argument["backend"]
        self._num_bytes: int = argument["num_bytes"]
        self._start_limit = datetime.timedelta(seconds=argument["start_limit_s"])
        self._limit = datetime.timedelta(seconds=argument["limit_s"])
        self._device = torch.device("cuda", 0) if self._backend == "nccl" else torch.device("cpu")
        self._store: Any = None
        """PyTorch's types don't know that its stores are public."""

    def find_missing(self, name: str) -> list[int]:
        """The ranks that have not come as far as this phase."""
        missing: list[int] = []
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                missing = [rank for rank in range(self._num_ranks) if not self._store.check([f"{name}/{rank}"])]
        return missing

    def leave(self) -> None:
        """The store is rank 0's: it stays until the others have seen in it who is missing."""
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", "")
            if self._rank == 0:
                everyone = [f"left/{rank}" for rank in range(self._num_ranks)]
                self._store.wait(everyone, self._limit)

    def _start(self) -> None:
        self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            self._address,
            self._port,
            self._num_ranks,
            self._rank == 0,
            timeout=self._start_limit,
            wait_for_workers=False,
        )
        self._be_at("start")
        self._store.wait([f"start/{rank}" for rank in range(self._num_ranks)], self._start_limit)

    def _join(self) -> None:
        self._be_at("join")
        if self._backend == "nccl":
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            self._backend, store=self._store, rank=self._rank, world_size=self._num_ranks, timeout=self._limit
        )

    def _add_one(self) -> None:
        self._be_at("one")
        value = torch.ones(1, device=self._device)
        dist.all_reduce(value)
        if value.item() != self._num_ranks:
            raise RuntimeError(f"one from each of {self._num_ranks} hosts makes {value.item():g}")

    def _wait_for_all(self) -> None:
        self._be_at("barrier")
        if self._backend == "gloo":
            dist.monitored_barrier(timeout=self._limit, wait_all_ranks=True)
        else:
            dist.barrier()

    def _add_many(self) -> None:
        self._be_at("large")
        values = torch.ones(self._num_bytes // 4, device=self._device)
        began_s = time.monotonic()
        dist.all_reduce(values)
        is_right = bool((values == self._num_ranks).all())  # on a GPU this also waits for the result
        self.large_s = time.monotonic() - began_s
        if not is_right:
            raise RuntimeError("the sum of the large all-reduce is wrong: something on the way changes data")

    def _be_at(self, name: str) -> None:
        if self._store is not None:
            self._store.set(f"{name}/{self._rank}", "")
