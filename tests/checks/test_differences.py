"""What differs between hosts: the rows, what they mean, and the command that evens them out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from made_up_hosts import GB, make_gpu_state, make_state
from paceline.checks import differences
from paceline.checks.differences import compare_hosts
from paceline.checks.findings import Finding
from paceline.checks.host_states import HostState

ALICE = make_state("alice")
TITAN = ["NVIDIA TITAN V"] * 2


def speak_up(*states: HostState) -> list[Finding]:
    return [finding for finding in compare_hosts(states).findings if finding.status not in ("ok", "skipped")]


@pytest.mark.parametrize(
    "states",
    [
        [ALICE],
        [ALICE, make_state("bob"), make_state("carol")],
        [ALICE, make_state("bob", facts={"python_version": "3.11.2"})],
        [make_gpu_state("alice"), make_gpu_state("bob", gpu={"driver": "580.65.06"})],
        [ALICE, make_state("bob", boot_id=ALICE.details.boot_id, machine_id=ALICE.details.machine_id)],  # containers
        [ALICE, make_state("bob", variables={"NCCL_SOCKET_IFNAME": "eth1", "LD_LIBRARY_PATH": "/opt"})],
        [ALICE, make_state("bob", time_zone="+0000", environment="conda")],
    ],
)
def test_alike_enough(states: list[HostState]) -> None:
    assert speak_up(*states) == []


def with_import(name: str, state: str, version: str | None, *, found: bool = True) -> HostState:
    return make_state(state, imports={name: {"found": found, "version": version}})


SETTING = {"variables": {"NCCL_ALGO": "Tree"}}
DATA: dict[str, Any] = {"path": "/data", "files": 10, "bytes": GB, "is_complete": True, "is_readable": True}

CASES: list[tuple[list[HostState], str, str, str, str]] = [
    (
        [ALICE, make_state("bob", facts={"python_version": "3.12.1"})],
        "same-python",
        "failure",
        "Python 3.11.7 on alice, 3.12.1 on bob",
        "for bob name a Python 3.11",
    ),
    (
        [ALICE, make_state("bob", facts={"torch_version": "2.12.1"}), make_state("carol")],
        "same-torch",
        "failure",
        "torch 2.13.0+cu128 on alice and carol, 2.12.1 on bob",
        "paceline env sync -H bob --from alice",
    ),
    (
        [make_state("alice", facts={"torch_version": None}), make_state("bob")],
        "same-torch",
        "failure",
        "torch 2.13.0+cu128 on bob, none on alice",
        "paceline env sync -H alice --from bob",
    ),
    (
        [make_state("alice", facts={"torch_version": None})],
        "same-torch",
        "failure",
        "no torch on alice",
        "-m pip install torch",
    ),
    (
        [make_gpu_state("alice"), make_gpu_state("bob", torch_cuda="12.6")],
        "same-torch",
        "warning",
        "CUDA 12.8 on alice, 12.6 on bob",
        "paceline env sync -H bob --from alice",
    ),
    (
        [make_gpu_state("alice"), make_state("bob")],
        "same-gpus",
        "failure",
        "GPUs 2 on alice, 0 on bob",
        "leave out bob",
    ),
    (
        [dataclasses.replace(make_gpu_state("alice"), slots=4)],
        "same-gpus",
        "failure",
        "slots per GPU 4 on 2 on alice",
        "alice:2",
    ),
    (
        [make_gpu_state("alice"), make_gpu_state("bob", facts={"gpus": TITAN})],
        "same-gpus",
        "warning",
        "GPU models 2 × NVIDIA GeForce RTX 3090 on alice, 2 × NVIDIA TITAN V on bob",
        "leave the slower host out",
    ),
    (
        [make_gpu_state("alice"), make_gpu_state("bob", packages={"nvidia-nccl-cu12": "2.21.5"})],
        "same-packages",
        "failure",
        "NCCL 2.27.3 on alice, 2.21.5 on bob",
        "paceline env sync -H bob --from alice",
    ),
    (
        [make_gpu_state("alice"), make_gpu_state("bob", packages={"nvidia-cudnn-cu12": "8.9.7"})],
        "same-packages",
        "warning",
        "cuDNN 9.10.2.21 on alice, 8.9.7 on bob",
        "paceline env sync -H bob --from alice",
    ),
    (
        [ALICE, make_state("bob", packages={"numpy": "1.26.4"})],
        "same-packages",
        "warning",
        "numpy 2.4.6 on alice, 1.26.4 on bob",
        "paceline env sync -H bob --from alice",
    ),
    (
        [with_import("einops", "alice", "0.8.1"), with_import("einops", "bob", None, found=False)],
        "same-packages",
        "failure",
        "einops 0.8.1 on alice, none on bob",
        "paceline env sync -H bob --from alice",
    ),
    (
        [with_import("einops", "alice", None, found=False), with_import("einops", "bob", None, found=False)],
        "same-packages",
        "failure",
        "the script imports einops, which no host has",
        "On each host:  /home/u/venv/bin/python -m pip install einops",
    ),
    (
        [ALICE, make_state("bob", **SETTING)],
        "same-settings",
        "failure",
        "NCCL_ALGO not set on alice, Tree on bob",
        "paceline run --env NCCL_ALGO=Tree ...",
    ),
    (
        [ALICE, make_state("bob", nccl_conf={"NCCL_IB_DISABLE": "1 (/etc/nccl.conf)"})],
        "same-settings",
        "warning",
        "NCCL_IB_DISABLE not set on alice, 1 on bob",
        "paceline run --env NCCL_IB_DISABLE=1 ...",
    ),
    (
        [ALICE, dataclasses.replace(make_state("bob"), clock_ahead_s=(-62.1, -61.9))],
        "clocks",
        "warning",
        "clocks differ: bob is 1m02s behind (± 0.1s)",
        "On bob:  timedatectl set-ntp true",
    ),
    (
        [make_state("localhost", hostname="vm", boot_id="1"), make_state("127.0.0.1", hostname="vm", boot_id="1")],
        "one-machine-each",
        "warning",
        "localhost and 127.0.0.1 are one machine",
        "-H localhost:2",
    ),
    (
        [
            make_gpu_state("alice", hostname="vm", boot_id="1"),
            make_gpu_state("bob", hostname="vm", boot_id="1", namespaces={"ipc": "2"}),
        ],
        "one-machine-each",
        "failure",
        "alice and bob are containers of one machine, both called vm",
        "docker run --hostname NEW-NAME",
    ),
    (
        [ALICE, make_state("bob", hostname="alice")],
        "one-machine-each",
        "warning",
        "both call themselves alice",
        "On bob:  hostnamectl set-hostname NEW-NAME",
    ),
    (
        [ALICE, make_state("bob", machine_id=ALICE.details.machine_id)],
        "one-machine-each",
        "warning",
        "have one machine id",
        "systemd-machine-id-setup",
    ),
    (
        [make_state("alice", data={**DATA, "files": 9, "bytes": GB - 1}), make_state("bob", data=DATA)],
        "same-data",
        "warning",
        "data 9 files, 1000.0 MB on alice, 10 files, 1.0 GB on bob",
        "On bob:  for host in alice; do rsync -a --mkpath /data/ $host:/data/; done",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("states", "check", "status", "text", "remedy"), CASES)
def test_each_difference_and_the_line_that_mends_it(
    states: list[HostState], check: str, status: str, text: str, remedy: str
) -> None:
    [found] = speak_up(*states)
    assert (found.check, found.status) == (check, status)
    assert text in found.text and remedy in found.remedy, found


def test_every_check_has_a_case() -> None:
    names = {case[1] for case in CASES}
    assert len(names) == len([*differences.STOPPING_CHECKS, *differences.OTHER_CHECKS])


def test_rows_have_a_value_for_each_host() -> None:
    rows = {row.what: row for row in compare_hosts([ALICE, make_state("bob", packages={"numpy": "1.26.4"})]).rows}
    assert rows["numpy"].values == ("2.4.6", "1.26.4") and rows["numpy"].status == "warning"
    assert rows["torch"].values == ("2.13.0+cu128",) * 2 and rows["torch"].status == "ok"


def test_a_command_needs_no_torch() -> None:
    bare = [make_state(name, facts={"torch_version": None}, torch_version=None) for name in ("alice", "bob")]
    found = compare_hosts(bare, needs_torch=False).findings
    assert all(finding.status in ("ok", "skipped") for finding in found)


def test_a_module_whose_version_is_not_known_is_no_difference() -> None:
    assert speak_up(with_import("kernels", "alice", "1.0"), with_import("kernels", "bob", None)) == []
    [lacking] = speak_up(with_import("kernels", "alice", None), with_import("kernels", "bob", None, found=False))
    assert lacking.text == "kernels there on alice, none on bob"


def test_a_clock_that_could_be_right_is_not_blamed() -> None:
    slow_to_answer = dataclasses.replace(make_state("bob"), clock_ahead_s=(-3.0, 0.5))
    assert speak_up(ALICE, slow_to_answer) == []


def test_two_containers_told_apart_for_nccl() -> None:
    one = make_gpu_state("alice", hostname="vm", boot_id="1", variables={"NCCL_HOSTID": "a"})
    two = make_gpu_state("bob", hostname="vm", boot_id="1", namespaces={"ipc": "2"}, variables={"NCCL_HOSTID": "b"})
    assert "failure" not in {finding.status for finding in speak_up(one, two)}


def test_a_data_folder_that_is_not_there() -> None:
    missing = {"path": "/data", "files": 0, "bytes": 0, "is_complete": True, "is_readable": False}
    [found] = speak_up(make_state("alice", data=missing), make_state("bob", data=missing))
    assert (found.status, found.text) == ("failure", "no host has a folder /data that can be read")
    states = [make_state("alice", data=DATA), make_state("bob", data=missing), make_state("carol", data=missing)]
    [found] = speak_up(*states)
    assert found.status == "failure" and "none that can be read on bob and carol" in found.text
    assert found.remedy.startswith("On alice:  for host in bob carol; do rsync -a")


def test_an_import_that_is_nowhere_may_have_another_package() -> None:
    for name, told in (("cv2", "install opencv-python"), ("scipy", "install scipy"), ("apex", "install PACKAGE")):
        state = make_state(imports={name: {"found": False, "version": None}})
        [found] = [one for one in speak_up(state) if name in one.text]
        assert found.remedy.startswith("On each host:  ") and told in found.remedy


def test_data_too_large_to_count_is_skipped() -> None:
    states = [make_state(name, data={**DATA, "is_complete": False}) for name in ("alice", "bob")]
    assert "could be counted" in compare_hosts(states).findings[-1].text
