"""Means over hosts, asynchronous and in place: the only module of this floor that talks to other ranks.

Two levels are the rule. The ranks of one host add up exactly; then rank `lane` of each host carries its share of the
values across, as the codec writes them; then all ranks of the host get the result. Across hosts a coded mean takes two
hops (topk one): each host gets everybody's values for one part, adds them up in fp32, and sends the coded sum to all.
Everybody decodes the same bytes, its own included, so the result has the same bits on every rank of the world. What can
be added up on its way, none and bf16, goes round a ring, which fills the wire (four hosts at a gigabit: 96 %, not 83).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from paceline.codec import HEADER_BYTES, PLAIN, Codec, chunk_slices, exact_bytes, lane_slice, part_values, worthwhile
from paceline.sync import codecs
from paceline.sync.meter import Traffic
from paceline.sync.pipeline import Job, Pipeline, Scratch, Work

Weights = Callable[[], Sequence[float]]

# PyTorch has renamed it and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_NUM_HEADER_WORDS = HEADER_BYTES // 8
_PATIENCE = timedelta(minutes=30)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Groups:
    """Each is used by one stage of the pipeline alone, so that its order is the same on every rank; `world` and `host`
    by the one thread that calls `mean`."""

    world: dist.ProcessGroup | None = None
    host: dist.ProcessGroup | None = None
    local_sum: dist.ProcessGroup | None = None
    local_share: dist.ProcessGroup | None = None
    first_hop: dist.ProcessGroup | None = None
    second_hop: dist.ProcessGroup | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mean:
    """What is asked of one mean."""

    codec: Codec
    sum_local: bool
    weights: Weights | None


class Mesh:
    """The ranks of the world, by host. Every rank calls `mean` and `exchange` in the same order, from one thread.

    On GPUs it needs NCCL, and holds up to six communicators, made when they are first used; written for streams, and
    not tested on GPUs so far.
    """

    def __init__(self, ranks_by_host: dict[str, list[int]], groups: _Groups, device: torch.device) -> None:
        self._ranks = list(ranks_by_host.values())
        self._groups = groups
        self.world_size = sum(len(ranks) for ranks in self._ranks)
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        self.device = device
        """Of the values that are averaged."""
        self.hosts = list(ranks_by_host)
        """Their names, in the order of their first ranks."""
        self.num_hosts = len(self.hosts)
        self.host = next(host for host, ranks in enumerate(self._ranks) if self.rank in ranks)
        """The index of this rank's host."""
        self.lanes = min(len(ranks) for ranks in self._ranks)
        """Ranks of each host that carry values across; as many as the smallest host has."""
        local_rank = self._ranks[self.host].index(self.rank)
        self.lane = local_rank if local_rank < self.lanes else None
        """Which of them this rank is; None when it carries nothing."""
        self.traffic = Traffic()
        self._neighbours = self._ranks[self.host]
        self.num_neighbours = len(self._neighbours)
        """Ranks of this host, this one included."""
        self._has_neighbours = self.num_neighbours > 1
        self._pipeline = Pipeline(5 if self._has_neighbours else 3, device)
        self._scratch = Scratch(device)

    @classmethod
    def connect(cls, host_names: Sequence[str], device: torch.device, *, is_patient: bool = False) -> Mesh:
        """Makes the process groups. Every rank of the world calls it, with the same names: the host of each rank, by
        rank. Ranks with the same host name are taken to share a machine. One rank alone needs no process group.

        A rank gives up on another as late as it does in the world's group; with `is_patient`, because a host may be a
        whole period ahead, after 30 minutes at the earliest."""
        ranks_by_host: dict[str, list[int]] = {}
        for rank, name in enumerate(host_names):
            ranks_by_host.setdefault(name, []).append(rank)
        if len(host_names) == 1:
            return cls(ranks_by_host, _Groups(), device)
        assert len(host_names) == dist.get_world_size(), "one host name for each rank"
        timeout = _timeout_of_world(device)
        patience = max(timeout, _PATIENCE) if timeout and is_patient and len(ranks_by_host) > 1 else timeout
        return cls(ranks_by_host, _make_groups(list(ranks_by_host.values()), timeout, patience), device)

    def mean(
        self,
        flat: torch.Tensor,
        *,
        codec: Codec = PLAIN,
        sum_local: bool,
        weights: Weights | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Averages `flat` over all hosts, in place; the future's value is `flat`.

        flat       1-D, contiguous, float32 on the mesh's device; with codec none any floating-point type
        codec      how values cross hosts, unless they are too few for it (`worthwhile`); not powersgd, whose factors
                   are means of their own
        sum_local  whether the ranks of a host hold different values. Then the mean is over all ranks, each of which
                   counts the same also when hosts have different numbers of them; else the ranks of a host must hold
                   the same values
        weights    gives what each host counts, by host; called late, when every `exchange` from before has arrived.
                   With sum_local a host's weight is shared by its ranks. All hosts count the same without it
        residual   like flat: what the codec has lost so far is added to the values, and what it loses now is left.
                   Values that are not finite leave theirs as it was

        The future raises what torch.distributed raises when a rank is lost.
        """
        if (self.num_hosts == 1 and (self.world_size == 1 or not sum_local)) or flat.numel() == 0:
            return self._done(flat)
        codec = worthwhile(codec, flat.numel(), num_hosts=self.num_hosts, lanes=self.lanes)
        is_plain = codec.name == "none" and weights is None and residual is None
        if self.num_hosts == 1 or (self.world_size == self.num_hosts and is_plain):
            # as DDP does by itself: every rank counts the same, nothing is coded, and all hosts are alike or one
            num_bytes = exact_bytes(flat.numel() * flat.element_size(), self.num_hosts)
            return self._plain_mean(flat, self._groups.world, self.world_size, num_bytes=num_bytes)
        asked = _Mean(codec=codec, sum_local=sum_local, weights=weights)
        lanes = [lane_slice(lane, flat.numel(), self.lanes) for lane in range(self.lanes)]
        cuts = [
            [
                slice(part.start + cut.start, part.start + cut.stop)
                for cut in chunk_slices(codec, part.stop - part.start, self.num_hosts)
            ]
            for part in lanes
        ]
        future = self._future()
        *chunks, last = zip_longest(*cuts, fillvalue=slice(0, 0))
        for chunk in chunks:
            self._pipeline.submit(self._mean_chunk(flat, residual, chunk, asked), future=None)
        self._pipeline.submit(self._mean_chunk(flat, residual, last, asked), future, flat)
        return future

    def exchange(self, numbers: Sequence[int]) -> torch.futures.Future[list[list[int]]]:
        """Every host's `numbers` (up to six, of 64 bits, as many everywhere), by host, on every rank. The ranks of one
        host must pass the same. Keeps its place among the means, and is there before the weights of later ones are
        asked for."""
        if len(numbers) > _NUM_HEADER_WORDS:
            raise ValueError(f"{len(numbers)} numbers; at most {_NUM_HEADER_WORDS} fit")
        if self.num_hosts == 1:
            return self._done([list(numbers)])
        future = self._future()
        self._pipeline.submit(self._exchange_headers(list(numbers), future), future)
        return future

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """The ranks of this host, for a DistributedDataParallel that doesn't cross hosts; None where one host is
        all."""
        return self._groups.host

    def mean_of_host(self, flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Averages `flat` (as for `mean`) over the ranks of this host, in place, exactly."""
        if not self._has_neighbours:
            return self._done(flat)
        return self._plain_mean(flat, self._groups.host or self._groups.world, self.num_neighbours, num_bytes=0.0)

    def close(self) -> None:
        """Ends the mesh's threads. Its process groups end with the world's."""
        self._pipeline.close()

    def _future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=[self.device] if self.device.type == "cuda" else None)

    def _done(self, value: Any) -> torch.futures.Future[Any]:
        future = self._future()
        future.set_result(value)
        return future

    def _start(
        self, collective: Callable[..., Any], *tensors: torch.Tensor, num_bytes: float = 0.0, **options: Any
    ) -> Work:
        self.traffic.count(num_bytes)
        return collective(*tensors, **options, async_op=True)

    def _plain_mean(
        self, flat: torch.Tensor, group: dist.ProcessGroup | None, size: int, *, num_bytes: float
    ) -> torch.futures.Future[torch.Tensor]:
        op = dist.ReduceOp.AVG
        if self.device.type == "cpu":  # Gloo has no average
            flat.div_(size)
            op = dist.ReduceOp.SUM
        work: Any = self._start(dist.all_reduce, flat, num_bytes=num_bytes, op=op, group=group)
        return work.get_future().then(lambda done: done.value()[0])

    def _mean_chunk(
        self, flat: torch.Tensor, residual: torch.Tensor | None, chunk: Sequence[slice], asked: _Mean
    ) -> Job:
        """`chunk` is what each lane carries."""
        lanes = [(flat[part], self._neighbours[lane]) for lane, part in enumerate(chunk) if part.stop > part.start]
        if self._has_neighbours:
            group = self._groups.local_sum
            yield [self._start(dist.reduce, values, dst=rank, group=group) for values, rank in lanes if asked.sum_local]
        if self.lane is None or chunk[self.lane].stop == chunk[self.lane].start:
            yield []
            yield []
        else:
            own = chunk[self.lane]
            yield from self._cross(flat[own], residual[own] if residual is not None else None, asked)
        if self._has_neighbours:
            group = self._groups.local_share
            yield [self._start(dist.broadcast, values, src=rank, group=group) for values, rank in lanes]

    def _cross(self, values: torch.Tensor, residual: torch.Tensor | None, asked: _Mean) -> Job:
        if residual is not None:
            values.add_(residual)
        if asked.codec.name in ("none", "bf16"):
            yield from self._cross_in_ring(values, residual, asked)
        elif asked.codec.name == "topk":
            yield from self._cross_once(values, residual, asked)
        else:
            yield from self._cross_twice(values, residual, asked)

    def _cross_in_ring(self, values: torch.Tensor, residual: torch.Tensor | None, asked: _Mean) -> Job:
        """Of bf16, what a host rounds away from its own values is kept, but not what sums lose on their way."""
        yield []
        factor, is_coded = self._factors(asked)[self.host], asked.codec.name == "bf16"
        values.mul_(factor)
        travels = self._scratch.take(1, values.numel(), torch.bfloat16)[0].copy_(values) if is_coded else values
        if residual is not None and factor:
            lost = (values - travels).div_(factor)
            torch.where(lost.isfinite(), lost, residual, out=residual)
        num_bytes = exact_bytes(travels.numel() * travels.element_size(), self.num_hosts)
        yield [self._start(dist.all_reduce, travels, num_bytes=num_bytes, group=self._groups.second_hop)]
        if is_coded:
            values.copy_(travels)
            self._scratch.give(travels)

    def _cross_twice(self, values: torch.Tensor, residual: torch.Tensor | None, asked: _Mean) -> Job:
        codec, others = asked.codec, self.num_hosts - 1
        width = part_values(codec, values.numel(), self.num_hosts)
        row_bytes = codec.encoded_bytes(width)
        sent, received = (self._scratch.take(self.num_hosts, row_bytes) for _ in range(2))
        self._encode(codec, values, sent)
        group = self._groups.first_hop
        work = self._start(dist.all_to_all_single, received, sent, num_bytes=others * row_bytes, group=group)
        if residual is not None:
            self._keep_lost(codec, values, sent, residual)
        yield [work]
        factors = self._factors(asked)
        mean = self._scratch.take(1, width, torch.float32)
        codecs.decode_sum(codec, received, torch.tensor(factors, device=self.device), mean[0])
        codecs.encode(codec, mean, sent[:1])
        group = self._groups.second_hop
        work = self._start(_all_gather, received, sent[:1], num_bytes=others * row_bytes, group=group)
        part = slice(self.host * width, (self.host + 1) * width)
        if residual is not None and factors[self.host] and (lost := residual[part]).numel():
            # Added to what this host sends next, it counts by this host's weight.
            again = self._scratch.take(1, width, torch.float32)
            codecs.decode(codec, sent[:1], again)
            torch.sub(mean, again, out=again).div_(factors[self.host])
            lost.add_(again[0, : lost.numel()].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
            self._scratch.give(again)
        yield [work]
        self._decode(codec, received, values)
        self._scratch.give(sent, received, mean)

    def _cross_once(self, values: torch.Tensor, residual: torch.Tensor | None, asked: _Mean) -> Job:
        """Every host's choice of values goes to all; there is no sum whose choice would be sent again."""
        codec, others = asked.codec, self.num_hosts - 1
        width = part_values(codec, values.numel(), 1)
        row_bytes = codec.encoded_bytes(width)
        sent, received = self._scratch.take(1, row_bytes), self._scratch.take(self.num_hosts, row_bytes)
        self._encode(codec, values, sent)
        group = self._groups.first_hop
        work = self._start(_all_gather, received, sent, num_bytes=others * row_bytes, group=group)
        if residual is not None:
            self._keep_lost(codec, values, sent, residual)
        yield [work]
        mean = self._scratch.take(1, width, torch.float32)
        codecs.decode_sum(codec, received, torch.tensor(self._factors(asked), device=self.device), mean[0])
        values.copy_(mean[0, : values.numel()])
        self._scratch.give(sent, received, mean)
        yield []

    def _factors(self, asked: _Mean) -> list[float]:
        """What each host's values are multiplied by, by host."""
        if asked.weights is None:
            return [1 / (self.world_size if asked.sum_local else self.num_hosts)] * self.num_hosts
        weights = asked.weights()
        sizes = [len(ranks) if asked.sum_local else 1 for ranks in self._ranks]
        return [weight / size for weight, size in zip(weights, sizes, strict=True)]

    def _encode(self, codec: Codec, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Writes rows of equal width; what the values don't fill is zero. Only a row that is not full is copied."""
        num_rows = encoded.shape[0]
        width = part_values(codec, values.numel(), num_rows)
        full = values.numel() // width
        if full:
            codecs.encode(codec, values[: full * width].view(full, width), encoded[:full])
        if full < num_rows:
            padded = self._scratch.take(num_rows - full, width, torch.float32)
            rest = values[full * width :]
            padded.view(-1)[: rest.numel()].copy_(rest)
            padded.view(-1)[rest.numel() :].zero_()
            codecs.encode(codec, padded, encoded[full:])
            self._scratch.give(padded)

    def _decode(self, codec: Codec, encoded: torch.Tensor, values: torch.Tensor) -> None:
        width = part_values(codec, values.numel(), encoded.shape[0])
        full = values.numel() // width
        if full:
            codecs.decode(codec, encoded[:full], values[: full * width].view(full, width))
        rest = values[full * width :]
        if rest.numel():
            padded = self._scratch.take(1, width, torch.float32)
            codecs.decode(codec, encoded[full : full + 1], padded)
            rest.copy_(padded[0, : rest.numel()])
            self._scratch.give(padded)

    def _keep_lost(self, codec: Codec, values: torch.Tensor, encoded: torch.Tensor, residual: torch.Tensor) -> None:
        lost = self._scratch.take(1, values.numel(), torch.float32)[0]
        self._decode(codec, encoded, lost)
        torch.sub(values, lost, out=lost)
        torch.where(lost.isfinite(), lost, residual, out=residual)
        self._scratch.give(lost)

    def _exchange_headers(self, numbers: list[int], future: torch.futures.Future[list[list[int]]]) -> Job:
        words = torch.zeros(_NUM_HEADER_WORDS, dtype=torch.int64)
        words[: len(numbers)] = torch.tensor(numbers)
        own = words.to(self.device)
        headers = torch.empty(self.num_hosts * _NUM_HEADER_WORDS, dtype=torch.int64, device=self.device)
        if self._has_neighbours:
            yield []
        if self.lane is None:
            yield []
        else:
            num_bytes = (self.num_hosts - 1) * HEADER_BYTES
            group = self._groups.first_hop
            yield [self._start(_all_gather, headers, own, num_bytes=num_bytes, group=group)]
            future.set_result(_rows(headers, len(numbers)))
        yield []
        if self.num_neighbours > self.lanes:  # somebody here carries nothing across
            yield [self._start(dist.broadcast, headers, src=self._neighbours[0], group=self._groups.local_share)]
        if self.lane is None:
            future.set_result(_rows(headers, len(numbers)))


def _rows(headers: torch.Tensor, length: int) -> list[list[int]]:
    return [row[:length] for row in headers.view(-1, _NUM_HEADER_WORDS).tolist()]


def _timeout_of_world(device: torch.device) -> timedelta | None:
    """What a script has set; a new group would have PyTorch's own. None where this PyTorch doesn't tell."""
    backend = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _make_groups(ranks: list[list[int]], timeout: timedelta | None, patience: timedelta | None) -> _Groups:
    """Every rank makes all groups, in the same order, and keeps those that it belongs to. Gradients within a host wait
    for `timeout`, what waits for other hosts for `patience`."""
    kept: dict[str, Any] = {"world": dist.new_group(timeout=patience)}

    def make(name: str, members: list[int]) -> None:
        group = dist.new_group(members, timeout=timeout if name == "host" else patience)
        if dist.get_rank() in members:
            kept[name] = group

    for neighbours in ranks if len(ranks) > 1 else []:
        make("host", neighbours)
        if len(neighbours) > 1:
            make("local_sum", neighbours)
            make("local_share", neighbours)
    for lane in range(min(map(len, ranks)) if len(ranks) > 1 else 0):
        across = [neighbours[lane] for neighbours in ranks]
        make("first_hop", across)
        make("second_hop", across)
    return _Groups(**kept)
