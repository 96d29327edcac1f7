"""What failed, in words, and which of several failures was the cause. Pure."""

from __future__ import annotations

import re
import signal

from paceline.records import Record

ROOT_CAUSE_WINDOW_S = 3.0
"""A failure that looks like a consequence is one only if another failure lies this close to it."""

_CONSEQUENCE = re.compile(
    r"[Cc]onnection (closed|reset) by peer|Broken pipe|Connection refused|recvValue failed|store->get|"
    r"ncclRemoteError|Socket Timeout|Timed out waiting|ECONNRESET|EPIPE|DistNetworkError|DistBackendError"
)


class Failure(Record):
    """Something that ended a run: a rank, or a whole host (`rank` None)."""

    at_s: float
    host: int
    rank: int | None
    exit_code: int | None
    what: str
    """In words: `exit code 1: ValueError: ...`, or `signal 9 (SIGKILL): ...`."""
    traceback: str = ""
    is_consequence: bool = False
    """It looks like what happens to a rank when another one has died."""
    names_ranks: bool = False
    """`what` says by itself which rank did what."""


def order_failures(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """By time, the cause first: a failure that looks like a consequence comes after one close to it that does not."""
    by_time = sorted(failures, key=lambda failure: failure.at_s)
    causes = [failure for failure in by_time if not failure.is_consequence]
    if not causes or causes[0].at_s - by_time[0].at_s > ROOT_CAUSE_WINDOW_S:
        return tuple(by_time)
    return (causes[0], *(failure for failure in by_time if failure is not causes[0]))


def looks_like_consequence(summary: str, exit_code: int) -> bool:
    """Whether a rank ends like this when another one has died: its connection breaks, or its communicator aborts."""
    return bool(_CONSEQUENCE.search(summary)) or exit_code == -signal.SIGABRT


def describe_exit(exit_code: int, kernel_says: str = "") -> str:
    """An exit code in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "unknown"
    text = f"signal {-exit_code} ({name})"
    if kernel_says:
        return f"{text}; the kernel says: {kernel_says}"
    if -exit_code == signal.SIGKILL:
        return f"{text}: killed from outside, most often by the kernel because memory ran out"
    return text
