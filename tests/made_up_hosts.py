"""Hosts that nobody has: a healthy one, and what a test changes about it."""

from __future__ import annotations

from typing import Any

from paceline.checks.details import Details
from paceline.checks.host_states import HostState
from paceline.launch.facts import Facts

GB = 10**9
TWO_CARDS = ["NVIDIA GeForce RTX 3090"] * 2

FACTS = Facts(
    hostname="bob",
    python_path="/home/u/venv/bin/python",
    python_version="3.11.7",
    torch_version="2.13.0+cu128",
    cuda_version="12.8",
    has_safetensors=True,
    gpus=[],
    visible_gpus=None,
    num_cores=8,
    machine="x86_64",
    state_folder="/home/u/.local/state/paceline",
    free_bytes=100 * GB,
    interfaces=[],
)
DISK = {"path": "/home/u", "free": 100 * GB, "total": 200 * GB, "free_inodes": 10**6, "inodes": 10**7}
DETAILS = Details(
    environment="venv",
    prefix="/home/u/venv",
    user_site="",
    packages={"numpy": "2.4.6", "torch": "2.13.0", "nvidia-nccl-cu12": "2.27.3", "nvidia-cudnn-cu12": "9.10.2.21"},
    imports={},
    torch_path="/home/u/venv/lib/python3.11/site-packages/torch/version.py",
    torch_version="2.13.0+cu128",
    torch_cuda="12.8",
    gpu={"driver": None, "libcuda": [], "cards": 0, "devices": [], "errors": []},
    nccl_libraries=[],
    shm={"total": 16 * GB, "free": 16 * GB},
    limits={"nofile": [1024, 1048576], "memlock": [8 << 20, 8 << 20], "stack": [8 << 20, -1], "nproc": [60000, 60000]},
    disks={"state": {**DISK, "is_writable": True}, "temporary": {**DISK, "path": "/tmp", "is_writable": True}},
    cgroup={"cores": None, "memory": None, "processes": None},
    memory={"total": 32 * GB, "available": 30 * GB},
    num_cpus=8,
    load=0.3,
    wall_s=1.8e9,
    monotonic_s=1000.0,
    encoding="UTF-8",
    time_zone="+0100",
    hostname="bob",
    resolved={"addresses": ["127.0.1.1"], "problem": "", "elapsed_s": 0.001},
    boot_id="boot of bob",
    machine_id="machine of bob",
    namespaces={"net": "1", "ipc": "1", "mnt": "1"},
    container="",
    rdma_devices=[],
    variables={},
    nccl_conf={},
    processes=[],
    shm_leftovers=[],
    data=None,
)
GPU = {
    "driver": "570.124.06",
    "libcuda": ["570.124.06"],
    "cards": 2,
    "devices": ["/dev/nvidia0", "/dev/nvidia1"],
    "errors": [],
}


def make_state(
    name: str = "bob", *, facts: dict[str, Any] | None = None, slots: int = 1, num_gpus: int = 0, **details: Any
) -> HostState:
    """A healthy host without a GPU, with these of its details changed; a dict changes that part of a dict."""
    own = {"hostname": name, "boot_id": f"boot of {name}", "machine_id": f"machine of {name}"}
    changes = {key: _merged(getattr(DETAILS, key), value) for key, value in {**own, **details}.items()}
    return HostState(
        name=name,
        facts=FACTS.replace(hostname=name, **(facts or {})),
        details=DETAILS.replace(**changes),
        clock_ahead_s=(-0.1, 0.1),
        slots=slots,
        num_gpus=num_gpus,
    )


def make_gpu_state(name: str = "bob", *, facts: dict[str, Any] | None = None, **details: Any) -> HostState:
    """A healthy host with two cards."""
    details = {**details, "gpu": {**GPU, **details.get("gpu", {})}}
    num_gpus = details.pop("num_gpus", 2)
    return make_state(name, facts={"gpus": TWO_CARDS, **(facts or {})}, slots=2, num_gpus=num_gpus, **details)


def _merged(before: Any, change: Any) -> Any:
    return {**before, **change} if isinstance(before, dict) and isinstance(change, dict) else change
