"""A model whose compute is emulated: its layers sleep, so that several hosts fit on one machine.

The weights, the gradients and everything done with them are real; only the arithmetic of the layers is not.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

NUM_LAYERS = 24


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


def layer_shape(model_bytes: int) -> tuple[int, int]:
    """Of each layer's weights: nearly a square."""
    num_values = model_bytes // 4 // NUM_LAYERS
    rows = math.isqrt(num_values)
    return rows, round(num_values / rows)


class EmulatedLayer(torch.nn.Module):
    """One weight matrix and a gradient of normal noise for it."""

    def __init__(self, shape: tuple[int, int], compute_s: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape))
        self.gradient = torch.randn(self.weight.numel()) * 1e-3  # no buffer: nobody is to send it
        self.compute_s = compute_s

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(values, self.weight, self)  # type: ignore[no-any-return]


class EmulatedModel(torch.nn.Module):
    """`NUM_LAYERS` equal layers: `model_bytes` of float32 weights in all, `compute_s` seconds a step in all."""

    def __init__(self, model_bytes: int, compute_s: float) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            EmulatedLayer(layer_shape(model_bytes), compute_s / NUM_LAYERS) for _ in range(NUM_LAYERS)
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values)
        return values

    def set_compute(self, compute_s: float) -> None:
        """Seconds a step from now on."""
        for layer in self.layers:
            layer.compute_s = compute_s / NUM_LAYERS


class OneInTurn(torch.optim.Optimizer):
    """Moves one parameter a step, in turn, so that there is something to average: an optimizer's time, too, counts as
    emulated."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.turn = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        parameter = parameters[self.turn % len(parameters)]
        parameter.sub_(parameter.grad)
        self.turn += 1


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """The loop of an ordinary script."""
    for _ in range(num_steps):
        optimizer.zero_grad(set_to_none=True)
        model(torch.ones(1)).sum().backward()
        optimizer.step()


def interface_bytes() -> int:
    """What this host has sent so far on everything but its loopback, headers and acknowledgements included."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(fields.split()[8]) for name, fields in lines if name.strip() != "lo")
