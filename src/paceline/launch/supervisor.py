"""What to do when something happens to a run: a pure state machine.

    step(state, event, now) -> (state, actions)

No clock, no sockets, no processes: run.py tells it what happened and performs what it asks for. The run is over when it
asks for Finish; every start has a stop, and every stop has an end in time.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Mapping
from typing import Literal

GONE_HOST_GRACE_S = 2.0
"""The grace for the other hosts' ranks when a host has gone: some of the time was already spent on noticing it."""
STOP_LIMIT_S = 6.0
"""Beyond the grace: a host that has not stopped by then is given up, and its lease ends it."""
ROOT_CAUSE_WINDOW_S = 3.0
"""A failure that looks like a consequence is one only if another failure lies this close to it."""

_CONSEQUENCE = re.compile(
    r"[Cc]onnection (closed|reset) by peer|Broken pipe|Connection refused|recvValue failed|store->get|"
    r"ncclRemoteError|Socket Timeout|Timed out waiting|ECONNRESET|EPIPE|DistNetworkError|DistBackendError"
)


# Events


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begin:
    """All hosts are ready."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PortPicked:
    """The first host holds this port for rank 0; 0 means that the port asked for is taken."""

    port: int
    problem: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Raised:
    """A rank's script ended with an exception; its process will end soon."""

    rank: int
    summary: str
    traceback: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """A rank's script came to its end; its process will end soon."""

    rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """A rank's process has ended at `at_s`, on the driver's clock."""

    rank: int
    exit_code: int
    at_s: float
    kernel_says: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostGone:
    """The channel of a host has closed, or it has not been heard for too long."""

    host: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostStopped:
    """No process of the run is left on a host."""

    host: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostProblem:
    """An agent could not do what it was asked for."""

    host: int
    problem: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interrupted:
    """The driver got SIGINT, SIGTERM or SIGHUP."""

    number: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed."""


Event = Begin | PortPicked | Raised | Finished | Ended | HostGone | HostStopped | HostProblem | Interrupted | Tick


# Actions


@dataclasses.dataclass(frozen=True, kw_only=True)
class PickPort:
    """Ask the first host for a port, then report PortPicked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartAll:
    """Start every rank."""

    attempt: int
    port: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopHost:
    """End every process on a host, then report HostStopped."""

    host: int
    grace_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Say:
    """Tell the user."""

    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finish:
    """The run is over."""

    outcome: Outcome


Action = PickPort | StartAll | StopHost | Say | Finish


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How it ended. `failures` has the cause first; empty after a success or an interrupt without failure."""

    exit_code: int
    failures: tuple[Failure, ...] = ()
    interrupted_by: int | None = None
    attempts: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank in the present attempt."""

    host: int
    finished: bool = False
    raised: Raised | None = None
    exit_code: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """All that the supervisor knows."""

    phase: Literal["waiting", "picking", "running", "stopping", "done"] = "waiting"
    ranks: Mapping[int, RankState]
    grace_s: float
    restarts_left: int
    attempt: int = 0
    failures: tuple[Failure, ...] = ()
    stopped_hosts: frozenset[int] = frozenset()
    """Hosts that have nothing running, in the stopping phase."""
    gone_hosts: frozenset[int] = frozenset()
    stop_until_s: float = 0.0
    interrupts: int = 0
    interrupted_by: int | None = None

    @property
    def hosts(self) -> frozenset[int]:
        return frozenset(rank.host for rank in self.ranks.values())


Step = tuple[State, list[Action]]


def new_state(rank_hosts: Mapping[int, int], *, grace_s: float, restarts: int) -> State:
    """`rank_hosts`: the host of each rank."""
    ranks = {rank: RankState(host=host) for rank, host in rank_hosts.items()}
    return State(ranks=ranks, grace_s=grace_s, restarts_left=restarts)


def step(state: State, event: Event, now: float) -> Step:
    """The next state, and what must be done to get there."""
    if state.phase == "done":
        return state, []
    match event:
        case Begin():
            return dataclasses.replace(state, phase="picking"), [PickPort()]
        case PortPicked():
            return _on_port(state, event, now)
        case Raised() | Finished():
            return _on_word(state, event), []
        case Ended():
            return _on_ended(state, event, now)
        case HostGone():
            return _on_host_gone(state, event, now)
        case HostStopped():
            state = dataclasses.replace(state, stopped_hosts=state.stopped_hosts | {event.host})
            return _end_if_all_stopped(state, now)
        case HostProblem():
            failure = Failure(at_s=now, host=event.host, rank=None, exit_code=None, what=event.problem)
            return _fail(state, failure, now, grace_s=state.grace_s)
        case Interrupted():
            return _on_interrupt(state, event, now)
        case Tick():
            return _on_tick(state, now)


def _on_port(state: State, event: PortPicked, now: float) -> Step:
    if state.phase != "picking":
        return state, []
    if event.port == 0:
        host = state.ranks[0].host
        failure = Failure(at_s=now, host=host, rank=None, exit_code=None, what=event.problem)
        return _fail(dataclasses.replace(state, restarts_left=0), failure, now, grace_s=0.0)
    fresh = {number: RankState(host=rank.host) for number, rank in state.ranks.items()}
    state = dataclasses.replace(state, phase="running", ranks=fresh, stopped_hosts=frozenset())
    return state, [StartAll(attempt=state.attempt, port=event.port)]


def _on_word(state: State, event: Raised | Finished) -> State:
    rank = state.ranks[event.rank]
    if isinstance(event, Raised):
        rank = dataclasses.replace(rank, raised=event)
    else:
        rank = dataclasses.replace(rank, finished=True)
    return dataclasses.replace(state, ranks={**state.ranks, event.rank: rank})


def _on_ended(state: State, event: Ended, now: float) -> Step:
    rank = dataclasses.replace(state.ranks[event.rank], exit_code=event.exit_code)
    state = dataclasses.replace(state, ranks={**state.ranks, event.rank: rank})
    # Gloo may abort the interpreter while it exits; a script that had come to its end has succeeded all the same.
    succeeded = event.exit_code == 0 or (rank.finished and event.exit_code == -signal.SIGABRT)
    if succeeded:
        all_ended = all(rank.exit_code is not None for rank in state.ranks.values())
        if state.phase == "running" and all_ended:
            return _stop(state, now, grace_s=0.0)
        return state, []
    stopped_by_us = state.phase == "stopping" and event.exit_code in (-signal.SIGTERM, -signal.SIGKILL)
    if stopped_by_us and rank.raised is None:
        return state, []
    failure = _rank_failure(event, rank)
    return _fail(state, failure, now, grace_s=state.grace_s)


def _rank_failure(event: Ended, rank: RankState) -> Failure:
    what = describe_exit(event.exit_code, event.kernel_says)
    traceback = ""
    if rank.raised is not None:
        what = f"{what}: {rank.raised.summary}"
        traceback = rank.raised.traceback
    return Failure(
        at_s=event.at_s,
        host=rank.host,
        rank=event.rank,
        exit_code=event.exit_code,
        what=what,
        traceback=traceback,
        is_consequence=bool(rank.raised and _CONSEQUENCE.search(rank.raised.summary))
        or event.exit_code == -signal.SIGABRT,
    )


def _on_host_gone(state: State, event: HostGone, now: float) -> Step:
    if event.host in state.gone_hosts:
        return state, []
    state = dataclasses.replace(state, gone_hosts=state.gone_hosts | {event.host})
    if state.phase == "stopping":
        state, actions = _end_if_all_stopped(dataclasses.replace(state, restarts_left=0), now)
        return state, actions
    failure = Failure(at_s=now, host=event.host, rank=None, exit_code=None, what=event.reason)
    state = dataclasses.replace(state, restarts_left=0)
    return _fail(state, failure, now, grace_s=min(GONE_HOST_GRACE_S, state.grace_s))


def _fail(state: State, failure: Failure, now: float, *, grace_s: float) -> Step:
    state = dataclasses.replace(state, failures=(*state.failures, failure))
    if state.phase == "stopping":
        return state, []
    return _stop(state, now, grace_s=grace_s)


def _stop(state: State, now: float, *, grace_s: float) -> Step:
    state = dataclasses.replace(
        state, phase="stopping", stopped_hosts=frozenset(), stop_until_s=now + grace_s + STOP_LIMIT_S
    )
    stops: list[Action] = [StopHost(host=host, grace_s=grace_s) for host in sorted(state.hosts - state.gone_hosts)]
    if stops:
        return state, stops
    return _end_if_all_stopped(state, now)


def _on_interrupt(state: State, event: Interrupted, now: float) -> Step:
    state = dataclasses.replace(
        state,
        interrupts=state.interrupts + 1,
        interrupted_by=state.interrupted_by or event.number,
        restarts_left=0,
    )
    name = signal.Signals(event.number).name
    if state.interrupts > 1:
        state, actions = _stop(state, now, grace_s=0.0)
        return state, [Say(text="stopping at once"), *actions]
    if state.phase == "stopping":
        return state, []
    state, actions = _stop(state, now, grace_s=state.grace_s)
    text = f"{name}: stopping all ranks (up to {state.grace_s:g} s); once more to stop at once"
    return state, [Say(text=text), *actions]


def _on_tick(state: State, now: float) -> Step:
    if state.phase != "stopping" or now < state.stop_until_s:
        return state, []
    late = state.hosts - state.gone_hosts - state.stopped_hosts
    state = dataclasses.replace(state, gone_hosts=state.gone_hosts | late, restarts_left=0)
    return _end_if_all_stopped(state, now)


def _end_if_all_stopped(state: State, now: float) -> Step:
    if state.phase != "stopping" or state.hosts - state.gone_hosts - state.stopped_hosts:
        return state, []
    if state.failures and state.restarts_left > 0:
        cause = order_failures(state.failures)[0]
        text = (
            f"starting all ranks again ({state.restarts_left} of {state.restarts_left + state.attempt} restarts left)"
        )
        state = dataclasses.replace(
            state,
            phase="picking",
            attempt=state.attempt + 1,
            restarts_left=state.restarts_left - 1,
            failures=(),
        )
        where = f"rank {cause.rank}" if cause.rank is not None else "a host"
        return state, [Say(text=f"{where} failed ({cause.what}); {text}"), PickPort()]
    state = dataclasses.replace(state, phase="done")
    return state, [Finish(outcome=_outcome(state))]


def _outcome(state: State) -> Outcome:
    failures = order_failures(state.failures)
    if state.interrupted_by is not None:
        exit_code = 128 + state.interrupted_by
    elif failures or not _all_succeeded(state):
        exit_code = 1
    else:
        exit_code = 0
    return Outcome(
        exit_code=exit_code,
        failures=failures,
        interrupted_by=state.interrupted_by,
        attempts=state.attempt + 1,
    )


def _all_succeeded(state: State) -> bool:
    return all(rank.exit_code == 0 or rank.finished for rank in state.ranks.values())


def order_failures(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """By time, the cause first: a failure that looks like a consequence comes after one close to it that does not."""
    by_time = sorted(failures, key=lambda failure: failure.at_s)
    causes = [failure for failure in by_time if not failure.is_consequence]
    if not causes or causes[0].at_s - by_time[0].at_s > ROOT_CAUSE_WINDOW_S:
        return tuple(by_time)
    return (causes[0], *(failure for failure in by_time if failure is not causes[0]))


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
