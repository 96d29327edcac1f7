"""How a check speaks: it yields results, and is called in a way that its own crash is one more of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import ParamSpec

from paceline.checks.findings import CHECKS, Finding, Status
from paceline.launch.hosts import InterruptedEarlyError

P = ParamSpec("P")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A finding before its check and its place stand beside it."""

    status: Status
    text: str
    remedy: str = ""


def ok(text: str) -> Result:
    """It was looked at, and is as it should be."""
    return Result(status="ok", text=text)


def warning(text: str, remedy: str) -> Result:
    """It works, but slower, or not for every script."""
    return Result(status="warning", text=text, remedy=remedy)


def failure(text: str, remedy: str) -> Result:
    """Something will break."""
    return Result(status="failure", text=text, remedy=remedy)


def skipped(why: str) -> Result:
    """It could not be looked at."""
    return Result(status="skipped", text=why)


def run_check(
    function: Callable[P, Iterable[Result]], where: str, *arguments: P.args, **named: P.kwargs
) -> list[Finding]:
    """All that a check says of a place."""
    return as_findings(function, where, collect(function, *arguments, **named))


def collect(function: Callable[P, Iterable[Result]], *arguments: P.args, **named: P.kwargs) -> list[Result]:
    """All that a check says. It may raise what it likes: that is a result, and those before it are kept."""
    results: list[Result] = []
    try:
        for result in function(*arguments, **named):
            results.append(result)  # noqa: PERF402  # those before a crash are kept
    except Exception as error:  # noqa: BLE001  # whatever a check stumbles over
        results.append(crashed(error))
    return results


def as_findings(function: Callable[..., Iterable[Result]], where: str, results: Iterable[Result]) -> list[Finding]:
    """The same under the name with which the function was registered by @check, and with its place."""
    name = next(name for name, check in CHECKS.items() if check.function is function)
    return [_as_finding(name, where, result) for result in results]


def crashed(error: Exception) -> Result:
    """What a check's own mistake is told as."""
    last = (str(error).strip().splitlines() or ["no message"])[-1]
    return Result(status="crashed", text=f"the check itself broke: {type(error).__name__}: {last}")


def catch_crash(
    name: str, call: Callable[P, Iterable[Finding]], *arguments: P.args, **named: P.kwargs
) -> list[Finding]:
    """The findings of a larger part of the examination, or that it broke. Signals pass: InterruptedEarlyError."""
    try:
        return list(call(*arguments, **named))
    except InterruptedEarlyError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it stumbles over
        return [_as_finding(name, "", crashed(error))]


def _as_finding(name: str, where: str, result: Result) -> Finding:
    return Finding(check=name, status=result.status, where=where, text=result.text, remedy=result.remedy)
