"""Buffers that training may change (BatchNorm's running statistics), averaged over hosts once per period."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.modules.batchnorm import _NormBase

from paceline.codec import PLAIN
from paceline.sync.collectives import Mesh

_MOST_VALUES = 1 << 16


class SharedBuffers:
    """The buffers of a module on this rank, and what all hosts share in their place.

    Which ones is a matter of the model alone, so that all hosts send the same: all of normalisation layers, and others
    of up to 65,536 values. Larger ones are masks and tables, as a rule; each host keeps its own. Whole numbers (how
    many batches BatchNorm has seen) are averaged too and rounded: where all hosts hold the same number it stays.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._places = [(part, name) for part in module.modules() for name in part._buffers if _is_shared(part, name)]
        self._shared: list[torch.Tensor] = []
        self._mean: torch.futures.Future[torch.Tensor] | None = None

    def take_own(self) -> None:
        """What this rank's buffers are now is what all share. What is under way is forgotten."""
        self._shared = [buffer.detach().clone() for buffer in self._own()]
        self._mean = None

    def send(self, mesh: Mesh, weights: Callable[[], list[float]]) -> None:
        """Begins to average them; `weights` as for `Mesh.mean`."""
        if self._places:
            row = torch.cat([buffer.reshape(-1).float() for buffer in self._own()])
            self._mean = mesh.mean(row, codec=PLAIN, sum_local=True, weights=weights)

    def receive(self, *, adopt: bool) -> None:
        """Waits for the averages; with `adopt` they are what all share, and this rank's own."""
        if self._mean is None:
            return
        row, self._mean = self._mean.wait(), None
        own = self._own()
        if adopt:
            for buffer, shared, mean in zip(own, self._shared, row.split([b.numel() for b in own]), strict=True):
                shared.copy_((mean if shared.is_floating_point() else mean.round()).view_as(shared))
                buffer.copy_(shared)

    def shared_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What all share in place of this buffer of the module; None for another tensor."""
        own = zip(self._own(), self._shared, strict=True)
        return next((shared for mine, shared in own if mine is tensor), None)

    def swap_in(self) -> list[torch.Tensor]:
        """Gives the module the shared values; what it had is for `set_own_values`."""
        own = self.own_values()
        self.set_own_values(self._shared)
        return own

    def own_values(self) -> list[torch.Tensor]:
        return [buffer.detach().clone() for buffer in self._own()]

    def set_own_values(self, values: list[torch.Tensor]) -> None:
        for buffer, value in zip(self._own(), values, strict=True):
            buffer.copy_(value)

    def pending_state(self) -> torch.Tensor | None:
        """What is under way, waited for, as it is kept in a checkpoint."""
        return None if self._mean is None else self._mean.wait()

    def load_pending_state(self, mean: torch.Tensor | None) -> None:
        if mean is not None:
            self._mean = torch.futures.Future()
            self._mean.set_result(mean)

    def _own(self) -> list[torch.Tensor]:
        # Looked up anew: a module may put another tensor in a buffer's place.
        return [part.get_buffer(name) for part, name in self._places]


def _is_shared(part: torch.nn.Module, name: str) -> bool:
    buffer = part._buffers[name]
    if buffer is None or buffer.dtype == torch.bool or buffer.is_complex() or name in part._non_persistent_buffers_set:
        return False
    return isinstance(part, _NormBase) or buffer.numel() <= _MOST_VALUES
