"""A log's bytes, however dirty and however many: which lines are found, and whose they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from explaining import LOGS, read
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.explain import signatures
from paceline.explain.reading import Log, read_log
from paceline.explain.signatures import Signature

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
LOST = "RuntimeError: Connection closed by peer [192.0.2.7]:31245"


def found(log: Log) -> dict[str, tuple[int, int, int]]:
    """Entry -> line of the first, line of the last, how many."""
    return {hit.signature.id: (hit.first.number, hit.last.number, hit.count) for hit in log.hits}


@pytest.mark.parametrize(
    ("data", "number"),
    [
        (f"a\nb\n{OOM}\n".encode(), 3),
        (f"a\nb\n{OOM}".encode(), 3),
        (f"a\r\nb\r\n{OOM}\r\n".encode(), 3),
        (f"a\r\r\nb\r\r\n{OOM}\r\r\n".encode(), 3),
        (b"\xff\xfe\x80\nb\n" + OOM.encode() + b" \xff\n", 3),
        (b"a\0\0\nb\n" + OOM.replace(" ", "\0 ").encode() + b"\n", 3),
        ("\n".join(["a", "b", OOM]).encode("utf-16"), 3),
        (
            b"\x1b[31ma\x1b[0m\n\x1b]0;title\x07\n\x1b[1;31mtorch.OutOfMemoryError: \x1b[0mCUDA out of "
            + OOM[36:].encode(),
            3,
        ),
        (b" 10%\r 50%\r100%\n\r 10%\r 20%\r" + OOM.encode() + b"\nmore\n", 2),
        (b" 10%|##|\r" * 50 + OOM.encode(), 1),
    ],
)
def test_a_text_is_found_in_dirty_bytes(data: bytes, number: int) -> None:
    log = read(data)
    assert found(log) == {"cuda-oom": (number, number, 1)}
    assert log.hits[0].first.text.endswith(("GiB.", "GiB. �"))


def test_lines_are_counted() -> None:
    assert [read(text).num_lines for text in ("", "a", "a\n", "a\nb", "a\n\n\n")] == [0, 1, 1, 2, 3]


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.sampled_from(["x", OOM, LOST, "  40%\r  50%", "[rank1]: Traceback (most recent call last):"])),
    st.data(),
)
def test_pieces_make_no_difference(lines: list[str], data: st.DataObject) -> None:
    text = "\n".join(lines)
    whole = read(text)
    pieces = read(text, piece_bytes=data.draw(st.integers(1, 40)))
    assert found(pieces) == found(whole)
    assert pieces.num_lines == whole.num_lines == len(text.split("\n")) - (text.endswith("\n") or not text)


@pytest.mark.parametrize("name", sorted(path.name for path in LOGS.iterdir()))
def test_pieces_make_no_difference_to_real_logs(name: str) -> None:
    data = (LOGS / name).read_bytes()
    whole, pieces = read(data), read(data, piece_bytes=100)
    assert (found(pieces), pieces.crashes, pieces.ranks) == (found(whole), whole.crashes, whole.ranks)


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=400), st.integers(1, 50))
def test_no_bytes_do_harm(data: bytes, piece_bytes: int) -> None:
    read(data, piece_bytes=piece_bytes)
    read(
        b"Traceback (most recent call last):\n" + data + b"\nCUDA out of memory. Tried to allocate",
        piece_bytes=piece_bytes,
    )


class CountingCatalogue(signatures.Catalogue):
    """Counts the lines that are looked at one by one."""

    num_matched = 0

    def match(self, text: str) -> Signature | None:
        self.num_matched += 1
        return super().match(text)


def repeated(line: str, count: int, end: str) -> Callable[[int], bytes]:
    """A file of so many lines, none of which is held in memory."""
    block = (line + "\n").encode() * 1000
    blocks = [*[block] * (count // 1000), end.encode(), b""]
    return lambda size: blocks.pop(0)


def test_huge_logs_are_read_without_a_look_at_each_line() -> None:
    catalogue = CountingCatalogue(signatures.load().signatures)
    plain = "2026-11-30 12:00:00,123 INFO step 12 loss 0.31 lr 0.001 tokens/s 12345 grad norm 0.7"
    log = read_log(repeated(plain, 100_000, OOM), "big.log", catalogue)
    assert found(log) == {"cuda-oom": (100_001, 100_001, 1)}
    assert catalogue.num_matched == 1


def test_a_text_in_every_line_is_not_looked_at_for_ever() -> None:
    catalogue = CountingCatalogue(signatures.load().signatures)
    log = read_log(repeated(LOST, 8_000, OOM), "big.log", catalogue)
    first, last, count = found(log)["gloo-closed-by-peer"]
    assert (first, last) == (1, 8_000) and count < 2000
    assert found(log)["cuda-oom"] == (8_001, 8_001, 1)
    assert catalogue.num_matched < 2000


def test_tracebacks_without_number_are_not_all_taken_apart() -> None:
    catalogue = CountingCatalogue(signatures.load().signatures)
    caught = (
        'Traceback (most recent call last):\n  File "/home/alice/a.py", line 3, in f\n    x()\nValueError: skipped\n'
    )
    log = read_log(repeated(caught, 5_000, caught.replace("skipped", "the end")), "big.log", catalogue)
    assert log.crashes[-1].line.text == "ValueError: the end"
    assert catalogue.num_matched < 3000


def test_a_line_without_end_is_cut_around_what_was_found() -> None:
    log = read("x" * 50_000 + OOM + "y" * 50_000)
    assert OOM in log.hits[0].first.text and len(log.hits[0].first.text) < 10_000


def test_a_progress_bar_without_end_needs_no_memory() -> None:
    log = read(b"\r 10%|##" * 500_000 + b"\n" + OOM.encode())
    assert found(log) == {"cuda-oom": (2, 2, 1)}


@pytest.mark.parametrize(
    ("text", "time", "reason"),
    [
        (f"2026-11-30 12:00:01 INFO a\nb\n{OOM}", "12:00:01", "the nearest line before"),
        (f"{OOM}\n2026-11-30 12:00:01 {LOST}", "12:00:01", "no line before has one: the first of the file"),
        (
            f"[rank0]: 2026-11-30 12:00:01 a\n[rank1]: 2026-11-30 12:00:02 a\n[rank0]: {OOM}",
            "12:00:01",
            "its own rank's",
        ),
    ],
)
def test_a_line_without_time_has_its_neighbours(text: str, time: str, reason: str) -> None:
    log = read(text)
    line = next(hit.first for hit in log.hits if hit.signature.id == "cuda-oom")
    assert line.time_s is not None and line.time_s % 86_400 == 12 * 3600 + int(time[-2:]), reason


def test_one_host_in_a_file_is_the_host_of_all_its_lines() -> None:
    nccl = "{}:70:70 [0] NCCL INFO Bootstrap : Using eth0:192.0.2.5<0>\n"
    assert {hit.first.host for hit in read(nccl.format("node1") + OOM).hits} == {"node1"}
    two = read(nccl.format("node1") + nccl.format("node2") + OOM)
    assert two.hosts == {"node1", "node2"}
    assert next(hit.first.host for hit in two.hits if hit.signature.id == "cuda-oom") is None


def test_ranks_that_only_print_are_known_as_well() -> None:
    log = read(f"[rank0]: step 1\n[rank1]: step 1\n[rank1]: {OOM}\n")
    assert log.ranks == {0, 1}


def test_slurms_labels_are_believed_if_all_lines_have_them() -> None:
    labelled = read(f"0: a\n1: b\n 1: {OOM}\n")
    assert labelled.ranks == {0, 1} and labelled.hits[0].first.rank == 1
    plain = read(f"0: a\nb\nc\nd\n1: {OOM}\n")
    assert plain.ranks == frozenset() and plain.hits[0].first.rank is None


SUMMARY = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Failures:
[1]:
  time      : 2026-11-30_12:00:07
  host      : node2
  rank      : 5 (local_rank: 1)
  exitcode  : -11 (pid: 4401)
  error_file: <N/A>
  traceback : Signal 11 (SIGSEGV) received by PID 4401
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_12:00:06
  host      : node3
  rank      : 4 (local_rank: 0)
  exitcode  : -9 (pid: 4400)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4400
============================================================
"""


def test_torchruns_summary_names_rank_host_and_time() -> None:
    log = read(SUMMARY)
    lines = {hit.signature.id: hit.first for hit in log.hits if hit.signature.id.startswith("exit")}
    assert {name: (line.rank, line.host) for name, line in lines.items()} == {
        "exit-sigsegv": (5, "node2"),
        "exit-sigkill": (4, "node3"),
    }
    assert (lines["exit-sigsegv"].time_s or 0) - (lines["exit-sigkill"].time_s or 0) == 1
    (blame,) = log.blames
    assert (blame.line.rank, blame.line.host, blame.exit_code) == (4, "node3", -9)


def test_the_size_of_the_world_is_read() -> None:
    assert read("RuntimeError: Gloo connectFullMesh failed with x (rank=1, size=16, x").world_size == 16
    assert read("node1:7:7 [0] NCCL INFO comm 0x55 rank 0 nranks 4 cudaDev 0 - Init COMPLETE").world_size == 4
    assert read("Timed out initializing process group in store based barrier on rank 1, (world_size=4,").world_size == 4
    assert read(OOM).world_size is None
