"""What each check says of itself, as a page and one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from paceline.checks import examine, quick, script
from paceline.checks.findings import CHECKS, Check

_GROUPS = {
    examine.__name__: "Opening the hosts",
    quick.__name__: "Opening the hosts",
    "paceline.checks.host": "One host",
    "paceline.checks.surroundings": "One host: what surrounds the ranks",
    "paceline.checks.gpu": "One host: its GPUs",
    "paceline.checks.differences": "All hosts: what differs",
    "paceline.checks.identities": "All hosts: what differs",
    "paceline.checks.ends": "Every pair of hosts",
    "paceline.checks.ports": "Every pair of hosts",
    "paceline.checks.links": "Every pair of hosts",
    "paceline.checks.together": "All hosts together",
    script.__name__: "The training script",
}


def describe(name: str) -> str | None:
    """One check, for a terminal; None where there is none of this name."""
    if name not in CHECKS:
        return None
    check = CHECKS[name]
    lines = [f"{name}: {check.title}"]
    for heading, text in check.sections.items():
        lines += ["", heading, *(f"  {line}".rstrip() for line in text.splitlines())]
    return "\n".join(lines)


def write_page() -> str:
    """docs/checks.md."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# What `paceline check` looks at"
    yield ""
    yield "Made from the checks' own descriptions; `paceline explain NAME` prints one of them. What a check calls a"
    yield "failure will break a run; a warning makes it slower, or breaks some scripts."
    for group, members in groupby(sorted(CHECKS.values(), key=_place), key=_group):
        yield from ("", f"## {group}")
        for check in members:
            yield from ("", f"### {check.name}", "", check.title)
            for heading, text in check.sections.items():
                yield from ("", f"*{heading}.*", text)


def _place(check: Check) -> tuple[int, str, int]:
    """The order of the examination, whatever was imported first."""
    module = check.function.__module__
    number = list(_GROUPS).index(module) if module in _GROUPS else len(_GROUPS)
    return number, module, check.function.__code__.co_firstlineno


def _group(check: Check) -> str:
    return _GROUPS.get(check.function.__module__, _GROUPS[script.__name__])
