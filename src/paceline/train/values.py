"""Weighted means of a few numbers over all ranks, in one small all-reduce that notices a disagreement."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping

from paceline.errors import InputError, WorldError
from paceline.train.checks import printable
from paceline.units import format_count

MAX_VALUES = 60
_HASH_BITS = 20
_NUM_HASHES = 2


def pack(step: int, values: Mapping[str, float], *, weight: float, samples: int) -> list[float]:
    """The row that each rank adds: always of the same length, whatever the names, so that a mistake can't
    hang.

    Next to the weighted values stand hashes of step and names, and their squares. W ranks agree exactly if
    W * sum(h^2) == (sum h)^2 (Cauchy-Schwarz); hashes of 20 bits keep both sides exact in double precision.
    """
    if len(values) > MAX_VALUES:
        raise InputError(f"run.log was given {len(values)} values; at most {MAX_VALUES} fit")
    hashes = _hashes(json.dumps([step, sorted(values)]))
    # A rank without samples has no say, not even with a NaN.
    weighted = [values[name] * weight if weight else 0.0 for name in sorted(values)]
    padding = [0.0] * (MAX_VALUES - len(values))
    return [*hashes, *(h * h for h in hashes), weight, float(samples), *weighted, *padding]


def pack_failure() -> list[float]:
    """The row of a rank that has nothing to add: with it, ranks never agree.

    Hashes of 0 with squares of 1 only add to W * sum(h^2), which is at least (sum h)^2 without them.
    """
    return [*[0.0] * _NUM_HASHES, *[1.0] * _NUM_HASHES, *[0.0] * (2 + MAX_VALUES)]


def agree(total: list[float], world_size: int) -> bool:
    """Whether every rank packed the same step and names."""
    sums, squares = total[:_NUM_HASHES], total[_NUM_HASHES : 2 * _NUM_HASHES]
    return all(world_size * int(q) == int(s) ** 2 for s, q in zip(sums, squares, strict=True))


def unpack(total: list[float], names: list[str]) -> tuple[dict[str, float], int]:
    """The weighted means by name, and the samples of all ranks, from the sum of all rows."""
    weight, samples, *weighted = total[2 * _NUM_HASHES :]
    means = dict(zip(sorted(names), weighted, strict=False))
    return {name: means[name] / weight if weight else math.nan for name in names}, int(samples)


def disagreement(
    gather: Callable[[bytes], list[bytes]], step: int, names: list[str], failure: Exception | None
) -> WorldError:
    """Who logged what, or could not; `gather` collects the bytes of every rank."""
    mine = (
        f"step {step}, {', '.join(map(printable, names))}"
        if failure is None
        else f"{type(failure).__name__}: {failure}"
    )
    told = [part.decode() for part in gather(f"{failure is None:d}{mine}".encode())]
    lines = [f"rank {rank}: {part[1:]}" for rank, part in enumerate(told)]
    failed = [line for line, part in zip(lines, told, strict=True) if part[0] == "0"]
    if failed:
        return WorldError(f"run.log failed on {'; '.join(failed)}")
    return WorldError(
        f"run.log was called with different steps or names. {'; '.join(lines)}",
        hint="every rank must call run.log with the same step and names; only rank 0 prints",
    )


def line(step: int, means: dict[str, float], samples: int, seconds: float) -> str:
    """What rank 0 prints of the means; `samples` of all ranks in `seconds`."""
    words = [f"step {step}", *(f"{printable(name)} {value:.4g}" for name, value in means.items())]
    if samples and seconds > 0:
        words.append(f"{format_count(samples / seconds)} samples/s")
    return "  ".join(words)


def _hashes(text: str) -> list[float]:
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
    return [float((digest >> (index * _HASH_BITS)) % 2**_HASH_BITS) for index in range(_NUM_HASHES)]
