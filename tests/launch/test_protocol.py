"""The wire: any cut of the bytes gives the same messages, and anything else is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.protocol import (
    MAX_LINE_BYTES,
    AllStopped,
    Decoder,
    FileData,
    Heartbeat,
    Message,
    Output,
    ProtocolError,
    RankEnded,
    Setup,
    encode,
)

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "Any": st.none() | st.booleans() | st.lists(st.text(), max_size=3),
    "str": st.text(),
    "int": st.integers(-(1 << 40), 1 << 40),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
    "list[str]": st.lists(st.text(), max_size=3),
    "list[Any]": st.lists(st.lists(st.integers() | st.text(), max_size=3), max_size=3),
    "list[list[Any]]": st.lists(st.lists(st.integers() | st.text() | st.none(), max_size=5), max_size=3),
    "list[dict[str, Any]]": st.lists(st.dictionaries(st.text(), st.text(), max_size=3), max_size=3),
    "dict[str, Any]": st.dictionaries(st.text(), st.text() | st.integers(), max_size=3),
}


def messages_of(cls: type[Message]) -> st.SearchStrategy[Message]:
    return st.builds(cls, **{name: VALUES[cls.__annotations__[name]] for name in cls.field_names})


ANY_MESSAGE = st.sampled_from(sorted(Message.__subclasses__(), key=lambda cls: cls.type)).flatmap(messages_of)


def test_every_message_has_a_name_of_its_own() -> None:
    names = [cls.type for cls in Message.__subclasses__()]
    assert len(set(names)) == len(names) and "" not in names


@given(st.lists(st.tuples(ANY_MESSAGE, st.binary(max_size=40)), max_size=6), st.lists(st.integers(1, 30)))
def test_any_cut_of_the_bytes_gives_the_same_messages(sent: list[tuple[Message, bytes]], cuts: list[int]) -> None:
    data = b"".join(encode(message, payload) for message, payload in sent)
    decoder, received = Decoder(), []
    for size in [*cuts, len(data)]:
        received += decoder.feed(data[:size])
        data = data[size:]
    assert received == sent


def test_a_payload_of_newlines_and_braces_is_no_message() -> None:
    payload = encode(Heartbeat()) * 3 + b"\n\n{}"
    (received,) = Decoder().feed(encode(Output(rank=0, stream="stdout"), payload))
    assert received == (Output(rank=0, stream="stdout"), payload)


def test_an_empty_payload_and_no_payload_are_the_same() -> None:
    message = FileData(project="p", path="empty.py", last_of_file=True, last_of_all=True)
    assert Decoder().feed(encode(message, b"")) == [(message, b"")]


def test_names_that_are_not_text_survive() -> None:
    message = FileData(project="p", path="caf\udce9\n.py", last_of_file=True, last_of_all=False)
    assert Decoder().feed(encode(message)) == [(message, b"")]


@pytest.mark.parametrize(
    "line",
    [
        b"Welcome to Ubuntu 24.04 LTS",
        b"",
        b"{",
        b"[]",
        b"3",
        b'"output"',
        b"null",
        b"\xff\xfe",
        b"{}",
        b'{"type":"nobody"}',
        b'{"type":["output"]}',
        b'{"type":"output"}',
        b'{"type":"heartbeat","more":1}',
        b'{"type":"heartbeat","payload_bytes":-1}',
        b'{"type":"heartbeat","payload_bytes":"many"}',
        b'{"type":"heartbeat","payload_bytes":1e999}',
        b'{"type":"heartbeat","payload_bytes":99999999999}',
        b"[" * 200_000,
    ],
    ids=lambda line: line[:30].decode(errors="replace"),
)
def test_anything_else_is_refused_with_its_words(line: bytes) -> None:
    decoder = Decoder()
    assert decoder.feed(encode(AllStopped())) == [(AllStopped(), b"")]
    with pytest.raises(ProtocolError, match=r"not a message|a payload of"):
        decoder.feed(line + b"\n")


@given(st.binary(max_size=200))
def test_garbage_is_nothing_or_an_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert Decoder().feed(data) == []


def test_a_line_without_end_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.protocol.MAX_LINE_BYTES", 1000)
    decoder = Decoder()
    decoder.feed(b"x" * 1000)
    with pytest.raises(ProtocolError, match="a line without an end"):
        decoder.feed(b"x")
    assert MAX_LINE_BYTES >= 64 << 20, "a large project's file list is one line"


BREAKS: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("a field is missing", lambda record: record.pop("rank")),
    ("a field is unknown", lambda record: record.update(new=1)),
]


@pytest.mark.parametrize(("what", "change"), BREAKS, ids=[what for what, _ in BREAKS])
def test_fields_must_be_those_of_the_message(what: str, change: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads(encode(RankEnded(rank=1, exit_code=0, at_s=1.0, kernel_says="")))
    change(record)
    with pytest.raises(ProtocolError):
        Decoder().feed(json.dumps(record).encode() + b"\n")


def test_messages_keep_their_types() -> None:
    message = Setup(run_id="r", host_index=1, lease_s=12.0, heartbeat_s=1.0, grace_s=5.0)
    ((received, _),) = Decoder().feed(encode(message))
    assert received == message and isinstance(received, Setup)
