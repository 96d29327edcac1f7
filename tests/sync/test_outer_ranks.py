"""The outer engine on real ranks that pretend to be on several hosts: same bits, counted bytes, two levels."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import WorldError
from paceline.strategy import Outer, parse_sync
from paceline.sync.collectives import Mesh
from paceline.sync.outer import OuterEngine
from rank_pool import RankPool

pytestmark = pytest.mark.ranks

STEPS = 12
STRATEGIES = [
    "local:H=4:warmup=0", "diloco:H=4:int8", "streaming:H=6:P=3:tau=2", "eager:H=4", "sparseloco:H=3", "local:H=2:bf16",
]  # fmt: skip


def train(sync: str, hosts: list[str]) -> tuple[list[float], float, float]:
    """(shared weights, bytes sent per step here, the same as the strategy counts it)."""
    dist.init_process_group("gloo")
    mesh = Mesh.connect(hosts, torch.device("cpu"))
    strategy = parse_sync(sync)
    assert isinstance(strategy, Outer)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 70), nn.BatchNorm1d(70), nn.Linear(70, 30))
    engine = OuterEngine(model, strategy, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        engine.begin()
        torch.manual_seed(100 * step + mesh.host)  # as if the ranks of a host had averaged their gradients
        model(torch.randn(8, 100)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.step_ended(8)
    engine.shared_state()  # waits for what is under way
    sent = torch.tensor(mesh.traffic.sent_bytes)
    dist.all_reduce(sent)
    counted = strategy.wire_bytes(
        [[p.shape for p in model.parameters()]], num_hosts=mesh.num_hosts, lanes=mesh.lanes, num_buffer_values=141
    )
    with engine.shared(with_buffers=True):
        shared = torch.cat([value.reshape(-1).float() for value in model.state_dict().values()]).tolist()
    mesh.close()
    return shared, float(sent) / mesh.num_hosts / STEPS, counted


@pytest.mark.parametrize(
    ("sync", "hosts"), [*((sync, "aabb") for sync in STRATEGIES), ("diloco:H=4:int8", "abbb"), ("local:H=4", "abcd")]
)
def test_the_same_bits_on_every_rank_and_the_bytes_that_were_promised(
    four_ranks: RankPool, sync: str, hosts: str
) -> None:
    results = four_ranks.run(train, sync, list(hosts))
    assert all(shared == results[0][0] for shared, _, _ in results)
    for _, sent, counted in results:
        assert sent == pytest.approx(counted, rel=1e-6)


def train_unevenly(steps: list[int]) -> tuple[list[float], str]:
    dist.init_process_group("gloo")
    mesh = Mesh.connect(["a", "b"], torch.device("cpu"))
    torch.manual_seed(0)
    model = nn.Linear(10, 10)
    engine = OuterEngine(model, Outer(period_steps=3), mesh)
    for _ in range(steps[mesh.host]):
        engine.begin()
        with torch.no_grad():
            model.weight.add_(1 + mesh.host)
        engine.step_ended(1)
    engine.finish()
    mesh.close()
    return model.weight.flatten().tolist(), ""


def test_a_rank_that_ends_early_serves_the_others_over_real_sockets(two_ranks: RankPool) -> None:
    (here, _), (there, _) = two_ranks.run(train_unevenly, [2, 11])
    assert here == there


def differ() -> str:
    dist.init_process_group("gloo")
    mesh = Mesh.connect(["alice", "bob"], torch.device("cpu"))
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1.0 + mesh.rank)
    nn.init.zeros_(model.bias)
    engine = OuterEngine(model, Outer(period_steps=1), mesh)
    engine.begin()
    try:
        engine.step_ended(1)
    except WorldError as error:
        return str(error)
    finally:
        mesh.close()
    return ""


def test_a_difference_names_the_host_on_every_rank(two_ranks: RankPool) -> None:
    told = two_ranks.run(differ)
    assert told[0] == told[1]
    assert "bob holds others than alice" in told[0]
