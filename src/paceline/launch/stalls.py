"""Who waits for whom, when nothing moves any more: where each rank stands in, sentences out. Pure.

A rank that waits in a collective stands still because of another one. So the news is never what one rank says but what
all of them say together; it is held back until each has spoken or ended, and for SETTLE_S at most.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from paceline.events import RankStalled
from paceline.records import Record

SETTLE_S = 2.5
"""From the first rank that has stalled to the sentences: the others look no less often than once a second."""
_MOST_LINES = 8
_BUFFERS = "forward (buffers)"
_BACKWARD = "backward"
_PASSES = ("forward", "backward")


class Stalls(Record):
    """What is known of one attempt."""

    hosts: tuple[str, ...]
    """The host's name of each rank."""
    stalled: Mapping[int, RankStalled] = {}
    ended: Mapping[int, int | None] = {}
    """Ranks that have come to their end, with the steps that they did."""
    speak_at_s: float | None = None
    """When the sentences are due at the latest; None when there is no news."""
    said: tuple[str, ...] = ()
    said_at_s: float = 0.0
    has_told_of_stillness: bool = False
    """Told once that all ranks are in the script alike; that is no hang, most often."""


def stall(stalls: Stalls, rank: int, event: RankStalled, now: float) -> Stalls:
    """Nothing has moved in a rank."""
    due_s = now + SETTLE_S if stalls.speak_at_s is None else stalls.speak_at_s
    return stalls.replace(stalled={**stalls.stalled, rank: event}, speak_at_s=due_s)


def end(stalls: Stalls, rank: int, steps: int | None, now: float) -> Stalls:
    """A rank's script has come to its end."""
    left = {number: event for number, event in stalls.stalled.items() if number != rank}
    due_s = now + SETTLE_S if left and stalls.speak_at_s is None else stalls.speak_at_s
    return stalls.replace(stalled=left, ended={**stalls.ended, rank: steps}, speak_at_s=due_s)


def move(stalls: Stalls, rank: int, now: float) -> tuple[Stalls, list[str]]:
    """A rank moves again; the lines to say, now that none stands still any more."""
    left = {number: event for number, event in stalls.stalled.items() if number != rank}
    stalls = stalls.replace(stalled=left)
    if left:
        return stalls, []
    lines = [f"the ranks move again, after {now - stalls.said_at_s:.0f} s more"] if stalls.said else []
    return stalls.replace(speak_at_s=None, said=()), lines


def speak(stalls: Stalls, now: float) -> tuple[Stalls, list[str]]:
    """The lines that are due now, if any."""
    if stalls.speak_at_s is None:
        return stalls, []
    all_known = len(stalls.stalled.keys() | stalls.ended.keys()) == len(stalls.hosts)
    if now < stalls.speak_at_s and not all_known:
        return stalls, []
    stalls = stalls.replace(speak_at_s=None)
    lines = explain(stalls.hosts, stalls.stalled, stalls.ended)
    waits = any(event.waits for event in stalls.stalled.values())
    if not lines or tuple(lines[1:]) == stalls.said[1:] or (stalls.has_told_of_stillness and not waits):
        return stalls, []
    has_told = stalls.has_told_of_stillness or not waits
    return stalls.replace(said=tuple(lines), said_at_s=now, has_told_of_stillness=has_told), lines


def explain(hosts: Sequence[str], stalled: Mapping[int, RankStalled], ended: Mapping[int, int | None]) -> list[str]:
    """A heading with the cause, as far as it is known, and a line for each group of ranks that stand alike.

    hosts    the host's name of each rank
    stalled  ranks in which nothing moves
    ended    ranks that have come to their end, with the steps that they did

    Nothing where no rank waits and some go on: nobody is in anybody's way.
    """
    unheard = [rank for rank in range(len(hosts)) if rank not in stalled and rank not in ended]
    waits = any(event.waits for event in stalled.values())
    if not stalled or (unheard and not waits):
        return []
    since_s = min(event.since_s for event in stalled.values() if event.waits or not waits)
    cause = _cause(hosts, stalled, ended, unheard)
    groups = list(_describe_groups(hosts, stalled))
    lines = groups[:_MOST_LINES]
    if len(groups) > _MOST_LINES:
        lines.append(f"and {len(groups) - _MOST_LINES} more groups of ranks, each in another place")
    for steps in sorted(set(ended.values()), key=str):
        ranks = [rank for rank in sorted(ended) if ended[rank] == steps]
        lines.append(f"{name_ranks(ranks, hosts)} {_have(ranks)} ended{_after(steps or 0)}")
    if unheard:
        lines.append(f"{name_ranks(unheard, hosts)}: nothing heard: not come so far, moving, or unable to report")
    return [f"nothing has moved for {since_s:.0f} s: {cause}", *(f"  {line}" for line in lines)]


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`rank 1 (bob)`, `ranks 0, 2 (alice, carol)`; without hosts where there is one."""
    numbers = ", ".join(map(str, ranks[:_MOST_LINES])) + (", ..." if len(ranks) > _MOST_LINES else "")
    named = list(dict.fromkeys(hosts[rank] for rank in ranks))
    places = f" ({', '.join(named[:_MOST_LINES])})" if len(set(hosts)) > 1 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}{places}"


def _cause(
    hosts: Sequence[str], stalled: Mapping[int, RankStalled], ended: Mapping[int, int | None], unheard: Sequence[int]
) -> str:
    waiting = [rank for rank in sorted(stalled) if stalled[rank].waits]
    elsewhere = [rank for rank in sorted(stalled) if not stalled[rank].waits]
    if not waiting:
        return "no rank waits for another, all are in the script"
    wait = f"{name_ranks(waiting, hosts)} {_verb(waiting, 'wait')}"
    if ended:
        left = sorted(ended)
        steps = [ended[rank] or 0 for rank in left]
        uneven = ": uneven batches?" if max(steps) else ""
        return f"{wait} for {name_ranks(left, hosts)}, which {_have(left)} ended{_after(max(steps))}{uneven}"
    if elsewhere:
        what = {stalled[rank].doing for rank in elsewhere}
        where = {stalled[rank].where for rank in elsewhere if stalled[rank].where}
        at = f" ({', '.join(sorted(where))})" if where else ""
        is_in = "are" if len(elsewhere) > 1 else "is"
        return f"{wait} for {name_ranks(elsewhere, hosts)}, which {is_in} in {' or '.join(sorted(what))}{at}"
    if unheard:
        return f"{wait}, and of {name_ranks(unheard, hosts)} nothing is heard"
    return _cause_among_waiting(hosts, stalled)


def _cause_among_waiting(hosts: Sequence[str], stalled: Mapping[int, RankStalled]) -> str:
    """All wait: in different places, or in the same one."""
    in_model = [rank for rank in sorted(stalled) if stalled[rank].doing.startswith(_PASSES)]
    beyond = [rank for rank in sorted(stalled) if rank not in in_model]
    doing = {event.doing for event in stalled.values()}
    places = {(event.doing, event.where) for event in stalled.values()}
    hint = " (a part of the ranks can run model.module)" if _BUFFERS in doing else ""
    if in_model and beyond:
        who, others = name_ranks(in_model, hosts), name_ranks(beyond, hosts)
        what = " or ".join(sorted({stalled[rank].doing for rank in beyond}))
        after = _after(max(stalled[rank].step for rank in beyond))
        return (
            f"{who} {_verb(in_model, 'wait')} in the model for {others}, which {_verb(beyond, 'wait')} in "
            f"{what}{after}: uneven batches?{hint}"
        )
    if hint and len(places) > 1:
        return f"the ranks wait in different passes of the model, which all must run together{hint}"
    if len(doing) > 1:
        return "the ranks wait in different collectives: does some code run on a part of them only?"
    if ahead := _find_ahead({rank: event.collectives for rank, event in stalled.items()}):
        has_begun = f"{name_ranks(ahead, hosts)} {_have(ahead)} begun"
        return f"all wait, but {has_begun} more collectives than the others: does some code run on a part of them only?"
    if len(places) > 1:
        return "the ranks wait in different lines: does some code run on a part of them only?"
    return "all ranks wait in the same collective: sizes that differ, or the network between them"


def _find_ahead(counts: Mapping[int, int]) -> list[int]:
    """Ranks that have begun more collectives than the fewest; none where that is not known."""
    fewest = min(counts.values())
    return [rank for rank in sorted(counts) if counts[rank] > fewest] if fewest >= 0 else []


def _describe_groups(hosts: Sequence[str], stalled: Mapping[int, RankStalled]) -> Iterator[str]:
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, event in sorted(stalled.items()):
        busy = event.busy and not event.waits
        groups.setdefault((event.doing, event.waits, busy, event.where, event.text, event.step), []).append(rank)
    for ranks in groups.values():
        event = stalled[ranks[0]]
        at = ": ".join(filter(None, [event.where, event.text]))
        yield f"{name_ranks(ranks, hosts)} {_describe(event, ranks)}" + (f" ({at})" if at else "")


def _describe(event: RankStalled, ranks: Collection[int]) -> str:
    if event.waits:
        in_step = event.doing.startswith(_BACKWARD)
        when = f" of step {event.step + 1}" if in_step and event.step else "" if in_step else _after(event.step)
        return f"{_verb(ranks, 'wait')} in {event.doing}{when}"
    busy = ", busy" if event.busy else ""
    after = f", after step {event.step}" if event.step else ""
    return f"{'are' if len(ranks) > 1 else 'is'} in {event.doing}{busy}{after}"


def _after(steps: int) -> str:
    return f" after step {steps}" if steps else ""


def _verb(ranks: Collection[int], verb: str) -> str:
    return verb if len(ranks) > 1 else f"{verb}s"


def _have(ranks: Collection[int]) -> str:
    return "have" if len(ranks) > 1 else "has"
