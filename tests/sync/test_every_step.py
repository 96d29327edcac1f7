"""The communication hook on real DDP models over pretended hosts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.strategy import EveryStep, parse_sync
from paceline.sync.collectives import Mesh
from paceline.sync.every_step import EveryStepHook
from rank_pool import RankPool

pytestmark = pytest.mark.ranks

BATCH = 4


class Trainee:
    """A model under DDP with the hook, and its data: the same for all, of which each rank takes its share."""

    def __init__(self, hosts: str, sync: str, bucket_cap_mb: float | None = None) -> None:
        dist.init_process_group("gloo")
        self.mesh = Mesh.connect(hosts, torch.device("cpu"))
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.ddp = nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=bucket_cap_mb)
        strategy = parse_sync(sync)
        assert isinstance(strategy, EveryStep)
        self.hook = EveryStepHook(strategy, self.mesh, list(self.model.parameters()))
        self.ddp.register_comm_hook(None, self.hook.average)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, x: torch.Tensor) -> None:
        loss = (self.ddp(x) - x.sin().sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def close(self) -> torch.Tensor:
        self.hook.close()
        self.mesh.close()
        return self.weights()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(hosts: str, sync: str, num_steps: int = 6, bucket_cap_mb: float | None = None) -> torch.Tensor:
    trainee = Trainee(hosts, sync, bucket_cap_mb)
    for step in range(num_steps):
        trainee.step(batch(step, trainee.mesh.rank))
    return trainee.close()


def train_alone(num_ranks: int, accumulate: int, num_steps: int = 6) -> torch.Tensor:
    """On all samples."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for first in range(0, num_steps, accumulate):
        x = torch.cat([batch(step, rank) for step in range(first, first + accumulate) for rank in range(num_ranks)])
        (model(x) - x.sin().sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("sync", "tolerance"),
    [
        ("every", 1e-6),
        ("every:accumulate=3", 1e-6),
        ("every:bf16", 5e-3),
        ("every:int8:accumulate=2", 1e-2),
        ("every:powersgd=64", 1e-6),
    ],
)
@pytest.mark.parametrize("hosts", ["ab", "aaab"])
def test_ranks_train_like_one_with_all_samples(
    hosts: str, sync: str, tolerance: float, two_ranks: RankPool, four_ranks: RankPool
) -> None:
    pool = two_ranks if len(hosts) == 2 else four_ranks
    results = pool.run(train, hosts, sync)
    assert all(torch.equal(results[0], other) for other in results)
    strategy = parse_sync(sync)
    assert isinstance(strategy, EveryStep)
    alone = pool.run(train_alone, len(hosts), strategy.accumulate_steps)[0]
    assert (results[0] - alone).abs().max() <= tolerance
