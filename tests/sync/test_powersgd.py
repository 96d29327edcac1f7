"""PowerSGD over pretended hosts: exact where the rank suffices, and what is lost is kept."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from paceline.codec import Codec
from paceline.strategy import EveryStep
from paceline.sync.collectives import Mesh
from paceline.sync.powersgd import PowerSgd
from rank_pool import RankPool

pytestmark = pytest.mark.ranks

SHAPES = [(40, 30), (7,), (8, 4, 5, 5), (3, 2)]
"""A matrix, a vector, a convolution, and a matrix too small for factors."""
RANK = 2


def reduce_rounds(hosts: str, bad_round: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Each of three rounds: the sum over ranks of what went in and came out, the mean, and what was lost here."""
    dist.init_process_group("gloo")
    mesh = Mesh.connect(hosts, torch.device("cpu"))
    parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
    powersgd = PowerSgd(mesh, RANK, parameters)
    residual = torch.zeros(sum(parameter.numel() for parameter in parameters))
    rounds = []
    for number in range(3):
        flat = torch.randn(residual.numel(), generator=torch.Generator().manual_seed(10 * number + mesh.rank))
        if number == bad_round and mesh.rank == 1:
            flat[3] = torch.inf
        before = flat + residual
        powersgd.mean(flat, parameters, residual).wait()
        after = residual + flat
        for total in (before, after):
            dist.all_reduce(total)
        rounds.append({"before": before, "after": after, "mean": flat.clone(), "residual": residual.clone()})
    powersgd.close()
    mesh.close()
    sent = torch.zeros(mesh.num_hosts, dtype=torch.float64)
    sent[mesh.host] = mesh.traffic.sent_bytes
    dist.all_reduce(sent)
    expected = EveryStep(codec=Codec(name="powersgd", rank=RANK)).wire_bytes(
        [SHAPES], num_hosts=mesh.num_hosts, lanes=mesh.lanes
    )
    assert bad_round is not None or sent.tolist() == pytest.approx([3 * expected] * mesh.num_hosts)
    return rounds


@pytest.mark.parametrize("hosts", ["ab", "aabb", "aaab"])
def test_means_are_equal_everywhere_and_nothing_is_lost(hosts: str, two_ranks: RankPool, four_ranks: RankPool) -> None:
    first, *others = (two_ranks if len(hosts) == 2 else four_ranks).run(reduce_rounds, hosts)
    for number, found in enumerate(first):
        assert all(torch.equal(found["mean"], other[number]["mean"]) for other in others)
        assert (found["before"] - found["after"]).abs().max() < 1e-4
        assert found["residual"].abs().max() > 0.1
    gradients = [
        torch.randn(len(first[0]["mean"]), generator=torch.Generator().manual_seed(rank)) for rank in range(len(hosts))
    ]
    vector = slice(40 * 30, 40 * 30 + 7)
    assert torch.allclose(first[0]["mean"][vector], torch.stack(gradients).mean(0)[vector], atol=1e-6)


def test_what_is_not_finite_reaches_all_ranks_and_no_residual(two_ranks: RankPool) -> None:
    for rounds in two_ranks.run(reduce_rounds, "ab", 1):
        assert [bool(found["mean"].isfinite().any()) for found in rounds] == [True, False, True]
        lost = (rounds[1]["residual"] - rounds[0]["residual"]).abs()
        lost[3] = 0.0  # the one that is not finite
        assert lost.max() < 1e-5 and rounds[1]["residual"].isfinite().all()


def reduce_low_rank(num_rounds: int) -> float:
    """How far the mean of matrices of rank 2 in all is from what comes out, after the first round."""
    dist.init_process_group("gloo")
    mesh = Mesh.connect("ab", torch.device("cpu"))
    parameter = Parameter(torch.zeros(40, 30))
    powersgd = PowerSgd(mesh, RANK, [parameter])
    residual = torch.zeros(parameter.numel())
    left, right = torch.randn(2, 40, 1, generator=torch.Generator().manual_seed(1)), torch.ones(2, 1, 30)
    right[1, :, ::2] = -2
    matrices = left @ right  # one of rank 1 on each rank
    gap = 1.0
    for _ in range(num_rounds):
        flat = matrices[mesh.rank].flatten().clone()
        before = flat + residual
        powersgd.mean(flat, [parameter], residual).wait()
        dist.all_reduce(before)
        gap = float((flat - before / 2).abs().max())
    powersgd.close()
    mesh.close()
    return gap


def test_a_gradient_of_low_rank_comes_out_exactly(two_ranks: RankPool) -> None:
    assert max(two_ranks.run(reduce_low_rank, 3)) < 1e-4


def train_after_zero() -> float:
    dist.init_process_group("gloo")
    mesh = Mesh.connect("ab", torch.device("cpu"))
    parameter = Parameter(torch.zeros(40, 30))
    powersgd = PowerSgd(mesh, RANK, [parameter])
    residual = torch.zeros(parameter.numel())
    largest = 0.0
    for number in range(4):
        flat = torch.full((1200,), float(number > 0))
        powersgd.mean(flat, [parameter], residual).wait()
        largest = float(flat.abs().max())
    powersgd.close()
    mesh.close()
    return largest


def test_a_gradient_that_was_zero_once_is_not_lost_for_good(two_ranks: RankPool) -> None:
    assert min(two_ranks.run(train_after_zero)) > 0.5
