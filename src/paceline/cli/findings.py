"""What `paceline check` shows: a table of the hosts, what needs a hand, and one line for all that is well. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.checks.examine import Examined
from paceline.checks.findings import Finding, Status
from paceline.checks.host_states import HostState
from paceline.units import format_bytes

_SIGNS: dict[Status, str] = {"failure": "✗", "crashed": "✗", "warning": "!", "skipped": "-", "ok": "✓"}
_COLOURS: dict[Status, str] = {"failure": "31", "crashed": "31", "warning": "33", "skipped": "2", "ok": "32"}
_MARKS: dict[Status, str] = {"failure": "stop", "warning": "warn", "ok": "fine"}
_COLUMNS = (("host", 14), ("python", 8), ("torch", 13), ("GPUs", 16), ("cores", 5), ("memory", 8), ("disk free", 9))


_MOST_PLACES = 4
"""Named before a sentence that holds for all of them."""


def table(states: Sequence[HostState]) -> list[str]:
    """One line per host, in 80 columns."""
    if not states:
        return []
    rows = [[name for name, _ in _COLUMNS], *(_cells(state) for state in states)]
    return [
        " ".join(_cut(cell, width).ljust(width) for cell, (_, width) in zip(row, _COLUMNS, strict=True)).rstrip()
        for row in rows
    ]


def _cells(state: HostState) -> list[str]:
    facts, details = state.facts, state.details
    models = Counter(model.removeprefix("NVIDIA ").removeprefix("GeForce ") for model in facts.gpus)
    gpus = ", ".join(f"{count} × {model}" if count > 1 else model for model, count in models.items())
    return [
        state.name,
        facts.python_version,
        facts.torch_version or "none",
        gpus or "none",
        str(facts.num_cores),
        format_bytes(details.memory["total"]),
        format_bytes(details.disks["state"]["free"]),
    ]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def lines(findings: Sequence[Finding], *, num_hosts: int, width: int, is_verbose: bool, colour: bool) -> Iterator[str]:
    """The worst first, then the count of what was fine on the `num_hosts` that were looked at. `is_verbose`: each of
    those as well."""
    shown = {"failure", "crashed", "warning", *({"skipped", "ok"} if is_verbose else ())}
    for finding in merge(findings):
        if finding.status in shown:
            sign = _SIGNS[finding.status]
            yield from _lines(finding, f"\x1b[{_COLOURS[finding.status]}m{sign}\x1b[0m" if colour else sign, width)
    if any(finding.status == "ok" for finding in findings):
        yield _count(findings, num_hosts, is_verbose=is_verbose, sign="\x1b[32m✓\x1b[0m" if colour else "✓")


def _lines(finding: Finding, sign: str, width: int) -> Iterator[str]:
    names = [name for name in finding.where.split(", ") if not _speaks_of(finding.text, name)]
    told = ", ".join(names[:_MOST_PLACES]) + (f" and {len(names) - _MOST_PLACES} more" if names[_MOST_PLACES:] else "")
    text = f"{told}: {finding.text}" if names and finding.where else finding.text
    first, *rest = [line for part in text.splitlines() for line in textwrap.wrap(part, width - 2) or [""]]
    yield f"{sign} {first}"
    yield from (f"  {line}" for line in rest)
    yield from (f"    {line}" for line in finding.remedy.splitlines())


def _speaks_of(text: str, name: str) -> bool:
    """It names the place as such: a host may be called like any word."""
    return re.search(rf"(^|\b(on|and|of|between) ){re.escape(name)}(?![\w-])", text) is not None


def merge(findings: Sequence[Finding]) -> list[Finding]:
    """Several hosts of which the same is said become one finding."""
    groups: dict[tuple[str, Status, str, str], list[str]] = {}
    for finding in findings:
        remedy = finding.remedy.removeprefix(f"On {finding.where}:  ") if finding.where else finding.remedy
        on_host = "On {}:  " if remedy != finding.remedy else ""
        key = finding.check, finding.status, finding.text, on_host + remedy.replace("{", "{{").replace("}", "}}")
        groups.setdefault(key, []).append(finding.where)
    return [
        Finding(check=name, status=status, where=(where := ", ".join(places)), text=text, remedy=remedy.format(where))
        for (name, status, text, remedy), places in groups.items()
    ]


def _count(findings: Sequence[Finding], num_hosts: int, *, is_verbose: bool, sign: str) -> str:
    statuses = Counter(finding.status for finding in findings)
    is_all = statuses["ok"] == len(findings) - statuses["skipped"]
    num_links = num_hosts * (num_hosts - 1) // 2
    where = _number(num_hosts, "host") + (f" and {_number(num_links, 'link')}" if num_links else "")
    checks = _number(statuses["ok"], "check" if is_all else "more check")
    text = f"{sign} {checks} on {where} {'is' if statuses['ok'] == 1 else 'are'} fine"
    if statuses["skipped"]:
        text += f", {statuses['skipped']} could not be made" + ("" if is_verbose else " (-v lists them)")
    return text


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def as_json(examined: Examined, exit_code: int) -> str:
    """The same for programs."""
    record: dict[str, Any] = {
        "exit_code": exit_code,
        "hosts": [
            {"name": state.name, "facts": state.facts.as_dict(), "details": state.details.as_dict()}
            for state in examined.states
        ],
        "differences": [
            {"what": row.what, "values": list(row.values), "mark": _MARKS.get(row.status, "fine")}
            for row in examined.rows
        ],
        "pairs": examined.matrix.as_list() if examined.matrix is not None else [],
        "findings": [dataclasses.asdict(finding) for finding in examined.findings],
    }
    return json.dumps(record, indent=2)
