"""A module's trainable weights as one row of numbers, laid end to end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch


class FlatWeights:
    """Reads and writes any range of the row. Tied weights count once; frozen ones don't count.

    All ranks hold the same parameters in the same order, so a range means the same everywhere.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.parameters: list[torch.nn.Parameter] = [p for p in module.parameters() if p.requires_grad]
        self._starts = [0, *itertools.accumulate(parameter.numel() for parameter in self.parameters)]

    @property
    def num_values(self) -> int:
        return self._starts[-1]

    @property
    def everything(self) -> slice:
        """The whole row."""
        return slice(0, self.num_values)

    def read(self, part: slice, out: torch.Tensor) -> None:
        """Copies the values of `part` into `out`, which has as many."""
        for parameter, inside, outside in self._overlaps(part):
            out[outside].copy_(parameter.detach().reshape(-1)[inside])

    def write(self, part: slice, values: torch.Tensor) -> None:
        """The inverse of `read`."""
        for parameter, inside, outside in self._overlaps(part):
            row = parameter.detach().reshape(-1)
            row[inside].copy_(values[outside])
            if row.data_ptr() != parameter.data_ptr():  # not contiguous in memory (channels last): row is a copy
                parameter.detach().copy_(row.view_as(parameter))

    def views(self, row: torch.Tensor) -> dict[torch.nn.Parameter, torch.Tensor]:
        """The part of `row` (num_values values) that belongs to each parameter, in its shape."""
        parts = zip(self.parameters, self._starts[:-1], self._starts[1:], strict=True)
        return {parameter: row[start:stop].view(parameter.shape) for parameter, start, stop in parts}

    def _overlaps(self, part: slice) -> Iterator[tuple[torch.nn.Parameter, slice, slice]]:
        """(parameter, range within it, range within `part`) of each parameter that has a share in `part`."""
        for parameter, first, last in zip(self.parameters, self._starts[:-1], self._starts[1:], strict=True):
            start, stop = max(first, part.start), min(last, part.stop)
            if start < stop:
                yield parameter, slice(start - first, stop - first), slice(start - part.start, stop - part.start)


_CACHE_VALUES = 1 << 18


def checksum(values: torch.Tensor) -> int:
    """A sum over the bits of float32 `values` that finds a difference, at about the speed of memory. Sums of parts add
    up, modulo 2**64."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    # PyTorch first copies what it is to add up in another type: as a whole that takes ten times as long.
    for part in values.detach().view(torch.int32).split(_CACHE_VALUES):
        total += part.sum(dtype=torch.int64)
    return int(total)
