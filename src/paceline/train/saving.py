"""From a live run to a snapshot and back, and a snapshot from rank 0 to every rank.

What all ranks hold alike is rank 0's to write. What a rank alone knows (see `parts.py`) it writes itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CheckpointError
from paceline.strategy import Outer
from paceline.sync.hooks import Sync
from paceline.train import checkpoint, parts, seeds, tree
from paceline.train.batches import Batches
from paceline.train.checkpoint import Snapshot
from paceline.train.precision import Precision
from paceline.train.world import World


@dataclasses.dataclass(kw_only=True)
class Prepared:
    """What a checkpoint is taken from on one rank."""

    model: torch.nn.Module
    """The plain module, without the DistributedDataParallel around it."""
    optimizer: torch.optim.Optimizer
    precision: Precision
    batches: list[Batches]
    """In the order in which the script made them."""
    training: str
    """Names this training; one that continues it has the same name. Old checkpoints of others are not removed."""
    sync: Sync | None
    """None when there is one rank only."""
    hosts: list[str]
    """The name of the host of each rank."""

    @property
    def host_indices(self) -> list[int]:
        """For each rank the number of its host, in the order of ranks."""
        return [list(dict.fromkeys(self.hosts)).index(host) for host in self.hosts]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed:
    """What `run.resume` found."""

    step: int
    """The step that was given to run.checkpoint."""
    extra: Any
    """What was given to run.checkpoint as `extra`."""


def take(
    prepared: Prepared, *, step: int, extra: Any, rng: list[dict[str, Any]], own: dict[str, Any] | None
) -> Snapshot:
    """The state of the run on rank 0; `rng` holds the generators of every rank, and `own` is what `write_own` gave."""
    tensors: dict[str, torch.Tensor] = {}
    sync = prepared.sync
    state = {
        "step": step,
        "training": prepared.training,
        "extra": tree.flatten(extra, "extra", tensors),
        "optimizer": tree.flatten(prepared.optimizer.state_dict(), "optimizer", tensors),
        "optimizer_kind": _kind(prepared.optimizer),
        "scaler": prepared.precision.state_dict(),
        "batches": [batches.state_dict() for batches in prepared.batches],
        "rng": rng,
        "sync": None
        if sync is None
        else {
            "strategy": str(sync.strategy),
            "hosts": prepared.host_indices,
            "shared": tree.flatten(sync.shared_state(), "sync", tensors),
            "own": own,
        },
    }
    return Snapshot(model=_plain_tensors(prepared.model), tensors=tensors, state=state)


def write_own(prepared: Prepared, world: World, folder: Path, *, step: int) -> dict[str, Any] | None:
    """Every rank writes what it alone knows; what the checkpoint is to say of it, or None where no rank knows any.

    Raises CheckpointError on every rank when one can't write.
    """
    if prepared.sync is None:
        return None
    own: dict[str, Any] = {"sync": prepared.sync.own_state()}
    tensors: dict[str, torch.Tensor] = {}
    tree.flatten(own, "part", tensors)
    if not any(json.loads(part) for part in world.gather_bytes(json.dumps(bool(tensors)).encode())):
        return None  # all ranks are in step
    if _first_of_host(prepared, world) != world.rank:
        own["sync"].pop("host", None)  # the first one writes it
    elif world.rank > 0 and isinstance(prepared.sync.strategy, Outer):  # rank 0's are in the checkpoint
        own["optimizer"] = prepared.optimizer.state_dict()
        own["scaler"] = prepared.precision.state_dict()

    def choose() -> bytes:
        return json.dumps(
            [checkpoint.next_name(folder, step=step), *(path.name for path in checkpoint.newest_first(folder))]
        ).encode()

    name, *there = json.loads(world.on_rank_0("run.checkpoint", choose))
    # What checkpoints that failed, or were killed, have left would fill the disks of the others.
    parts.remove_others(folder, prepared.training, [name, *there])
    sha256 = world.on_each_rank(
        "run.checkpoint",
        lambda: parts.write(folder, prepared.training, name, world.rank, own),
        tells=CheckpointError,
    )
    return {"name": name, "sha256": [part.decode() for part in world.gather_bytes(sha256.encode())]}


def _first_of_host(prepared: Prepared, world: World) -> int:
    return prepared.hosts.index(prepared.hosts[world.rank])


def read_own(
    prepared: Prepared, world: World, folder: Path, state: dict[str, Any], *, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """What this rank alone knew when the checkpoint with `state` was written: on every rank, or None on all.

    Where it can't be had and is missed, `say` is told why.
    """
    saved = state.get("sync")
    if saved is None or saved["own"] is None:
        return {}
    own: dict[str, Any] = {}
    reason = _difference(prepared, saved)
    if reason is None:
        try:
            own = _read_parts(prepared, world, folder, state)
            problem = ""
        except CheckpointError as error:
            problem = error.message
        told = [part.decode() for part in world.gather_bytes(problem.encode())]
        reason = next((f"on rank {rank}: {text}" for rank, text in enumerate(told) if text), None)
    if reason is None:
        return own
    say(f"paceline: all hosts continue from the weights they share, without what each alone knew ({reason})")
    return None


def _difference(prepared: Prepared, saved: dict[str, Any]) -> str | None:
    """Why what the ranks knew then is of no use to those of now."""
    hosts = prepared.host_indices
    if saved["hosts"] != hosts:
        return f"{_layout(saved['hosts'])} then, {_layout(hosts)} now"
    strategy = str(prepared.sync.strategy) if prepared.sync is not None else "one rank"
    return f"{saved['strategy']} then, {strategy} now" if saved["strategy"] != strategy else None


def _layout(hosts: list[int]) -> str:
    return f"{len(hosts)} ranks on {len(set(hosts))} hosts"


def _read_parts(prepared: Prepared, world: World, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """This rank's part, and of the first rank of its host what is the host's."""
    name, hashes = state["sync"]["own"]["name"], state["sync"]["own"]["sha256"]

    def read(rank: int) -> dict[str, Any]:
        return parts.read(folder, state["training"], name, rank, hashes[rank])

    mine = read(world.rank)
    if (first := _first_of_host(prepared, world)) != world.rank:
        of_host = read(first)
        mine = {**of_host, **mine, "sync": {**of_host["sync"], **mine["sync"]}}
    return mine


def require_same_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], path: Path) -> None:
    """Raises CheckpointError when the checkpoint holds the state of another kind of optimizer.

    PyTorch takes it if only the shapes fit, and then fails in a later step, or goes on with wrong numbers. Settings
    that are new here are not a difference: a newer PyTorch adds some.
    """
    there, here = state.get("optimizer_kind"), _kind(optimizer)
    if there is None:  # written before this was kept
        return
    lacking = [name for name in there["settings"] if name not in here["settings"]]
    if there["class"] != here["class"] or lacking:
        told = f", without {', '.join(lacking)}" if lacking else ""
        raise CheckpointError(
            f"{path} belongs to another optimizer: {there['class']} ({', '.join(there['settings'])}) there and "
            f"{here['class']} ({', '.join(here['settings'])}) here{told}",
            hint="resume with the optimizer it was trained with, or choose another checkpoint folder",
        )


def put_back(
    prepared: Prepared, snapshot: Snapshot, own: dict[str, Any] | None, *, rank: int, device: torch.device
) -> Resumed:
    """Gives everything the state in `snapshot` and what `read_own` gave. Raises CheckpointError when the optimizer is
    another one."""
    state = snapshot.state
    prepared.training = state["training"]
    prepared.model.load_state_dict(snapshot.model)
    mine = own or {}
    _load_optimizer(prepared.optimizer, mine.get("optimizer") or tree.rebuild(state["optimizer"], snapshot.tensors))
    prepared.precision.load_state_dict(mine.get("scaler") or state["scaler"])
    saved = state.get("sync")
    if prepared.sync is not None and saved is not None and saved["strategy"] == str(prepared.sync.strategy):
        shared = tree.rebuild(saved["shared"], snapshot.tensors)
        prepared.sync.load_state(shared, mine.get("sync"))
    for batches, place in zip(prepared.batches, state["batches"], strict=False):
        batches.load_state_dict(place)
    # With more ranks than before, the new ones keep the generators that their seed gave them.
    if rank < len(state["rng"]):
        seeds.restore(state["rng"][rank], device)
    return Resumed(step=state["step"], extra=tree.rebuild(state["extra"], snapshot.tensors))


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint belongs to another optimizer: {error}") from error
    for group in optimizer.param_groups:
        for name, value in optimizer.defaults.items():
            group.setdefault(name, value)  # a setting that was not there when the checkpoint was written


def share(world: World, snapshot: Snapshot | None) -> Snapshot:
    """Rank 0's snapshot on every rank; the others pass None."""
    if world.size == 1:
        assert snapshot is not None
        return snapshot
    index = b""
    if snapshot is not None:
        index = json.dumps([_describe(snapshot.model), _describe(snapshot.tensors), snapshot.state]).encode()
    model, tensors, state = json.loads(world.broadcast_bytes(index))

    def place() -> Snapshot:
        return snapshot or Snapshot(model=_allocate(model), tensors=_allocate(tensors), state=state)

    whole = world.on_each_rank("run.resume", place)
    for part in (whole.model, whole.tensors):
        for name in sorted(part):
            world.broadcast(part[name])
    return whole


def _kind(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its own settings, without what a scheduler adds to the parameter groups."""
    return {"class": type(optimizer).__name__, "settings": sorted(optimizer.defaults)}


def _plain_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"the model's {name} is a {type(value).__name__}; only tensors can be kept")
    return state


def _describe(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}


def _allocate(described: dict[str, tuple[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in described.items()}
