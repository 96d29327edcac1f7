"""Events survive the wire, and a stranger's line never hurts."""

from __future__ import annotations

import json
import os
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import events

KINDS = events.Event.__subclasses__()

VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(),
    bool: st.booleans(),
    int: st.integers(),
    int | None: st.none() | st.integers(),
    float: st.floats(allow_nan=False),
    float | None: st.none() | st.floats(allow_nan=False),
    tuple[str, ...]: st.lists(st.text()).map(tuple),
    typing.get_type_hints(events.Logged)["values"]: st.dictionaries(st.text(), st.floats(allow_nan=False)),
}


def make(cls: type[events.Event]) -> st.SearchStrategy[events.Event]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{name: VALUES[hints[name]] for name in cls.field_names})


def as_lists(event: events.Event) -> dict[str, Any]:
    return json.loads(json.dumps(event.as_dict()))


@given(st.one_of([make(cls) for cls in KINDS]))
def test_round_trip_through_json(event: events.Event) -> None:
    record = json.loads(json.dumps(events.to_record(event)))
    back = events.from_record(record)
    assert type(back) is type(event)
    assert as_lists(back) == as_lists(event)


def test_kinds_are_distinct_and_named() -> None:
    kinds = [cls.kind for cls in KINDS]
    assert len(set(kinds)) == len(kinds)
    assert all(kinds)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"kind": "from_the_future", "v": 99},
        {"kind": "logged"},  # fields missing
        {"kind": ["rank_finished"]},
    ],
)
def test_unknown_records_are_none(record: dict[str, Any]) -> None:
    assert events.from_record(record) is None


def test_unknown_fields_are_dropped() -> None:
    assert events.from_record({"kind": "rank_finished", "v": 2, "mood": "good"}) == events.RankFinished()


def test_emit_writes_one_line() -> None:
    reader, writer = os.pipe()
    try:
        events.emit(
            events.Logged(step=3, values={"loss": 2.5}), environ={"PACELINE_EVENT_FD": events.name_descriptor(writer)}
        )
        line = os.read(reader, 4096)
    finally:
        os.close(reader)
        os.close(writer)
    assert line.endswith(b"\n")
    expected = {"v": events.SCHEMA_VERSION, "kind": "logged", "step": 3, "values": {"loss": 2.5}}
    assert json.loads(line) == expected


def test_emit_outside_a_run_or_after_the_agent_died_does_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        for environ in ({}, {"PACELINE_EVENT_FD": f"{writer}:1"}, {"PACELINE_EVENT_FD": "nonsense"}):
            events.emit(events.RankFinished(), environ=environ)
    finally:
        os.close(writer)
