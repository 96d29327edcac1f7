"""Buffers that training changes (BatchNorm's running statistics), averaged over hosts once per period."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.codec import PLAIN
from paceline.sync.collectives import Mesh


class SharedBuffers:
    """The buffers of a module on this rank, and what all hosts share in their place.

    Buffers that never change, masks and tables, are never sent. Whole numbers (how many batches BatchNorm has seen)
    are averaged too and rounded: where all hosts hold the same number it stays.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._shared: list[torch.Tensor] = []
        self._changing: list[int] = []
        """Indices of those that have changed in training. The same on all hosts, which do the same."""
        self._mean: torch.futures.Future[torch.Tensor] | None = None

    def take_own(self) -> None:
        """What this rank's buffers are now is what all share. What is under way is forgotten."""
        self._shared = [buffer.detach().clone() for buffer in self._own()]
        self._mean = None

    def send(self, mesh: Mesh, weights: Callable[[], list[float]]) -> None:
        """Begins to average those that change; `weights` as for `Mesh.mean`."""
        own = self._own()
        differ = [i for i, (mine, shared) in enumerate(zip(own, self._shared, strict=True)) if not mine.equal(shared)]
        self._changing = sorted({*self._changing, *differ})
        if self._changing:
            row = torch.cat([own[index].reshape(-1).float() for index in self._changing])
            self._mean = mesh.mean(row, codec=PLAIN, sum_local=False, weights=weights)

    def receive(self, *, adopt: bool) -> None:
        """Waits for the averages; with `adopt` they are what all share, and this rank's own."""
        if self._mean is None:
            return
        row, self._mean = self._mean.wait(), None
        if not adopt:
            return
        own = self._own()
        for index, mean in zip(self._changing, row.split([own[i].numel() for i in self._changing]), strict=True):
            value = mean.view_as(own[index])
            self._shared[index].copy_(value if own[index].is_floating_point() else value.round())
            own[index].copy_(self._shared[index])

    def shared_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What all share in place of this buffer of the module; None for another tensor."""
        own = zip(self._own(), self._shared, strict=True)
        return next((shared for mine, shared in own if mine is tensor), None)

    def swap_in(self) -> list[torch.Tensor]:
        """Gives the module the shared values; what it had is for `put_back`."""
        own = self.own_values()
        self.set_own_values(self._shared)
        return own

    def put_back(self, own: list[torch.Tensor]) -> None:
        self.set_own_values(own)

    def own_values(self) -> list[torch.Tensor]:
        return [buffer.detach().clone() for buffer in self._own()]

    def set_own_values(self, values: list[torch.Tensor]) -> None:
        for buffer, value in zip(self._own(), values, strict=True):
            buffer.copy_(value)

    def pending_state(self) -> dict[str, Any]:
        """What is under way, waited for, as it is kept in a checkpoint."""
        return {"changing": self._changing, "mean": None if self._mean is None else self._mean.wait()}

    def load_pending_state(self, state: dict[str, Any]) -> None:
        self._changing = list(state["changing"])
        if state["mean"] is not None:
            self._mean = torch.futures.Future()
            self._mean.set_result(state["mean"])

    def _own(self) -> list[torch.Tensor]:
        # Looked up anew: a module may put another tensor in a buffer's place.
        return [buffer for buffer in self._module.buffers() if _is_number(buffer)]


def _is_number(buffer: torch.Tensor) -> bool:
    return buffer.dtype != torch.bool and not buffer.is_complex()
