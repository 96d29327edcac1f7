"""What to do when something happens to a run: a pure state machine.

    step(state, event, now) -> (state, actions)

No clock, no sockets, no processes: run.py tells it what happened and performs what it asks for. The run is over when it
asks for Finish; every start has a stop, and every stop has an end in time.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Literal

from paceline.launch.failures import Failure, describe_exit, looks_like_consequence, order_failures
from paceline.records import Record

GONE_HOST_GRACE_S = 2.0
"""The grace for the other hosts' ranks when a host has gone: some of the time was already spent on noticing it."""
STOP_LIMIT_S = 6.0
"""Beyond the grace: a host that has not stopped by then is given up, and its lease ends it."""
CLOCK_SLACK_S = 0.2
"""How far a host's clock, as the driver knows it, may be off."""
RAISED_LIMIT_S = 5.0
"""A rank that has raised but does not end (a thread of the script's still runs) has failed all the same."""


# Events


class Begin(Record):
    """All hosts are ready."""


class PortPicked(Record):
    """The first host holds this port for rank 0; 0 means that the port asked for is taken."""

    port: int
    problem: str = ""


class Raised(Record):
    """A rank's script ended with an exception; its process will end soon."""

    rank: int
    summary: str
    traceback: str


class Finished(Record):
    """A rank's script came to its end; its process will end soon."""

    rank: int


class Ended(Record):
    """A rank's process has ended at `at_s`, on the driver's clock."""

    rank: int
    exit_code: int
    at_s: float
    kernel_says: str = ""


class HostGone(Record):
    """The channel of a host has closed, or it has not been heard for too long."""

    host: int
    reason: str


class HostStopped(Record):
    """No process of the run is left on a host."""

    host: int


class HostProblem(Record):
    """An agent could not do what it was asked for."""

    host: int
    problem: str


class Interrupted(Record):
    """The driver got SIGINT, SIGTERM or SIGHUP."""

    number: int


class Tick(Record):
    """Time has passed."""


Event = Begin | PortPicked | Raised | Finished | Ended | HostGone | HostStopped | HostProblem | Interrupted | Tick


# Actions


class PickPort(Record):
    """Ask the first host for a port, then report PortPicked."""


class StartAll(Record):
    """Start every rank."""

    attempt: int
    port: int


class StopHost(Record):
    """End every process on a host, then report HostStopped."""

    host: int
    grace_s: float


class GiveUp(Record):
    """Tell the user that this host did not confirm its end in time; its lease ends what may be left there."""

    host: int


class Say(Record):
    """Tell the user."""

    text: str


class Finish(Record):
    """The run is over."""

    outcome: Outcome


Action = PickPort | StartAll | StopHost | GiveUp | Say | Finish


class Outcome(Record):
    """How it ended. `failures` has the cause first; empty after a success or an interrupt without failure."""

    exit_code: int
    failures: tuple[Failure, ...] = ()
    interrupted_by: int | None = None
    attempts: int = 1


class RankState(Record):
    """One rank in the present attempt."""

    host: int
    finished: bool = False
    raised: Raised | None = None
    raised_at_s: float = 0.0
    exit_code: int | None = None


class State(Record):
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
    stopping_since_s: float = 0.0
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
            if state.phase != "waiting":
                return state, []
            return state.replace(phase="picking"), [PickPort()]
        case PortPicked():
            return _on_port(state, event, now)
        case Raised() | Finished():
            return _on_word(state, event, now), []
        case Ended():
            return _on_ended(state, event, now)
        case HostGone():
            return _on_host_gone(state, event, now)
        case HostStopped():
            state = state.replace(stopped_hosts=state.stopped_hosts | {event.host})
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
        failure = Failure(at_s=now, host=state.ranks[0].host, rank=None, exit_code=None, what=event.problem)
        return _fail(state.replace(restarts_left=0), failure, now, grace_s=0.0)
    fresh = {number: RankState(host=rank.host) for number, rank in state.ranks.items()}
    state = state.replace(phase="running", ranks=fresh, stopped_hosts=frozenset())
    return state, [StartAll(attempt=state.attempt, port=event.port)]


def _on_word(state: State, event: Raised | Finished, now: float) -> State:
    rank = state.ranks[event.rank]
    news = {"raised": event, "raised_at_s": now} if isinstance(event, Raised) else {"finished": True}
    return state.replace(ranks={**state.ranks, event.rank: rank.replace(**news)})


def _on_ended(state: State, event: Ended, now: float) -> Step:
    rank = state.ranks[event.rank].replace(exit_code=event.exit_code)
    state = state.replace(ranks={**state.ranks, event.rank: rank})
    # Gloo may abort the interpreter while it exits; a script that had come to its end has succeeded all the same.
    # One of whose processes raised what it could not go on from has not, though its parent may not have looked.
    came_to_its_end = event.exit_code == 0 or (rank.finished and event.exit_code == -signal.SIGABRT)
    succeeded = came_to_its_end and rank.raised is None
    if succeeded:
        all_ended = all(rank.exit_code is not None for rank in state.ranks.values())
        if state.phase == "running" and all_ended:
            return _stop(state, now, grace_s=0.0)
        return state, []
    by_us = state.phase == "stopping" and event.exit_code in (-signal.SIGTERM, -signal.SIGKILL)
    is_known = any(failure.rank == event.rank for failure in state.failures)
    if is_known or (by_us and rank.raised is None):
        return state, []
    failure = _rank_failure(state, event, rank)
    return _fail(state, failure, now, grace_s=state.grace_s)


def _rank_failure(state: State, event: Ended, rank: RankState) -> Failure:
    summary = rank.raised.summary if rank.raised is not None else ""
    how = describe_exit(event.exit_code, event.kernel_says) if event.exit_code else "one of its processes raised"
    what = f"{how}: {summary}" if summary else how
    looks_so = looks_like_consequence(summary, event.exit_code)
    left = sorted(number for number, other in state.ranks.items() if other.exit_code == 0)
    names_ranks = looks_so and bool(left) and state.phase == "running"
    if names_ranks:
        # Nothing failed before it: the one that went without a word is what the user must look at.
        what = f"rank {left[0]} had left before, with exit code 0; then rank {event.rank}: {what}"
    came_at_s = event.at_s if rank.raised is None else rank.raised_at_s
    after_stop = state.phase == "stopping" and came_at_s > state.stopping_since_s + CLOCK_SLACK_S
    return Failure(
        at_s=event.at_s,
        host=rank.host,
        rank=event.rank,
        exit_code=event.exit_code,
        what=what,
        traceback=rank.raised.traceback if rank.raised is not None else "",
        is_consequence=looks_so or after_stop,
        names_ranks=names_ranks,
    )


def _on_host_gone(state: State, event: HostGone, now: float) -> Step:
    if event.host in state.gone_hosts:
        return state, []
    state = state.replace(gone_hosts=state.gone_hosts | {event.host}, restarts_left=0)
    if state.phase == "stopping":
        return _end_if_all_stopped(state, now)
    failure = Failure(at_s=now, host=event.host, rank=None, exit_code=None, what=event.reason)
    return _fail(state, failure, now, grace_s=min(GONE_HOST_GRACE_S, state.grace_s))


def _fail(state: State, failure: Failure, now: float, *, grace_s: float) -> Step:
    state = state.replace(failures=(*state.failures, failure))
    if state.phase == "stopping":
        return state, []
    return _stop(state, now, grace_s=grace_s)


def _stop(state: State, now: float, *, grace_s: float) -> Step:
    until_s = now + grace_s + STOP_LIMIT_S
    if state.phase == "stopping":  # asked again: never later than before
        until_s = min(until_s, state.stop_until_s)
    else:
        state = state.replace(phase="stopping", stopping_since_s=now)
    state = state.replace(stopped_hosts=frozenset(), stop_until_s=until_s)
    stops: list[Action] = [StopHost(host=host, grace_s=grace_s) for host in sorted(state.hosts - state.gone_hosts)]
    if stops:
        return state, stops
    return _end_if_all_stopped(state, now)


def _on_interrupt(state: State, event: Interrupted, now: float) -> Step:
    state = state.replace(
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
    say = Say(text=f"{name}: stopping all ranks (up to {state.grace_s:g} s); once more to stop at once")
    return state, [say, *actions]


def _on_tick(state: State, now: float) -> Step:
    if state.phase == "running":
        return _fail_if_stuck(state, now)
    if state.phase != "stopping" or now < state.stop_until_s:
        return state, []
    late = state.hosts - state.gone_hosts - state.stopped_hosts
    state, actions = _end_if_all_stopped(state.replace(gone_hosts=state.gone_hosts | late, restarts_left=0), now)
    return state, [*(GiveUp(host=host) for host in sorted(late)), *actions]


def _fail_if_stuck(state: State, now: float) -> Step:
    for number, rank in sorted(state.ranks.items()):
        if rank.raised is None or rank.exit_code is not None or now - rank.raised_at_s < RAISED_LIMIT_S:
            continue
        failure = Failure(
            at_s=rank.raised_at_s,
            host=rank.host,
            rank=number,
            exit_code=None,
            what=f"{rank.raised.summary} (its process did not end by itself)",
            traceback=rank.raised.traceback,
            is_consequence=looks_like_consequence(rank.raised.summary, 1),
        )
        return _fail(state, failure, now, grace_s=state.grace_s)
    return state, []


def _end_if_all_stopped(state: State, now: float) -> Step:
    if state.phase != "stopping" or state.hosts - state.gone_hosts - state.stopped_hosts:
        return state, []
    if state.failures and state.restarts_left > 0:
        cause = order_failures(state.failures)[0]
        number = f"restart {state.attempt + 1} of {state.attempt + state.restarts_left}"
        state = state.replace(
            phase="picking",
            attempt=state.attempt + 1,
            restarts_left=state.restarts_left - 1,
            failures=(),
        )
        where = f"rank {cause.rank}" if cause.rank is not None else "a host"
        return state, [Say(text=f"{where} failed ({cause.what}); starting all ranks again ({number})"), PickPort()]
    state = state.replace(phase="done")
    return state, [Finish(outcome=_outcome(state))]


def _outcome(state: State) -> Outcome:
    failed = bool(state.failures) or not _all_succeeded(state)
    return Outcome(
        exit_code=int(failed) if state.interrupted_by is None else 128 + state.interrupted_by,
        failures=order_failures(state.failures),
        interrupted_by=state.interrupted_by,
        attempts=state.attempt + 1,
    )


def _all_succeeded(state: State) -> bool:
    return all(rank.exit_code == 0 or rank.finished for rank in state.ranks.values())
