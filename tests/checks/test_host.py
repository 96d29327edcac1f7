"""Every check of one host: what makes it speak up, and that it is content with a healthy host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from made_up_hosts import DISK, GB, make_gpu_state, make_state
from paceline.checks import gpu, host, surroundings
from paceline.checks.findings import Status
from paceline.checks.host_states import HostState
from paceline.checks.results import Result, collect

ALL = (*host.HOST_CHECKS, *surroundings.SURROUNDINGS_CHECKS, *gpu.GPU_CHECKS)
MB = 10**6


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("state", [make_state(), make_gpu_state()], ids=["plain", "gpus"])
def test_a_healthy_host(check: host.HostCheck, state: HostState) -> None:
    results = list(check(state))
    assert results and {result.status for result in results} == {"ok"}, results


def disk(use: str, **changes: Any) -> HostState:
    return make_state(disks={use: {**DISK, "is_writable": True, **changes}})


def process(pid: int, *, is_led: bool) -> dict[str, Any]:
    return {"pid": pid, "run": "20260101-1", "age_s": 7200.0, "command": "python train.py", "is_led": is_led}


CASES: list[tuple[Callable[[HostState], Any], HostState, Status, str, str]] = [
    (
        host.check_python_environment,
        make_state(user_site="/home/u/.local/lib", torch_path="/home/u/.local/lib/torch/version.py"),
        "warning",
        "torch comes from the user's own folder /home/u/.local/lib, not from /home/u/venv",
        "--env PYTHONNOUSERSITE=1",
    ),
    (
        host.check_torch,
        make_state(torch_version="2.3.1+cpu"),
        "warning",
        "torch 2.3.1+cpu is older",
        "--upgrade torch",
    ),
    (host.check_torch, make_state(torch_version=None), "skipped", "there is no torch", ""),
    (host.check_shared_memory, make_state(shm=None), "failure", "there is no /dev/shm", "mount -t tmpfs"),
    (
        host.check_shared_memory,
        make_state(shm={"total": 64 * MB, "free": 60 * MB}, container="docker"),
        "warning",
        "/dev/shm has 60.0 MB free of 64.0 MB",
        "docker run --shm-size=8g",
    ),
    (
        host.check_shared_memory,
        make_gpu_state(shm={"total": MB, "free": MB}),
        "failure",
        "too little for NCCL between 2 GPUs",
        "On bob:  mount -o remount,size=8G /dev/shm",
    ),
    (host.check_shared_memory, make_state(shm={"total": MB, "free": MB}), "warning", "can die there", "remount"),
    (host.check_open_files, make_state(limits={"nofile": [512, 4096]}), "warning", "only 512 files", "nofile 65536"),
    (host.check_open_files, make_state(limits={"nofile": [64, 64]}), "failure", "only 64 files", "On bob:  echo"),
    (
        host.check_locked_memory,
        make_state(rdma_devices=["mlx5_0"]),
        "warning",
        "only 8.4 MB may be locked, but mlx5_0",
        "memlock unlimited",
    ),
    (host.check_stack_and_processes, make_state(limits={"stack": [65536, -1]}), "warning", "65.5 kB", "stack 8192"),
    (
        host.check_stack_and_processes,
        make_state(cgroup={"processes": 100.0}),
        "warning",
        "only 100 processes",
        "--pids-limit=-1",
    ),
    (host.check_stack_and_processes, make_state(limits={"nproc": [200, 200]}), "warning", "only 200", "nproc 65536"),
    (
        host.check_disk,
        disk("state", free=MB),
        "failure",
        "1.0 MB free in /home/u: too little to start",
        "XDG_STATE_HOME",
    ),
    (host.check_disk, disk("state", free=GB), "warning", "little for checkpoints", "On bob:  df -h /home/u"),
    (host.check_disk, disk("temporary", free=MB // 2), "failure", "too little to start", "TMPDIR"),
    (host.check_disk, disk("temporary", free=100 * MB), "warning", "little for temporary files", "TMPDIR"),
    (host.check_disk, disk("state", is_writable=False), "failure", "/home/u can't be written", "findmnt"),
    (host.check_disk, disk("state", free_inodes=0), "failure", "no room for another file", "df -i"),
    (host.check_disk, disk("state", free_inodes=10), "warning", "room for 10 more files", "df -i"),
    (
        host.check_memory,
        make_state(memory={"available": MB}),
        "warning",
        "1.0 MB of memory are available",
        "On bob:  ps",
    ),
    (host.check_memory, make_state(cgroup={"memory": 1e8}), "warning", "control group allows 100.0 MB", "--memory"),
    (host.check_cores, make_state(cgroup={"cores": 2.5}), "warning", "8 cores are seen", "OMP_NUM_THREADS=2"),
    (host.check_cores, make_state(slots=9), "warning", "9 ranks share 8 cores", "-H bob:8"),
    (host.check_load, make_state(load=20.0), "warning", "20 processes want the 8 cores", "On bob:  ps"),
    (
        surroundings.check_host_name,
        make_state(resolved={"addresses": [], "problem": "no answer", "elapsed_s": 3.0}),
        "warning",
        "bob was not resolved within 3.0 s",
        "echo '127.0.1.1 bob' >> /etc/hosts",
    ),
    (
        surroundings.check_host_name,
        make_state(resolved={"addresses": [], "problem": "no answer", "elapsed_s": 0.25}),
        "skipped",
        "had not answered within 0.25 s",
        "",
    ),
    (
        surroundings.check_host_name,
        make_state(resolved={"addresses": [], "problem": "Name or service not known", "elapsed_s": 0.1}),
        "warning",
        "can't be resolved (Name or service not known)",
        "/etc/hosts",
    ),
    (surroundings.check_host_name, make_state(resolved={"elapsed_s": 2.0}), "warning", "it took 2.0 s", "/etc/hosts"),
    (surroundings.check_encoding, make_state(encoding="ISO-8859-1"), "warning", "ISO-8859-1", "--env PYTHONUTF8=1"),
    (
        surroundings.check_settings,
        make_state(variables={"CUDA_LAUNCH_BLOCKING": "1"}),
        "warning",
        "CUDA_LAUNCH_BLOCKING=1 waits for the GPU",
        "On bob:  grep -n CUDA_LAUNCH_BLOCKING ~/.bashrc",
    ),
    (
        surroundings.check_settings,
        make_state(nccl_conf={"NCCL_ALGO": "Tree (/etc/nccl.conf)"}),
        "warning",
        "NCCL_ALGO=Tree takes the choice from NCCL",
        "On bob:  grep -n NCCL_ALGO /etc/nccl.conf ",
    ),
    (
        surroundings.check_settings,
        make_state(variables={"NCCL_SOCKET_FAMILY": "IPv4"}),
        "warning",
        "NCCL_SOCKET_FAMILY=IPv4 does nothing",
        "grep",
    ),
    (
        surroundings.check_other_runs,
        make_state(processes=[process(41, is_led=False), process(42, is_led=False)]),
        "warning",
        "2 processes of run 20260101-1 left there, 2h00m00s old: python train.py",
        "On bob:  kill -9 41 42",
    ),
    (
        surroundings.check_other_runs,
        make_state(processes=[process(41, is_led=True)]),
        "warning",
        "1 process of another run at work there (20260101-1)",
        "On bob:  ps -fp 41",
    ),
    (
        surroundings.check_shared_memory_leftovers,
        make_state(shm_leftovers=[{"path": f"/dev/shm/nccl-{i}", "bytes": MB, "age_s": 7200.0} for i in range(5)]),
        "warning",
        "5 files of dead processes in /dev/shm, 5.0 MB",
        "On bob:  rm /dev/shm/nccl-0 /dev/shm/nccl-1",
    ),
    (
        gpu.check_gpu_driver,
        make_state(gpu={"cards": 1}),
        "warning",
        "1 NVIDIA card there, but the driver",
        "modprobe",
    ),
    (gpu.check_gpu_driver, make_gpu_state(gpu={"devices": []}), "warning", "no /dev/nvidia0", "nvidia-modprobe"),
    (
        gpu.check_gpu_driver,
        make_gpu_state(gpu={"devices": []}, container="docker"),
        "warning",
        "no /dev/nvidia0",
        "docker run --gpus all",
    ),
    (
        gpu.check_gpu_driver,
        make_gpu_state(gpu={"libcuda": ["580.65.06"]}),
        "failure",
        "the kernel has driver 570.124.06, but libcuda is 580.65.06",
        "reboot",
    ),
    (
        gpu.check_gpu_torch,
        make_gpu_state(torch_cuda=None),
        "warning",
        "is built without CUDA",
        "--force-reinstall torch",
    ),
    (gpu.check_gpu_torch, make_gpu_state(torch_cuda="13.0"), "failure", "needs driver 580.0.0 or newer", "update"),
    (gpu.check_gpu_torch, make_gpu_state(torch_cuda="99.0"), "skipped", "nothing is known of CUDA 99.0", ""),
    (
        gpu.check_gpu_visible,
        make_gpu_state(facts={"visible_gpus": "0"}, num_gpus=1),
        "warning",
        "1 of 2 NVIDIA cards can be used: CUDA_VISIBLE_DEVICES='0'",
        "grep -n CUDA_VISIBLE_DEVICES",
    ),
    (
        gpu.check_gpu_nccl,
        make_gpu_state(packages={"nvidia-nccl-cu13": "2.28.9"}),
        "failure",
        "nvidia-nccl-cu12 and nvidia-nccl-cu13 are both installed",
        "pip uninstall -y nvidia-nccl-cu13 && /home/u/venv/bin/python -m pip install --force-reinstall --no-deps "
        "nvidia-nccl-cu12==2.27.3",
    ),
    (
        gpu.check_gpu_nccl,
        make_gpu_state(variables={"LD_LIBRARY_PATH": "/opt/nccl/"}, nccl_libraries=["/opt/nccl/libnccl.so.2"]),
        "warning",
        "LD_LIBRARY_PATH puts /opt/nccl/libnccl.so.2 before",
        "--env LD_LIBRARY_PATH=",
    ),
    (
        gpu.check_gpu_errors,
        make_gpu_state(gpu={"errors": ["NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus."]}),
        "warning",
        "Xid 79 (the card has fallen off the bus",
        "dmesg | grep Xid",
    ),
    (gpu.check_gpu_errors, make_gpu_state(gpu={"errors": None}), "skipped", "root only", ""),
]


@pytest.mark.parametrize(("check", "state", "status", "text", "remedy"), CASES)
def test_what_makes_it_speak_up(
    check: host.HostCheck, state: HostState, status: Status, text: str, remedy: str
) -> None:
    found = [result for result in check(state) if result.status != "ok"]
    assert [result.status for result in found] == [status]
    assert text in found[0].text and remedy in found[0].remedy, found
    assert bool(found[0].remedy) == (status != "skipped"), "a remedy for all that needs one"


def test_every_check_has_a_case_in_which_it_speaks_up() -> None:
    assert {case[0] for case in CASES} == set(ALL)


def test_errors_of_the_script_are_no_errors_of_the_card() -> None:
    line = "NVRM: Xid (PCI:0000:01:00): 31, pid=1, name=python, MMU Fault"
    assert [result.status for result in gpu.check_gpu_errors(make_gpu_state(gpu={"errors": [line]}))] == ["ok"]


def test_a_host_whose_gpus_stay_unused_may_have_any_driver() -> None:
    idle = make_gpu_state(torch_cuda="13.0", num_gpus=0, gpu={"libcuda": ["1"]})
    found = [result.status for check in (gpu.check_gpu_driver, gpu.check_gpu_torch) for result in check(idle)]
    assert found == ["ok", "ok"]


def test_a_check_that_breaks_is_a_verdict() -> None:
    assert collect(host.check_cores, make_state(cgroup={"cores": "many"})) == [
        Result(status="crashed", text="the check itself broke: TypeError: '<' not supported between instances of "
        "'str' and 'int'")
    ]  # fmt: skip
