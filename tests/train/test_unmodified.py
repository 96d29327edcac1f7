"""Which models of a script `--sync` takes on, and how they start. What then happens is in tests/sync/test_hooks.py."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import InputError, WorldError
from paceline.train import unmodified, wrapping
from paceline.train.world import World
from rank_pool import RankPool

pytestmark = pytest.mark.ranks


def build(module: nn.Module, *more: Any, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    with (
        mock.patch.dict(os.environ, PACELINE_SYNC="local:H=2"),
        mock.patch.object(World, "host_names", return_value=["alice", "bob"]),
    ):
        unmodified.build(ddp, DistributedDataParallel.__init__, module, *more, **options)
    return ddp


def models() -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        alone = build(nn.Linear(2, 2), process_group=dist.new_group())
        alone.register_comm_hook(None, lambda state, bucket: None)
        with pytest.raises(InputError, match="delay_all_reduce_named_params"):
            build(nn.Linear(2, 2), delay_all_reduce_named_params=[("weight", None)])
        with pytest.raises(InputError, match="weight has no shape yet"):
            build(nn.LazyLinear(2))
        with pytest.raises(InputError, match=r"1\.weight is on the meta device"):
            build(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
        torch.manual_seed(rank)
        taken = build(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), process_group=dist.group.WORLD)
        with pytest.raises(WorldError, match="the model in DistributedDataParallel differs between the ranks"):
            build(nn.Linear(2, 3 + rank))
        placed = build(nn.Linear(2, 3), None, None, 0, True, True, dist.group.WORLD)
        assert [dist.get_world_size(ddp.process_group) for ddp in (taken, placed)] == [1, 1], "the host's own"
    torch.manual_seed(0)
    assert taken.module[0].weight.equal(nn.Linear(2, 3).weight), "rank 0's"
    taken(torch.randn(4, 2)).square().mean().backward()
    wrapping.finish()
    assert wrapping._unfinished == []
    unmodified._meters.clear()
    return said.getvalue()


def test_models_over_all_ranks_are_attached(two_ranks: RankPool) -> None:
    said, nothing = two_ranks.run(models)
    assert said.splitlines() == [
        "paceline: sync local:H=2: a model over a process group of the script's own is left alone",
        "paceline: sync local:H=2 between 2 hosts",
    ]
    assert nothing == ""
