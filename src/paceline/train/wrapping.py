"""A model spread over all ranks, from its start to its good end, and who said how its hosts are to synchronise."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from paceline.errors import InputError
from paceline.strategy import EveryStep, Outer, Strategy, parse_sync
from paceline.sync import hooks
from paceline.sync.collectives import Mesh
from paceline.sync.hooks import Sync
from paceline.sync.meter import Meter
from paceline.train.world import World

EXACT = EveryStep()
"""What is done unless something else is asked for: plain DistributedDataParallel."""

_unfinished: list[tuple[Sync, Meter]] = []
"""Every model that this process trains."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """How to synchronise, and who said so."""

    strategy: Strategy
    reason: str


def choose(sync: Strategy, text: str | None) -> Asked:
    """`sync` is what the script says, `text` what `paceline run --sync` says, which comes first."""
    if text is None:
        return Asked(sync, "paceline.init")
    told = parse_sync(text)
    return Asked(told, "--sync" if sync in (told, EXACT) else f"--sync, instead of paceline.init's {sync}")


def require_weights(module: torch.nn.Module) -> None:
    """Raises InputError that names a parameter or buffer which has no values yet."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            hint = "call the model once before it is wrapped, so that it learns its shapes"
            raise InputError(f"the model's {name} has no shape yet (a lazy module)", hint=hint)
        if tensor.is_meta:
            hint = "model.to_empty(device=...), and give it its weights, before it is wrapped"
            raise InputError(f"the model's {name} is on the meta device, without values", hint=hint)


def wrap(model: torch.nn.Module, asked: Asked, *, world: World, hosts: list[str], meter: Meter) -> Sync:
    """The model in DistributedDataParallel, for a loop that counts its own steps. Every rank calls it; `hosts` names
    the host of each. Rank 0 says what becomes of a strategy that was asked for."""
    require_weights(model)
    mesh = Mesh.connect(hosts, world.device, is_patient=isinstance(asked.strategy, Outer))
    meter.traffic.append(mesh.traffic)
    if world.rank == 0 and asked.strategy != EXACT:
        print(f"paceline: {hooks.describe(asked.strategy, mesh)} (from {asked.reason})", flush=True)

    def build(group: dist.ProcessGroup | None) -> DistributedDataParallel:
        device_ids = [world.device] if world.device.type == "cuda" else None
        # Gradients that lie where they travel: one copy of all less to hold, and to make at each step.
        return DistributedDataParallel(model, device_ids=device_ids, process_group=group, gradient_as_bucket_view=True)

    return spread(model, asked.strategy, build, world=world, mesh=mesh, meter=meter, counts_steps=False)


def spread(
    module: torch.nn.Module,
    strategy: Strategy,
    build: Callable[[dist.ProcessGroup | None], DistributedDataParallel],
    *,
    world: World,
    mesh: Mesh,
    meter: Meter,
    counts_steps: bool,
) -> Sync:
    """Attaches what is left of the strategy on these hosts to the model that `build` puts in DistributedDataParallel,
    over the given group or, for None, over all ranks. Every rank calls it.

    Raises InputError for a model that can't be attached, and WorldError when the ranks bring different models.
    """
    strategy = hooks.fit(strategy, mesh)
    is_outer = isinstance(strategy, Outer)
    if is_outer:
        _make_equal(module, world)
    sync = hooks.attach(build(mesh.host_group if is_outer else None), strategy, mesh, meter, counts_steps=counts_steps)
    _unfinished.append((sync, meter))
    return sync


def finish() -> None:
    """The script has come to a good end, or leaves its process group: what is not shared yet is shared."""
    finished = _unfinished[:]
    _unfinished.clear()
    # A script that has left the process group by itself leaves nothing to share with.
    if finished and dist.is_initialized():
        # At once, because another host may have more batches for any of them.
        with ThreadPoolExecutor(len(finished)) as threads:
            for _ in threads.map(Sync.finish, [sync for sync, _ in finished]):
                pass
    for _, meter in finished:
        meter.tell()


def _make_equal(module: torch.nn.Module, world: World) -> None:
    """As DistributedDataParallel does where it spans all ranks: rank 0's weights and buffers on every one."""
    tensors = [*module.parameters(), *module.buffers()]
    shapes = " ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
    seen = (
        f"{len(tensors)} tensors, {sum(tensor.numel() for tensor in tensors)} values, {zlib.crc32(shapes.encode()):08x}"
    )
    world.require_same("the model in DistributedDataParallel", seen)
    with torch.no_grad():
        for tensor in tensors:
            row = tensor.detach().contiguous()
            world.broadcast(row)
            tensor.copy_(row)
