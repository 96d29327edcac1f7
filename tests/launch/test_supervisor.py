"""The supervisor: tables of what happens and what must follow, and any order of anything."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.failures import Failure, describe_exit, order_failures
from paceline.launch.supervisor import (
    RAISED_LIMIT_S,
    STOP_LIMIT_S,
    Action,
    Begin,
    Ended,
    Event,
    Finish,
    Finished,
    HostGone,
    HostProblem,
    HostStopped,
    Interrupted,
    Outcome,
    PickPort,
    PortPicked,
    Raised,
    Say,
    StartAll,
    State,
    StopHost,
    Tick,
    new_state,
    step,
)

HOSTS = {0: 0, 1: 0, 2: 1, 3: 1}
GRACE_S = 5.0


@dataclasses.dataclass
class Drive:
    """Feeds events; time passes by a tenth of a second with each, or as told."""

    state: State
    now: float = 100.0
    actions: list[Action] = dataclasses.field(default_factory=list)

    def tell(self, *events: Event, after_s: float = 0.1) -> list[Action]:
        news: list[Action] = []
        for event in events:
            self.now += after_s
            self.state, actions = step(self.state, event, self.now)
            news += [action for action in actions if not isinstance(action, Say)]
            self.actions += actions
        return news

    @property
    def outcome(self) -> Outcome:
        (finish,) = [action for action in self.actions if isinstance(action, Finish)]
        return finish.outcome


def running(*, restarts: int = 0) -> Drive:
    drive = Drive(new_state(HOSTS, grace_s=GRACE_S, restarts=restarts))
    assert drive.tell(Begin()) == [PickPort()]
    assert drive.tell(PortPicked(port=29500)) == [StartAll(attempt=0, port=29500)]
    return drive


def ended(rank: int, exit_code: int, at_s: float = 100.3, kernel_says: str = "") -> Ended:
    return Ended(rank=rank, exit_code=exit_code, at_s=at_s, kernel_says=kernel_says)


def raised(rank: int, summary: str = "ValueError: no") -> Raised:
    return Raised(rank=rank, summary=summary, traceback=f"Traceback\n{summary}\n")


def stop_all(grace_s: float) -> list[Action]:
    return [StopHost(host=0, grace_s=grace_s), StopHost(host=1, grace_s=grace_s)]


def all_stopped() -> list[Event]:
    return [HostStopped(host=0), HostStopped(host=1)]


def test_success_stops_what_the_ranks_left_and_ends_with_0() -> None:
    drive = running()
    assert drive.tell(*(ended(rank, 0) for rank in (0, 1, 2))) == []
    assert drive.tell(ended(3, 0)) == stop_all(0.0)
    assert drive.tell(HostStopped(host=0)) == []
    drive.tell(HostStopped(host=1))
    assert drive.outcome == Outcome(exit_code=0)


@pytest.mark.parametrize(
    ("event", "grace_s", "exit_code", "who", "what"),
    [
        (ended(2, 1), GRACE_S, 1, (1, 2), "exit code 1"),
        (ended(2, 139), GRACE_S, 1, (1, 2), "exit code 139"),
        (ended(2, -signal.SIGSEGV), GRACE_S, 1, (1, 2), "signal 11 (SIGSEGV)"),
        (ended(2, -signal.SIGABRT), GRACE_S, 1, (1, 2), "signal 6 (SIGABRT)"),
        (ended(2, -signal.SIGTERM), GRACE_S, 1, (1, 2), "signal 15 (SIGTERM)"),
        (
            ended(2, -signal.SIGKILL),
            GRACE_S,
            1,
            (1, 2),
            "signal 9 (SIGKILL): killed from outside, most often by the kernel because memory ran out",
        ),
        (
            ended(2, -signal.SIGKILL, kernel_says="Out of memory: Killed process 7"),
            GRACE_S,
            1,
            (1, 2),
            "signal 9 (SIGKILL); the kernel says: Out of memory: Killed process 7",
        ),
        (ended(2, -250), GRACE_S, 1, (1, 2), "signal 250 (unknown)"),
        (HostProblem(host=1, problem="No such file: x"), GRACE_S, 1, (1, None), "No such file: x"),
    ],
)
def test_a_failure_stops_every_host_and_is_named(
    event: Event, grace_s: float, exit_code: int, who: tuple[int, int | None], what: str
) -> None:
    drive = running()
    assert drive.tell(event) == stop_all(grace_s)
    drive.tell(*all_stopped())
    cause = drive.outcome.failures[0]
    assert (drive.outcome.exit_code, (cause.host, cause.rank), cause.what) == (exit_code, who, what)


def test_a_lost_host_is_named_and_the_others_stopped_sooner() -> None:
    drive = running(restarts=3)
    assert drive.tell(HostGone(host=1, reason="bob has not been heard for 7 s")) == [StopHost(host=0, grace_s=2.0)]
    drive.tell(HostGone(host=1, reason="again"))
    drive.tell(HostStopped(host=0))
    assert [failure.what for failure in drive.outcome.failures] == ["bob has not been heard for 7 s"]
    assert drive.outcome.exit_code == 1, "without its host a run can't start again"


def test_all_hosts_lost_is_the_end() -> None:
    drive = running()
    drive.tell(HostGone(host=1, reason="first"), HostGone(host=0, reason="second"))
    assert drive.outcome.failures[0].what == "first"


def test_a_taken_port_ends_the_run_before_any_rank() -> None:
    drive = Drive(new_state(HOSTS, grace_s=GRACE_S, restarts=3))
    drive.tell(Begin())
    assert drive.tell(PortPicked(port=0, problem="port 80 is taken")) == stop_all(0.0)
    drive.tell(*all_stopped())
    assert drive.outcome.failures[0].what == "port 80 is taken"
    assert not [action for action in drive.actions if isinstance(action, StartAll | PickPort)][1:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_stops_within_the_grace_and_shows_in_the_exit_code(number: signal.Signals) -> None:
    drive = running(restarts=3)
    assert drive.tell(Interrupted(number=number)) == stop_all(GRACE_S)
    drive.tell(*(ended(rank, -signal.SIGTERM) for rank in HOSTS), *all_stopped())
    assert drive.outcome == Outcome(exit_code=128 + number, interrupted_by=number)
    assert {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}[number] == drive.outcome.exit_code


def test_a_second_interrupt_hastens_and_the_first_names_the_exit_code() -> None:
    drive = running()
    drive.tell(Interrupted(number=signal.SIGTERM))
    assert drive.tell(Interrupted(number=signal.SIGINT)) == stop_all(0.0)
    assert [action.text for action in drive.actions if isinstance(action, Say)][-1] == "stopping at once"
    drive.tell(*all_stopped())
    assert drive.outcome.exit_code == 143


def test_interrupts_without_end_do_not_put_off_the_end() -> None:
    drive = running()
    began = drive.now
    while drive.state.phase != "done":
        drive.tell(Interrupted(number=signal.SIGINT), Tick(), after_s=0.5)
        assert drive.now - began < GRACE_S + STOP_LIMIT_S + 2
    assert drive.outcome.exit_code == 130


def test_an_interrupt_while_a_failure_is_being_stopped_is_no_restart() -> None:
    drive = running(restarts=3)
    drive.tell(raised(0), ended(0, 1))
    assert drive.tell(Interrupted(number=signal.SIGINT)) == []
    drive.tell(*all_stopped())
    assert drive.outcome.exit_code == 130
    assert [failure.rank for failure in drive.outcome.failures] == [0]


def test_a_host_that_does_not_stop_is_given_up() -> None:
    drive = running(restarts=3)
    drive.tell(ended(0, 1), HostStopped(host=0))
    assert drive.tell(Tick(), after_s=GRACE_S) == []
    drive.tell(Tick(), after_s=STOP_LIMIT_S)
    assert drive.outcome.exit_code == 1


def test_restarts_are_counted_and_then_it_is_over() -> None:
    drive = running(restarts=2)
    for attempt in (1, 2):
        drive.tell(raised(1), ended(1, 1))
        assert drive.tell(*all_stopped()) == [PickPort()]
        assert drive.tell(PortPicked(port=29500 + attempt)) == [StartAll(attempt=attempt, port=29500 + attempt)]
    drive.tell(ended(1, 7), *all_stopped())
    said = [action.text for action in drive.actions if isinstance(action, Say)]
    assert said == [
        "rank 1 failed (exit code 1: ValueError: no); starting all ranks again (restart 1 of 2)",
        "rank 1 failed (exit code 1: ValueError: no); starting all ranks again (restart 2 of 2)",
    ]
    assert (drive.outcome.exit_code, drive.outcome.attempts) == (1, 3)
    assert [failure.what for failure in drive.outcome.failures] == ["exit code 7"], "of the last attempt only"


def test_success_after_a_restart_is_success() -> None:
    drive = running(restarts=1)
    drive.tell(ended(1, 1), *all_stopped(), PortPicked(port=29501), *(ended(rank, 0) for rank in HOSTS))
    drive.tell(*all_stopped())
    assert drive.outcome == Outcome(exit_code=0, attempts=2)


def test_gloo_aborting_after_the_script_is_no_failure() -> None:
    drive = running()
    drive.tell(*(Finished(rank=rank) for rank in HOSTS), ended(0, 0), ended(1, -signal.SIGABRT), ended(2, 0))
    assert drive.tell(ended(3, -signal.SIGABRT)) == stop_all(0.0)
    drive.tell(*all_stopped())
    assert drive.outcome == Outcome(exit_code=0)


def test_a_rank_whose_worker_raised_has_failed_though_it_exits_with_0() -> None:
    drive = running()
    assert drive.tell(raised(1, "a world of its own"), ended(1, 0)) == stop_all(GRACE_S)
    drive.tell(*(ended(rank, -signal.SIGTERM) for rank in (0, 2, 3)), *all_stopped())
    assert drive.outcome.exit_code == 1
    assert [failure.what for failure in drive.outcome.failures] == ["one of its processes raised: a world of its own"]


def test_other_ends_after_the_script_are_failures() -> None:
    drive = running()
    drive.tell(Finished(rank=0))
    assert drive.tell(ended(0, -signal.SIGKILL)) == stop_all(GRACE_S)


CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:9"


@pytest.mark.parametrize(
    "consequence",
    [
        (CLOSED, 1),
        ("RuntimeError: Connection reset by peer", 1),
        ("torch.distributed.DistBackendError: NCCL error in: ncclRemoteError", 1),
        ("torch.distributed.DistNetworkError: client socket has failed", 1),
        ("ConnectionRefusedError: [Errno 111] Connection refused", 1),
        ("BrokenPipeError: [Errno 32] Broken pipe", 1),
        ("", -signal.SIGABRT),
    ],
)
@pytest.mark.parametrize("cause_first", [True, False])
def test_the_cause_comes_first_however_they_arrive(consequence: tuple[str, int], cause_first: bool) -> None:
    summary, exit_code = consequence
    cause = [raised(2, "ValueError: bad batch"), ended(2, 1, at_s=100.5)]
    other = [*([raised(0, summary)] if summary else []), ended(0, exit_code, at_s=100.2)]
    drive = running()
    drive.tell(*(cause + other if cause_first else other + cause), *all_stopped())
    assert [failure.rank for failure in drive.outcome.failures] == [2, 0]
    assert [failure.is_consequence for failure in drive.outcome.failures] == [False, True]
    assert drive.outcome.failures[0].traceback == "Traceback\nValueError: bad batch\n"


def test_a_rank_that_left_without_a_word_is_named_beside_the_broken_connection() -> None:
    drive = running()
    drive.tell(ended(1, 0), raised(0, CLOSED), ended(0, 1), *all_stopped())
    cause = drive.outcome.failures[0]
    assert cause.what == f"rank 1 had left before, with exit code 0; then rank 0: exit code 1: {CLOSED}"
    assert cause.names_ranks


def test_an_exit_that_we_asked_for_is_never_the_cause() -> None:
    drive = running()
    drive.tell(ended(0, -signal.SIGABRT, at_s=100.25))  # may well be a consequence, but nothing else failed
    drive.tell(ended(1, -signal.SIGTERM, at_s=100.5))  # stopped by us: no failure at all
    drive.tell(ended(2, 3, at_s=100.8), *all_stopped())  # its own way to end after SIGTERM
    assert [(failure.rank, failure.is_consequence) for failure in drive.outcome.failures] == [(0, True), (2, True)]


def test_a_rank_that_raised_but_does_not_end_has_failed() -> None:
    drive = running()
    drive.tell(raised(1))
    assert drive.tell(Tick(), after_s=RAISED_LIMIT_S - 1) == []
    assert drive.tell(Tick(), after_s=1.5) == stop_all(GRACE_S)
    drive.tell(ended(1, -signal.SIGTERM, at_s=200), *all_stopped())
    assert [failure.what for failure in drive.outcome.failures] == [
        "ValueError: no (its process did not end by itself)"
    ]


def failure(rank: int, at_s: float, is_consequence: bool) -> Failure:
    return Failure(at_s=at_s, host=0, rank=rank, exit_code=1, what="", is_consequence=is_consequence)


def test_a_cause_long_after_is_none() -> None:
    early, late = failure(0, 10.0, True), failure(1, 14.0, False)
    assert order_failures((late, early)) == (early, late)
    assert order_failures(()) == ()


@given(
    st.lists(st.builds(failure, st.integers(0, 9), st.floats(0, 20), st.booleans()), max_size=6),
    st.randoms(use_true_random=False),
)
def test_ordering_loses_nothing_and_does_not_depend_on_arrival(failures: list[Failure], random: object) -> None:
    ordered = order_failures(tuple(failures))
    assert sorted(map(repr, ordered)) == sorted(map(repr, failures))
    if len({one.at_s for one in failures}) == len(failures):
        shuffled = list(failures)
        random.shuffle(shuffled)  # type: ignore[attr-defined]
        assert order_failures(tuple(shuffled)) == ordered


def test_exit_codes_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-11) == "signal 11 (SIGSEGV)"


RANKS = st.integers(0, 3)
ANYTHING = st.one_of(
    st.builds(Begin),
    st.builds(PortPicked, port=st.sampled_from([0, 29500]), problem=st.just("taken")),
    st.builds(Raised, rank=RANKS, summary=st.sampled_from(["ValueError", CLOSED]), traceback=st.just("")),
    st.builds(Finished, rank=RANKS),
    st.builds(Ended, rank=RANKS, exit_code=st.sampled_from([0, 0, 0, 1, -6, -9, -15]), at_s=st.floats(100, 200)),
    st.builds(HostGone, host=st.integers(0, 1), reason=st.just("gone")),
    st.builds(HostStopped, host=st.integers(0, 1)),
    st.builds(HostProblem, host=st.integers(0, 1), problem=st.just("no")),
    st.builds(Interrupted, number=st.sampled_from([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])),
    st.builds(Tick),
)


@given(st.lists(st.tuples(ANYTHING, st.floats(0, 4)), max_size=40), st.integers(0, 2), st.booleans())
def test_any_order_of_anything_comes_to_one_end(
    events: list[tuple[Event, float]], restarts: int, hosts_answer: bool
) -> None:
    drive = Drive(new_state(HOSTS, grace_s=GRACE_S, restarts=restarts))
    drive.tell(Begin())
    for event, after_s in events:
        drive.tell(event, after_s=after_s)
    # From here on every rank ends, and the hosts answer or else time passes.
    for _ in range(restarts + 2):
        drive.tell(PortPicked(port=1), *(ended(rank, 1) for rank in HOSTS))
        drive.tell(*(all_stopped() if hosts_answer else [Tick()]), after_s=GRACE_S + STOP_LIMIT_S + 1)
    assert drive.state.phase == "done"
    check_actions(drive.actions, restarts)
    assert step(drive.state, Interrupted(number=signal.SIGINT), drive.now) == (drive.state, [])
    check_exit_code(drive.outcome)


def check_actions(actions: Iterable[Action], restarts: int) -> None:
    """Each attempt starts once at most, and every start is followed by a stop before the next one and the end."""
    started: list[int] = []
    running = False
    for action in actions:
        if isinstance(action, StartAll):
            assert not running
            started.append(action.attempt)
            running = True
        elif isinstance(action, StopHost):
            running = False
        elif isinstance(action, Finish):
            assert not running or any(one.rank is None for one in action.outcome.failures), "all hosts are gone"
    assert started == sorted(set(started))
    assert len(started) <= restarts + 1
    assert isinstance(list(actions)[-1], Finish)


def check_exit_code(outcome: Outcome) -> None:
    if outcome.interrupted_by is not None:
        assert outcome.exit_code == 128 + outcome.interrupted_by
    else:
        assert outcome.exit_code == (1 if outcome.failures else 0)


@given(st.lists(st.tuples(ANYTHING, st.floats(0, 4)), max_size=40))
def test_after_a_start_every_host_that_is_there_is_stopped(events: list[tuple[Event, float]]) -> None:
    drive = running()
    gone: set[int] = set()
    for event, after_s in events:
        if isinstance(event, HostGone):
            gone.add(event.host)
        news = drive.tell(event, after_s=after_s)
        stopped = [action.host for action in news if isinstance(action, StopHost)]
        if stopped:
            assert set(stopped) == {0, 1} - drive.state.gone_hosts
            assert gone >= drive.state.gone_hosts or drive.state.interrupts
