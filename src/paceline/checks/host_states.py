"""One host as the checks see it, and the errand that makes the acquaintance: what its agent and its interpreter say."""

from __future__ import annotations

import dataclasses
import time

from paceline.checks import details
from paceline.checks.details import Details
from paceline.launch.errands import Errand, run_errands
from paceline.launch.facts import Facts
from paceline.launch.hosts import Hosts

QUICK_LIMIT_S = 10.0
LIMIT_S = 15.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostState:
    """One host that could be opened."""

    name: str
    facts: Facts
    details: Details
    clock_ahead_s: tuple[float, float]
    """By how much its wall clock is ahead of the driver's: it lies between these two."""
    slots: int
    """Ranks that it is to run."""
    num_gpus: int
    """GPUs that they will see."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetailsQuery:
    """What is to be read on every host."""

    imports: tuple[str, ...] = ()
    """Modules that the script imports."""
    data: str | None = None
    """A folder to count."""
    is_quick: bool = False
    """For the start of a run: nothing is waited for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """The details of one host, or why there are none."""

    details: Details | None
    clock_ahead_s: tuple[float, float]
    problem: str = ""


def read_details(hosts: Hosts, query: DetailsQuery) -> list[Reading]:
    """Reads all hosts at the same time; one for each, in order. Raises InterruptedEarlyError for a signal."""
    argument = {
        "run": hosts.run_id,
        "imports": list(query.imports),
        "data": query.data,
        "resolve_limit_s": details.QUICK_RESOLVE_LIMIT_S if query.is_quick else details.RESOLVE_LIMIT_S,
    }
    errands = [Errand(host=index, module=details.__name__, argument=argument) for index in range(len(hosts.hosts))]
    wall_s, asked_s = time.time(), time.monotonic()
    replies = run_errands(hosts, errands, timeout_s=QUICK_LIMIT_S if query.is_quick else LIMIT_S)
    answered_s = time.monotonic()
    readings: list[Reading] = []
    for index, reply in enumerate(replies):
        if reply.problem:
            readings.append(Reading(details=None, clock_ahead_s=(0.0, 0.0), problem=reply.problem))
            continue
        found = Details(**reply.value)
        # It was read after we asked, and before all had answered. The host's own monotonic clock says more: as its
        # first message was under way for a while, the offset is too large, and so this is no earlier than it was.
        latest_s = min(answered_s, found.monotonic_s + hosts.clock_offset_s[index])
        ahead_s = (found.wall_s - wall_s - max(0.0, latest_s - asked_s), found.wall_s - wall_s)
        readings.append(Reading(details=found, clock_ahead_s=ahead_s))
    return readings
