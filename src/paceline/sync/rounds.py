"""One exchange between hosts in which they share what they have learned: what each says of itself, and the mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from paceline.errors import WorldError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What a host says of itself in each round; whole numbers, because that is what travels."""

    steps: int
    """Attempted so far. All hosts that have not ended are at the same."""
    fragment: int
    num_samples: int
    """Seen by this host since this fragment's last round: the weight of its delta."""
    has_ended: int
    loads: int
    """How often the script has loaded weights."""
    checksum: int
    """Of the shared weights of this fragment, before this round."""

    def pack(self) -> list[int]:
        return list(dataclasses.astuple(self))


class Round:
    """One fragment's exchange: the mean delta that is under way, or has arrived."""

    def __init__(self, fragment: int, arrives_step: int) -> None:
        self.fragment = fragment
        self.arrives_step = arrives_step
        self.pieces: list[tuple[slice, torch.futures.Future[torch.Tensor]]] = []
        """Ranges of the row of weights, in order, and their mean deltas."""
        self.headers: torch.futures.Future[list[list[int]]] | None = None
        """None for a round that came from a checkpoint, and was checked before."""
        self.trained = True
        """Whether any host has trained since the last round; else nothing moves, not even by momentum."""

    def told(self) -> list[Header]:
        """What each host said, by host."""
        assert self.headers is not None
        return [Header(**dict(zip(_HEADER_FIELDS, row, strict=True))) for row in self.headers.wait()]

    def shares(self) -> list[float]:
        """The weight of each host's delta; called where its header has arrived."""
        samples = [header.num_samples for header in self.told()]
        total = sum(samples)
        return [count / total for count in samples] if total else [0.0] * len(samples)

    def check(self, hosts: Sequence[str]) -> None:
        """Finds out whether any host has trained. Raises WorldError where the hosts are not in agreement."""
        if self.headers is not None:
            headers = self.told()
            require_agreement(headers, hosts)
            self.trained = any(header.num_samples for header in headers)

    def wait(self) -> None:
        for _, mean in self.pieces:
            mean.wait()


_HEADER_FIELDS = [field.name for field in dataclasses.fields(Header)]


def require_agreement(headers: list[Header], hosts: Sequence[str]) -> None:
    """Raises WorldError that names a host which is out of step with the first, or holds other shared weights.

    A host that has ended is at the step of its end, and serves whatever fragment the others are at.
    """
    active = [index for index, header in enumerate(headers) if not header.has_ended]
    compared = ("loads", "steps", "fragment", "checksum") if active else ("fragment", "checksum")
    first, *others = active or range(len(headers))
    for other in others:
        for what in compared:
            here, there = getattr(headers[first], what), getattr(headers[other], what)
            if here != there:
                raise WorldError(_disagreement(what, hosts[first], here, hosts[other], there, headers[first].steps))


def _disagreement(what: str, first: str, here: int, other: str, there: int, steps: int) -> str:
    if what == "checksum":
        return f"after {steps} steps the weights that all hosts share differ: {other} holds others than {first}"
    if what == "loads":
        return (
            f"at step {steps} {first} has loaded weights {here} times and {other} {there} times; "
            "with an outer strategy every rank must load the same weights at the same step"
        )
    noun = "step" if what == "steps" else "fragment"
    return f"{first} is at {noun} {here} and {other} at {noun} {there}: they did not do the same number of steps"
