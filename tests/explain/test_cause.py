"""Which of all that logs hold is called the cause, how surely, and what is asked for instead."""

from __future__ import annotations

import pytest
from explaining import explain_texts, read

from paceline.explain.cause import explain

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
DISK = "OSError: [Errno 28] No space left on device"
LOST = "RuntimeError: Connection closed by peer [192.0.2.7]:31245"
KILLED = "exitcode  : -9 (pid: 4400)"
VAGUE = "RuntimeError: NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO for details)"
OWN = """\
Traceback (most recent call last):
  File "/home/alice/train.py", line 42, in step
    f(x)
ValueError: bad label
"""
LIBRARY = OWN.replace("/home/alice", "/opt/venv/lib/python3.12/site-packages/lib")


def at(second: int, text: str) -> str:
    return f"2026-11-30 12:00:{second:02} {text}"


# What comes first


@pytest.mark.parametrize(
    ("texts", "entry", "file"),
    [
        ([f"{LOST}\n{OOM}"], "cuda-oom", "0.log"),
        ([f"{OOM}\n{LOST}"], "cuda-oom", "0.log"),
        ([f"{KILLED}\n{OOM}"], "cuda-oom", "0.log"),
        ([f"{OOM}\n{DISK}"], "cuda-oom", "0.log"),
        ([f"{DISK}\n{OOM}"], "disk-full", "0.log"),
        ([at(9, OOM), at(2, DISK)], "disk-full", "1.log"),
        ([at(2, OOM), at(9, DISK)], "cuda-oom", "0.log"),
        ([LOST, KILLED], "exit-sigkill", "1.log"),
        ([f"{VAGUE}\n" + "x\n" * 50 + KILLED], "exit-sigkill", "0.log"),
        (["2026-12-31 23:59:59 x\n" + OOM, "2027-01-01 00:00:01 x\n" + DISK], "cuda-oom", "0.log"),
        (["2027-01-01 00:00:01 x\n" + DISK, "2026-12-31 23:59:59 x\n" + OOM], "cuda-oom", "1.log"),
    ],
)
def test_the_first_cause_is_named(texts: list[str], entry: str, file: str) -> None:
    explanation = explain_texts(*texts)
    assert (explanation.verdict, explanation.entry, explanation.evidence[0].file) == ("cause", entry, file)


def test_the_rest_is_mentioned() -> None:
    explanation = explain_texts(f"{OOM}\n{DISK}\n{KILLED}\n{LOST}\n{VAGUE}\n")
    assert [other.what for other in explanation.others] == ["disk-full", "exit-sigkill"]
    assert explanation.num_consequences == 1


# How sure it is


def test_only_a_root_cause_text_makes_it_certain() -> None:
    assert explain_texts(OOM).confidence == "certain"
    assert explain_texts(KILLED).confidence == "likely"
    assert explain_texts(VAGUE).confidence == "possible"


def test_two_causes_of_unknown_order_are_no_certainty() -> None:
    explanation = explain_texts(OOM, DISK)
    assert explanation.confidence == "likely" and "not known which came first" in explanation.cause
    assert explain_texts(at(1, OOM), at(2, DISK)).confidence == "certain"
    assert explain_texts(OOM, OOM).confidence == "certain", "the same on all ranks"


def test_what_stands_far_above_the_end_did_not_end_the_run() -> None:
    healthy = "step 1 loss 0.3\n" * 1500
    assert explain_texts(f"{DISK}\n{healthy}").confidence == "possible"
    later = explain_texts(f"{DISK}\n{healthy}{KILLED}\n")
    assert later.entry == "exit-sigkill" and [other.what for other in later.others] == ["disk-full"]
    later = explain_texts(f"{OWN}\n{healthy}{LOST}\n")
    assert later.verdict == "consequences"


def test_many_lines_of_consequences_do_not_make_the_cause_old() -> None:
    noise = f"{LOST}\n" + "  frame #0: x\n" * 500
    assert explain_texts(f"{OWN}\n{noise * 8}").confidence == "certain"


def test_the_line_that_counts_is_the_one_at_the_end() -> None:
    explanation = explain_texts(f"{DISK}\n" + "step\n" * 1500 + f"{DISK}\n")
    assert explanation.confidence == "certain" and explanation.evidence[0].number == 1502


# The user's own exceptions


def test_an_exception_of_the_users_own_is_a_cause() -> None:
    explanation = explain_texts(f"{OWN}{LOST}\n")
    assert (explanation.verdict, explanation.entry, explanation.confidence) == ("cause", None, "certain")
    assert (
        "ValueError: bad label" in explanation.cause and "/home/alice/train.py, line 42, in step" in explanation.cause
    )


def test_a_rank_dies_of_its_last_exception_only() -> None:
    caught = OWN.replace("ValueError: bad label", "KeyError: 'skipped'")
    text = "".join(f"[rank0]: {line}\n" for line in f"{caught}going on\n{OWN}".splitlines())
    explanation = explain_texts(text)
    assert "ValueError: bad label" in explanation.cause and not explanation.others


def test_exceptions_that_differ_in_numbers_are_one() -> None:
    texts = [OWN.replace("bad label", f"bad label {number}") for number in (1, 2)]
    explanation = explain_texts(*texts)
    assert explanation.confidence == "certain" and not explanation.others
    assert [line.file for line in explanation.evidence] == ["0.log", "1.log"]


@pytest.mark.parametrize("name", ["ValueError", "my.project.Mistake", "AssertionError"])
def test_any_exception_will_do(name: str) -> None:
    assert name in explain_texts(OWN.replace("ValueError", name)).cause


def test_what_the_catalogue_knows_is_better_than_the_bare_exception() -> None:
    explanation = explain_texts(OWN.replace("ValueError: bad label", OOM))
    assert explanation.entry == "cuda-oom"
    assert explanation.crash is not None and str(explanation.crash.frame) == "/home/alice/train.py, line 42, in step"


def test_an_exception_that_is_a_consequence_is_no_cause() -> None:
    assert explain_texts(OWN.replace("ValueError: bad label", LOST)).verdict == "consequences"


def test_own_code_that_raises_after_a_consequence_is_still_a_cause() -> None:
    """Ranks' lines mix: the rank that lost the other may print first."""
    assert explain_texts(f"{LOST}\n{OWN}").entry is None
    assert explain_texts(f"{LOST}\n{OWN}").verdict == "cause"


def test_a_library_that_raises_after_a_consequence_tells_of_it_only() -> None:
    assert explain_texts(f"{LOST}\n{LIBRARY}").verdict == "consequences"
    assert explain_texts(LIBRARY).verdict == "cause"
    assert explain_texts(LOST, LIBRARY).verdict == "cause", "of another rank"


def test_a_library_that_raises_soon_after_a_known_symptom_tells_of_it_only() -> None:
    assert explain_texts(f"{at(1, KILLED)}\n{LIBRARY}").entry == "exit-sigkill"
    hour_later = "2026-11-30 13:00:00 x\n"
    assert explain_texts(f"{at(1, KILLED)}\n{hour_later}{LIBRARY}").entry is None


# Consequences


def test_a_vague_symptom_beside_a_consequence_is_one() -> None:
    explanation = explain_texts(
        f"{VAGUE}\nLast error:\nsocketProgress: Connection closed by remote peer node2<41022>\n"
    )
    assert explanation.verdict == "consequences" and explanation.confidence is None


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        (LOST, "the log of host 192.0.2.7, which these lines name"),
        ("x NCCL WARN Connection closed by remote peer node2<41022>", "the log of host node2, which these lines name"),
        (
            "[W1 TCPStore.cpp:141] [c10d] recvValue failed on SocketImpl(fd=6, remote=[::ffff:192.0.2.5]:2)",
            "the log of host 192.0.2.5, which these lines name",
        ),
        (
            "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store",
            "the log of rank 0, which these lines name",
        ),
        (
            "[PG 0 Rank 1] Received a dump signal due to a collective timeout from rank 3 and we will try",
            "the log of rank 3, which these lines name",
        ),
        (
            "[c10d] recvValue failed on x; trying to connect to (head, 29400).",
            "the log of host head, which these lines name",
        ),
        ("NCCL communicator was aborted on rank 5.", "the log of rank 5, which these lines name"),
        ("srun: error: node2: task 3: Exited with exit code 1", "the log of rank 3, which these lines name"),
        ("srun: error: node2: task 3: Exited with exit code 1", "the log of host node2, which these lines name"),
        (
            "mpirun noticed that process rank 1 with PID 44 on node node2 exited on signal 6 (Aborted).",
            "the log of host node2, which these lines name",
        ),
    ],
)
def test_the_log_that_is_missing_is_asked_for_by_name(text: str, needed: str) -> None:
    explanation = explain_texts(f"{text}\n")
    assert explanation.verdict == "consequences"
    assert needed in explanation.needed


def test_hosts_and_ranks_whose_logs_are_there_are_not_asked_for() -> None:
    own = "node2:70:70 [0] NCCL INFO Bootstrap : Using eth0:192.0.2.7<0>\n"
    asked = explain_texts(f"[rank0]: {LOST}\n", own).needed
    assert asked == ("the stderr of all other ranks and hosts; no line here names one",)
    named = "x NCCL WARN Connection closed by remote peer node2.example.org<41022>\n"
    assert explain_texts(named, own).needed == asked
    aborted = "[rank0]: NCCL communicator was aborted on rank 1.\n"
    assert explain_texts(f"{aborted}[rank1]: x\n").needed == asked


def test_an_address_is_given_the_name_that_another_log_has_for_it() -> None:
    both = "".join(
        f"{host}:70:70 [0] NCCL INFO Bootstrap : Using eth0:{address}<0>\n"
        for host, address in (("node1", "192.0.2.6"), ("node2", "192.0.2.7"))
    )
    assert "node2" not in str(explain_texts(both + LOST).needed)


def test_the_ranks_that_are_missing_are_counted() -> None:
    lines = [f"node1:7:7 [0] NCCL INFO comm 0x55 rank {rank} nranks 8 - Init COMPLETE\n" for rank in (0, 1, 4)]
    explanation = explain_texts("".join(lines) + "RuntimeError: Connection reset by peer\n")
    assert explanation.needed == ("the log of ranks 2 to 3, 5 to 7 (the run has 8)",)


def test_where_all_logs_are_there_the_kernels_is_asked_for() -> None:
    lines = [f"node1:7:7 [0] NCCL INFO comm 0x55 rank {rank} nranks 2 - Init COMPLETE\n" for rank in (0, 1)]
    (needed,) = explain_texts("".join(lines) + "RuntimeError: Connection reset by peer\n").needed
    assert "journalctl -k" in needed


def test_torchruns_summary_says_whose_stderr_is_missing() -> None:
    text = (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
        "Root Cause (first observed failure):\n[0]:\n"
        "  time      : 2026-11-30_12:00:06\n  host      : node2\n  rank      : 4 (local_rank: 0)\n"
        "  exitcode  : 1 (pid: 4400)\n  error_file: <N/A>\n"
    )
    explanation = explain_texts(text)
    assert explanation.verdict == "consequences"
    assert explanation.needed == ("the stderr of rank 4 on host node2, which ended first there, with exit code 1",)


# What is behind a symptom


def test_a_symptom_is_explained_by_what_was_told_before() -> None:
    warning = "[W1 ProcessGroupGloo.cpp:7] Warning: Unable to resolve hostname to a (local) address. Using the loopback"
    failed = "RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error"
    assert explain_texts(failed).entry == "gloo-mesh-failed"
    explanation = explain_texts(f"{warning}\n{failed}\n")
    assert (explanation.entry, explanation.confidence) == ("gloo-loopback-warning", "likely")
    assert len(explanation.evidence) == 2
    assert explain_texts(warning).verdict == "nothing", "right on one machine"


WATCHDOG = (
    "[E1130 12:00:0{rank}.1 x.cpp:1] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={number}, OpType={op}, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600020 milliseconds\n"
)


def test_a_time_out_alone_is_possible_and_compared_it_is_likely() -> None:
    same = [WATCHDOG.format(rank=rank, number=808, op="ALLREDUCE") for rank in (0, 1)]
    assert explain_texts(*same).confidence == "possible"
    other = explain_texts(same[0], WATCHDOG.format(rank=1, number=808, op="BROADCAST"))
    assert other.confidence == "likely" and "rank 0 was in ALLREDUCE, rank 1 in BROADCAST" in other.cause


def test_a_time_out_at_the_start_is_the_networks() -> None:
    explanation = explain_texts(WATCHDOG.format(rank=0, number=1, op="ALLREDUCE"))
    assert explanation.entry == "pgnccl-watchdog-startup"


# Where nothing failed


P2P = "node1:225:240 [1] NCCL INFO Channel 00 : 1[c2000] -> 0[c1000] via P2P/direct pointer\n"


def test_a_hang_is_possible_only_where_the_log_ends() -> None:
    assert explain_texts(P2P).entry == "nccl-p2p-hang"
    assert explain_texts(P2P + "step 1 loss 0.3\n" * 100).verdict == "nothing"


@pytest.mark.parametrize("text", ["", "step 1 loss 0.3\n", "INFO: Error rates: 0.1\n"])
def test_nothing_is_nothing(text: str) -> None:
    explanation = explain_texts(text)
    assert (explanation.verdict, explanation.confidence, explanation.cause) == ("nothing", None, "")


def test_no_logs_are_nothing() -> None:
    assert explain([]).verdict == "nothing"


def test_the_order_of_logs_with_times_makes_no_difference() -> None:
    logs = [read(at(number, text), f"{number}.log") for number, text in enumerate((DISK, OOM, LOST, KILLED), start=1)]
    causes = {explain([logs[index] for index in order]).entry for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1))}
    assert causes == {"disk-full"}
