"""What `paceline check` shows, as golden texts, and the whole command on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from made_up_hosts import make_gpu_state, make_state
from paceline.checks.examine import Examined
from paceline.checks.findings import Finding, Status, worst_first
from paceline.checks.matrix import Matrix
from paceline.checks.quick import check_states
from paceline.cli import findings as render

PACELINE = str(Path(sys.executable).parent / "paceline")
Golden = Callable[[str, str], None]
STATES = (
    make_gpu_state("alice"),
    make_gpu_state("bob", facts={"torch_version": "2.12.1+cu128"}, shm={"total": 10**6, "free": 10**6}),
    make_gpu_state("a-host-with-a-long-name", encoding="latin-1", limits={"nofile": [512, 512]}),
    make_gpu_state("carol", limits={"nofile": [512, 512]}, gpu={"errors": None}),
)


def shown(findings: list[Finding], *, is_verbose: bool = False, colour: bool = False, num_hosts: int = 2) -> str:
    found = render.lines(findings, num_hosts=num_hosts, width=80, is_verbose=is_verbose, colour=colour)
    return "\n".join(found) + "\n"


def make_finding(status: Status, where: str, text: str, remedy: str = "") -> Finding:
    return Finding(check="a", status=status, where=where, text=text, remedy=remedy)


def test_four_hosts_in_need_of_a_hand(golden: Golden) -> None:
    findings, _ = check_states(STATES)
    table = "\n".join(render.table(STATES))
    assert all(len(line) <= 80 for line in table.splitlines())
    golden("check.txt", f"{table}\n\n{shown(worst_first(findings), num_hosts=4)}")


def test_a_healthy_pair_is_one_line() -> None:
    findings, _ = check_states([make_state("alice"), make_state("bob")])
    assert re.fullmatch(r"✓ \d+ checks on 2 hosts and 1 link are fine\n", shown(findings))


def test_verbose_lists_what_is_fine() -> None:
    findings, _ = check_states([make_state("alice")])
    text = shown(findings, is_verbose=True, num_hosts=1)
    assert "✓ alice: text is read as UTF-8" in text
    assert re.search(r"✓ \d+ checks on 1 host are fine\n$", text)


def test_what_could_not_be_made_is_counted() -> None:
    findings, _ = check_states([make_gpu_state("alice", gpu={"errors": None})])
    assert shown(findings, num_hosts=1).endswith(" are fine, 1 could not be made (-v lists them)\n")
    text = shown(findings, is_verbose=True, num_hosts=1)
    assert "- alice: the kernel's log may be read by root only\n" in text
    assert text.endswith(" are fine, 1 could not be made\n")


def test_the_same_of_several_hosts_is_said_once() -> None:
    findings = [
        make_finding("warning", "alice", "low {x}", "On alice:  raise {it}"),
        make_finding("warning", "bob", "low {x}", "On bob:  raise {it}"),
        make_finding("warning", "bob", "lower", "paceline run ..."),
    ]
    assert shown(findings).splitlines()[:4] == [
        "! alice, bob: low {x}",
        "    On alice, bob:  raise {it}",
        "! bob: lower",
        "    paceline run ...",
    ]


def test_long_sentences_are_wrapped_and_commands_are_not() -> None:
    remedy = "On alice:  " + "command " * 20
    lines = shown([make_finding("failure", "alice → bob", "word " * 40, remedy)]).splitlines()
    assert lines[0].startswith("✗ alice → bob: word") and all(len(line) <= 80 for line in lines[:3])
    assert f"    {remedy}" in lines


def test_a_name_that_the_sentence_has_is_not_put_before_it() -> None:
    assert shown([make_finding("failure", "bob", "bob is down")]).startswith("✗ bob is down\n")


def test_a_host_that_is_called_like_a_word_is_named() -> None:
    assert shown([make_finding("failure", "open", "a process may open only 9 files")]).startswith("✗ open: a process")
    text = "nothing listens for ssh there (ssh: connect to host h2 port 22: refused)"
    assert shown([make_finding("failure", "h2", text)]).startswith("✗ h2: nothing listens")


def test_of_many_places_some_are_named() -> None:
    found = [make_finding("warning", f"train.py:{line}", "every rank prints this line") for line in range(1, 80)]
    [line, *_] = shown(found).splitlines()
    assert line == "! train.py:1, train.py:2, train.py:3, train.py:4 and 75 more: every rank prints"


def test_where_nothing_was_looked_at_nothing_is_fine() -> None:
    assert "fine" not in shown([make_finding("failure", "h2", "no such host")])
    found = [make_finding("failure", "h2", "no such host"), make_finding("ok", "h1", "well")]
    assert shown(found, num_hosts=1).endswith("✓ 1 more check on 1 host is fine\n")


def test_colours() -> None:
    assert shown([make_finding("failure", "", "no")], colour=True).startswith("\x1b[31m✗\x1b[0m no\n")


def test_json() -> None:
    findings, rows = check_states(STATES)
    record = json.loads(render.as_json(Examined(states=STATES, rows=rows, findings=tuple(findings)), 2))
    assert record["exit_code"] == 2 and [host["name"] for host in record["hosts"]][:2] == ["alice", "bob"]
    [torch] = [row for row in record["differences"] if row["what"] == "torch"]
    assert torch["values"] == ["2.13.0+cu128", "2.12.1+cu128", "2.13.0+cu128", "2.13.0+cu128"]
    assert torch["mark"] == "stop"
    assert {row["mark"] for row in record["differences"]} == {"stop", "fine"}
    assert {"check", "status", "where", "text", "remedy"} == set(record["findings"][0])
    assert record["pairs"] == []


def test_json_has_what_the_matrix_shows() -> None:
    matrix = Matrix(
        names=["alice", "bob"],
        rates_mbps={(0, 1): 941.0},
        round_trips_ms={(0, 1): 0.2, (1, 0): 0.3},
        broken=frozenset({(1, 0)}),
    )
    record = json.loads(render.as_json(Examined(states=(), rows=(), findings=(), matrix=matrix), 0))
    assert record["pairs"] == [
        {"from": "alice", "to": "bob", "mbps": 941.0, "round_trip_ms": 0.2, "is_broken": False},
        {"from": "bob", "to": "alice", "mbps": None, "round_trip_ms": 0.3, "is_broken": True},
    ]


def start(*words: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [PACELINE, "check", *words],
        env={**os.environ, "XDG_STATE_HOME": str(folder), "COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.launcher
class TestHere:
    """The command itself, with real agents on this machine."""

    def test_this_machine_under_two_names(self, tmp_path: Path) -> None:
        process = start("-H", "localhost,127.0.0.1", "--quick", folder=tmp_path)
        out, err = process.communicate(timeout=50)
        assert err == "" and process.returncode == 0, out
        header, first, second, *rest = out.splitlines()
        assert header.split()[:3] == ["host", "python", "torch"]
        assert first.startswith("localhost ") and second.startswith("127.0.0.1 ")
        assert "! localhost and 127.0.0.1 are one machine" in rest
        assert "more checks on 2 hosts and 1 link are fine" in rest[-1]

    def test_strict_json_and_a_host_that_is_not_there(self, tmp_path: Path) -> None:
        (tmp_path / "hosts").write_text("localhost\n127.0.0.1 python=/no/such/python\n")
        process = start("--hostfile", str(tmp_path / "hosts"), "--quick", "--strict", "--json", folder=tmp_path)
        out, err = process.communicate(timeout=50)
        record = json.loads(out)
        assert err == "" and process.returncode == record["exit_code"] == 2
        assert record["findings"][0]["check"] == "reachable" and record["findings"][0]["where"] == "127.0.0.1"

    def test_ctrl_c(self, tmp_path: Path) -> None:
        """The interpreter sleeps before it becomes the agent, so that the signal comes while hosts are opened."""
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\ntouch {tmp_path}/began\nsleep 5\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        process = start("--python", str(python), folder=tmp_path)
        deadline_s = time.monotonic() + 20
        while not (tmp_path / "began").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (out, err, process.returncode) == ("", "paceline: stopped\n", 130)

    def test_what_can_not_be(self, tmp_path: Path) -> None:
        process = start("-H", "a,a", folder=tmp_path)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 2 and "a is there twice" in err


def test_a_path_that_can_not_be_looked_at_is_one_line(tmp_path: Path) -> None:
    for words in (["check", "x" * 300 + ".py", "-H", "localhost"], ["explain", "x" * 300]):
        done = subprocess.run([PACELINE, *words], cwd=tmp_path, capture_output=True, text=True, timeout=20)
        assert done.returncode == 2 and done.stderr == f"paceline: File name too long: {words[1]}\n", done.stderr
