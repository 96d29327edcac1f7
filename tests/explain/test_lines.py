"""One line: whose it is, when it was written, and what is left of it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.explain.lines import Line, clock, find_time, local_time, read_line

NOON = find_time("2026-11-30 12:00:00") or 0.0


def line(text: str | bytes, *, is_slurm: bool = False) -> Line:
    raw = text.encode() if isinstance(text, str) else text
    return read_line(raw, file="a.log", number=1, is_slurm=is_slurm)


@pytest.mark.parametrize(
    ("raw", "text", "rank", "local_rank", "host"),
    [
        ("ValueError: x", "ValueError: x", None, None, None),
        ("[rank3]: ValueError: x", "ValueError: x", 3, None, None),
        ("[rank3]:   File 'a'", "  File 'a'", 3, None, None),
        ("[default1]:ValueError: x", "ValueError: x", None, 1, None),
        ("[trainer1]:[rank5]: ValueError: x", "ValueError: x", 5, 1, None),
        ("[1]:ValueError: x", "ValueError: x", None, 1, None),
        ("[alice:2] ValueError: x", "ValueError: x", 2, None, "alice"),
        ("[192.0.2.7:2] ValueError: x", "ValueError: x", 2, None, "192.0.2.7"),
        ("[1,2]<stderr>:ValueError: x", "ValueError: x", 2, None, None),
        ("[1,2]<stdout>: ValueError: x", "ValueError: x", 2, None, None),
        ("[prterun-node1-99@1,2]<stderr>:ValueError: x", "ValueError: x", 2, None, None),
        ("(Worker pid=99, ip=192.0.2.7) ValueError: x", "ValueError: x", None, None, "192.0.2.7"),
        ("(Worker pid=99) ValueError: x", "ValueError: x", None, None, None),
        ("[1,2]<stderr>:[node2:20411] signal", "[node2:20411] signal", 2, None, None),
        ("[12:00:01] x", "[12:00:01] x", None, None, None),
        ("[2]: params[0] differ", "[2]: params[0] differ", None, None, None),
        ("node1:70:95 [0] NCCL INFO x", "node1:70:95 [0] NCCL INFO x", None, None, "node1"),
        ("64:219:636 [4] misc/a.cc:9 NCCL WARN x", "64:219:636 [4] misc/a.cc:9 NCCL WARN x", None, None, "64"),
        ("[E1130 12:00:00.5 a.cpp:1] [Rank 7] x", "[E1130 12:00:00.5 a.cpp:1] [Rank 7] x", 7, None, None),
        ("x [PG ID 0 PG GUID 0(default_pg) Rank 7] y", "x [PG ID 0 PG GUID 0(default_pg) Rank 7] y", 7, None, None),
        ("failed, (rank=8, size=16, x", "failed, (rank=8, size=16, x", 8, None, None),
        ("failed (exitcode: -9) local_rank: 1 (pid: 9)", "failed (exitcode: -9) local_rank: 1 (pid: 9)", None, 1, None),
        ("Nov 30 12:00:01 node1 kernel: x", "Nov 30 12:00:01 node1 kernel: x", None, None, "node1"),
        ("0: x", "0: x", None, None, None),
    ],
)
def test_whose_it_is(raw: str, text: str, rank: int | None, local_rank: int | None, host: str | None) -> None:
    found = line(raw)
    assert (found.text, found.rank, found.local_rank, found.host) == (text, rank, local_rank, host)


@pytest.mark.parametrize(("raw", "text", "rank"), [("0: x", "x", 0), (" 12: x", "x", 12), ("x: 0: y", "x: 0: y", None)])
def test_slurms_labels_count_where_the_file_has_them(raw: str, text: str, rank: int | None) -> None:
    found = line(raw, is_slurm=True)
    assert (found.text, found.rank) == (text, rank)


@pytest.mark.parametrize(
    ("text", "after_noon_s"),
    [
        ("[E1130 12:00:01.123456789 ProcessGroupNCCL.cpp:616] x", 1.123456789),
        ("W1130 12:00:01.500000 4321 torch/distributed/run.py:793] x", 1.5),
        ("[rank0]:[W1130 12:00:01.5 TCPStore.cpp:141] x", 1.5),
        ("2026-11-30 12:00:01,250 INFO x", 1.25),
        ("[2026-11-30 12:00:01] x", 1.0),
        ("2026-11-30T12:00:01.5Z x", 1.5),
        ("  time      : 2026-11-30_12:00:01", 1.0),
        ("2026/11/30 12:00:01 x", 1.0),
        ("Nov 30 12:00:01 node1 kernel: x", 1.0),
        ("[E ProcessGroupNCCL.cpp:458] [Rank 0] x", None),
        ("ratio 12:00:01", None),
        ("[E1399 12:00:01.1 x] no such day", None),
        ("x" * 200 + " 2026-11-30 12:00:01", None),
    ],
)
def test_when_it_was(text: str, after_noon_s: float | None) -> None:
    found = line(text).time_s
    assert found == (None if after_noon_s is None else pytest.approx(NOON + after_noon_s))


def test_a_month_without_a_leading_zero() -> None:
    assert find_time("[E321 02:07:08.4 x] y") == find_time("2026-03-21 02:07:08.4")


def test_our_own_times_are_those_of_the_logs() -> None:
    epoch_s = time.mktime((2026, 11, 30, 12, 0, 1, 0, 0, -1))
    assert local_time(epoch_s) == pytest.approx(NOON + 1)
    assert clock(NOON + 1) == "12:00:01"


@pytest.mark.parametrize("text", ["W1130 12:00:01.5 4 a.py:1] x", "INFO: x", "[ERROR] x", "2026-11-30 12:00:01 x"])
def test_stamped_lines_continue_nothing(text: str) -> None:
    assert line(text).is_stamped
    assert not line("  and more of it").is_stamped


def test_control_characters_are_gone() -> None:
    assert line(b"a\x07b\x00c\xff\r").text == "abc�"


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_do_harm(raw: bytes, is_slurm: bool) -> None:
    found = line(raw, is_slurm=is_slurm)
    assert found.text.isprintable() or "\t" in found.text or found.text != ""
