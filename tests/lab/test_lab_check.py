"""`paceline check` on hosts that were broken on purpose: each is named, and nothing else is; what mends it does."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_runs import PACELINE, of_runs, wait_until, write

from paceline.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(90)]

# The machine under the lab is busy with the tests themselves.
OF_THE_MACHINE = {"load", "speed", "round-trip", "memory"}
DEBIAN_PYTHON = "/usr/bin/python3"
FAKETIME = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")


def check(lab: Lab, *words: str, exit_code: int = 0) -> list[dict[str, str]]:
    """What needs a hand, as `paceline check --json WORDS` on h1 tells it."""
    done = lab.run("h1", [PACELINE, "check", "--json", *words], cwd=lab.spec.home, timeout_s=80)
    assert done.stderr == "" and done.returncode == exit_code, f"{done.stdout}\n{done.stderr}"
    record: dict[str, Any] = json.loads(done.stdout)
    return [
        finding
        for finding in record["findings"]
        if finding["status"] not in ("ok", "skipped") and finding["check"] not in OF_THE_MACHINE
    ]


def one(lab: Lab, *words: str, exit_code: int) -> dict[str, str]:
    found = check(lab, "-H", "h1,h2,h3", "--quick", *words, exit_code=exit_code)
    assert len(found) == 1, found
    return found[0]


@contextlib.contextmanager
def mounted(lab: Lab, host: str, folder: str, size: str) -> Iterator[None]:
    """A small disk at this folder of a host's."""
    done = lab.run(host, ["sh", "-c", f"mkdir -p {folder} && mount -t tmpfs -o size={size} none {folder}"])
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        assert lab.run(host, ["umount", "-l", folder]).returncode == 0


@contextlib.contextmanager
def called(lab: Lab, host: str, name: str) -> Iterator[None]:
    """A host by another name."""
    assert lab.run(host, ["hostname", name]).returncode == 0
    try:
        yield
    finally:
        assert lab.run(host, ["hostname", host]).returncode == 0


@contextlib.contextmanager
def few_files(lab: Lab, host: str, limit: int) -> Iterator[None]:
    """All that ssh starts there may open only so many files."""
    sshd = lab.processes(host)[0].pid
    before = resource.prlimit(sshd, resource.RLIMIT_NOFILE)
    resource.prlimit(sshd, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(sshd, resource.RLIMIT_NOFILE, before)


def test_a_healthy_lab(lab: Lab) -> None:
    assert check(lab, "-H", "h1,h2,h3,h4") == []


@pytest.mark.large
def test_another_python(lab: Lab) -> None:
    hosts = hostfile(lab, f"h1\nh2 python={stand_in(lab, 'sys.version_info = (3, 12, 1)')}\n")
    [found] = check(lab, "--hostfile", hosts, "--quick", exit_code=2)
    assert found["check"] == "same-python" and "3.12.1 on h2" in found["text"] and "python=PATH" in found["remedy"]


def test_another_torch(lab: Lab) -> None:
    write(lab, "h2", "fake/torch/__init__.py", "")
    write(lab, "h2", "fake/torch/version.py", "__version__ = '2.9.0+cu128'\ncuda: str = '12.8'\n")
    python = stand_in(lab, f"sys.path.insert(0, '{lab.spec.home}/fake')")
    hosts = hostfile(lab, f"h1\nh2 python={python}\n")
    [found] = check(lab, "--hostfile", hosts, "--quick", exit_code=2)
    assert found["check"] == "same-torch" and "2.9.0+cu128 on h2" in found["text"]
    assert found["remedy"] == "paceline env sync -H h2 --from h1"


def test_packages_that_one_host_lacks(lab: Lab) -> None:
    script = write(lab, "h1", "lacking/train.py", "import numpy, sklearn\n") + "/train.py"
    hosts = hostfile(lab, f"h1\nh2 python={DEBIAN_PYTHON}\n")
    found = check(lab, "--hostfile", hosts, "--quick", script, exit_code=2)
    texts = " ".join(finding["text"] for finding in found)
    assert "none on h2" in texts and "numpy" in texts and "sklearn" in texts
    assert {finding["remedy"] for finding in found} == {"paceline env sync -H h2 --from h1"}


@pytest.mark.large
def test_a_host_that_is_not_there(lab: Lab) -> None:
    found = check(lab, "-H", "h1,nohost,h2,stranger@h3", "--quick", exit_code=2)
    assert [(finding["check"], finding["where"]) for finding in found] == [("reachable", "nohost"), ("reachable", "h3")]
    assert "no such host" in found[0]["text"] and found[1]["remedy"] == "ssh-copy-id stranger@h3"


def test_tiny_shared_memory(lab: Lab) -> None:
    with mounted(lab, "h2", "/dev/shm", "1m"):
        found = one(lab, exit_code=0)
    assert found["check"] == "shared-memory" and found["where"] == "h2" and "of 1.0 MB" in found["text"]
    assert found["remedy"] in (
        "On h2:  mount -o remount,size=8G /dev/shm",
        "docker run --shm-size=8g ...   (or --ipc=host)",
    )


@pytest.mark.large
def test_a_full_disk(lab: Lab) -> None:
    with mounted(lab, "h2", f"{lab.spec.home}/.local/state", "4m"):
        found = one(lab, exit_code=2)
    assert found["check"] == "disk" and found["where"] == "h2" and "too little to start" in found["text"]


@pytest.mark.large
def test_few_open_files(lab: Lab) -> None:
    with few_files(lab, "h3", 512):
        found = one(lab, "--strict", exit_code=1)
    assert found["check"] == "open-files" and found["where"] == "h3" and "only 512 files" in found["text"]


@pytest.mark.skipif(not FAKETIME, reason="needs libfaketime")
def test_a_clock_that_is_ten_minutes_off(lab: Lab) -> None:
    fake = f"LD_PRELOAD={FAKETIME[0]} FAKETIME=+600s FAKETIME_DONT_FAKE_MONOTONIC=1"
    folder = write(lab, "h2", "late/python", f'#!/bin/sh\n{fake} exec {sys.executable} "$@"\n')
    (lab.home("h2") / "late" / "python").chmod(0o755)
    hosts = hostfile(lab, f"h1\nh2 python={folder}/python\nh3\n")
    found = check(lab, "--hostfile", hosts, "--quick", exit_code=0)
    [clocks] = [finding for finding in found if finding["check"] == "clocks"]
    assert "h2 is 10m0" in clocks["text"] and "chrony" in clocks["remedy"], clocks


def test_two_hosts_with_one_name(lab: Lab) -> None:
    with called(lab, "h3", "h2"):
        found = one(lab, exit_code=0)
    assert found["check"] == "one-machine-each" and "h2 and h3" in found["text"] and "both called h2" in found["text"]


def test_a_process_of_an_earlier_run(lab: Lab) -> None:
    """And the remedy ends it."""
    env = {**os.environ, "PACELINE_LEASE": "20200101-000000-dead/1"}
    with lab.popen("h2", ["sleep", "80"], env=env) as left:
        try:
            found = one(lab, exit_code=0)
            assert found["check"] == "other-runs" and "run 20200101-000000-dead" in found["text"]
            where, command = found["remedy"].split(":  ")
            assert where == "On h2" and lab.run("h2", command.split()).returncode == 0
            assert left.wait(10) == -signal.SIGKILL
        finally:
            left.kill()
    assert check(lab, "-H", "h1,h2,h3", "--quick") == []


def test_ctrl_c_leaves_nothing_running(lab: Lab) -> None:
    command = [PACELINE, "check", "-H", "h1,h2,h3,h4"]
    with lab.popen("h1", command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: any(host == "h4" for host, _ in of_runs(lab)), 30, lambda: of_runs(lab))
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=20) == ("", "paceline: stopped\n")
        finally:
            process.kill()
    assert process.returncode == 130
    wait_until(lambda: not of_runs(lab), 20, lambda: of_runs(lab))


def hostfile(lab: Lab, text: str) -> str:
    write(lab, "h1", "check-hosts.txt", text)
    return f"{lab.spec.home}/check-hosts.txt"


def stand_in(lab: Lab, before: str) -> str:
    """An interpreter on h2 that runs `before` first, for what can't be installed here."""
    code = f"import sys; code = sys.argv.pop(1); {before}; exec(code)"
    folder = write(lab, "h2", "stand-in/python", f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$2"\n')
    (lab.home("h2") / "stand-in" / "python").chmod(0o755)
    return str(Path(folder) / "python")
