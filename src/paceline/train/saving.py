"""From a live run to a snapshot and back, and a snapshot from rank 0 to every rank."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CheckpointError
from paceline.train import seeds, tree
from paceline.train.batches import Batches
from paceline.train.checkpoint import Snapshot
from paceline.train.precision import Precision
from paceline.train.world import World


@dataclasses.dataclass(kw_only=True)
class Parts:
    """What a checkpoint is made of on one rank."""

    model: torch.nn.Module
    """The plain module, without the DistributedDataParallel around it."""
    optimizer: torch.optim.Optimizer
    precision: Precision
    batches: list[Batches]
    """In the order in which the script made them."""
    training: str
    """Names this training; one that continues it has the same name. Old checkpoints of others are not removed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed:
    """What `run.resume` found."""

    step: int
    """The step that was given to run.checkpoint."""
    extra: Any
    """What was given to run.checkpoint as `extra`."""


def take(parts: Parts, *, step: int, extra: Any, rng: list[dict[str, Any]]) -> Snapshot:
    """The whole state of the run; `rng` holds the generators of every rank."""
    tensors: dict[str, torch.Tensor] = {}
    state = {
        "step": step,
        "training": parts.training,
        "extra": tree.flatten(extra, "extra", tensors),
        "optimizer": tree.flatten(parts.optimizer.state_dict(), "optimizer", tensors),
        "optimizer_kind": _kind(parts.optimizer),
        "scaler": parts.precision.state_dict(),
        "batches": [batches.state_dict() for batches in parts.batches],
        "rng": rng,
    }
    return Snapshot(model=_plain_tensors(parts.model), tensors=tensors, state=state)


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


def put_back(parts: Parts, snapshot: Snapshot, *, rank: int, device: torch.device) -> Resumed:
    """Gives every part the state in `snapshot`. Raises CheckpointError when the optimizer is another one."""
    state = snapshot.state
    parts.training = state["training"]
    parts.model.load_state_dict(snapshot.model)
    try:
        parts.optimizer.load_state_dict(tree.rebuild(state["optimizer"], snapshot.tensors))
    except ValueError as error:
        raise CheckpointError(f"the checkpoint belongs to another optimizer: {error}") from error
    for group in parts.optimizer.param_groups:
        for name, value in parts.optimizer.defaults.items():
            group.setdefault(name, value)  # a setting that was not there when the checkpoint was written
    parts.precision.load_state_dict(state["scaler"])
    for batches, saved in zip(parts.batches, state["batches"], strict=False):
        batches.load_state_dict(saved)
    # With more ranks than before, the new ones keep the generators that their seed gave them.
    if rank < len(state["rng"]):
        seeds.restore(state["rng"][rank], device)
    return Resumed(step=state["step"], extra=tree.rebuild(state["extra"], snapshot.tensors))


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
