"""Files and folders: which of them are logs, and what a run's own records add."""

from __future__ import annotations

import gzip
import io
import json
import os
import pathlib
import random
import time
from collections.abc import Mapping
from typing import Any

import pytest

from paceline import events
from paceline.errors import InputError
from paceline.explain import explain_folder, explain_run, signatures, sources
from paceline.explain.cause import explain

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
LOST = "RuntimeError: Connection closed by peer [192.0.2.7]:31245\n"
OWN = """\
Traceback (most recent call last):
  File "/home/alice/train.py", line 42, in step
    f(x)
ValueError: bad label
"""
NOON_S = time.mktime((2026, 11, 30, 12, 0, 0, 0, 0, -1))
STARTED = events.RunStarted(run_id="r", command=("train.py",), hosts=("alice", "bob"), num_ranks=2)
KILLED = "signal 9 (SIGKILL): killed from outside, most often by the kernel because memory ran out"


def started(rank: int, attempt: int = 0) -> events.RankStarted:
    return events.RankStarted(rank=rank, host=("alice", "bob")[rank], pid=7, attempt=attempt)


def exited(rank: int, code: int, attempt: int = 0) -> events.RankExited:
    return events.RankExited(rank=rank, host=("alice", "bob")[rank], exit_code=code, attempt=attempt)


def make_run(folder: pathlib.Path, records: list[events.Event], logs: Mapping[str, str]) -> pathlib.Path:
    """A run's folder, its events one second apart."""
    folder.mkdir(parents=True)
    entries: list[dict[str, Any]] = [
        {"at": NOON_S + number, **events.to_record(event)} for number, event in enumerate(records)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    for name, text in logs.items():
        (folder / name).write_text(text)
    return folder


def ended(code: int = 1, headline: str = "exit code 1: ValueError: bad label") -> events.RunEnded:
    return events.RunEnded(exit_code=code, headline=headline)


BEGIN: list[events.Event] = [STARTED, started(0), started(1)]


def test_a_runs_folder_knows_hosts_and_the_order_of_ends(tmp_path: pathlib.Path) -> None:
    records = [*BEGIN, exited(1, 1), exited(0, 1), ended()]
    run = make_run(tmp_path / "run", records, {"rank-0.stderr.log": LOST, "rank-1.stderr.log": OWN})
    explanation = explain_folder(run)
    assert explanation.verdict == "cause" and "ValueError: bad label" in explanation.cause
    (line,) = explanation.evidence
    assert (line.file, line.number, line.rank, line.host) == ("rank-1.stderr.log", 4, 1, "bob")
    assert line.time_s is not None and line.time_s % 86_400 == 12 * 3600 + 3


def test_of_two_causes_the_rank_that_ended_first_has_the_first(tmp_path: pathlib.Path) -> None:
    logs = {"rank-0.stderr.log": OWN, "rank-1.stderr.log": OOM}
    run = make_run(tmp_path / "run", [*BEGIN, exited(1, 1), exited(0, 1), ended()], logs)
    assert (explain_folder(run).entry, explain_folder(run).confidence) == ("cuda-oom", "certain")


def test_a_rank_that_was_killed_has_no_words_but_the_run_has(tmp_path: pathlib.Path) -> None:
    records = [*BEGIN, exited(1, -9), exited(0, 1), ended(headline=KILLED)]
    explanation = explain_folder(make_run(tmp_path / "run", records, {"rank-0.stderr.log": LOST}))
    assert (explanation.entry, explanation.confidence) == ("exit-sigkill", "likely")
    assert (explanation.evidence[0].rank, explanation.evidence[0].host) == (1, "bob")
    headline = "signal 9 (SIGKILL); the kernel says: Out of memory: Killed process 7 (python)"
    explanation = explain_folder(make_run(tmp_path / "two", [*BEGIN, exited(1, -9), ended(headline=headline)], {}))
    assert (explanation.entry, explanation.confidence) == ("kernel-oom", "certain")


def test_a_rank_that_exits_by_itself_is_the_cause_and_not_those_that_we_end_then(tmp_path: pathlib.Path) -> None:
    records = [*BEGIN, exited(1, 3), exited(0, -9), ended(headline="exit code 3")]
    explanation = explain_folder(make_run(tmp_path / "run", records, {"rank-0.stderr.log": LOST}))
    assert (explanation.entry, explanation.confidence) == ("paceline-exit-code", "likely")
    assert (explanation.evidence[0].rank, explanation.evidence[0].host) == (1, "bob")
    usage = {"rank-0.stderr.log": LOST, "rank-1.stderr.log": OWN}
    explanation = explain_folder(make_run(tmp_path / "two", records, usage))
    assert "ValueError" in explanation.cause, "what it said is more than how it ended"


def test_a_rank_that_left_early_is_the_cause_of_what_others_say_then(tmp_path: pathlib.Path) -> None:
    headline = "rank 1 had left before, with exit code 0; then rank 0: exit code 1: RuntimeError: Connection closed"
    records = [*BEGIN, exited(1, 0), exited(0, 1), ended(headline=headline)]
    explanation = explain_folder(make_run(tmp_path / "run", records, {"rank-0.stderr.log": LOST}))
    assert (explanation.entry, explanation.confidence) == ("paceline-left-early", "likely")
    assert (explanation.evidence[0].rank, explanation.evidence[0].host) == (1, "bob")


def test_a_host_that_was_lost(tmp_path: pathlib.Path) -> None:
    headline = "bob has not been heard for 12 s (machine down, cable, or network); it ends its ranks by itself"
    run = make_run(tmp_path / "run", [*BEGIN, exited(0, 1), ended(headline=headline)], {"rank-0.stderr.log": LOST})
    assert explain_folder(run).entry == "paceline-host-lost"


def stalled(*, waits: bool, doing: str, where: str) -> events.RankStalled:
    return events.RankStalled(
        step=7, collectives=9, doing=doing, waits=waits, busy=False, where=where, text="x", since_s=60.0
    )


def test_a_run_that_stood_still_says_who_waited_for_whom(tmp_path: pathlib.Path) -> None:
    waiting = {"rank": 0, **events.to_record(stalled(waits=True, doing="all_reduce", where="train.py:40"))}
    busy = {"rank": 1, **events.to_record(stalled(waits=False, doing="the script", where="train.py:52"))}
    interrupted = events.to_record(events.RunEnded(exit_code=130, headline=""))
    run = make_run(tmp_path / "run", BEGIN, {})
    with open(run / "events.jsonl", "a") as file:
        for number, record in enumerate((waiting, busy, interrupted), start=10):
            file.write(json.dumps({"at": NOON_S + number, **record}) + "\n")
    explanation = explain_folder(run)
    assert (explanation.entry, explanation.confidence) == ("paceline-stood-still", "likely")
    (line,) = explanation.evidence
    assert line.text.endswith("rank 0 (alice) waits for rank 1 (bob), which is in the script (train.py:52)")
    assert line.number == 4


def test_a_run_that_moved_again_did_not_stand_still(tmp_path: pathlib.Path) -> None:
    run = make_run(tmp_path / "run", BEGIN, {})
    waiting = stalled(waits=True, doing="all_reduce", where="train.py:40")
    with open(run / "events.jsonl", "a") as file:
        for event in (waiting, events.RankMoved(step=8), ended(headline="exit code 3")):
            file.write(json.dumps({"at": NOON_S, "rank": 0, **events.to_record(event)}) + "\n")
    assert explain_folder(run).entry == "paceline-exit-code", "and not that it stood still"


def test_only_the_last_attempt_counts(tmp_path: pathlib.Path) -> None:
    again: list[events.Event] = [started(0, 1), started(1, 1), exited(0, 1, 1), ended()]
    logs = {"rank-0.stderr.log": OOM, "rank-1.restart-1.stderr.log": OWN}
    run = make_run(tmp_path / "run", [*BEGIN, exited(0, 1), *again], logs)
    explanation = explain_folder(run)
    assert explanation.entry is None and [log.name for log in explanation.logs][1:] == ["rank-1.restart-1.stderr.log"]


def test_records_that_are_cut_or_foreign_do_no_harm(tmp_path: pathlib.Path) -> None:
    run = make_run(tmp_path / "run", [*BEGIN, exited(1, 1)], {"rank-1.stderr.log": OWN})
    with open(run / "events.jsonl", "a") as file:
        file.write(
            '{"kind": "progress", "broken\n[1, 2]\n"text"\n{"kind": "of another version"}\n{"at": 1, "kind": "run_e'
        )
    assert "ValueError" in explain_folder(run).cause


# Any folder


def test_a_folder_of_logs(tmp_path: pathlib.Path) -> None:
    (tmp_path / "attempt_0" / "1").mkdir(parents=True)
    (tmp_path / "attempt_0" / "1" / "stderr.log").write_text(OOM)
    (tmp_path / "node1.err").write_text(LOST)
    (tmp_path / "output_rank3").write_text(LOST)
    (tmp_path / "model.pt").write_text(OOM)
    explanation = explain_folder(tmp_path)
    assert sorted(log.name for log in explanation.logs) == ["attempt_0/1/stderr.log", "node1.err", "output_rank3"]
    assert explanation.entry == "cuda-oom"
    assert {rank for log in explanation.logs for hit in log.hits if (rank := hit.first.rank) is not None} == {3}


def test_a_folder_without_logs_says_what_was_looked_for(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.pt").write_text(OOM)
    with pytest.raises(InputError, match=r"no logs there\n.*\.err, \.log"):
        explain_folder(tmp_path)


def test_a_file_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match=r"gone\.log: No such file"):
        sources.read_file(tmp_path / "gone.log", signatures.load())


def test_what_is_no_text_is_not_read_as_if_nothing_were_wrong(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.log").write_bytes(gzip.compress(OOM.encode()))
    with pytest.raises(InputError, match=r"run\.log: this is compressed\n.*zcat .*run\.log \| paceline explain -"):
        sources.read_file(tmp_path / "run.log", signatures.load())
    (tmp_path / "rank-0.pt").write_bytes(random.Random(1).randbytes(9000))
    with pytest.raises(InputError, match=r"rank-0\.pt: this is no text"):
        sources.read_file(tmp_path / "rank-0.pt", signatures.load())
    (tmp_path / "run.log").write_text(OOM)
    assert [log.name for log in explain_folder(tmp_path).logs] == ["run.log"], "the checkpoint is no log"
    (tmp_path / "run.log").write_bytes("Speicherüberlauf\n".encode("latin-1") * 10 + OOM.encode())
    assert explain_folder(tmp_path).entry == "cuda-oom"


def test_a_pipe_without_a_writer_is_not_waited_for(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe.log")
    with pytest.raises(InputError, match=r"pipe\.log: this is no regular file"):
        sources.read_file(tmp_path / "pipe.log", signatures.load())


def test_standard_input() -> None:
    log = sources.read_stream(io.BytesIO(OOM.encode()), signatures.load())
    assert explain([log]).entry == "cuda-oom" and log.name == "stdin"


# The newest failed run


def test_the_newest_failed_run(tmp_path: pathlib.Path) -> None:
    assert sources.newest_failed_run(tmp_path / "runs") == (None, None)
    runs = {
        "20261130-110000-aaaa": [*BEGIN, events.RunEnded(exit_code=130, headline="")],
        "20261130-120000-bbbb": [*BEGIN, ended()],
        "20261130-130000-cccc": [*BEGIN, events.RunEnded(exit_code=0, headline="")],
        "20261130-140000-dddd": [*BEGIN, events.RunEnded(exit_code=130, headline="")],
        "20261130-150000-eeee": BEGIN,
    }
    for name, records in runs.items():
        make_run(tmp_path / "runs" / name, records, {})
    (tmp_path / "runs" / "20261130-160000-ffff").mkdir()
    newest, stopped = sources.newest_failed_run(tmp_path / "runs")
    assert newest is not None and newest.name == "20261130-120000-bbbb"
    assert stopped is not None and stopped.name == "20261130-140000-dddd", "and not one that was stopped before it"


# At the end of a failed run


def test_a_run_that_failed_is_explained_in_five_lines(tmp_path: pathlib.Path) -> None:
    logs = {"rank-0.stderr.log": OWN.replace("ValueError: bad label", OOM), "rank-1.stderr.log": LOST}
    lines = explain_run(make_run(tmp_path / "run", [*BEGIN, exited(0, 1), exited(1, 1), ended()], logs))
    assert 3 <= len(lines) <= 5 and all(len(line) <= 100 for line in lines)
    assert lines[0].startswith("  explained  the cause: The GPU's memory ran out.")
    assert lines[2].startswith("  remedy ") and lines[-2].endswith(" ...")
    assert lines[-1].split() == ["more", "paceline", "explain", str(tmp_path / "run")]


@pytest.mark.parametrize("stderr", [OWN, LOST, "hello\n"])
def test_nothing_is_said_that_the_run_shows_or_that_is_a_guess(tmp_path: pathlib.Path, stderr: str) -> None:
    run = make_run(tmp_path / "run", [*BEGIN, exited(0, 1), ended()], {"rank-0.stderr.log": stderr})
    assert explain_run(run) == []


def test_only_the_ends_of_a_runs_logs_are_read(tmp_path: pathlib.Path) -> None:
    run = make_run(tmp_path / "run", [*BEGIN, exited(0, 1), ended()], {"rank-0.stderr.log": OOM + "x\n" * 50})
    catalogue = signatures.load()
    assert [log.num_lines for log in sources.read_run(run, catalogue, tail_bytes=20)][1:] == [10]
    assert [log.num_lines for log in sources.read_run(run, catalogue)][1:] == [51]


def test_a_run_without_a_folder_is_not_explained(tmp_path: pathlib.Path) -> None:
    assert explain_run(tmp_path / "gone") == []
