"""How a check speaks: it yields verdicts, and is called in a way that its own crash is one more of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import ParamSpec

from paceline.checks.findings import CHECKS, Finding, Status
from paceline.launch.hosts import InterruptedEarlyError

P = ParamSpec("P")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A finding before its check and its place stand beside it."""

    status: Status
    text: str
    remedy: str = ""


def ok(text: str) -> Verdict:
    """It was looked at, and is as it should be."""
    return Verdict(status="ok", text=text)


def warning(text: str, remedy: str) -> Verdict:
    """It works, but slower, or not for every script."""
    return Verdict(status="warning", text=text, remedy=remedy)


def failure(text: str, remedy: str) -> Verdict:
    """Something will break."""
    return Verdict(status="failure", text=text, remedy=remedy)


def skipped(why: str) -> Verdict:
    """It could not be looked at."""
    return Verdict(status="skipped", text=why)


def run_check(
    function: Callable[P, Iterable[Verdict]], where: str, *arguments: P.args, **named: P.kwargs
) -> list[Finding]:
    """All that a check says of a place."""
    return as_findings(function, where, collect(function, *arguments, **named))


def collect(function: Callable[P, Iterable[Verdict]], *arguments: P.args, **named: P.kwargs) -> list[Verdict]:
    """All that a check says. It may raise what it likes: that is a verdict, and those before it are kept."""
    verdicts: list[Verdict] = []
    try:
        for verdict in function(*arguments, **named):
            verdicts.append(verdict)  # noqa: PERF402  # those before a crash are kept
    except Exception as error:  # noqa: BLE001  # whatever a check stumbles over
        verdicts.append(crashed(error))
    return verdicts


def as_findings(function: Callable[..., Iterable[Verdict]], where: str, verdicts: Iterable[Verdict]) -> list[Finding]:
    """The same under the name with which the function was registered by @check, and with its place."""
    name = next(name for name, check in CHECKS.items() if check.function is function)
    return [_as_finding(name, where, verdict) for verdict in verdicts]


def crashed(error: Exception) -> Verdict:
    """What a check's own mistake is told as."""
    last = (str(error).strip().splitlines() or ["no message"])[-1]
    return Verdict(status="crashed", text=f"the check itself broke: {type(error).__name__}: {last}")


def protect(name: str, call: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of a larger part of the examination, or that it broke. Signals pass: InterruptedEarlyError."""
    try:
        return call()
    except InterruptedEarlyError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it stumbles over
        return [_as_finding(name, "", crashed(error))]


def _as_finding(name: str, where: str, verdict: Verdict) -> Finding:
    return Finding(check=name, status=verdict.status, where=where, text=verdict.text, remedy=verdict.remedy)
