"""`paceline run --sync TEXT` on a script that nobody changes: each DistributedDataParallel model that it builds over
all ranks is attached as it is built. `train/guard.py` calls this."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline import events
from paceline.cluster.detect import detect_place
from paceline.errors import InputError
from paceline.strategy import Outer, parse_sync
from paceline.sync.collectives import Mesh
from paceline.sync.hooks import describe
from paceline.sync.meter import Meter
from paceline.train.world import World
from paceline.train.wrapping import require_weights, spread

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
    require_weights(module)
    world = _world(module)
    mesh = Mesh.connect(world.host_names(), world.device, is_patient=isinstance(strategy, Outer))
    if not _meters:
        _say(describe(strategy, mesh))
    meter = _meter(world, mesh)

    def construct(group: dist.ProcessGroup | None) -> DistributedDataParallel:
        given, named = args, kwargs
        if group is not None:
            given = tuple(group if isinstance(value, dist.ProcessGroup) else value for value in args)
            named = kwargs if given != args else kwargs | {"process_group": group}
        init(ddp, *given, **named)
        return ddp

    spread(module, strategy, construct, world=world, mesh=mesh, meter=meter, counts_steps=True)


def _spans_world(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = [kwargs.get("process_group"), *(value for value in args if isinstance(value, dist.ProcessGroup))]
    return kwargs.get("device_mesh") is None and all(group in (None, dist.group.WORLD) for group in given)


def _world(module: torch.nn.Module) -> World:
    parameter = next(iter(module.parameters()), torch.empty(0))
    place = detect_place(os.environ)
    return World(place=place, device=parameter.device, backend=dist.get_backend(), device_reason="the model's")


def _meter(world: World, mesh: Mesh) -> Meter:
    tell = events.emit if not _meters else lambda _: None
    _meters.append(Meter(clock_s=time.monotonic, tell=tell, measures_wait=world.backend == "gloo"))
    _meters[0].traffic.append(mesh.traffic)
    return _meters[-1]


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"paceline: {text}", flush=True)
