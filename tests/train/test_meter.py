"""Counting with a clock that is passed in."""

from __future__ import annotations

from paceline.events import Event, Progress
from paceline.sync.meter import Meter, Traffic
from paceline.train.values import agree, pack, pack_failure, unpack


def test_progress_is_told_about_once_a_second() -> None:
    now_s = 100.0
    told: list[Event] = []
    meter = Meter(clock_s=lambda: now_s, tell=told.append, measures_wait=True)
    sent = Traffic()
    meter.traffic.append(sent)
    meter.tell()
    assert told == []
    meter.begin()
    for _ in range(30):
        meter.bucket_ready()
        sent.count(1000.5)
        now_s += 0.06
        meter.bucket_done()
        now_s += 0.04
        meter.backward_ended(4)
        meter.step_ended()
    assert [event.steps for event in told if isinstance(event, Progress)] in ([10, 20, 30], [11, 22], [10, 20])
    meter.waited(0.2)
    meter.tell()
    last = told[-1]
    assert isinstance(last, Progress)
    assert (last.steps, last.samples, last.sent_bytes) == (30, 120, 30015)
    assert last.sync_wait_s is not None and round(last.since_first_step_s, 6) == 3.0
    assert round(last.sync_wait_s, 6) == 2.0


def test_what_came_in_before_the_last_bucket_was_ready_was_not_waited_for() -> None:
    now_s = 0.0
    meter = Meter(clock_s=lambda: now_s, tell=lambda _: None, measures_wait=True)
    for done_s, ready_s in ((2.0, 1.0), (5.0, 6.0)):
        now_s = ready_s
        meter.bucket_ready()
        now_s = done_s
        meter.bucket_done()
        now_s = 10.0
        meter.backward_ended(1)
        meter.backward_ended(0)
    assert meter.sync_wait_s == 1.0


def test_wait_is_unknown_where_it_can_not_be_measured() -> None:
    told: list[Event] = []
    meter = Meter(clock_s=lambda: 0.0, tell=told.append, measures_wait=False)
    meter.begin()
    meter.bucket_ready()
    meter.backward_ended(1)
    meter.tell()
    assert isinstance(told[0], Progress) and (told[0].sync_wait_s, told[0].sent_bytes) == (None, 0)


def test_ranks_agree_exactly_when_names_and_step_do() -> None:
    same = [pack(3, {"b": 1.0, "a": 2.0}, weight=1, samples=1) for _ in range(1000)]
    total = [sum(column) for column in zip(*same, strict=True)]
    assert agree(total, 1000)
    assert unpack(total, ["b", "a"]) == ({"b": 1.0, "a": 2.0}, 1000)
    for other in (pack(3, {"b": 1.0}, weight=1, samples=1), pack(4, {"b": 1.0, "a": 2.0}, weight=1, samples=1)):
        mixed = [sum(column) for column in zip(*same[1:], other, strict=True)]
        assert not agree(mixed, 1000)
    for num_failed in (1, 999, 1000):
        mixed = [sum(column) for column in zip(*same[num_failed:], *[pack_failure()] * num_failed, strict=True)]
        assert not agree(mixed, 1000)
    assert not agree(pack_failure(), 1)
