"""What a check finds, and the list of all checks; their docstrings are the reference page, and what `paceline explain`
tells of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

Status = Literal["ok", "warning", "failure", "skipped", "crashed"]
WORST_FIRST: tuple[Status, ...] = ("failure", "crashed", "warning", "skipped", "ok")
HEADINGS = ("What it looks at", "Why it matters", "How to mend it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """The check's name, as `paceline explain` takes it."""
    status: Status
    where: str
    """`train.py:41`, a host, a pair of hosts as `alice → bob`; empty for all."""
    text: str
    """One sentence: what was found; of a skipped check, why."""
    remedy: str = ""
    """The command or the changed line that mends it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One check, as its function describes itself."""

    name: str
    title: str
    """The first line of the docstring."""
    sections: dict[str, str]
    """Of each of HEADINGS."""
    function: Callable[..., Any]


CHECKS: dict[str, Check] = {}
"""Every check that was imported, by name."""

F = TypeVar("F", bound=Callable[..., Any])


def check(name: str) -> Callable[[F], F]:
    """Registers a function as the check of this name. Its docstring has a first line, and a paragraph under each of
    HEADINGS. Raises ValueError where one is missing, or the name is taken."""

    def register(function: F) -> F:
        if name in CHECKS:
            raise ValueError(f"two checks are called {name}")
        title, sections = _read(name, inspect.getdoc(function) or "")
        CHECKS[name] = Check(name=name, title=title, sections=sections, function=function)
        return function

    return register


def worst_first(findings: list[Finding]) -> list[Finding]:
    """In the order in which a person should read them."""
    return sorted(findings, key=lambda finding: WORST_FIRST.index(finding.status))


def exit_code(findings: list[Finding], *, is_strict: bool) -> int:
    """2 when something will break, 1 for warnings where these count, else 0. A check that crashed is a warning."""
    found = {finding.status for finding in findings}
    if "failure" in found:
        return 2
    return 1 if is_strict and found & {"warning", "crashed"} else 0


def _read(name: str, text: str) -> tuple[str, dict[str, str]]:
    title, _, rest = text.partition("\n")
    sections: dict[str, list[str]] = {}
    for line in rest.splitlines():
        if line.strip() in HEADINGS:
            sections[line.strip()] = []
        elif sections:
            list(sections.values())[-1].append(line.strip())
    missing = [heading for heading in HEADINGS if not " ".join(sections.get(heading, [])).strip()]
    if missing or not title.strip():
        raise ValueError(f"the docstring of check {name} lacks {', '.join(missing) or 'its first line'}")
    return title.strip(), {heading: "\n".join(sections[heading]).strip() for heading in HEADINGS}
