"""The communication hook on real DDP models over pretended hosts."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import InputError
from paceline.strategy import EveryStep, parse_sync
from paceline.sync.collectives import Mesh
from paceline.sync.every_step import EveryStepHook
from rank_pool import RankPool

pytestmark = pytest.mark.ranks

BATCH = 4
LR = 0.1


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
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9, weight_decay=0.01)

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
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=0.01)
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


def count_collectives(hosts: str, sync: str) -> tuple[list[int], list[torch.Tensor]]:
    """Collectives of each batch, and the weights after it."""
    trainee = Trainee(hosts, sync)
    counts, weights = [], []
    for step in range(6):
        before = trainee.mesh.traffic.num_collectives
        trainee.step(batch(step, trainee.mesh.rank))
        counts.append(trainee.mesh.traffic.num_collectives - before)
        weights.append(trainee.weights())
    trainee.close()
    return counts, weights


@pytest.mark.parametrize("sync", ["every:accumulate=3", "every:int4:accumulate=3"])
def test_accumulation_sends_nothing_in_between(sync: str, two_ranks: RankPool) -> None:
    for counts, weights in two_ranks.run(count_collectives, "ab", sync):
        assert [count > 0 for count in counts] == [False, False, True] * 2
        moved = [not torch.equal(before, after) for before, after in itertools.pairwise(weights)]
        assert moved == [False, True, False, False, True]  # momentum and weight decay move nothing in between


def step_with_a_closure() -> str:
    trainee = Trainee("ab", "every:accumulate=2")
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    other.step(lambda: 0.0)  # has nothing to do with the model
    with pytest.raises(InputError) as raised:
        trainee.optimizer.step(lambda: trainee.ddp(batch(0, 0)).sum().backward())
    trainee.close()
    return raised.value.message


def test_a_closure_can_not_be_added_up(two_ranks: RankPool) -> None:
    told = two_ranks.run(step_with_a_closure)
    assert told[0].startswith("every:accumulate=2: optimizer.step(closure) computes gradients within the step")


def scaled_window() -> list[float]:
    """The scale after each batch; one gradient overflows on rank 1, in the middle of a window."""
    trainee = Trainee("ab", "every:int8:accumulate=2")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    scales = []
    for step in range(4):
        loss = trainee.ddp(batch(step, trainee.mesh.rank)).square().mean()
        scaler.scale(loss * (torch.inf if step == 0 and trainee.mesh.rank == 1 else 1)).backward()
        scaler.unscale_(trainee.optimizer)
        nn.utils.clip_grad_norm_(trainee.model.parameters(), 1.0)
        scaler.step(trainee.optimizer)
        scaler.update()
        trainee.optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert trainee.close().isfinite().all()
    return scales


def test_an_overflow_on_one_rank_skips_the_windows_step_on_all(two_ranks: RankPool) -> None:
    assert two_ranks.run(scaled_window) == [[2.0**10, 2.0**9, 2.0**9, 2.0**9]] * 2


def residuals_through_regrouping() -> list[float]:
    """How far the sum of gradients is from what was applied plus what is kept; DDP regroups after the first step."""
    trainee = Trainee("ab", "every:topk=0.01", bucket_cap_mb=0.01)
    trainee.optimizer = torch.optim.SGD(trainee.model.parameters(), lr=LR)
    start, total = trainee.weights(), torch.zeros(trainee.weights().numel())
    gaps = []
    for step in range(4):
        alone = copy.deepcopy(trainee.model)
        x = batch(step, trainee.mesh.rank)
        (alone(x) - x.sin().sum(1, keepdim=True)).square().mean().backward()
        total += torch.cat([parameter.grad.flatten() for parameter in alone.parameters()])  # type: ignore[union-attr]
        trainee.step(x)
        state = trainee.hook.own_state()["residuals"]
        kept = torch.cat([state[str(place)].flatten() for place in range(len(state))])
        mean = torch.stack([total, kept])
        dist.all_reduce(mean)
        mean /= 2
        gaps.append(float((LR * (mean[0] - mean[1]) - (start - trainee.weights())).abs().max()))
    trainee.close()
    return gaps


def test_residuals_outlive_ddps_regrouping(two_ranks: RankPool) -> None:
    for gaps in two_ranks.run(residuals_through_regrouping):
        assert max(gaps) < 1e-5


def train_and_resume(sync: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights after ten steps, without and with a new hook in the middle of the way."""
    trainee = Trainee("ab", sync)
    for step in range(5):
        trainee.step(batch(step, trainee.mesh.rank))
    state = copy.deepcopy((trainee.model.state_dict(), trainee.optimizer.state_dict()))
    shared, own = trainee.hook.shared_state(), trainee.hook.own_state()
    for step in range(5, 10):
        trainee.step(batch(step, trainee.mesh.rank))
    weights = trainee.close()
    dist.barrier()

    again = nn.parallel.DistributedDataParallel(trainee.model)
    trainee.model.load_state_dict(state[0])
    trainee.optimizer.load_state_dict(state[1])
    mesh = Mesh.connect("ab", torch.device("cpu"))
    hook = EveryStepHook(trainee.hook.strategy, mesh, list(trainee.model.parameters()))
    hook.load_state(shared, own)
    again.register_comm_hook(None, hook.average)
    trainee.ddp, trainee.hook, trainee.mesh = again, hook, mesh
    for step in range(5, 10):
        trainee.step(batch(step, trainee.mesh.rank))
    return weights, trainee.close()


@pytest.mark.parametrize("sync", ["every:topk", "every:powersgd=2", "every:int4", "every:int4:accumulate=2"])
def test_a_resume_goes_on_bit_for_bit(sync: str, two_ranks: RankPool) -> None:
    for weights, again in two_ranks.run(train_and_resume, sync):
        assert torch.equal(weights, again)


def half_precision_gradients(sync: str) -> torch.Tensor:
    dist.init_process_group("gloo")
    model = nn.Linear(64, 64, bias=False).bfloat16()
    nn.init.zeros_(model.weight)
    ddp = nn.parallel.DistributedDataParallel(model)
    mesh = Mesh.connect("ab", torch.device("cpu"))
    hook = EveryStepHook(parse_sync(sync), mesh, list(model.parameters()))  # type: ignore[arg-type]
    ddp.register_comm_hook(None, hook.average)
    ddp(torch.full((1, 64), 1.0 + mesh.rank, dtype=torch.bfloat16)).sum().backward()
    hook.close()
    mesh.close()
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.bfloat16
    return model.weight.grad.float()


@pytest.mark.parametrize("sync", ["every", "every:int8", "every:powersgd=1", "every:topk=0.5"])
def test_bfloat16_gradients(sync: str, two_ranks: RankPool) -> None:
    for gradient in two_ranks.run(half_precision_gradients, sync):
        assert (gradient - 1.5).abs().max() <= 0.02 or sync == "every:topk=0.5"
