"""PowerSGD (arXiv 1905.13727): a gradient's matrix travels as two narrow factors.

With the gradients and what was lost before as M, and the last step's right factor Q: P = mean of M Q, made
orthonormal; Q = mean of Mᵀ P; the mean gradient is P Qᵀ, and what a rank has lost is M - P Qᵀ. Matrices that two
factors would not halve, and vectors, are averaged as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter

from paceline.codec import is_low_rank, matrix_shape
from paceline.sync.collectives import Mesh
from paceline.sync.pipeline import Job, Pipeline


@dataclasses.dataclass(frozen=True)
class _Matrix:
    values: Tensor
    """[rows, columns]: what was lost before; with the gradient while it is sent; then what is lost now."""
    mean: Tensor
    """[rows, columns]: the gradient, then the mean."""
    factor: Tensor
    """Q: [columns, rank], of the last step."""


class PowerSgd:
    """Averages the buckets of one model. Buckets are reduced one after the other, beside the backward pass.

    Ranks of different hardware may make P orthonormal with different last bits; then their gradients differ by as much.
    """

    def __init__(self, mesh: Mesh, rank: int, parameters: Sequence[Parameter]) -> None:
        self._mesh = mesh
        self._rank = rank
        self._places = {parameter: place for place, parameter in enumerate(parameters)}
        self._factors: dict[Parameter, Tensor] = {}
        """Q of each matrix: [columns, rank], the same on every rank."""
        self._pipeline = Pipeline(1, mesh.device)

    def mean(self, flat: Tensor, bucket: Sequence[Parameter], residual: Tensor) -> Future[Tensor]:
        """Averages `flat` (1-D float32: the gradients of `bucket`, end to end) over all ranks, in place. `residual`, as
        long as `flat`, is added, and then holds what was lost. If a value is not finite on any rank, the result is nan
        on all, and what was lost before is kept, but for the values that are not finite."""
        future: Future[Tensor] = Future(devices=[flat.device] if flat.is_cuda else None)
        self._pipeline.submit(self._reduce(flat, list(bucket), residual), future, flat)
        return future

    def state(self) -> dict[str, Tensor]:
        """By the parameter's place in the model."""
        return {str(self._places[parameter]): factor.clone() for parameter, factor in self._factors.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        parameters = list(self._places)
        self._factors = {
            parameters[int(place)]: factor.to(parameters[int(place)].device) for place, factor in state.items()
        }

    def close(self) -> None:
        self._pipeline.close()

    def _reduce(self, flat: Tensor, bucket: list[Parameter], residual: Tensor) -> Job:
        yield from ()  # one stretch alone: its means are waited for in place, in the same order on every rank
        matrices, rest = self._sort(flat, bucket, residual)
        for matrix in matrices:
            matrix.values.add_(matrix.mean)
        lefts = [matrix.values @ matrix.factor for matrix in matrices]
        # 0, or nan, which makes the mean nan everywhere: what is not finite in a matrix is in its factor, too
        health = torch.stack([tensor.sum() * 0 for tensor in [*lefts, *rest]]).sum()
        health, *means = self._mean([health, *lefts, *rest])
        if not torch.isfinite(health):
            for matrix in matrices:
                matrix.values.sub_(matrix.mean).nan_to_num_(nan=0.0)
            flat.fill_(torch.nan)
            return
        lefts = [torch.linalg.qr(left).Q for left in means[: len(matrices)]]
        for view, mean in zip(rest, means[len(matrices) :], strict=True):
            view.copy_(mean)
        # transposed, so that the large operand is read along its rows: three times as fast on a processor
        rights = self._mean([left.T.contiguous() @ matrix.values for matrix, left in zip(matrices, lefts, strict=True)])
        for matrix, left, right in zip(matrices, lefts, rights, strict=True):
            torch.mm(left, right, out=matrix.mean)
            matrix.values.sub_(matrix.mean)
            matrix.factor.copy_(right.T)

    def _sort(self, flat: Tensor, bucket: list[Parameter], residual: Tensor) -> tuple[list[_Matrix], list[Tensor]]:
        """Views of what travels as factors, and of what travels as it is."""
        sizes = [parameter.numel() for parameter in bucket]
        matrices, rest = [], []
        for parameter, view, lost in zip(bucket, flat.split(sizes), residual.split(sizes), strict=True):
            if is_low_rank(parameter.shape, self._rank):
                shape = matrix_shape(parameter.shape)
                matrices.append(_Matrix(lost.view(shape), view.view(shape), self._factor(parameter)))
            else:
                rest.append(view)
        return matrices, rest

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """The means over all ranks, with one message for all."""
        if not tensors:
            return []
        together = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._mesh.mean(together, sum_local=True).wait()
        parts = together.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _factor(self, parameter: Parameter) -> Tensor:
        if parameter not in self._factors:
            columns = matrix_shape(parameter.shape)[1]
            random = torch.Generator().manual_seed(self._places[parameter])  # the same on every rank
            self._factors[parameter] = torch.randn(columns, self._rank, generator=random).to(parameter.device)
        return self._factors[parameter]
