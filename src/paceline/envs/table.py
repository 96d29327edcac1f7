"""Which packages differ between hosts: the doctor's comparison, with every package as one that the script imports."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from paceline.checks.differences import Row, compare_hosts
from paceline.checks.host_states import DetailsQuery, HostState, read_details
from paceline.checks.quick import make_state
from paceline.envs.opening import Opened
from paceline.errors import HostError

_OWN = "paceline"
_GAP = "  "


def meet(opened: Opened) -> list[HostState]:
    """The details of all open hosts. Raises HostError where they can't be read."""
    states: list[HostState] = []
    for index, reading in enumerate(read_details(opened.hosts, DetailsQuery(is_quick=True))):
        if reading.details is None:
            text = f"{opened.name(index)}: a process there could not read its details: {reading.problem}"
            raise HostError(text, hint=f"paceline check -H {opened.name(index)}")
        facts = opened.facts[index]
        states.append(make_state(opened.hosts.hosts[index], facts, reading, (1, len(facts.gpus))))
    return states


def find_differences(states: Sequence[HostState]) -> list[Row]:
    """A row for Python, for torch, and for each package that is not the same everywhere; those with one remedy
    together."""
    names = sorted({name for state in states for name in state.details.packages} - {_OWN})
    rows = compare_hosts([_ask_for_all(state, names) for state in states], needs_torch=False).rows
    kept = [
        row
        for row in rows
        if row.what in ("Python", *names) and row.what != "torch" and row.status in ("warning", "failure")
    ]
    kept += [_other_build(row, states) for row in rows if row.what == "torch" and len(set(row.values)) > 1]
    return sorted(dict.fromkeys(kept), key=lambda row: (row.what != "Python", row.remedy, row.what))


def _other_build(row: Row, states: Sequence[HostState]) -> Row:
    """Builds of one version talk to each other, so that a run starts; the environments are not the same, though."""
    has = next(index for index, value in enumerate(row.values) if value != "none")
    others = [state.name for state, value in zip(states, row.values, strict=True) if value != row.values[has]]
    remedy = f"paceline env sync -H {','.join(others)} --from {states[has].name}"
    return dataclasses.replace(row, status="warning", remedy=remedy)


def _ask_for_all(state: HostState, names: Sequence[str]) -> HostState:
    packages = state.details.packages
    imports = {name: {"found": name in packages, "version": packages.get(name)} for name in names}
    return dataclasses.replace(state, details=state.details.replace(imports=imports))


def render_differences(names: Sequence[str], rows: Sequence[Row], width: int) -> Iterator[str]:
    """A table of this width; what evens out stands below the rows that it is for."""
    table = [("package", *names), *((row.what, *row.values) for row in rows)]
    widths = _fit([max(len(line[column]) for line in table) for column in range(len(table[0]))], width)
    yield _line(table[0], widths)
    for remedy, group in itertools.groupby(rows, key=lambda row: row.remedy):
        yield from (_line((row.what, *row.values), widths) for row in group)
        if remedy:
            yield f"    {remedy}"


def _fit(widths: list[int], width: int) -> list[int]:
    """Takes from the widest column until all fit; none gets narrower than six characters."""
    widths = list(widths)
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width and max(widths) > 6:
        widths[widths.index(max(widths))] -= 1
    return widths


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    cut = (cell if len(cell) <= width else cell[: width - 1] + "…" for cell, width in zip(cells, widths, strict=True))
    return _GAP.join(cell.ljust(width) for cell, width in zip(cut, widths, strict=True)).rstrip()
