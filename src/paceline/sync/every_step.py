"""Gradients averaged at each step: a communication hook for DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import InputError
from paceline.strategy import EveryStep
from paceline.sync.collectives import Mesh
from paceline.sync.powersgd import PowerSgd
from paceline.sync.residuals import Residuals


class _Held:
    """A bucket, and the future that DDP waits for."""

    def __init__(self, flat: Tensor, parameters: list[Parameter], gradients: list[Tensor]) -> None:
        self.flat = flat
        self.parameters = parameters
        self.gradients = gradients
        self.mean: Future[Tensor] = Future(devices=[flat.device] if flat.is_cuda else None)


class EveryStepHook:
    """For one DDP model whose parameters that need gradients are `parameters`:

        ddp.register_comm_hook(None, hook.average)

    With `accumulate_steps` K, in K-1 of K backward passes nothing is sent: the gradients are added up here, DDP gets
    zeros (so that norms and a gradient scaler's checks still work), and the optimizer's step finds no gradients, so
    that it changes nothing. The K-th pass averages the mean of all K. A gradient scaler should keep its scale within
    such a window: the gradients are added up as they come.
    """

    def __init__(self, strategy: EveryStep, mesh: Mesh, parameters: Sequence[Parameter]) -> None:
        self.strategy = strategy
        self._mesh = mesh
        self._parameters = list(parameters)
        self._codec = strategy.codec
        self._residuals = Residuals(self._parameters) if self._codec.name in ("topk", "powersgd") else None
        self._powersgd = PowerSgd(mesh, self._codec.rank, self._parameters) if self._codec.name == "powersgd" else None
        self._passes = 0
        """Backward passes since the last average."""
        self._sums: dict[Parameter, Tensor] = {}
        self._groups: list[list[Parameter]] = []
        """The buckets of the last backward pass."""
        self._groups_before: list[list[Parameter]] = []
        """After a resume, those from before, until the first backward pass has ended."""
        self._held: list[_Held] = []
        self._step_hook = None
        if strategy.accumulate_steps > 1:
            self._step_hook = register_optimizer_step_pre_hook(self._before_optimizer_step)

    @property
    def is_accumulating(self) -> bool:
        """Whether the last backward pass has sent nothing."""
        return self._passes > 0

    # DDP compares a hook's annotations with the types themselves; with postponed ones it would refuse it.
    def average(self, _state, bucket):
        """The communication hook. The future's value is the bucket's buffer: the mean over all ranks, or zeros."""
        if self.strategy.accumulate_steps == 1 and not self._groups_before:  # the common way, kept short
            return self._send(bucket)
        held = _Held(bucket.buffer(), bucket.parameters(), bucket.gradients())
        if self.strategy.accumulate_steps > 1:
            is_complete = self._accumulate(held)
            if bucket.is_last():
                self._passes = (self._passes + 1) % self.strategy.accumulate_steps
            if not is_complete:
                if bucket.is_last():
                    self._groups_before = []
                held.mean.set_result(held.flat.zero_())
                return held.mean
            held.flat.div_(self.strategy.accumulate_steps)
        if self._groups_before:
            return self._hold(held, is_last=bucket.is_last())
        return self._send(bucket)

    def shared_state(self) -> dict[str, Any]:
        """What is the same on every rank."""
        places = {parameter: place for place, parameter in enumerate(self._parameters)}
        return {
            "passes": self._passes,
            "groups": [[places[parameter] for parameter in group] for group in self._groups],
            "factors": self._powersgd.state() if self._powersgd else {},
        }

    def own_state(self) -> dict[str, Any]:
        """What this rank alone knows: gradients of an unfinished window, and what the codec has lost."""
        sums = {str(i): self._sums[p].clone() for i, p in enumerate(self._parameters) if p in self._sums}
        return {
            "sums": sums if self.is_accumulating else {},
            "residuals": self._residuals.state() if self._residuals else {},
        }

    def load_state(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Continues from `shared_state` and, on the same rank of the same layout, `own_state`; without it a window
        starts anew, and nothing has been lost so far."""
        self._passes = shared["passes"] if own is not None else 0
        self._groups_before = [[self._parameters[place] for place in group] for group in shared["groups"]]
        if self._powersgd is not None:
            self._powersgd.load(shared["factors"])
        own = own or {"sums": {}, "residuals": {}}
        self._sums = {
            self._parameters[int(place)]: total.to(self._parameters[int(place)].device)
            for place, total in own["sums"].items()
        }
        if self._residuals is not None:
            self._residuals.load(own["residuals"])

    def close(self) -> None:
        """Leaves the optimizers alone from now on. The mesh stays open."""
        if self._step_hook is not None:
            self._step_hook.remove()
        if self._powersgd is not None:
            self._powersgd.close()

    def _accumulate(self, held: _Held) -> bool:
        """Adds this pass's gradients to those of the window, or, in its last pass, these to the gradients."""
        is_complete = self._passes == self.strategy.accumulate_steps - 1
        for parameter, gradient in zip(held.parameters, held.gradients, strict=True):
            total = self._sums.get(parameter)
            if is_complete and total is not None:
                gradient.add_(total)
            elif total is None:
                self._sums[parameter] = gradient.detach().to(torch.float32, copy=True)
            elif self._passes == 0:
                total.copy_(gradient)
            else:
                total.add_(gradient)
        return is_complete

    def _hold(self, held: _Held, *, is_last: bool) -> Future[Tensor]:
        """DDP regroups its buckets after the first step. So that a resume goes on bit for bit, its first step waits for
        all gradients, and averages them in the groups in which they would have travelled."""
        self._held.append(held)
        if is_last:
            gradients = {p: g for each in self._held for p, g in zip(each.parameters, each.gradients, strict=True)}
            groups, self._groups_before = self._groups_before, []
            if {parameter for group in groups for parameter in group} != gradients.keys():
                groups = [each.parameters for each in self._held]
            self._groups = groups
            means = [self._mean(torch.cat([gradients[p].flatten() for p in group]), group) for group in groups]
            for group, mean in zip(groups, means, strict=True):
                for parameter, part in zip(group, mean.wait().split([p.numel() for p in group]), strict=True):
                    gradients[parameter].copy_(part.view_as(parameter))
            for each in self._held:
                each.mean.set_result(each.flat)
            self._held = []
        return held.mean

    def _send(self, bucket: Any) -> Future[Tensor]:
        if bucket.index() == 0:
            self._groups = []
        self._groups.append(bucket.parameters())
        return self._mean(bucket.buffer(), self._groups[-1])

    def _mean(self, flat: Tensor, bucket: list[Parameter]) -> Future[Tensor]:
        if self._codec.name == "none" or flat.dtype == torch.float32:
            return self._mean_of_floats(flat, bucket)
        mean = self._mean_of_floats(flat.float(), bucket)
        return mean.then(lambda done: flat.copy_(done.value()))

    def _mean_of_floats(self, flat: Tensor, bucket: list[Parameter]) -> Future[Tensor]:
        residual = self._residuals.of(bucket) if self._residuals is not None else None
        if self._powersgd is not None and residual is not None:
            return self._powersgd.mean(flat, bucket, residual)
        return self._mesh.mean(flat, codec=self._codec, sum_local=True, residual=residual)

    def _before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None and self._is_ours(optimizer):  # its backward pass would come too late to be left out
            raise InputError(
                f"{self.strategy}: optimizer.step(closure) computes gradients within the step, which can't be added up",
                hint="leave accumulate out, or call backward() before optimizer.step()",
            )
        if not self.is_accumulating:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._sums:
                    parameter.grad = None

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        ours = set(self._parameters)
        return any(parameter in ours for group in optimizer.param_groups for parameter in group["params"])
