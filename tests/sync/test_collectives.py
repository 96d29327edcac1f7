"""Means over pretended hosts: what comes out, on whom, and what it weighs."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline import codec as codec_module
from paceline.codec import HEADER_BYTES, Codec
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


def mean_in_small_chunks(hosts: str) -> list[tuple[torch.Tensor, float, float]]:
    """What came out, what each host sent, and what it was to send; lanes whose numbers of chunks differ by one."""
    whole, codec_module.CHUNK_VALUES = codec_module.CHUNK_VALUES, 1 << 13
    mesh = connect(hosts)
    results = []
    for codec in CODECS:
        flat = own_values(mesh.rank, (1 << 15) + 1)
        sent_before = host_sent_bytes(mesh)
        mesh.mean(flat, codec=codec, sum_local=True).wait()
        expected = EveryStep(codec=codec).wire_bytes([[flat.shape]], num_hosts=mesh.num_hosts, lanes=mesh.lanes)
        results.append((flat, host_sent_bytes(mesh) - sent_before, expected))
    mesh.close()
    codec_module.CHUNK_VALUES = whole
    return results


@pytest.mark.parametrize("hosts", [TWO_BY_TWO, FOUR])
def test_what_is_cut_into_chunks_comes_out_whole(hosts: str, four_ranks: RankPool) -> None:
    mean = torch.stack([own_values(rank, (1 << 15) + 1) for rank in range(4)]).mean(0)
    for codec, *results in zip(CODECS, *four_ranks.run(mean_in_small_chunks, hosts), strict=True):
        for found, sent_bytes, expected in results:
            assert torch.equal(found, results[0][0]) and sent_bytes == pytest.approx(expected)
            assert codec.name == "topk" or (found - mean).abs().max() <= ERRORS[codec.name]


def conserved(hosts: str, codec: Codec) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each of some rounds: the sum of values and residuals before, and of the mean and the residuals after. So few
    values as in the last ones are sent as they are."""
    mesh = connect(hosts)
    rounds = []
    for size in (70_001, 21):
        residual = torch.full((size,), 0.25)
        for number in range(3):
            flat = own_values(4 * number + mesh.rank, size)
            before, after = (flat + residual).double(), torch.zeros(size, dtype=torch.float64)
            mesh.mean(flat, codec=codec, sum_local=True, residual=residual).wait()
            after += residual
            for tensor in (before, after):
                dist.all_reduce(tensor)
            rounds.append((before, after + mesh.world_size * flat.double()))
    mesh.close()
    return rounds


@pytest.mark.parametrize("name", ["topk", "int4", "int8"])
@pytest.mark.parametrize("hosts", [PAIR, TWO_BY_TWO, UNEVEN])
def test_error_feedback_conserves_the_sum(hosts: str, name: str, two_ranks: RankPool, four_ranks: RankPool) -> None:
    pool = two_ranks if len(hosts) == 2 else four_ranks
    for rounds in pool.run(conserved, hosts, Codec(name=name)):  # type: ignore[arg-type]
        for before, after in rounds:
            assert (before - after).abs().max() < 1e-5


def spread(hosts: str, codec: Codec, bad: float) -> tuple[bool, bool, bool]:
    """Whether what is not finite on one rank arrived, the residual stayed finite, and the next mean is right."""
    mesh = connect(hosts)
    flat, residual = own_values(mesh.rank, 9000), torch.full((9000,), 0.0)
    if mesh.rank == mesh.world_size - 1:
        flat[5] = bad
    mesh.mean(flat, codec=codec, sum_local=True, residual=residual).wait()
    arrived = not flat.isfinite().all()
    after = mesh.mean(own_values(mesh.rank, 9000), codec=codec, sum_local=True, residual=residual).wait()
    mesh.close()
    return arrived, bool(residual.isfinite().all()), bool(after.isfinite().all())


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_not_finite_reaches_all_ranks_and_no_residual(codec: Codec, four_ranks: RankPool) -> None:
    for hosts, bad in (TWO_BY_TWO, float("inf")), (UNEVEN, float("nan")):
        assert four_ranks.run(spread, hosts, codec, bad) == [(True, True, True)] * 4


def weighted(hosts: str, sum_local: bool) -> list[torch.Tensor]:
    mesh = connect(hosts)
    means = []
    for codec in CODECS[:-1]:
        flat = own_values(mesh.rank if sum_local else mesh.host, 5000)
        means.append(mesh.mean(flat, codec=codec, sum_local=sum_local, weights=lambda: [0.75, 0.25]).wait())
    mesh.close()
    return means


@pytest.mark.parametrize("sum_local", [False, True])
@pytest.mark.parametrize("hosts", [PAIR, UNEVEN])
def test_a_host_counts_as_its_weight_says(
    hosts: str, sum_local: bool, two_ranks: RankPool, four_ranks: RankPool
) -> None:
    pool = two_ranks if len(hosts) == 2 else four_ranks
    if sum_local:
        last = len(hosts) - 1
        of_hosts = [torch.stack([own_values(rank, 5000) for rank in range(last)]).mean(0), own_values(last, 5000)]
    else:
        of_hosts = [own_values(0, 5000), own_values(1, 5000)]
    expected = 0.75 * of_hosts[0] + 0.25 * of_hosts[1]
    first, *others = pool.run(weighted, hosts, sum_local)
    for mean, codec, *same in zip(first, CODECS, *others, strict=False):
        assert all(torch.equal(mean, other) for other in same), codec
        assert (mean - expected).abs().max() <= ERRORS[codec.name], codec


def many_at_once(hosts: str) -> list[tuple[list[list[int]], float]]:
    """Headers and means, all begun before the first is waited for; the weights of each come from its header."""
    mesh = connect(hosts)
    begun = []
    for number in range(20):
        headers = mesh.exchange([mesh.host + 1, -number])
        codec = CODECS[number % len(CODECS)]

        def shares(headers: torch.futures.Future[list[list[int]]] = headers) -> list[float]:
            total = sum(row[0] for row in headers.wait())
            return [row[0] / total for row in headers.wait()]

        flat = torch.full((4096 * (number % 3 + 1),), float(mesh.host))
        begun.append((headers, mesh.mean(flat, codec=codec, sum_local=False, weights=shares)))
    results = [(headers.wait(), float(mean.wait()[0])) for headers, mean in begun]
    mesh.close()
    return results


@pytest.mark.parametrize("hosts", [PAIR, TWO_BY_TWO, UNEVEN, FOUR])
def test_many_at_once_keep_their_order(hosts: str, two_ranks: RankPool, four_ranks: RankPool) -> None:
    num_hosts = len(set(hosts))
    expected = sum(host * (host + 1) for host in range(num_hosts)) / sum(range(num_hosts + 1))
    for results in (two_ranks if len(hosts) == 2 else four_ranks).run(many_at_once, hosts):
        for number, (headers, mean) in enumerate(results):
            assert headers == [[host + 1, -number] for host in range(num_hosts)]
            assert mean == pytest.approx(expected, rel=0.02)


def header_bytes(hosts: str) -> float:
    mesh = connect(hosts)
    mesh.exchange([1, 2, 3, 4, 5, 6]).wait()
    mesh.close()
    return host_sent_bytes(mesh)


def test_a_header_weighs_what_the_strategy_says(four_ranks: RankPool) -> None:
    assert four_ranks.run(header_bytes, TWO_BY_TWO) == [2 * HEADER_BYTES] * 4
    assert four_ranks.run(header_bytes, FOUR) == [3 * HEADER_BYTES] * 4


def alone_on_one_host() -> tuple[torch.Tensor, list[list[int]], float, bool]:
    mesh = connect("aa")
    flat = own_values(mesh.rank, 999)
    mean = mesh.mean(flat, codec=Codec(name="int4"), sum_local=True).wait()
    headers = mesh.exchange([7, mesh.host]).wait()
    same = mesh.mean(torch.ones(5), sum_local=False).wait()
    mesh.close()
    return mean, headers, mesh.traffic.sent_bytes, bool((same == 1).all())


def test_on_one_host_nothing_is_coded_and_nothing_crosses(two_ranks: RankPool) -> None:
    expected = (own_values(0, 999) + own_values(1, 999)) / 2
    for mean, headers, sent_bytes, same in two_ranks.run(alone_on_one_host):
        assert torch.allclose(mean, expected) and headers == [[7, 0]] and sent_bytes == 0.0 and same


def fail_in_the_pipeline() -> list[str]:
    mesh = connect("ab")

    def broken() -> list[float]:
        raise ZeroDivisionError("no samples")

    told = []
    for weights in (broken, None):
        flat = torch.ones(5000)
        future = mesh.mean(flat, codec=Codec(name="int8"), sum_local=False, weights=weights)
        try:
            future.wait()
        except Exception as error:  # noqa: BLE001
            told.append(str(error))
    mesh.close()
    return told


def test_an_error_reaches_its_future_and_all_later_ones(two_ranks: RankPool) -> None:
    for told in two_ranks.run(fail_in_the_pipeline):
        assert len(told) == 2 and all("no samples" in text for text in told)


def limits(hosts: str) -> list[set[timedelta]]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=77))
    told = []
    for is_patient in (False, True):
        mesh = Mesh.connect(hosts, torch.device("cpu"), is_patient=is_patient)
        mesh.close()
        groups = (getattr(mesh._groups, field.name) for field in dataclasses.fields(mesh._groups))
        told.append({group._get_backend(mesh.device).options._timeout for group in groups if group is not None})
    return told


def test_a_rank_waits_as_long_as_the_script_says(two_ranks: RankPool) -> None:
    short, long = timedelta(seconds=77), timedelta(minutes=30)
    assert two_ranks.run(limits, "aa") == [[{short}, {short}]] * 2, "one host is nobody to be patient with"
    assert two_ranks.run(limits, PAIR) == [[{short}, {short, long}]] * 2, "gradients within a host don't wait longer"


def test_one_rank_needs_no_process_group() -> None:
    mesh = Mesh.connect(["a"], torch.device("cpu"))
    flat = torch.ones(3)
    assert mesh.mean(flat, codec=Codec(name="int4"), sum_local=True).wait() is flat
    assert mesh.exchange([3]).wait() == [[3]]
    assert (mesh.rank, mesh.world_size, mesh.num_hosts, mesh.lane, mesh.hosts) == (0, 1, 1, 0, ["a"])
    mesh.close()
