"""Means over pretended hosts: what comes out, on whom, and what it weighs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.codec import Codec
from paceline.strategy import EveryStep
from paceline.sync.collectives import Mesh
from rank_pool import RankPool

pytestmark = pytest.mark.ranks

CODECS = [Codec(), Codec(name="bf16"), Codec(name="fp16"), Codec(name="int8"), Codec(name="int4"), Codec(name="topk")]
ERRORS = {"none": 1e-6, "bf16": 8e-3, "fp16": 1e-3, "int8": 1.5e-2, "int4": 0.3}
"""Of values between -1 and 1, after both hops."""
SIZES = [1, 3, 1000, 4096 * 4, 100_003]
PAIR, TWO_BY_TWO, UNEVEN, FOUR = "ab", "aabb", "aaab", "abcd"


def connect(hosts: str) -> Mesh:
    dist.init_process_group("gloo")
    return Mesh.connect(hosts, torch.device("cpu"))


def own_values(rank: int, size: int) -> torch.Tensor:
    return torch.empty(size).uniform_(-1, 1, generator=torch.Generator().manual_seed(100 * rank + size))


def host_sent_bytes(mesh: Mesh) -> float:
    sent = torch.zeros(mesh.num_hosts, dtype=torch.float64)
    sent[mesh.host] = mesh.traffic.sent_bytes
    dist.all_reduce(sent)
    assert sent.max() == sent.min()
    return float(sent[0])


def mean_of_ranks(hosts: str, cases: list[tuple[Codec, int]]) -> list[tuple[torch.Tensor, float]]:
    """For each case what came out, and what each host sent."""
    mesh = connect(hosts)
    results = []
    for codec, size in cases:
        mesh.traffic.sent_bytes = 0.0
        flat = own_values(mesh.rank, size)
        assert mesh.mean(flat, codec=codec, sum_local=True).wait() is flat
        results.append((flat, host_sent_bytes(mesh)))
    mesh.close()
    return results


@pytest.mark.parametrize("hosts", [PAIR, TWO_BY_TWO, UNEVEN, FOUR])
def test_mean_is_right_equal_everywhere_and_weighs_what_the_strategy_says(
    hosts: str, two_ranks: RankPool, four_ranks: RankPool
) -> None:
    cases = [(codec, size) for codec in CODECS for size in SIZES]
    pool = two_ranks if len(hosts) == 2 else four_ranks
    for (codec, size), *results in zip(cases, *pool.run(mean_of_ranks, hosts, cases), strict=True):
        mean = torch.stack([own_values(rank, size) for rank in range(len(hosts))]).mean(0)
        found, sent_bytes = results[0]
        assert all(torch.equal(found, other) for other, _ in results[1:]), (codec, size)
        if codec.name != "topk":
            assert (found - mean).abs().max() <= ERRORS[codec.name], (codec, size)
        num_hosts, lanes = len(set(hosts)), min(hosts.count(host) for host in hosts)
        expected = EveryStep(codec=codec).wire_bytes([[(size,)]], num_hosts=num_hosts, lanes=lanes)
        assert sent_bytes == pytest.approx(expected), (codec, size)
