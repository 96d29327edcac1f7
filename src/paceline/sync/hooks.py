"""A strategy on a DistributedDataParallel model, through PyTorch's hooks: the loop around it need not know.

The communication hook carries gradients; before a training forward, a step that was attempted is over and weights may
move; around any other forward, and in `state_dict`, the module holds what all hosts share.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.codec import PLAIN
from paceline.errors import InputError
from paceline.strategy import EveryStep, Outer, Strategy
from paceline.sync import codecs
from paceline.sync.collectives import Mesh
from paceline.sync.every_step import EveryStepHook
from paceline.sync.meter import Meter
from paceline.sync.outer import OuterEngine

_COMPILES_LONG_S = 2.0
"""After so long somebody wonders."""


def fit(strategy: Strategy, mesh: Mesh) -> Strategy:
    """What is left of a strategy where nothing crosses hosts."""
    if mesh.num_hosts > 1:
        return strategy
    return EveryStep(accumulate_steps=strategy.accumulate_steps) if isinstance(strategy, EveryStep) else EveryStep()


def describe(asked: Strategy, mesh: Mesh) -> str:
    """The strategy in a line, and why there are two levels, where there are."""
    if mesh.num_hosts == 1:
        return f"sync {asked}: one host, so nothing crosses hosts, and ranks average exactly at every step"
    words = [f"sync {asked} between {mesh.num_hosts} hosts"]
    if mesh.world_size > mesh.num_hosts:
        words.append("ranks of one host average exactly at every step")
    if mesh.lanes > 1:
        words.append(f"{mesh.lanes} of each host share what crosses")
    return " · ".join(words)


def attach(
    ddp: DistributedDataParallel, strategy: Strategy, mesh: Mesh, meter: Meter, *, counts_steps: bool = True
) -> Sync:
    """Lets `strategy` carry what `ddp` learns. Every rank calls it, at the same place in the script.

    ddp           built over all ranks for EveryStep, over `mesh.host_group` for Outer, and equal on all ranks
    strategy      as `fit` says for this mesh
    counts_steps  whether steps and samples are found out here, from forward and backward passes; else the caller
                  calls `Sync.step_ended`, and counts for the meter

    Raises InputError for a model that can't be attached: one that reduces in a way of its own.
    """
    if isinstance(strategy, Outer) and any(isinstance(part, torch.nn.SyncBatchNorm) for part in ddp.modules()):
        raise InputError(
            f"--sync {strategy}: SyncBatchNorm averages over all ranks in every forward pass",
            hint="leave convert_sync_batchnorm out (rounds average BatchNorm's statistics), or use --sync every",
        )
    if getattr(ddp, "mixed_precision", None) is not None:
        raise InputError(
            f"--sync {strategy}: DistributedDataParallel(mixed_precision=...) reduces gradients in its own way",
            hint="use torch.autocast in its place, or leave --sync out",
        )
    sync = Sync(ddp, strategy, mesh, meter, counts_steps=counts_steps)
    num_values = sum(parameter.numel() for parameter in ddp.parameters() if parameter.requires_grad)
    row_values = num_values // (mesh.num_hosts * mesh.lanes)  # the longest that is ever encoded together
    if row_values >= codecs.COMPILED_FROM_VALUES:
        notice = threading.Timer(_COMPILES_LONG_S, _say, [mesh, f"compiling {strategy.codec}, once on each host ..."])
        notice.start()
        told = codecs.prepare(strategy.codec, mesh.device, mesh.num_hosts)
        notice.cancel()
        notice.join()
        if told is not None:
            _say(mesh, told)
    return sync


def _say(mesh: Mesh, text: str) -> None:
    if mesh.rank == 0:
        print(f"paceline: {text}", flush=True)


class Sync:
    """One attached model."""

    def __init__(
        self, ddp: DistributedDataParallel, strategy: Strategy, mesh: Mesh, meter: Meter, *, counts_steps: bool
    ) -> None:
        self.strategy = strategy
        self.ddp = ddp
        self._mesh = mesh
        self._meter = meter
        self._counts_steps = counts_steps
        self._num_samples = 0
        """Of this rank since the last step ended."""
        self._step_is_pending = False
        """Gradients have been averaged since a step was last counted."""
        self._engine: OuterEngine | None = None
        self._state: EveryStepHook | OuterEngine
        self._reduce: Callable[..., Any]
        self._trained: list[torch.Tensor] | None = None
        """What the module held before the script loaded other weights. Those are its own business until it trains
        again: a rank may load some for a last evaluation, alone."""
        self._has_warned = False
        self._trains_in_eval_mode: bool | None = None
        """What the first backward pass shows; None before it, when evaluation and training see the same weights."""
        self._swaps: list[contextlib.AbstractContextManager[None] | None] = []
        if isinstance(strategy, Outer):
            self._engine = OuterEngine(ddp.module, strategy, mesh)
            self._state = self._engine
            self._reduce = self._average
            self._hook_module(ddp.module)
            if mesh.world_size > mesh.num_hosts:
                ddp.join_hook = Hook(self._refuse_join)  # type: ignore[method-assign]
        else:
            self._state = EveryStepHook(strategy, mesh, [p for p in ddp.module.parameters() if p.requires_grad])
            self._reduce = self._state.average
        ddp.register_comm_hook(None, CommHook(self._carry))
        ddp.register_forward_pre_hook(Hook(self._before_training), with_kwargs=True)
        ddp.register_comm_hook = Hook(self._refuse_comm_hook)  # type: ignore[method-assign]

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients are being added up, so that the optimizer's next step does nothing."""
        return isinstance(self._state, EveryStepHook) and self._state.is_accumulating

    @property
    def averages_over_world(self) -> bool:
        """Whether gradients are averaged over all ranks in this step; else over those of each host."""
        return self._engine is None or self._engine.averages_gradients

    def step_ended(self, num_samples: int) -> None:
        """A step was attempted with so many samples on this rank; may wait for other hosts and move the weights."""
        if self._engine is None:
            return
        began_s = time.monotonic()
        with torch.no_grad(), self._as_trained():
            self._engine.step_ended(num_samples * self._mesh.num_neighbours)
        self._meter.waited(time.monotonic() - began_s)

    def synchronize(self) -> None:
        """Shares now what is not shared yet; afterwards all ranks hold the same weights."""
        self._count_step()
        self._take_up_loaded()
        if self._engine is not None:
            with torch.no_grad():
                self._engine.synchronize()

    def finish(self) -> None:
        """This rank has no more data: takes part until all have ended, and then shares what is not shared yet."""
        self._count_step()
        if self._engine is not None:
            with torch.no_grad(), self._as_trained():
                self._engine.finish()
        elif isinstance(self._state, EveryStepHook):
            self._state.close()
        self._mesh.close()

    def shared_state(self) -> dict[str, Any]:
        """What all ranks hold alike, beside the module's shared weights and buffers."""
        return self._state.shared_state()

    def own_state(self) -> dict[str, Any]:
        """What this rank alone knows."""
        return self._state.own_state()

    def load_state(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Continues from `shared_state` and, where they belong to this rank, `own_state`. After the module's
        `load_state_dict`."""
        self._trained = None
        self._state.load_state(shared, own)

    def _carry(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self._meter.bucket_ready()
        if bucket.is_last():
            self._step_is_pending = True
            self._note_mode()
        future = self._reduce(None, bucket)
        if self._meter.sync_wait_s is not None:
            future.add_done_callback(lambda _: self._meter.bucket_done())
        return future

    def _average(self, _state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        assert self._engine is not None
        if self._engine.averages_gradients:
            return self._mesh.mean(bucket.buffer(), codec=PLAIN, sum_local=True)
        return self._mesh.mean_of_host(bucket.buffer())

    def _before_training(self, _ddp: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._is_evaluation():
            return
        self._meter.begin()
        self._count_step()
        self._take_up_loaded()
        if self._engine is not None:
            with torch.no_grad():
                self._engine.begin()
        self._num_samples += _count_samples(inputs, named)

    def _count_step(self) -> None:
        if not self._step_is_pending or not self._counts_steps:
            return
        self._step_is_pending = False
        self._meter.backward_ended(self._num_samples)
        self.step_ended(self._num_samples)
        self._meter.step_ended()
        self._num_samples = 0

    def _take_up_loaded(self) -> None:
        if self._trained is not None and self._engine is not None:
            with torch.no_grad():
                self._engine.weights_loaded()
        self._trained = None

    @contextlib.contextmanager
    def _as_trained(self) -> Iterator[None]:
        if self._trained is None:
            yield
            return
        loaded = _copies(self.ddp.module)
        _put(self.ddp.module, self._trained)
        try:
            yield
        finally:
            _put(self.ddp.module, loaded)

    def _is_evaluation(self) -> bool:
        return not torch.is_grad_enabled() or not (self.ddp.training or self._trains_in_eval_mode is not False)

    def _note_mode(self) -> None:
        if self._trains_in_eval_mode is None:
            self._trains_in_eval_mode = not self.ddp.training
        elif self._engine is not None and not (self.ddp.training or self._trains_in_eval_mode):
            raise InputError(
                f"--sync {self.strategy}: a backward pass in eval mode, in which the model is what hosts share",
                hint="call model.train() before training goes on, or train in eval mode from the start",
            )

    def _hook_module(self, module: torch.nn.Module) -> None:
        module.register_forward_pre_hook(Hook(self._enter), prepend=True)
        module.register_forward_hook(Hook(self._leave), always_call=True)
        for part in module.modules():
            # Public from PyTorch 2.5 on.
            before_load = getattr(part, "register_load_state_dict_pre_hook", part._register_load_state_dict_pre_hook)
            before_load(Hook(self._keep_trained))
            after_save = getattr(part, "register_state_dict_post_hook", part._register_state_dict_hook)
            after_save(Hook(self._give_shared))

    def _enter(self, module: torch.nn.Module, _inputs: tuple[Any, ...]) -> None:
        assert self._engine is not None
        swap = None
        if self._is_evaluation() and self._trained is None:
            swap = self._engine.shared(with_buffers=not module.training)
            with torch.inference_mode(False):
                swap.__enter__()
        self._swaps.append(swap)

    def _leave(self, *_: object) -> None:
        swap = self._swaps.pop() if self._swaps else None
        if swap is not None:
            with torch.inference_mode(False):
                swap.__exit__(None, None, None)

    def _keep_trained(self, *_: object) -> None:
        if self._trained is None:
            self._trained = _copies(self.ddp.module)

    def _give_shared(self, part: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        if self._trained is not None:
            return
        assert self._engine is not None
        if self._counts_steps and not self._has_warned:
            self._warn_of_age(self._engine)
        for name, own in _direct_tensors(part):
            if prefix + name in state and (shared := self._engine.shared_value(own)) is not None:
                state[prefix + name] = shared.detach()

    def _warn_of_age(self, engine: OuterEngine) -> None:
        unshared = engine.num_unshared_steps
        if unshared is None or not unshared + self._step_is_pending:
            return
        self._has_warned = True
        _say(
            self._mesh,
            f"state_dict at step {engine.steps + self._step_is_pending} gives what hosts share, the weights of step "
            f"{engine.steps - unshared}: they share every {engine.strategy.period_steps} steps (said once)",
        )

    def _refuse_comm_hook(self, *_: object, **__: object) -> None:
        raise InputError(
            f"this script registers a communication hook of its own, and --sync {self.strategy} has taken its place",
            hint="leave --sync out, or the script's register_comm_hook",
        )

    def _refuse_join(self, *_: object, **__: object) -> None:
        raise InputError(
            f"--sync {self.strategy}: model.join() can't be used with several ranks on a host",
            hint="give the ranks of a host equally many batches (hosts may differ), or use --sync every",
        )


class Hook:
    """A hook that stays with the model it was made for: a copy of the model, or one read from a file, gets one that
    does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self._call(*arguments, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of the standard library that takes any positional arguments and returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")


class CommHook(Hook):
    """The same, as DistributedDataParallel wants its communication hook."""

    def __init__(self, call: Callable[[Any], torch.futures.Future[torch.Tensor]]) -> None:
        super().__init__(call)
        self.__name__ = self.__qualname__ = "paceline"

    def __call__(self, _state, bucket):  # without annotations, which PyTorch would compare as objects
        return self._call(bucket)


def _copies(module: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in (*module.parameters(), *module.buffers())]


def _put(module: torch.nn.Module, values: list[torch.Tensor]) -> None:
    for tensor, value in zip((*module.parameters(), *module.buffers()), values, strict=True):
        tensor.detach().copy_(value)


def _direct_tensors(part: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from part.named_parameters(recurse=False, remove_duplicate=False)
    yield from part.named_buffers(recurse=False, remove_duplicate=False)


def _count_samples(inputs: Iterable[Any], named: dict[str, Any]) -> int:
    """The first dimension of the first tensor; 1 where there is none."""
    tensor = next(_tensors([*inputs, *named.values()]), None)
    return 1 if tensor is None or tensor.dim() == 0 else tensor.shape[0]


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
