"""Key lines of failures that people have reported, with other names and addresses: the right cause comes first."""

from __future__ import annotations

import pytest
from explaining import LOGS, explain_files, explain_texts

from paceline.explain.cause import Explanation

CASES = [
    ("01-veth.log", "nccl-peer-link-local", "certain"),
    ("03-gloo-worker.log", "gloo-loopback", "likely"),
    ("04-gloo-nccl-syntax.log", "gloo-nccl-syntax", "certain"),
    ("05-interface-names.log", "gloo-no-such-interface", "certain"),
    ("05-horovod-interfaces.log", "horovod-no-common-interface", "certain"),
    ("06-shm-fallocate.log", "nccl-shm-full", "certain"),
    ("07-acs-hang.log", "nccl-p2p-hang", "possible"),
    ("08-iommu-hang.log", "nccl-p2p-hang", "possible"),
    ("09-memlock.out", "nccl-ib-memlock", "certain"),
    ("10-uneven.log", "pgnccl-watchdog-timeout", "likely"),
    ("11-two-nccl.log", "nccl-undefined-symbol", "certain"),
    ("12-terminal-closed.log", "torchrun-hangup", "certain"),
    ("13-fabric.log", "nccl-ib-completion-12", "certain"),
    ("14-node1.log", "nccl-no-route-to-host", "certain"),
    ("15-inplace.log", "ddp-inplace-buffers", "certain"),
]


@pytest.mark.parametrize(("name", "entry", "confidence"), CASES)
def test_the_cause_comes_first(name: str, entry: str, confidence: str) -> None:
    explanation = explain_files(name)
    assert (explanation.verdict, explanation.entry, explanation.confidence) == ("cause", entry, confidence)
    assert explanation.evidence


def test_what_nobody_found_out_is_not_claimed() -> None:
    """The reporter's job failed with the interface pinned as well."""
    explanation = explain_files("02-ambiguous.log")
    assert explanation.entry == "nccl-virtual-interface" and explanation.confidence == "possible"
    assert "this was not the cause" in explanation.remedy
    assert explanation.needed == ("the log of host 192.0.2.118, which these lines name",)


@pytest.mark.parametrize(
    ("first", "second", "entry"),
    [
        ("03-gloo-leader.log", "03-gloo-worker.log", "gloo-loopback"),
        ("14-node0.log", "14-node1.log", "nccl-no-route-to-host"),
    ],
)
def test_the_cause_stands_in_the_second_log_and_is_asked_for_before(first: str, second: str, entry: str) -> None:
    alone = explain_files(first)
    assert alone.verdict == "consequences" and alone.confidence is None
    assert alone.needed == ("the stderr of all other ranks and hosts; no line here names one",)
    for names in ((first, second), (second, first)):
        both = explain_files(*names)
        assert (both.verdict, both.entry) == ("cause", entry)
        assert both.evidence[0].file == second


def test_uneven_data_is_read_off_the_ranks_numbers() -> None:
    explanation = explain_files("10-uneven.log")
    assert "rank 1 had started 6244 collectives when others had started 6245" in explanation.cause
    assert [line.rank for line in explanation.evidence] == [1, 0]


def test_who_and_where_are_told() -> None:
    (line,) = explain_files("09-memlock.out").evidence
    assert (line.rank, line.host, line.number) == (1, "node2", 3)


def benign_lines() -> list[str]:
    return (LOGS / "16-benign.log").read_text().splitlines()[:4]


def is_nothing(explanation: Explanation) -> bool:
    return explanation.verdict == "nothing" and not explanation.evidence and not explanation.others


@pytest.mark.parametrize("line", benign_lines())
def test_a_harmless_line_is_no_cause(line: str) -> None:
    explanation = explain_texts(f"{line}\n")
    assert is_nothing(explanation) and explanation.num_benign == 1


def test_harmless_lines_together_are_none_either() -> None:
    explanation = explain_files("16-benign.log")
    assert is_nothing(explanation) and explanation.num_benign == 4


@pytest.mark.parametrize(("name", "entry", "confidence"), CASES)
def test_harmless_lines_before_change_nothing(name: str, entry: str, confidence: str) -> None:
    text = "\n".join(benign_lines()) + "\n" + (LOGS / name).read_text()
    if name.endswith(".out"):
        text = "".join(f"0: {line}\n" for line in benign_lines()) + (LOGS / name).read_text()
    explanation = explain_texts(text)
    assert (explanation.entry, explanation.confidence) == (entry, confidence)
