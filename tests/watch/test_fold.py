"""Events in, the picture of a run out."""

from __future__ import annotations

import functools

from hypothesis import given
from hypothesis import strategies as st

from paceline.events import CheckpointSaved, Event, Logged, Progress, RankFinished, RunStarted
from paceline.watch.fold import RunView, fold


def progress(
    *, samples: int = 100, since_first_step_s: float = 10.0, sync_wait_s: float | None = 1.0, sent_bytes: int = 0
) -> Progress:
    return Progress(
        steps=10, samples=samples, since_first_step_s=since_first_step_s, sync_wait_s=sync_wait_s, sent_bytes=sent_bytes
    )


def view_of(*events: tuple[Event, int | None]) -> RunView:
    return functools.reduce(lambda view, pair: fold(view, *pair), events, RunView())


def test_nothing_happened() -> None:
    view = RunView()
    assert (view.samples_per_s, view.sync_share, view.sent_bytes, view.checkpoint) == (None, None, 0, None)


def test_who_takes_part() -> None:
    view = view_of((RunStarted(run_id="r", command=("t.py",), hosts=("alice", "bob"), num_ranks=3), None))
    assert (view.hosts, view.num_ranks) == (("alice", "bob"), 3)


def test_totals_of_all_ranks_the_newest_of_each() -> None:
    view = view_of(
        (progress(samples=1), 0),
        (progress(samples=100, since_first_step_s=10, sync_wait_s=1, sent_bytes=5), 0),
        (progress(samples=300, since_first_step_s=10, sync_wait_s=5, sent_bytes=7), 1),
    )
    assert (view.samples_per_s, view.sync_share, view.sent_bytes) == (40.0, 0.3, 12)


def test_a_rank_that_cannot_measure_its_waiting_is_left_out_of_the_share() -> None:
    view = view_of((progress(sync_wait_s=None), 0), (progress(sync_wait_s=2.0), 1))
    assert view.sync_share == 0.2
    assert view_of((progress(sync_wait_s=None), 0)).sync_share is None


def test_before_the_first_step_there_is_no_rate() -> None:
    view = view_of((progress(samples=0, since_first_step_s=0.0, sync_wait_s=0.0), 0))
    assert (view.samples_per_s, view.sync_share) == (None, None)


def test_the_newest_checkpoint_and_values() -> None:
    first, second = (CheckpointSaved(step=step, path=f"/c/{step}", num_bytes=9) for step in (1, 2))
    view = view_of((first, 0), (Logged(step=1, values={"loss": 2.0}), 0), (second, 0))
    assert view.checkpoint == second and view.logged == Logged(step=1, values={"loss": 2.0})


EVENTS = st.one_of(
    st.builds(RankFinished),
    st.builds(
        Progress,
        steps=st.integers(0, 9),
        samples=st.integers(0, 9),
        since_first_step_s=st.floats(0, 9),
        sync_wait_s=st.none() | st.floats(0, 9),
        sent_bytes=st.integers(0, 9),
    ),
    st.builds(Logged, step=st.integers(0, 9), values=st.just({})),
)


@given(st.lists(st.tuples(EVENTS, st.none() | st.integers(0, 3)), max_size=20))
def test_any_order_of_events_gives_a_picture(pairs: list[tuple[Event, int | None]]) -> None:
    view = view_of(*pairs)
    assert view.sent_bytes >= 0 and (view.samples_per_s or 0) >= 0 and (view.sync_share or 0) >= 0
