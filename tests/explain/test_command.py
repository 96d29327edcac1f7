"""`paceline explain`: what it takes, how it reads, and how it ends."""

from __future__ import annotations

import json
import pathlib

import pytest
from click.testing import CliRunner, Result
from explaining import LOGS, explain_files, explain_texts

from paceline.cli.explain import explain
from paceline.errors import InputError
from paceline.explain import explain_name, report, signatures

LOST = "RuntimeError: Connection closed by peer [192.0.2.7]:31245\n"


@pytest.fixture
def state(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "paceline" / "runs"


def run(*words: str, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(explain, list(words), input=stdin)


@pytest.mark.parametrize(
    ("stdin", "code"), [("CUDA out of memory. Tried to allocate 1 GiB\n", 0), (LOST, 1), ("hello\n", 1), ("", 1)]
)
def test_exit_codes(stdin: str, code: int) -> None:
    assert run("-", stdin=stdin).exit_code == code


def test_files_folders_and_standard_input_together(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.log").write_text(LOST)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.log").write_text(LOST)
    done = run(str(tmp_path / "a.log"), str(tmp_path / "folder"), "-", stdin="No CUDA GPUs are available\n")
    assert done.exit_code == 0
    assert "read: 3 logs; 3 lines; 2 lines of consequences" in done.output and "stdin line 1" in done.output


def test_without_words_the_newest_failed_run(state: pathlib.Path) -> None:
    folder = state / "20261130-120000-aaaa"
    folder.mkdir(parents=True)
    end = {"at": 1.0, "kind": "run_ended", "exit_code": 1, "headline": "exit code 1"}
    (folder / "events.jsonl").write_text(json.dumps(end) + "\n")
    (folder / "rank-0.stderr.log").write_text("No CUDA GPUs are available\n")
    done = run()
    assert done.exit_code == 0 and "rank 0" in done.output and "cuda-no-gpus" in done.output


def test_without_words_and_without_a_failed_run(state: pathlib.Path) -> None:
    error = run().exception
    assert isinstance(error, InputError) and str(state) in error.message and error.hint is not None


@pytest.mark.parametrize(
    "label",
    [
        "2026-12-01 10:00:03 [rank1]: ",
        "2026-12-01T10:00:03.123Z ",
        "[2026-12-01 10:00:03] ",
        "10:00:03 ",
        "[10:00:03] ",
        "Dec 01 10:00:03 bob train[123]: ",
        "worker-1  | ",
    ],
)
def test_a_traceback_behind_what_collectors_of_logs_put_before_each_line(label: str) -> None:
    lines = ["epoch 1", "Traceback (most recent call last):", '  File "/home/u/train.py", line 14, in <module>']
    lines += ["    step()", "ValueError: bad label", "epoch was 1"]
    done = run("-", stdin="".join(f"{label}{line}\n" for line in lines))
    assert done.exit_code == 0 and "ValueError: bad label" in done.output and "train.py, line 14" in done.output


def test_a_frame_behind_a_label_is_no_exception() -> None:
    lines = ["Traceback (most recent call last):", '  File "/home/u/train.py", line 14, in <module>', "ValueError: bad"]
    assert 'File "/home' not in run("-", stdin="".join(f"bob: {line}\n" for line in lines)).output


def test_a_run_by_its_name(state: pathlib.Path) -> None:
    (state / "20261130-120000-aaaa").mkdir(parents=True)
    (state / "20261130-120000-aaaa" / "events.jsonl").write_text("")
    (state / "20261130-120000-aaaa" / "rank-0.stderr.log").write_text("No CUDA GPUs are available\n")
    assert "cuda-no-gpus" in run("20261130-120000-aaaa").output


def test_a_run_that_was_stopped_after_the_failed_one_is_mentioned(state: pathlib.Path) -> None:
    for name, end in {
        "20261130-120000-aaaa": {"exit_code": 1, "headline": "exit code 1"},
        "20261130-130000-bbbb": {"exit_code": 130, "headline": ""},
    }.items():
        (state / name).mkdir(parents=True)
        (state / name / "events.jsonl").write_text(json.dumps({"at": 1.0, "kind": "run_ended", **end}) + "\n")
    assert f"a later one was stopped: paceline explain {state / '20261130-130000-bbbb'}" in run().output


def test_a_name_shows_the_entry() -> None:
    done = run("cuda-oom")
    assert done.exit_code == 0 and done.output.startswith("cuda-oom (OOM, root)\n")
    assert explain_name("cuda-oom") == done.output.rstrip("\n")
    assert explain_name("no-such-entry") is None


def test_a_file_comes_before_an_entry_of_its_name(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("cuda-oom").write_text("hello\n")
    assert run("cuda-oom").exit_code == 1


def test_what_is_neither_file_nor_entry() -> None:
    error = run("cuda-om").exception
    assert isinstance(error, InputError) and error.exit_code == 2
    assert "cuda-om" in error.message and "cuda-oom" in str(error.hint)


def test_a_cause_as_long_as_it_likes_is_cut_and_a_narrow_terminal_gets_forty_columns() -> None:
    explanation = explain_texts(f"Traceback (most recent call last):\nValueError: {'x' * 100_000}\n")
    lines = report.to_text(explanation, 10)
    assert sum(map(len, lines)) < 3000 and any(len(line) > 30 for line in lines)


def test_json() -> None:
    done = run("--json", "-", stdin="a\n[rank1]: No CUDA GPUs are available\n")
    record = json.loads(done.output)
    assert done.exit_code == 0
    assert (record["verdict"], record["confidence"], record["entry"]) == ("cause", "certain", "cuda-no-gpus")
    assert record["evidence"] == [
        {"file": "stdin", "line": 2, "host": None, "rank": 1, "text": "No CUDA GPUs are available"}
    ]
    assert record["logs"] == [{"name": "stdin", "num_lines": 2}]


def test_orders_to_a_terminal_do_not_pass() -> None:
    done = run("-", stdin=b"\x1b[2J\x07\x9b31m\xc2\x9bNo CUDA GPUs are available \x1b]0;x\x07\n")
    assert not {"\x1b", "\x07", "\x9b"} & set(done.output)


EXAMPLE = """\
read: rank.log; 3 lines; ranks 0, 1; 1 line of consequences

The cause: The GPU's memory ran out. With several ranks it may also be that all
of them allocate on cuda:0, or that another process holds the GPU.

  evidence   rank 1 at 12:00:01, line 2:
               CUDA out of memory. Tried to allocate 2.00 GiB
  remedy     A smaller batch, mixed precision or gradient accumulation;
             torch.cuda.set_device(local_rank) first, map_location in
             torch.load. If much is reserved but not used:
             PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
  source     torch c10/cuda (entry cuda-oom)
"""


def test_how_it_reads() -> None:
    text = (
        "[rank1]: 2026-11-30 12:00:01 INFO step 7\n[rank1]: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "[rank0]: RuntimeError: Connection closed by peer [192.0.2.7]:31245\n"
    )
    explanation = explain_texts(text)
    assert "\n".join(report.to_text(explanation, 80)) + "\n" == EXAMPLE.replace("rank.log", "0.log")


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("name", sorted(path.name for path in LOGS.iterdir()))
def test_lines_keep_to_the_width(name: str, width: int) -> None:
    lines = report.to_text(explain_files(name), width)
    assert lines and max(map(len, lines)) <= width


def test_entries_keep_to_the_width() -> None:
    for entry in signatures.load().signatures:
        assert max(map(len, report.entry_text(entry, 80))) <= 80


def test_nothing_found_says_what_to_give() -> None:
    text = "\n".join(report.to_text(explain_texts("hello\n"), 80))
    assert "Nothing in it is known to be a failure." in text and "stderr of every rank and host" in text


def test_a_long_line_is_shown_in_part() -> None:
    explanation = explain_texts("No CUDA GPUs are available " + "x" * 5000)
    assert sum(map(len, report.to_text(explanation, 80))) < 1500
