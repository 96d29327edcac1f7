"""What a codec is, how values are cut into messages, and what those weigh. The engines cut as the planner counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from paceline.bounds import require_number, require_whole, short
from paceline.errors import InputError

CodecName = Literal["none", "bf16", "fp16", "int8", "int4", "powersgd", "topk"]
CODEC_NAMES: tuple[CodecName, ...] = ("none", "bf16", "fp16", "int8", "int4", "powersgd", "topk")

CHUNK_VALUES = 1 << 23
"""At most so many values travel as one message, so that encoding one overlaps with sending another."""
HEADER_BYTES = 48
"""What a host says of itself to each other host in each outer round."""

_SCALE_BYTES = 2  # bfloat16: gradients of 1e-8 are common, and float16 ends at 6e-8
_BLOCKS: dict[CodecName, int] = {
    "none": 1,
    "bf16": 1,
    "fp16": 1024,
    "int8": 256,
    "int4": 128,
    "powersgd": 1,
    "topk": 4096,
}
_SCALES: dict[CodecName, int] = {"fp16": 1, "int8": 2, "int4": 2, "topk": 1}  # two: rows are whole 32-bit words
_BITS: dict[CodecName, int] = {"fp16": 16, "int8": 8, "int4": 4}

Shape = Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
    """How values are written for the wire. Raises InputError for what it can't do."""

    name: CodecName = "none"
    rank: int = 4
    """Of powersgd: columns of the factors, at least 1."""
    density: float = 1 / 64
    """Of topk: the share of values that are sent, above 0 and at most 0.5."""

    def __post_init__(self) -> None:
        if self.name not in CODEC_NAMES:
            raise InputError(f"codec {self.name!r} is not known", hint=f"one of {', '.join(CODEC_NAMES)}")
        require_whole("powersgd's rank", self.rank, at_least=1)
        require_number("topk's density", self.density, above=0.0, at_most=0.5)

    @property
    def block_values(self) -> int:
        """What is encoded together is a multiple of it."""
        return _BLOCKS[self.name]

    @property
    def scales_per_block(self) -> int:
        """How many groups of neighbours a block has: each has a scale of its own."""
        return _SCALES.get(self.name, 0)

    @property
    def group_values(self) -> int:
        """Neighbours that share a scale."""
        return self.block_values // (self.scales_per_block or 1)

    @property
    def kept_values(self) -> int:
        """Of topk: values that are kept of each block; even, because two 12-bit indices share three bytes."""
        return max(2, 2 * round(self.density * self.block_values / 2))

    def encoded_bytes(self, num_values: int) -> int:
        """Bytes of `num_values` values (a multiple of `block_values`) once encoded. Not for none, bf16 and
        powersgd, which send floating-point numbers as they are."""
        blocks = num_values // self.block_values
        scales = blocks * self.scales_per_block * _SCALE_BYTES
        if self.name == "topk":  # per value an 8-bit code and a 12-bit index
            return blocks * (self.kept_values * 5 // 2) + scales
        return num_values * _BITS[self.name] // 8 + scales

    def __str__(self) -> str:
        if self.name == "powersgd":
            return f"powersgd={self.rank}"
        return f"topk={short(self.density)}" if self.name == "topk" else self.name


PLAIN = Codec()
"""Values as they are."""


def exact_bytes(num_bytes: float, num_hosts: int) -> float:
    """What each of `num_hosts` sends in an all-reduce of `num_bytes`: a reduce-scatter and an all-gather, each of
    which leaves out a host's own part (Patarasuk and Yuan, 2009)."""
    return 2 * (num_hosts - 1) / num_hosts * num_bytes


def reduced_bytes(codec: Codec, num_values: int, *, num_hosts: int, lanes: int, value_bytes: int = 4) -> float:
    """What a host sends to average `num_values` values that are laid end to end. Not for powersgd."""
    if num_hosts == 1:
        return 0.0
    if codec.name in ("none", "bf16"):
        return exact_bytes((2 if codec.name == "bf16" else value_bytes) * num_values, num_hosts)
    if worthwhile(codec, num_values, num_hosts=num_hosts, lanes=lanes) == PLAIN:
        return exact_bytes(4 * num_values, num_hosts)
    return _coded_bytes(codec, num_values, num_hosts, lanes)


def worthwhile(codec: Codec, num_values: int, *, num_hosts: int, lanes: int) -> Codec:
    """What float32 values are sent as: the codec, or as they are where so few of them fill no block."""
    if codec.name in ("none", "bf16"):
        return codec
    is_smaller = _coded_bytes(codec, num_values, num_hosts, lanes) < exact_bytes(4 * num_values, num_hosts)
    return codec if is_smaller else PLAIN


def _coded_bytes(codec: Codec, num_values: int, num_hosts: int, lanes: int) -> float:
    sent = 0
    for lane in range(lanes):
        part = lane_slice(lane, num_values, lanes)
        for chunk in chunk_slices(codec, part.stop - part.start, num_hosts):
            sent += (num_hosts - 1) * _message_bytes(codec, chunk.stop - chunk.start, num_hosts)
    return float(sent)


def _message_bytes(codec: Codec, num_values: int, num_hosts: int) -> int:
    """What a host sends to each other host for one chunk."""
    if codec.name == "topk":  # each host's choice of values goes to all
        return codec.encoded_bytes(part_values(codec, num_values, 1))
    return 2 * codec.encoded_bytes(part_values(codec, num_values, num_hosts))  # its part there, the mean of mine back


def lane_slice(lane: int, num_values: int, lanes: int) -> slice:
    """Which values the rank `lane` of each host carries across."""
    return slice(lane * num_values // lanes, (lane + 1) * num_values // lanes)


def chunk_slices(codec: Codec, num_values: int, num_hosts: int) -> list[slice]:
    """The messages that `num_values` values are sent in; all but the last are whole blocks for each host."""
    return piece_slices(codec, num_values, num_hosts=num_hosts, lanes=1)


def piece_slices(codec: Codec, num_values: int, *, num_hosts: int, lanes: int) -> list[slice]:
    """The reductions that an outer round of `num_values` values is done in: for each lane one message, so that taking
    the difference, sending and applying overlap."""
    whole = num_hosts * codec.block_values
    size = max(whole, CHUNK_VALUES // whole * whole) * lanes
    return [slice(start, min(start + size, num_values)) for start in range(0, num_values, size)]


def part_values(codec: Codec, num_values: int, num_hosts: int) -> int:
    """The values of a chunk that one host adds up, in whole blocks."""
    return _round_up(-(-num_values // num_hosts), codec.block_values)


def powersgd_values(bucket: Sequence[Shape], rank: int) -> int:
    """Floating-point numbers that PowerSGD reduces for a bucket: two factors per matrix, the rest as it is, and one
    that says whether all were finite (arXiv 1905.13727)."""
    return 1 + sum(
        rank * sum(matrix_shape(shape)) if is_low_rank(shape, rank) else math.prod(shape) for shape in bucket
    )


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """A gradient as a matrix: its first dimension by all others."""
    return shape[0], math.prod(shape[1:])


def is_low_rank(shape: Shape, rank: int) -> bool:
    """Whether PowerSGD's factors are at most half as large as the gradient."""
    return len(shape) > 1 and 2 * rank * sum(matrix_shape(shape)) <= math.prod(shape)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
