"""fp32, bf16 and fp16: autocast, and for fp16 a loss scale that is the same on all ranks that average gradients."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import InputError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class SharedScaler(torch.amp.GradScaler):
    """PyTorch's GradScaler, with an overflow on one rank counting as an overflow on all of `group`.

    Without it a rank that overflows alone skips its step and halves its scale alone, and the ranks drift
    apart without an error (pytorch/pytorch#136009). torch.distributed.fsdp.sharded_grad_scaler shares it the
    same way.
    """

    overflowed = False
    """Whether the gradients that were last unscaled held an infinity or a NaN on any rank of `group`."""
    group: dist.ProcessGroup | None = None
    """The ranks that average their gradients at every step; None for all."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        found = list(self._found_inf_per_device(optimizer).values())
        shared = torch.stack(found).max() if found else torch.zeros((), device=self._device)
        if dist.is_initialized():
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group)
        for found_here in found:
            found_here.copy_(shared)
        self.overflowed = bool(shared)


class Precision:
    """What `precision=` means for one optimizer: the autocast context, the loss scale, and when to skip a
    step."""

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in _DTYPES:
            raise InputError(f"precision {name!r} is not known; choose one of {', '.join(_DTYPES)}")
        self.name = name
        self._device = device
        self._scaler = SharedScaler(device.type) if name == "fp16" else None
        self._is_unscaled = False
        self._adds_up: Callable[[], bool] = lambda: False

    def share_with(self, group: dist.ProcessGroup | None) -> None:
        """Only these ranks take steps together, and so share a loss scale; None for all ranks."""
        if self._scaler is not None:
            self._scaler.group = group

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=_DTYPES[self.name])

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Brings the gradients back to their true size; done once per step, however often it is asked for, and not
        while gradients are being added up: the scale is fixed until they are complete."""
        if self._scaler is not None and not self._is_unscaled and not self._adds_up():
            self._scaler.unscale_(optimizer)
            self._is_unscaled = True

    def wrap_step(
        self, optimizer: torch.optim.Optimizer, *, adds_up: Callable[[], bool], on_skip: Callable[[], None]
    ) -> None:
        """For fp16: `optimizer.step()` unscales, skips the step when any rank overflowed, and adapts the
        scale. Where `adds_up` says that more gradients are to come, it does none of this."""
        scaler = self._scaler
        self._adds_up = adds_up
        if scaler is None:
            return
        plain_step = optimizer.step

        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None = None) -> float | None:
            if closure is not None:
                raise InputError("optimizer.step(closure) can't be used with fp16; use bf16 or fp32")
            if adds_up():
                return plain_step()
            self.unscale(optimizer)
            self._is_unscaled = False
            result = None
            if scaler.overflowed:
                on_skip()
            else:
                result = plain_step()
            scaler.update()
            return result

        # A bound method, because a learning-rate scheduler wraps `step.__func__` in its turn.
        optimizer.step = types.MethodType(step, optimizer)

    def state_dict(self) -> dict[str, Any] | None:
        return None if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)
