"""An errand whose bytes come as it writes them: where they end, and what is said where they do not."""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cluster.spec import parse_hosts
from paceline.errors import HostError
from paceline.launch.errands import Errand, run_errands, stream_errand
from paceline.launch.hosts import Hosts, InterruptedEarlyError, open_hosts
from paceline.launch.transport import Signalled

pytestmark = pytest.mark.launcher

MODULE = """\
import os, signal, sys, time

def main(argument):
    if argument == "large":
        for number in range(40):
            sys.stdout.buffer.write(bytes([number]) * 50_001)
    elif argument == "raise":
        sys.stdout.buffer.write(b"half")
        raise FileNotFoundError("a.so is gone")
    elif argument == "value":
        sys.stdout.buffer.write(b"bytes")
        sys.stdout.buffer.flush()
        return "null"
    elif argument == "agent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    elif argument == "hang":
        sys.stdout.buffer.write(b"x" * 100)
        sys.stdout.buffer.flush()
        time.sleep(60)
    elif argument is not None:
        sys.stdout.buffer.write(argument.encode())
    sys.stdout.buffer.flush()
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    (tmp_path / "stream_of_a_test.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with open_hosts(parse_hosts("localhost"), queue.SimpleQueue()) as opened:
        opened.open("stream", [sys.executable], grace_s=0.1)
        yield opened


def stream(hosts: Hosts, argument: str | None, idle_limit_s: float = 20.0) -> Iterator[bytes]:
    errand = Errand(host=0, module="stream_of_a_test", argument=argument)
    return stream_errand(hosts, errand, doing="read it", idle_limit_s=idle_limit_s)


def test_all_bytes_come_and_no_other(hosts: Hosts) -> None:
    assert b"".join(stream(hosts, None)) == b""
    for text in ("a", "\nnull\n", "null", "\nnull\n\nnull", "twelve\n{}\n"):
        assert b"".join(stream(hosts, text)) == text.encode()
    pieces = list(stream(hosts, "large"))
    assert b"".join(pieces) == b"".join(bytes([number]) * 50_001 for number in range(40))
    assert len(pieces) > 10, "as they come"


def test_what_goes_wrong_is_said_with_the_host_and_what_was_asked(hosts: Hosts) -> None:
    for argument, words in (
        ("raise", "FileNotFoundError: a.so is gone"),
        ("value", "it ended with exit code 0 and no word"),
    ):
        with pytest.raises(HostError) as raised:
            list(stream(hosts, argument))
        assert raised.value.message == f"localhost: cannot read it: {words}"
    came: list[bytes] = []
    with pytest.raises(HostError, match="localhost: cannot read it: nothing came for 0 s") as raised:
        came.extend(stream(hosts, "hang", 0.3))
    assert b"".join(came) == b"x" * 94, "the last six bytes could be the end"
    assert raised.value.hint is not None and raised.value.hint.endswith("ssh localhost dmesg | tail")


def test_a_host_that_is_lost_ends_it_at_once_and_for_all(hosts: Hosts) -> None:
    for _ in range(2):
        with pytest.raises(HostError, match="the agent there has ended"):
            list(stream(hosts, "agent"))
    [reply] = run_errands(hosts, [Errand(host=0, module="operator")], timeout_s=20.0)
    assert "the agent there has ended" in reply.problem


def test_a_signal_ends_it(hosts: Hosts) -> None:
    pieces = stream(hosts, "hang")
    assert next(pieces)
    hosts.inbox.put(Signalled(number=2))
    with pytest.raises(InterruptedEarlyError):
        next(pieces)
