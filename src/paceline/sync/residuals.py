"""What a codec has lost of each gradient so far, kept until it can be sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter


class Residuals:
    """By parameter, because DDP regroups its buckets after the first step; laid out like the bucket that asks."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = list(parameters)
        self._by_parameter: dict[Parameter, Tensor] = {}
        self._flat: dict[tuple[int, ...], Tensor] = {}
        """By the parameters of a bucket."""

    def of(self, bucket: Sequence[Parameter]) -> Tensor:
        """1-D float32, as long as the bucket; what is written there stays."""
        key = tuple(map(id, bucket))
        if key not in self._flat:
            kept = {other: flat for other, flat in self._flat.items() if not set(other) & set(key)}
            self._flat = kept | {key: self._lay_out(bucket)}
        return self._flat[key]

    def state(self) -> dict[str, Tensor]:
        """By the parameter's place in the model."""
        places = {parameter: place for place, parameter in enumerate(self._parameters)}
        return {str(places[parameter]): residual.clone() for parameter, residual in self._by_parameter.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continues from `state`; from zero where it holds nothing."""
        self._flat = {}
        self._by_parameter = {
            self._parameters[int(place)]: residual.to(self._parameters[int(place)].device, torch.float32).view(-1)
            for place, residual in state.items()
        }

    def _lay_out(self, bucket: Sequence[Parameter]) -> Tensor:
        flat = torch.zeros(sum(parameter.numel() for parameter in bucket), device=bucket[0].device)
        for parameter, view in zip(bucket, flat.split([parameter.numel() for parameter in bucket]), strict=True):
            if (before := self._by_parameter.get(parameter)) is not None:
                view.copy_(before)
            self._by_parameter[parameter] = view
        return flat
