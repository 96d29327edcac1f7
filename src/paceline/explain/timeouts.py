"""What several ranks' time-outs of NCCL say together: who is behind, and whether they wanted the same thing. Pure."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable

from paceline.explain.lines import Line

_WORK = re.compile(r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel>\d+))?")
_NUMBERS = re.compile(r"[Ll]ast enqueued (?:NCCL )?work: (?P<started>-?\d+), last completed (?:NCCL )?work: -?\d+")
_MOST_NAMED = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
    """Where one rank stood."""

    line: Line
    number: int
    op: str
    numel: str | None


def compare(lines: Iterable[Line], *, num_known_ranks: int) -> tuple[str, list[Line]] | None:
    """In a sentence, and the lines that show it; None if the lines don't tell the ranks apart.

    `num_known_ranks`: of how many ranks there is any line.
    """
    lines = list(lines)
    states: dict[int, _State] = {}
    started: dict[int, tuple[int, Line]] = {}
    for line in lines:
        if line.rank is None:
            continue
        if match := _WORK.search(line.text):
            state = _State(line=line, number=int(match["number"]), op=match["op"], numel=match["numel"])
            if line.rank not in states or state.number < states[line.rank].number:
                states[line.rank] = state
        if match := _NUMBERS.search(line.text):
            started.setdefault(line.rank, (int(match["started"]), line))
    return _differ(states) or _behind(started) or _silent(states, num_known_ranks)


def _differ(states: dict[int, _State]) -> tuple[str, list[Line]] | None:
    """Ranks that were in different collectives, or in one with different shapes."""
    by_number: dict[int, list[_State]] = collections.defaultdict(list)
    for state in states.values():
        by_number[state.number].append(state)
    for number, group in sorted(by_number.items()):
        first = group[0]
        for other in group[1:]:
            lines = [first.line, other.line]
            if other.op != first.op:
                pair = f"rank {first.line.rank} was in {first.op}, rank {other.line.rank} in {other.op}"
                return f"in collective {number} {pair}: they took different ways through the code.", lines
            if other.numel != first.numel:
                sizes = f"{first.numel} values on rank {first.line.rank}, {other.numel} on rank {other.line.rank}"
                return f"in collective {number} ({first.op}) the shapes differ: {sizes}.", lines
    if len(by_number) > 1:
        low, high = by_number[min(by_number)], by_number[max(by_number)]
        who = _ranks([state.line for state in low])
        text = (
            f"{who} waited in collective {min(by_number)}, {_ranks([state.line for state in high])} in {max(by_number)}"
        )
        return f"{text}: one had a batch more or less, or took another branch.", [low[0].line, high[0].line]
    return None


def _behind(started: dict[int, tuple[int, Line]]) -> tuple[str, list[Line]] | None:
    """Ranks that had started fewer collectives than the others."""
    if len({number for number, _ in started.values()}) < 2:
        return None
    most = max(number for number, _ in started.values())
    behind = [line for number, line in started.values() if number < most]
    ahead = [line for number, line in started.values() if number == most]
    least = min(number for number, _ in started.values())
    lines = [behind[0], ahead[0]]
    text = f"{_ranks(behind)} had started {least} collectives when others had started {most}"
    hosts = {line.host for line in behind}
    if len(hosts) == 1 and None not in hosts and hosts.isdisjoint({line.host for line in ahead}):
        return f"{text}, all on host {hosts.pop()}: look at its disk, processors, GPUs and network.", lines
    return f"{text}: fewer batches, another branch, or busy elsewhere.", lines


def _silent(states: dict[int, _State], num_known_ranks: int) -> tuple[str, list[Line]] | None:
    """Some ranks waited, and others of which there are lines did not."""
    if not 0 < len(states) < num_known_ranks:
        return None
    lines = [state.line for state in states.values()]
    text = f"only {_ranks(lines)} waited there"
    return f"{text}: the others had fewer batches, took another branch, or had ended.", lines[:2]


def _ranks(lines: list[Line]) -> str:
    ranks = sorted({line.rank for line in lines if line.rank is not None})
    named = ", ".join(str(rank) for rank in ranks[:_MOST_NAMED]) + (" ..." if len(ranks) > _MOST_NAMED else "")
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {named}"
