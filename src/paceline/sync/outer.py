"""Hosts that train on their own and share how far they have come: local SGD, DiLoCo, streaming, eager, SparseLoCo.

One engine for all of them, in fp32, with the settings of `strategy.Outer`:

    each step:          the script trains its own weights
    a fragment is due:  delta = shared - own, and the mean of all hosts' deltas is under way
    it has arrived:     shared = outer optimizer(shared, mean); own = mix * own + (1 - mix) * shared

The shared ("outer") weights have the same bits on all ranks. They are what is evaluated, saved and compared. Steps are
counted by attempt: a step that a gradient scaler skips on one rank counts there too, so that all stay in phase.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from paceline.codec import PLAIN, Codec, piece_slices
from paceline.strategy import Outer
from paceline.sync.buffers import SharedBuffers
from paceline.sync.collectives import Mesh
from paceline.sync.flat import FlatWeights, checksum
from paceline.sync.rounds import Header, Round

_ALL = -1
"""In place of a fragment: not a round, but the question whether one is needed."""


class OuterEngine:
    """Moves one module's weights. Every rank of the world makes one and calls the same methods in the same order, but
    for `shared`, `shared_value`, `shared_state` and `own_state`, which don't communicate."""

    def __init__(self, module: torch.nn.Module, strategy: Outer, mesh: Mesh) -> None:
        self.strategy = strategy
        self.steps = 0
        """Attempted so far."""
        self._mesh = mesh
        self._weights = FlatWeights(module)
        self._buffers = SharedBuffers(module)
        self._shared: torch.Tensor | None = None
        """The outer weights; None during the warm-up, in which all weights are shared."""
        self._rounds: list[Round] = []
        """Under way, in the order in which they began."""
        self._num_samples = 0
        self._samples_before = [0] * strategy.fragments
        """Samples seen when each fragment's last round began."""
        self._shared_step = 0  # when the last round that has arrived began
        self._loads = 0
        self._has_ended = False

    @property
    def averages_gradients(self) -> bool:
        """Whether gradients are to be averaged over all hosts, because this step belongs to the warm-up."""
        return self.steps < self.strategy.warmup_steps

    @property
    def num_unshared_steps(self) -> int | None:
        """Steps since the last round that has arrived began; None during the warm-up."""
        return None if self._shared is None else self.steps - self._shared_step

    def begin(self) -> None:
        """The first training step begins: what the weights are now is what all hosts share. Does nothing later."""
        if self._shared is None and not self.averages_gradients:
            self._start_from_own_weights()

    def step_ended(self, num_samples: int) -> None:
        """A step was attempted with so many samples on this host. Begins and ends the rounds that are due.

        Raises WorldError when the hosts are not in step, or their shared weights differ.
        """
        self.steps += 1
        self._num_samples += num_samples
        if self._shared is None:
            if not self.averages_gradients:  # the last step of the warm-up, or one without a forward pass before it
                self._start_from_own_weights()
            return
        while self._rounds and self._rounds[0].arrives_step <= self.steps:
            self._finish_round(self._rounds.pop(0))
        fragment = self.strategy.due_fragment(self.steps - self.strategy.warmup_steps)
        if fragment is None:
            return
        began = self._begin_round(
            fragment, arrives_step=self.steps + self.strategy.delay_steps, codec=self.strategy.codec
        )
        if self.strategy.delay_steps:
            self._rounds.append(began)
        else:
            self._finish_round(began)

    def synchronize(self) -> None:
        """Shares everything now: waits for rounds under way, and where any host has trained since, has one more of
        each fragment. Afterwards every rank's own weights are the shared ones."""
        if self._shared is None:
            return
        self._drain()
        asked = Round(0, self.steps)
        asked.headers = self._mesh.exchange(self._header(_ALL, num_samples=self._num_unshared()).pack())
        asked.check(self._mesh.hosts)
        # What topk leaves out is sent later, and there is no later.
        codec = PLAIN if self.strategy.codec.name == "topk" else self.strategy.codec
        for fragment in range(self.strategy.fragments) if asked.trained else ():
            self._finish_round(self._begin_round(fragment, arrives_step=self.steps, codec=codec))
        self._shared_step = self.steps
        self._weights.write(self._weights.everything, self._shared)
        if self.strategy.is_eager:
            self._start.copy_(self._shared)

    def finish(self) -> None:
        """This rank has no more data. Takes part in the others' rounds, with weight zero, until all have ended, and
        then in a last one for what is not shared yet."""
        if self._has_ended:
            return
        self._has_ended = True
        self.begin()  # a host without any data takes part too
        if self._shared is None:
            return
        self._drain()
        unshared = torch.empty_like(self._shared)
        self._weights.read(self._weights.everything, unshared)
        torch.sub(self._start, unshared, out=unshared)
        while (leader := self._serve()) is not None:
            self._finish_round(leader)
        # The shared weights have moved meanwhile, and what was learned here counts from where they are now.
        self._start.copy_(self._shared)
        self._weights.write(self._weights.everything, torch.sub(self._shared, unshared, out=unshared))
        self.synchronize()

    def weights_loaded(self) -> None:
        """The script has loaded weights: they are what all hosts share from here on. The outer optimizer, what the
        codec lost, and rounds under way belonged to the old ones and are dropped."""
        self._loads += 1
        if self._shared is not None:
            self._start_from_own_weights()

    @contextlib.contextmanager
    def shared(self, *, with_buffers: bool) -> Iterator[None]:
        """Within it the module holds the shared weights, and with `with_buffers` the shared buffers. No rank waits for
        another."""
        if self._shared is None:
            yield
            return
        own = {parameter: parameter.data for parameter in self._weights.parameters}
        for parameter in own:
            parameter.data = self._value(parameter)
        own_buffers = self._buffers.swap_in() if with_buffers else None
        try:
            yield
        finally:
            for parameter, data in own.items():
                parameter.data = data
            if own_buffers is not None:
                self._buffers.set_own_values(own_buffers)

    def shared_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What all hosts share in place of a parameter or buffer of the module; None where it is the tensor itself,
        or the tensor is not the module's."""
        if self._shared is None:
            return None
        if isinstance(tensor, torch.nn.Parameter):
            return self._value(tensor) if tensor in self._views else None
        return self._buffers.shared_value(tensor)

    def shared_state(self) -> dict[str, Any]:
        """What all ranks hold alike, beside the module's shared weights and buffers. Rounds under way are waited for,
        and kept as what they will bring."""
        if self._shared is None:
            return {"steps": self.steps, "weights": None}
        return {
            "steps": self.steps,
            "loads": self._loads,
            "weights": self._shared,
            "momentum": self._momentum,
            "rounds": [self._round_state(pending) for pending in self._rounds],
        }

    def own_state(self) -> dict[str, Any]:
        """What this rank alone knows; under "host" what the ranks of its host hold alike."""
        if self._shared is None:
            return {"num_samples": self._num_samples, "buffers": self._buffers.own_values()}
        for pending in self._rounds:
            pending.wait()  # what the codec loses is known then
        weights = torch.empty_like(self._shared)
        self._weights.read(self._weights.everything, weights)
        return {
            "num_samples": self._num_samples,
            "samples_before": self._samples_before,
            "host": {"weights": weights, "start": self._start if self.strategy.is_eager else None},
            "residual": self._residual,
            "buffers": self._buffers.own_values(),
        }

    def load_state(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Continues from `shared_state` and, on the same rank of the same layout, `own_state`; without it from the
        shared weights. The module holds the shared weights and buffers."""
        self._drop_rounds()
        self.steps = shared["steps"]
        self._num_samples = 0 if own is None else own["num_samples"]
        if shared["weights"] is None:
            self._shared = None
            if own is not None:
                self._buffers.set_own_values(own["buffers"])
            return
        self._loads = shared["loads"]
        self._start_from_own_weights()
        assert self._shared is not None
        self._shared.copy_(shared["weights"])
        if self._momentum is not None:
            self._momentum.copy_(shared["momentum"])
        self._rounds = [self._round_from(state) for state in shared["rounds"]]
        own_weights = shared["weights"] if own is None else own["host"]["weights"]
        self._weights.write(self._weights.everything, own_weights)
        if own is None:
            self._samples_before = [0] * self.strategy.fragments
            return
        self._samples_before = list(own["samples_before"])
        if self.strategy.is_eager:
            self._start.copy_(own["host"]["start"])
        if self._residual is not None:
            self._residual.copy_(own["residual"])
        self._buffers.set_own_values(own["buffers"])

    def _start_from_own_weights(self) -> None:
        self._drop_rounds()
        device = self._mesh.device
        if self._shared is None:
            self._shared = torch.empty(self._weights.num_values, device=device)
            self._delta = torch.empty_like(self._shared)
            self._views = self._weights.views(self._shared)
            self._momentum = torch.empty_like(self._shared) if self.strategy.momentum else None
            self._residual = torch.empty_like(self._shared) if self.strategy.error_feedback else None
            # Of an eager host only: where its own weights started from after the last round.
            self._start = torch.empty_like(self._shared) if self.strategy.is_eager else self._shared
        self._weights.read(self._weights.everything, self._shared)
        for state in (self._momentum, self._residual):
            if state is not None:
                state.zero_()
        if self.strategy.is_eager:
            self._start.copy_(self._shared)
        self._buffers.take_own()
        self._shared_step = self.steps
        self._samples_before = [self._num_samples] * self.strategy.fragments

    def _drop_rounds(self) -> None:
        for pending in self._rounds:
            pending.wait()  # what still arrives would be written over what is done next
        self._rounds = []

    def _value(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self._views[parameter].to(parameter.dtype)

    def _slice(self, fragment: int) -> slice:
        return self.strategy.fragment_slice(fragment, self._weights.num_values)

    def _pieces(self, fragment: int) -> list[slice]:
        part = self._slice(fragment)
        cuts = piece_slices(
            self.strategy.codec, part.stop - part.start, num_hosts=self._mesh.num_hosts, lanes=self._mesh.lanes
        )
        return [slice(part.start + cut.start, part.start + cut.stop) for cut in cuts]

    def _num_unshared(self) -> int:
        """Samples of which the others know nothing in some fragment."""
        return self._num_samples - min(self._samples_before)

    def _header(self, fragment: int, *, num_samples: int) -> Header:
        assert self._shared is not None
        return Header(
            steps=self.steps,
            fragment=fragment,
            num_samples=num_samples,
            has_ended=int(self._has_ended),
            loads=self._loads,
            checksum=checksum(self._shared if fragment == _ALL else self._shared[self._slice(fragment)]),
        )

    def _begin_round(self, fragment: int, *, arrives_step: int, codec: Codec) -> Round:
        """Tells the others what this host has learned; returns while it travels."""
        started = Round(fragment, arrives_step)
        header = self._header(fragment, num_samples=self._num_samples - self._samples_before[fragment])
        started.headers = self._mesh.exchange(header.pack())
        self._samples_before[fragment] = self._num_samples
        for piece in self._pieces(fragment):
            delta = self._delta[piece]
            self._weights.read(piece, delta)
            torch.sub(self._start[piece], delta, out=delta)
            if self.strategy.is_eager:
                self._go_on_alone(piece, delta)
            residual = None
            if self._residual is not None and header.num_samples:  # else it would be sent with weight zero, and lost
                residual = self._residual[piece].mul_(self.strategy.error_feedback)
            self._send(started, piece, residual, codec)
        self._send_buffers(started)
        return started

    def _serve(self) -> Round | None:
        """Takes part, with weight zero, in the next exchange of those who have not ended; None when all have."""
        served = Round(0, self.steps)
        served.headers = self._mesh.exchange(self._header(0, num_samples=0).pack())
        leader = next((header for header in served.told() if not header.has_ended), None)
        if leader is None:
            return None
        if leader.fragment == _ALL:
            return served
        served.fragment = leader.fragment
        for piece in self._pieces(served.fragment):
            self._delta[piece].zero_()
            self._send(served, piece, None, self.strategy.codec)
        self._send_buffers(served)
        return served

    def _send(self, started: Round, piece: slice, residual: torch.Tensor | None, codec: Codec) -> None:
        delta = self._delta[piece]
        mean = self._mesh.mean(delta, codec=codec, sum_local=False, weights=started.shares, residual=residual)
        started.pieces.append((piece, mean))

    def _carries_buffers(self, exchange: Round) -> bool:
        """Once per period: with the last fragment."""
        return exchange.fragment == self.strategy.fragments - 1

    def _send_buffers(self, started: Round) -> None:
        if self._carries_buffers(started):
            self._buffers.send(self._mesh, started.shares)

    def _finish_round(self, arrived: Round) -> None:
        """Waits for the mean delta, and moves the shared weights and, towards them, this rank's own."""
        assert self._shared is not None
        arrived.check(self._mesh.hosts)
        self._shared_step = arrived.arrives_step - self.strategy.delay_steps
        for piece, mean in arrived.pieces:
            gradient = mean.wait()
            if arrived.trained:
                self._outer_step(piece, gradient)
            if not self.strategy.is_eager and not self._has_ended:
                self._approach_shared(piece)
        if self._carries_buffers(arrived):
            self._buffers.receive(adopt=arrived.trained)

    def _outer_step(self, piece: slice, gradient: torch.Tensor) -> None:
        """SGD with momentum, as torch.optim.SGD counts it."""
        assert self._shared is not None
        strategy, shared = self.strategy, self._shared[piece]
        if self._momentum is None:
            shared.sub_(gradient, alpha=strategy.lr)
            return
        momentum = self._momentum[piece].mul_(strategy.momentum).add_(gradient)
        if strategy.nesterov:
            shared.sub_(gradient, alpha=strategy.lr).sub_(momentum, alpha=strategy.lr * strategy.momentum)
        else:
            shared.sub_(momentum, alpha=strategy.lr)

    def _approach_shared(self, piece: slice) -> None:
        assert self._shared is not None
        if not self.strategy.mix:
            self._weights.write(piece, self._shared[piece])
            return
        mixed = torch.empty_like(self._shared[piece])
        self._weights.read(piece, mixed)
        self._weights.write(piece, mixed.lerp_(self._shared[piece], 1 - self.strategy.mix))

    def _go_on_alone(self, piece: slice, delta: torch.Tensor) -> None:
        """The eager way (arXiv 2502.12996): this host's own share of the mean that is about to travel counts at once,
        in a preview of the outer step; the others' when the mean has arrived."""
        assert self._shared is not None
        strategy, start = self.strategy, self._start[piece]
        share = delta / self._mesh.num_hosts
        start.copy_(self._shared[piece])
        if self._momentum is not None:
            momentum = torch.add(share, self._momentum[piece], alpha=strategy.momentum)
            share = share.add_(momentum, alpha=strategy.momentum) if strategy.nesterov else momentum
        self._weights.write(piece, start.sub_(share, alpha=strategy.lr))

    def _drain(self) -> None:
        while self._rounds:
            self._finish_round(self._rounds.pop(0))

    def _round_state(self, pending: Round) -> dict[str, Any]:
        pending.wait()
        pending.check(self._mesh.hosts)
        return {
            "fragment": pending.fragment,
            "arrives_step": pending.arrives_step,
            "trained": pending.trained,
            "mean": self._delta[self._slice(pending.fragment)],
            "buffers": self._buffers.pending_state() if self._carries_buffers(pending) else None,
        }

    def _round_from(self, state: dict[str, Any]) -> Round:
        pending = Round(state["fragment"], state["arrives_step"])
        pending.trained = state["trained"]
        part = self._slice(pending.fragment)
        self._delta[part].copy_(state["mean"])
        mean: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        mean.set_result(self._delta[part])
        pending.pieces = [(part, mean)]
        if state["buffers"] is not None:
            self._buffers.load_pending_state(state["buffers"])
        return pending
