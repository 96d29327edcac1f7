"""What the words of the processes of a group mean: who is missing, and at which step."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.checks.findings import Finding
from paceline.checks.together import check_gloo, check_nccl, read_group
from paceline.errors import HostError
from paceline.launch.errands import Reply
from paceline.launch.facts import Facts

NAMES = ["h1", "h2", "h3", "h4"]


def facts(torch_version: str | None = "2.13.0") -> Facts:
    return Facts(
        hostname="h",
        python_path="/usr/bin/python3",
        python_version="3.11.7",
        torch_version=torch_version,
        cuda_version=None,
        has_safetensors=True,
        gpus=[],
        visible_gpus=None,
        num_cores=2,
        machine="x86_64",
        state_folder="/tmp",
        free_bytes=1,
        interfaces=[],
    )


def went_well(large_s: float = 1.0) -> Reply:
    phases = [{"name": name, "took_s": 0.1} for name in ("start", "join", "one", "barrier", "large")]
    return Reply(value={"phases": phases, "large_s": large_s})


def failed(name: str, problem: str, missing: Sequence[int] = (), took_s: float = 10.0) -> Reply:
    phase: dict[str, Any] = {"name": name, "took_s": took_s, "problem": problem, "missing": list(missing)}
    return Reply(value={"phases": [{"name": "start", "took_s": 1.0}, phase], "large_s": 0.0})


def read(replies: Sequence[Reply]) -> list[Finding]:
    return list(read_group("gloo", NAMES[: len(replies)], replies))


def test_a_group_that_works_tells_its_speed() -> None:
    [finding] = read([went_well(0.8), went_well(1.024), went_well(), went_well()])
    assert finding.status == "ok" and finding.text == "4 hosts add up 64.0 MB in 1.0s: 750 Mb/s on each link"


def test_who_never_came_is_named() -> None:
    late = "wait timeout after 40000ms"
    first, second = read([failed("start", late, [3]), failed("start", late, [3]), went_well(), Reply(problem="killed")])
    assert (first.where, first.status) == ("h4", "failure") and "the process on h4 ended, or hung: killed" in first.text
    assert (second.where, second.status) == ("h4", "warning"), "the cause was told already"
    assert "finding each other did not succeed; h4 never came: wait timeout" in second.text


def test_the_earliest_step_that_failed_is_told_once() -> None:
    refused = "connect: Connection refused, remote=[127.0.0.1]:5000"
    [finding] = read([failed("one", "closed by peer"), failed("join", refused), failed("one", "closed by peer")])
    assert (finding.status, finding.where) == ("failure", "h2")
    assert "making the group did not succeed; first on h2: connect: Connection refused" in finding.text
    assert "TORCH_CPP_LOG_LEVEL=INFO" in finding.remedy


def test_who_fails_at_once_is_the_cause_of_those_who_waited() -> None:
    no_such = "Unable to find address for: eth7"
    late = failed("join", "wait timeout after 10000ms")
    [finding] = read([late, failed("join", no_such, took_s=0.1), late])
    assert finding.where == "h2" and finding.text.endswith(f"first on h2: {no_such}")
    [finding] = read([late, late])
    assert finding.where == "" and "on h1 and h2: wait timeout" in finding.text


@pytest.mark.parametrize("check", [check_gloo, check_nccl])
def test_without_pytorch_there_is_no_group(check: Any) -> None:
    [finding] = check(NAMES[:2], [facts(), facts(None)], lambda: pytest.fail("nothing is started"))
    assert (finding.status, finding.text) == ("skipped", "no group was formed: no PyTorch on h2")


def test_one_host_is_no_group() -> None:
    [finding] = check_gloo(["h1"], [facts()], lambda: pytest.fail("nothing is started"))
    assert finding.text == "no group was formed: it takes two hosts"


def test_a_first_host_without_a_port() -> None:
    def raise_error() -> Sequence[Reply]:
        raise HostError("h1: no port is free", hint="ss -ltn")

    [finding] = check_gloo(NAMES[:2], [facts()] * 2, raise_error)
    assert (finding.status, finding.text, finding.remedy) == ("failure", "h1: no port is free", "ss -ltn")


@pytest.mark.large
@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_two_real_ranks_of_three_name_the_third() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    call = "import json, sys; from paceline.checks.group_errand import main; main(json.loads(sys.argv[1]))"
    limits = {"start_limit_s": 60.0, "limit_s": 5.0, "num_bytes": 4096}
    shared = {"num_ranks": 3, "address": "127.0.0.1", "port": port, "backend": "gloo", **limits}
    # The third is there, and makes the group, but for an interface that it doesn't have.
    interfaces = ["lo", "lo", "eth77"]
    arguments = [
        {**shared, "rank": rank, "env": {"GLOO_SOCKET_IFNAME": interface}} for rank, interface in enumerate(interfaces)
    ]
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        for argument in arguments:
            command = [sys.executable, "-c", call, json.dumps(argument)]
            started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            processes.append(stack.enter_context(started))
            stack.callback(started.kill)
        said = [process.communicate(timeout=100)[0] for process in processes]
    replies = [Reply(value=json.loads(words.splitlines()[-1])) for words in said]
    [finding] = read(replies)
    assert (finding.status, finding.where) == ("failure", "h3")
    assert "making the group did not succeed; first on h3:" in finding.text and "eth77" in finding.text
