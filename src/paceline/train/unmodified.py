"""`paceline run --sync TEXT` on a script that nobody changes: each DistributedDataParallel model that it builds over
all ranks is attached as it is built. `train/guard.py` calls this."""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline import events
from paceline.cluster.detect import detect_place
from paceline.errors import InputError
from paceline.strategy import Outer, parse_sync
from paceline.sync.collectives import Mesh
from paceline.sync.hooks import Sync, attach, describe, fit
from paceline.sync.meter import Meter
from paceline.train.world import World

_syncs: list[Sync] = []
_meters: list[Meter] = []
"""Of each model. The first one's is told: a step with two models is one step."""


def build(ddp: DistributedDataParallel, init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """What `ddp.__init__(*args, **kwargs)` is in such a script; `init` is PyTorch's own.

    Raises InputError for a model that can't be attached, and WorldError when the ranks build different models.
    """
    strategy = parse_sync(os.environ["PACELINE_SYNC"])
    if not _spans_world(args, kwargs):
        init(ddp, *args, **kwargs)
        _say(f"sync {strategy}: a model over a process group of the script's own is left alone")
        return
    if kwargs.get("delay_all_reduce_named_params") is not None:
        raise InputError(f"--sync {strategy}: delay_all_reduce_named_params reduces gradients in a way of its own")
    module = args[0] if args else kwargs["module"]
    world = _world(module)
    mesh = Mesh.connect(_host_names(world), world.device, is_patient=isinstance(strategy, Outer))
    meter = _meter(world, mesh)
    fitted = fit(strategy, mesh)
    if isinstance(fitted, Outer):
        make_equal(module, world)
        is_positional = any(isinstance(value, dist.ProcessGroup) for value in args)
        args = tuple(mesh.host_group if isinstance(value, dist.ProcessGroup) else value for value in args)
        kwargs |= {} if is_positional else {"process_group": mesh.host_group}
    init(ddp, *args, **kwargs)
    if len(_meters) == 1:
        _say(describe(strategy, mesh))
    _syncs.append(attach(ddp, fitted, mesh, meter))


def keep(sync: Sync) -> None:
    """Have `finish` finish this one too, which `run.prepare` has made."""
    _syncs.append(sync)


def finish() -> None:
    """The script has come to a good end, and leaves its process group: what is not shared yet is shared."""
    # A script that has left the process group by itself leaves nothing to share with.
    finished = _syncs[:] if dist.is_initialized() else []
    _syncs.clear()
    if len(finished) == 1:
        finished[0].finish()
    elif finished:
        # At once, because another host may have more batches for any of them.
        with ThreadPoolExecutor(len(finished)) as threads:
            for _ in threads.map(Sync.finish, finished):
                pass
    for meter in _meters[:1]:
        meter.tell()


def _spans_world(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = [kwargs.get("process_group"), *(value for value in args if isinstance(value, dist.ProcessGroup))]
    return kwargs.get("device_mesh") is None and all(group in (None, dist.group.WORLD) for group in given)


def _world(module: torch.nn.Module) -> World:
    parameter = next(iter(module.parameters()), torch.empty(0))
    place = detect_place(os.environ)
    return World(place=place, device=parameter.device, backend=dist.get_backend(), device_reason="the model's")


def _host_names(world: World) -> list[str]:
    """By rank. What `paceline run` calls the hosts, so that one machine may pass for two."""
    name = world.place.host or socket.gethostname()
    return [told.decode() for told in world.gather_bytes(name.encode())]


def _meter(world: World, mesh: Mesh) -> Meter:
    tell = events.emit if not _meters else lambda _: None
    _meters.append(Meter(clock_s=time.monotonic, tell=tell, measures_wait=world.device.type == "cpu"))
    _meters[0].traffic.append(mesh.traffic)
    return _meters[-1]


def make_equal(module: torch.nn.Module, world: World) -> None:
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


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"paceline: {text}", flush=True)
