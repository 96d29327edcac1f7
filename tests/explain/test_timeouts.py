"""Several ranks' time-outs, read together."""

from __future__ import annotations

import pytest

from paceline.explain import timeouts
from paceline.explain.lines import Line

WORK = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType={}, NumelIn={}, NumelOut=1, Timeout(ms)=6"
)
NUMBERS = "Timeout at NCCL work: 8, last enqueued NCCL work: {}, last completed NCCL work: 7."


def line(rank: int, text: str, host: str | None = None) -> Line:
    return Line(file="a.log", number=rank + 1, text=text, rank=rank, host=host)


def works(*states: tuple[int, str, int]) -> list[Line]:
    """Of (number, operation, values), one for each rank."""
    return [line(rank, WORK.format(*state)) for rank, state in enumerate(states)]


def compare(lines: list[Line], num_known_ranks: int) -> str | None:
    found = timeouts.compare(lines, num_known_ranks=num_known_ranks)
    return None if found is None else found[0]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([(8, "ALLREDUCE", 1), (8, "BROADCAST", 1)], "in collective 8 rank 0 was in ALLREDUCE, rank 1 in BROADCAST"),
        ([(8, "ALLREDUCE", 1), (8, "ALLREDUCE", 2)], "the shapes differ: 1 values on rank 0, 2 on rank 1"),
        (
            [(8, "ALLREDUCE", 1), (9, "ALLREDUCE", 1)],
            "rank 0 waited in collective 8, rank 1 in 9: one had a batch more",
        ),
    ],
)
def test_ranks_that_differ(states: list[tuple[int, str, int]], expected: str) -> None:
    text = compare(works(*states), 2)
    assert text is not None and expected in text


def test_ranks_that_agree_tell_nothing() -> None:
    assert compare(works((8, "ALLREDUCE", 1), (8, "ALLREDUCE", 1)), 2) is None
    assert compare([], 2) is None


def test_a_rank_that_never_came() -> None:
    text = compare(works((8, "ALLREDUCE", 1), (8, "ALLREDUCE", 1)), 3)
    assert text is not None and text.startswith("only ranks 0, 1 waited there")


def test_the_newest_of_a_rank_does_not_hide_where_it_hung() -> None:
    lines = [line(0, WORK.format(9, "BROADCAST", 1)), *works((8, "ALLREDUCE", 1), (8, "ALLREDUCE", 1))]
    assert compare(lines, 2) is None


def test_ranks_that_are_behind() -> None:
    lines = [line(rank, NUMBERS.format(11 if rank else 8)) for rank in range(3)]
    text = compare(lines, 3)
    assert text is not None and text.startswith("rank 0 had started 8 collectives when others had started 11")


def test_a_whole_host_that_is_behind_is_named() -> None:
    lines = [line(rank, NUMBERS.format(8 if rank < 2 else 11), "slow" if rank < 2 else "fast") for rank in range(4)]
    text = compare(lines, 4)
    assert text is not None and "ranks 0, 1 had started 8" in text and "all on host slow" in text
