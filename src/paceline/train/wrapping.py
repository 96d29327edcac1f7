"""A model spread over all ranks, and who said how its hosts are to synchronise."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.strategy import EveryStep, Outer, Strategy, parse_sync
from paceline.sync import hooks
from paceline.sync.collectives import Mesh
from paceline.sync.hooks import Sync
from paceline.sync.meter import Meter
from paceline.train import unmodified
from paceline.train.world import World

EXACT = EveryStep()
"""What is done unless something else is asked for: plain DistributedDataParallel."""


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


def wrap(
    model: torch.nn.Module, asked: Asked, *, world: World, hosts: list[str], meter: Meter
) -> tuple[DistributedDataParallel, Sync]:
    """The model in DistributedDataParallel, attached to what is left of the strategy on these hosts. Every rank calls
    it; `hosts` names the host of each. Rank 0 says what becomes of a strategy that was asked for."""
    mesh = Mesh.connect(hosts, world.device, is_patient=isinstance(asked.strategy, Outer))
    meter.traffic.append(mesh.traffic)
    if world.rank == 0 and asked.strategy != EXACT:
        print(f"paceline: {hooks.describe(asked.strategy, mesh)} (from {asked.reason})", flush=True)
    strategy = hooks.fit(asked.strategy, mesh)
    group = None
    if isinstance(strategy, Outer):
        group = mesh.host_group
        unmodified.make_equal(model, world)
    device_ids = [world.device] if world.device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=device_ids, process_group=group)
    sync = hooks.attach(ddp, strategy, mesh, meter, counts_steps=False)
    unmodified.keep(sync)
    return ddp, sync
