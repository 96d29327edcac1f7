"""A model whose compute is emulated: its layers sleep, so that a whole cluster's hosts fit on one machine.

The weights, the gradients and everything done with them are real; only the arithmetic of the layers is not.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

NUM_LAYERS = 24
_NUDGE = 1e-3


class _Sleep(torch.autograd.Function):
    """A third of a step's time in the forward pass, two thirds in the backward pass, as matrix products take it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, layer: EmulatedLayer) -> torch.Tensor:
        time.sleep(layer.compute_s / 3)
        ctx.layer = layer
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.layer.compute_s * 2 / 3)
        # A new view of what lies ready: a real layer would have written it by the end of its time.
        return grad, ctx.layer.gradient.view_as(ctx.layer.weight), None


class EmulatedLayer(torch.nn.Module):
    """One weight matrix of `num_values` values (rounded to a square) and a gradient of normal noise for it."""

    def __init__(self, num_values: int, compute_s: float) -> None:
        super().__init__()
        rows = math.isqrt(num_values)
        self.weight = torch.nn.Parameter(torch.zeros(rows, round(num_values / rows)))
        self.gradient = torch.randn(self.weight.numel()) * 1e-3  # no buffer: nobody is to send it
        self.compute_s = compute_s

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(values, self.weight, self)  # type: ignore[no-any-return]


class EmulatedModel(torch.nn.Module):
    """`NUM_LAYERS` equal layers: `model_bytes` of float32 weights in all, `compute_s` seconds a step in all."""

    def __init__(self, model_bytes: int, compute_s: float) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            EmulatedLayer(model_bytes // 4 // NUM_LAYERS, compute_s / NUM_LAYERS) for _ in range(NUM_LAYERS)
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values)
        return values

    def set_compute(self, compute_s: float) -> None:
        """Seconds a step from now on."""
        for layer in self.layers:
            layer.compute_s = compute_s / NUM_LAYERS

    @torch.no_grad()
    def nudge(self, step: int) -> None:
        """Stands in for the optimizer, whose time counts as emulated: moves one layer in turn, so that there is
        something to average."""
        layer = self.layers[step % NUM_LAYERS]
        layer.weight.add_(layer.gradient.view_as(layer.weight), alpha=_NUDGE)


def train(model: torch.nn.Module, emulated: EmulatedModel, num_steps: int) -> None:
    """The loop of an ordinary script. `model` is `emulated` in whatever synchronises it."""
    for step in range(num_steps):
        model(torch.ones(1)).sum().backward()
        emulated.nudge(step)
        model.zero_grad(set_to_none=True)
