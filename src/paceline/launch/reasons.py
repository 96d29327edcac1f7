"""Why a run is as it is: every automatic choice in words. A few lines for each start, all of them for --dry-run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from paceline.launch.environment import HostPlan, RunPlan, choose_num_threads
from paceline.network.wires import Wire
from paceline.strategy import spell_out

_MOST_NAMES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reason:
    """An automatic choice and why it was made."""

    what: str
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a host finds the project."""

    cwd: str
    script: str | None
    """The script's path from there."""
    num_sent: int | None
    """Files that had to be sent; None for a host that works in the user's own folder."""
    num_files: int
    left_behind: tuple[str, ...] = ()
    """What git ignores, and so was not sent."""
    copy_of: str = ""
    """Which folder of the user's was copied, and what it is."""
    is_spare: bool = False
    """Another run is using the host's first copy."""


def explain_choices(
    plan: RunPlan, wires: Sequence[Wire], places: Sequence[Place], *, hosts_why: str, slots_why: Sequence[str]
) -> Iterator[Reason]:
    """Every choice, host by host."""
    yield Reason(what="hosts", why=hosts_why)
    if plan.sync is not None:
        yield Reason(what="sync", why=f"{plan.sync}, from --sync: hosts exchange {spell_out(plan.sync)}")
    for index, host in enumerate(plan.hosts):
        place = places[index]
        threads, threads_why = choose_num_threads(host)
        yield Reason(what=f"slots on {host.name}", why=f"{host.slots}: {slots_why[index]}")
        yield Reason(what=f"wire of {host.name}", why=wires[index].reason)
        yield Reason(what=f"threads on {host.name}", why=f"OMP_NUM_THREADS={threads}: {threads_why}")
        where = "works in place, in" if place.num_sent is None else f"has a copy of {place.copy_of}, in"
        yield Reason(what=f"project on {host.name}", why=f"{where} {place.cwd}")


def summarise_choices(
    plan: RunPlan, wires: Sequence[Wire], places: Sequence[Place], unsent_names: Sequence[str]
) -> Iterator[Reason]:
    """What is worth a line at every start."""
    if len(plan.hosts) > 1:
        found = _grouped((host.name, wire.interface) for host, wire in zip(plan.hosts, wires, strict=True))
        interfaces = ", ".join(f"{interface} on {names}" for interface, names in found)
        yield Reason(what="wires", why=f"{interfaces}; every pair of hosts was tried")
    if plan.sync is not None:
        yield Reason(what="sync", why=f"{plan.sync}: {spell_out(plan.sync)}")
    threads = _grouped((host.name, _describe_threads(host)) for host in plan.hosts)
    yield Reason(what="threads", why="; ".join(f"{text} on {names}" for text, names in threads))
    copies = [(host.name, place) for host, place in zip(plan.hosts, places, strict=True) if place.num_sent is not None]
    if copies:
        sent = _grouped((name, f"{place.num_sent} of {place.num_files} files sent") for name, place in copies)
        text = "; ".join(f"{count} to {names}" for count, names in sent)
        where = ", in" if len(copies) == 1 else f"; on {copies[0][0]} in"
        yield Reason(what="project", why=f"{text}{where} {copies[0][1].cwd}")
        if left := copies[0][1].left_behind:
            more = f" and {len(left) - _MOST_NAMES} more" if len(left) > _MOST_NAMES else ""
            names = f"{', '.join(left[:_MOST_NAMES])}{more}"
            text = f"{names}: git ignores it; what the script needs of it, put there yourself"
            yield Reason(what="not sent", why=text)
        if spare := ", ".join(name for name, place in copies if place.is_spare):
            text = f"{spare}, as another run is using the first; what runs wrote there (checkpoints) is not in this one"
            yield Reason(what="second copy", why=text)
    if unsent_names:
        text = f"{', '.join(unsent_names)}; say --env NAME for each that the ranks there need"
        yield Reason(what="not sent to other hosts", why=text)


def _describe_threads(host: HostPlan) -> str:
    threads, why = choose_num_threads(host)
    return f"OMP_NUM_THREADS={threads} ({why})"


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """[(name, text)] -> [(text, "name, name, ...")], in the order of first appearance."""
    groups: dict[str, list[str]] = {}
    for name, text in pairs:
        groups.setdefault(text, []).append(name)
    return [(text, ", ".join(names)) for text, names in groups.items()]
