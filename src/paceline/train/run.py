"""The face that a training script sees: `run = paceline.init()` and the methods of `Run`."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from paceline import events
from paceline.cluster.detect import detect_place
from paceline.errors import InputError
from paceline.strategy import EveryStep, Outer
from paceline.sync.hooks import Sync
from paceline.sync.meter import Meter
from paceline.train import checkpoint, checks, guard, parts, saving, seeds, values
from paceline.train.batches import Batches, InHand, Share
from paceline.train.precision import Precision
from paceline.train.saving import Prepared, Resumed
from paceline.train.world import World, connect, start_line
from paceline.train.wrapping import EXACT, Asked, choose, wrap

_TIMEOUT_S = 300.0
"""Long enough for a slow disk or a first compilation on another rank, short enough to notice over a
coffee."""
_YEAR_S = 365 * 86400
_alone: list[Run] = []
"""The run of this process, where it is the only rank and so has made no process group."""


def init(
    *, sync: EveryStep | Outer = EXACT, precision: str = "fp32", timeout_s: float = _TIMEOUT_S, seed: int = 0
) -> Run:
    """Joins this process to the run that its launcher started, or trains alone. Call it once, first.

    Works under `paceline run`, `torchrun`, `mpirun` (Open MPI), `srun`, and without any. Each rank takes the
    GPU of its local rank (NCCL), or the CPU (Gloo). Rank 0 prints one line that says what was chosen.

    sync        how hosts synchronise: `EveryStep` averages gradients at each step, `Outer` weights every so many
                steps; what `paceline run --sync` says comes first
    precision   "fp32", "bf16" or "fp16": what `run.autocast()` computes in; weights stay as they are
    timeout_s   seconds after which a rank that waits for another gives up; between hosts of an `Outer` at least 1800,
                but not where they meet outside a round: `run.log` and `run.checkpoint`, which want all ranks at
                the same step
    seed        of PyTorch, `random` and `run.batches`: weights are drawn alike on all ranks; data order,
                augmentation and dropout depend on seed and rank. numpy's global generator is seeded too
                where numpy is imported before this call; seed a `numpy.random.Generator` yourself

    Raises InputError when it is called twice, an argument or the launcher's variables can't be used, or PyTorch is
    missing or too old;
    WorldError when the ranks don't meet within `timeout_s`.
    """
    if _alone:
        raise InputError("paceline.init() was called twice", hint="call it once, and pass the run on")
    if dist.is_initialized():
        raise InputError(
            "paceline.init() makes the process group itself, and there is one already",
            hint="call paceline.init() once, and drop init_process_group from the script",
        )
    expected = "seconds, from 0.001 to a year"
    timeout_s = checks.bounded("timeout_s", timeout_s, expected, at_least=0.001, at_most=_YEAR_S)
    guard.leave_models_alone()  # run.prepare does it
    asked = choose(checks.strategy("sync", sync), os.environ.get("PACELINE_SYNC"))
    place = detect_place(os.environ)
    world = connect(place, timeout_s=timeout_s)
    hosts = world.host_names()
    run = world.on_each_rank(
        "paceline.init", lambda: Run(world=world, hosts=hosts, sync=asked, precision=precision, seed=seed)
    )
    world.require_same(
        "paceline.init", f"sync={asked.strategy} precision={precision} seed={seed} device={world.device.type}"
    )
    if place.world_size == 1:
        _alone.append(run)
    if place.rank == 0:
        print(start_line(world, list(dict.fromkeys(hosts)), precision, timeout_s), flush=True)
    # At interpreter exit, because a script has no reason to say that it has ended; Gloo may abort without it.
    atexit.register(run._leave)
    return run


class Run:
    """One rank's hold on the run. Made by `paceline.init`.

    Every method but `autocast` must be called by every rank, in the same order.
    """

    def __init__(
        self,
        *,
        world: World,
        hosts: list[str],
        sync: Asked,
        precision: str,
        seed: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank: int = world.rank
        """0 to world_size - 1; rank 0 prints and writes."""
        self.world_size: int = world.size
        """Number of ranks."""
        self.device: torch.device = world.device
        """Where this rank computes."""
        self.attempt: int = world.place.attempt
        """How often the launcher has started this run again; 0 the first time."""
        self._world = world
        self._hosts = hosts
        self._asked = sync
        self._seed = seed = checks.whole(
            "seed", seed, "a whole number from -2**63 to 2**64 - 1", at_least=-(2**63), at_most=2**64 - 1
        )
        self._precision = Precision(precision, world.device)
        self._meter = Meter(clock_s=clock_s, tell=events.emit, measures_wait=world.backend == "gloo")
        self._in_hand = InHand()
        self._batches: list[Batches] = []
        self._waiting_states: list[dict[str, int]] = []
        self._samples_before = 0
        self._prepared: Prepared | None = None
        torch.manual_seed(seed)
        seeds.seed_python(seeds.derive(seed, "python", world.rank))

    def prepare(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """The model on its device, with gradients averaged over the ranks, and the optimizer that goes with
        it.

        Use what is returned. With several ranks the model is wrapped in DistributedDataParallel, so calling
        it for training is a matter for all ranks (its buffers are made equal); for something that rank 0 does alone
        call `model.module`. With fp16, `optimizer.step()` skips the step on all ranks that average their gradients
        when those of any overflowed. With an `Outer` strategy, hosts hold weights of their own between two rounds;
        evaluation and `state_dict` give those that all share. From here on PyTorch's random numbers differ between
        ranks. Raises InputError when called twice.
        """
        if self._prepared is not None:
            raise InputError("run.prepare was called twice; one model and one optimizer are supported")
        model.to(self.device)
        wrapped: torch.nn.Module = model
        sync: Sync | None = None
        if self.world_size > 1:
            sync = wrap(model, self._asked, world=self._world, hosts=self._hosts, meter=self._meter)
            wrapped = sync.ddp
            if isinstance(sync.strategy, Outer):
                self._precision.share_with(sync.ddp.process_group)
        self._prepared = Prepared(
            model=model,
            optimizer=optimizer,
            precision=self._precision,
            batches=self._batches,
            training=self._world.broadcast_bytes(secrets.token_hex(8).encode()).decode(),
            sync=sync,
            hosts=self._hosts,
        )
        optimizer.register_step_post_hook(lambda *_: self._step_ended())
        self._precision.wrap_step(
            optimizer, adds_up=lambda: sync is not None and sync.is_accumulating, on_skip=self._step_ended
        )
        torch.manual_seed(seeds.derive(self._seed, "torch", self.rank))
        return wrapped, optimizer

    def _step_ended(self) -> None:
        """A step was attempted, and taken or skipped."""
        if self._prepared is not None and self._prepared.sync is not None:
            self._prepared.sync.step_ended(max(1, self._meter.samples - self._samples_before))
        self._samples_before = self._meter.samples
        self._meter.step_ended()

    def synchronize(self) -> None:
        """Shares now what hosts have not shared yet, so that all ranks hold the same weights.

        Before a last evaluation or checkpoint. A matter for all ranks, at the same step. Does nothing where
        gradients are averaged at every step.
        """
        sync = self._require_prepared("run.synchronize").sync
        if sync is not None:
            sync.synchronize()

    def batches(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> Batches:
        """This rank's batches of a data set with `__len__` and `__getitem__`; see `Batches`.

        batch_size   samples per rank and step
        shuffle      a new order in each epoch, the same on all ranks, from the seed
        collate_fn   turns a list of samples into a batch; PyTorch's default otherwise
        num_workers  processes per rank that read ahead

        Raises InputError for a data set without a length, or with fewer samples than ranks; WorldError when
        the ranks pass data sets of different lengths, or another rank failed here.
        """
        share = Share(rank=self.rank, world_size=self.world_size, seed=self._seed, device=self.device)
        batches = self._world.on_each_rank(
            "run.batches",
            lambda: Batches(
                dataset,
                batch_size,
                share=share,
                in_hand=self._in_hand,
                shuffle=shuffle,
                collate_fn=collate_fn,
                num_workers=num_workers,
            ),
        )
        self._world.require_same(
            "run.batches", f"{batches.num_samples} samples, batch_size={batches.batch_size}, shuffle={shuffle}"
        )
        if self._waiting_states:
            batches.load_state_dict(self._waiting_states.pop(0))
        self._batches.append(batches)
        return batches

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Around the forward pass and the loss: computes in the precision given to `init`."""
        return self._precision.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of `loss` (a scalar: the mean over this rank's samples of the batch in hand).

        The gradients are then those of the mean over the samples of all ranks, also where ranks hold unequal
        batches (the end of an epoch): each loss is weighted with samples here * ranks / samples everywhere
        before DistributedDataParallel takes the plain average. Outside of a loop over `run.batches` ranks
        weigh the same. Where hosts train on their own, "all ranks" are those of this host.
        """
        self._meter.begin()
        counts = self._in_hand.counts
        if counts is not None and (weight := counts.weight(self._together(), self.world_size)) != 1.0:
            loss = loss * weight
        self._precision.scale(loss).backward()
        self._meter.backward_ended(counts.local if counts is not None else 0)

    def _together(self) -> Sequence[int]:
        """The ranks that average their gradients in this step."""
        sync = self._prepared.sync if self._prepared is not None else None
        if sync is None or sync.averages_over_world:
            return range(self.world_size)
        return [rank for rank, host in enumerate(self._hosts) if host == self._hosts[self.rank]]

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients down so that their norm is at most `max_norm`; returns the norm they had (a
        scalar).

        Between `backward` and `optimizer.step()`. With fp16 the true gradients are clipped, not the scaled
        ones.
        """
        prepared = self._require_prepared("run.clip_grad_norm_")
        self._precision.unscale(prepared.optimizer)
        return torch.nn.utils.clip_grad_norm_(prepared.model.parameters(), max_norm)

    def log(self, *, step: int, weight: float | None = None, **named: float | torch.Tensor) -> dict[str, float]:
        """The weighted means of the values over all ranks; rank 0 prints them and tells the launcher.

        step     the same on every rank
        weight   of this rank's values: the samples of the batch in hand unless given, 1 outside of a loop
                 over batches. For the mean loss of an evaluation, the samples that this rank evaluated.

        One small all-reduce: every rank must call it. Raises WorldError on all ranks when they pass different
        steps or names. A rank whose values, step or weight can't be logged raises InputError, the others a WorldError.
        """
        counts = self._in_hand.counts
        if weight is None:
            weight = 1.0 if counts is None else counts.local
        samples, seconds = self._meter.take_logged()
        failure: Exception | None = None
        try:
            floats = {name: checks.one_number(checks.printable(name), value) for name, value in named.items()}
            step = checks.whole("step", step, "a whole number")
            weight = checks.bounded("weight", weight, "a number of at least 0", at_least=0, at_most=math.inf)
            row = values.pack(step, floats, weight=weight, samples=samples)
        except Exception as error:  # noqa: BLE001  # raised below: the others are waiting in the sum
            failure, row = error, values.pack_failure()
        total = self._world.sum(row)
        if not values.agree(total, self.world_size):
            disagreement = values.disagreement(self._world.gather_bytes, step, sorted(named), failure)
            raise failure or disagreement
        means, all_samples = values.unpack(total, list(named))
        if self.rank == 0:
            print(values.line(step, means, all_samples, seconds), flush=True)
            events.emit(events.Logged(step=step, values=means))
        return means

    def checkpoint(self, folder: str | Path, *, step: int, extra: Any = None, keep: int = 2) -> Path:
        """Rank 0 writes the state of the run into a new folder inside `folder`, and all ranks get its path.

        It appears whole or not at all: files are written beside, hashed, forced to disk and then renamed. Of this
        training, also over resumes, the newest `keep` are kept; what another one wrote there stays. `extra`
        (rank 0's counts) may hold None, numbers, text, lists, tuples, dictionaries, tensors.

        Where hosts differ between two rounds, it holds the weights that all share, and each rank keeps what it
        alone knows on its own disk, in `folder`/parts.

        Raises CheckpointError on every rank when it can't be written; earlier checkpoints are then untouched.
        Raises InputError for a `step`, `keep` or `folder` that can't be used.
        """
        prepared = self._require_prepared("run.checkpoint")

        def prepare() -> bytes:
            checks.folder("run.checkpoint", folder)
            checks.whole("run.checkpoint: step", step, "a whole number, at least 0", at_least=0)
            checks.whole("run.checkpoint: keep", keep, "a whole number, at least 1", at_least=1)
            return json.dumps(seeds.capture(self.device)).encode()

        rng = self._world.gather_bytes(self._world.on_each_rank("run.checkpoint", prepare))
        number = int(step)  # numpy's are no JSON
        own = saving.write_own(prepared, self._world, Path(folder), step=number)

        def write() -> bytes:
            snapshot = saving.take(prepared, step=number, extra=extra, rng=[json.loads(part) for part in rng], own=own)
            saved = checkpoint.save(Path(folder), snapshot, step=number, keep=keep)
            path = saved.path.resolve()
            events.emit(events.CheckpointSaved(step=number, path=str(path), num_bytes=saved.num_bytes))
            kept = [path.name for path in checkpoint.newest_first(Path(folder))]
            return json.dumps([str(path), kept]).encode()

        path, kept = json.loads(self._world.on_rank_0("run.checkpoint", write))
        if own is not None:
            parts.remove_others(Path(folder), prepared.training, kept)
        return Path(path)

    def resume(self, folder: str | Path) -> Resumed | None:
        """Continues from the newest whole checkpoint in `folder`; None when there is none. After
        `run.prepare`.

        Rank 0 reads; the others get everything from it, and add what they kept in `folder`/parts. Restores the
        weights, optimizer, loss scale, random numbers of each rank, and the place of every `run.batches` in its
        epoch, in the order in which they are made (before or after this call). With the same ranks, hosts and
        strategy, training continues bit for bit as if it had not stopped. (Under an `Outer` with three or more ranks
        on a host, PyTorch arranges gradients anew after a process's first step: that changes the order of a sum,
        and so the last bits.)

        With another number of ranks, the remaining samples of the epoch still come in the same order, in other
        batches. Then, with another strategy, or where a rank's part is lost, hosts continue from the weights that
        all share, and rank 0 says so.

        A damaged checkpoint is named in one line and the one before it taken. Raises CheckpointError when
        none is whole, or it belongs to another model, optimizer or data set.
        """
        prepared = self._require_prepared("run.resume")
        found: checkpoint.Snapshot | None = None

        def read() -> bytes:
            nonlocal found
            newest = checkpoint.load_newest(
                checks.folder("run.resume", folder), say=lambda line: print(line, flush=True)
            )
            if newest is None:
                return b""
            path, found = newest
            checkpoint.require_same_shapes(prepared.model.state_dict(), found.model, path)
            saving.require_same_optimizer(prepared.optimizer, found.state, path)
            return str(path).encode()

        if not self._world.on_rank_0("run.resume", read):
            if self.rank == 0:
                print(f"paceline: no checkpoint in {folder} to continue from", flush=True)
            return None
        snapshot = saving.share(self._world, found)
        if self.rank == 0:
            print(f"paceline: continues from {folder}, step {snapshot.state['step']}", flush=True)
        self._waiting_states = snapshot.state["batches"][len(self._batches) :]
        own = saving.read_own(prepared, self._world, Path(folder), snapshot.state, say=self._say)
        return self._world.on_each_rank(
            "run.resume", lambda: saving.put_back(prepared, snapshot, own, rank=self.rank, device=self.device)
        )

    def _require_prepared(self, asked: str) -> Prepared:
        if self._prepared is None:
            raise InputError(f"{asked} needs the model: call run.prepare(model, optimizer) before it")
        return self._prepared

    def _say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def _leave(self) -> None:
        """At the end of the script. After a good one, hosts share what they have not shared yet; after another, they
        learn of it by the lost connection."""
        if dist.is_initialized():
            if not hasattr(sys, "last_value"):  # the interpreter's word for an exception that nobody caught
                guard.finish_models()
            dist.destroy_process_group()
            # Gloo's threads need the interpreter to let go of the last futures: its teardown would abort the process.
            time.sleep(0.02)
        self._meter.tell()
