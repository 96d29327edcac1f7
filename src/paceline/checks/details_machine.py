"""What the kernel says of this machine: GPUs, memory, control groups, other runs' processes and leftovers.

Standard library only: this module runs on every host.
"""

from __future__ import annotations

import glob
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from paceline.launch.forks import ERRAND_NAME
from paceline.launch.process import LEASE_VARIABLE, is_alive, read_kernel_log

_MOST_GPU_ERRORS = 5
_MOST_LISTED = 20
_AGENT_SIGN = b"exec(eval(f.readline()))"
"""Stands on the command line of every agent and of its forks, and of no rank."""
_NO_LIMIT_BYTES = 1 << 60
"""Control groups of version 1 write a number above this for no limit."""


def read_text(path: str) -> str:
    """Without the white space around it; empty where it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def read_link(path: str) -> str:
    """Where it leads; empty where it can't be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def read_space(path: str) -> dict[str, int] | None:
    """{`total`, `free`} bytes of the file system; None where there is no such folder."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return {"total": stat.f_blocks * stat.f_frsize, "free": stat.f_bavail * stat.f_frsize}


def read_gpu() -> dict[str, Any]:
    """{`driver`: version of the kernel module or None, `libcuda`: versions on the disk, `cards`: NVIDIA cards on the
    bus, `devices`: /dev/nvidia0 and on, `errors`: lines of the kernel log, or None where it is closed}."""
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", read_text("/proc/driver/nvidia/version").split("\n")[0])
    libraries = glob.glob("/usr/lib*/libcuda.so.*.*") + glob.glob("/usr/lib/*/libcuda.so.*.*")
    return {
        "driver": version[1] if version else None,
        "libcuda": sorted({path.partition("libcuda.so.")[2] for path in libraries}),
        "cards": sum(_is_nvidia_card(folder) for folder in glob.glob("/sys/bus/pci/devices/*")),
        "devices": sorted(path for path in glob.glob("/dev/nvidia*") if path[len("/dev/nvidia") :].isdigit()),
        "errors": _read_gpu_errors(),
    }


def _is_nvidia_card(folder: str) -> bool:
    is_display = read_text(f"{folder}/class").startswith("0x03")
    return is_display and read_text(f"{folder}/vendor") == "0x10de"


def _read_gpu_errors() -> list[str] | None:
    """Errors that the driver has put into the kernel log, the last ones."""
    lines = read_kernel_log()
    return None if lines is None else [line for line in lines if "NVRM: Xid" in line][-_MOST_GPU_ERRORS:]


def read_memory() -> dict[str, int]:
    """{`total`, `available`} bytes."""
    split = (line.partition(":") for line in read_text("/proc/meminfo").splitlines())
    lines = {name: value for name, _, value in split}
    names = {"total": "MemTotal", "available": "MemAvailable"}
    return {key: int((lines.get(name) or "0 kB").split()[0]) * 1024 for key, name in names.items()}


def read_cgroup() -> dict[str, float | None]:
    """{`cores`, `memory`, `processes`}: the tightest bound of this process's control group and those above it."""
    cores: list[float] = []
    memory: list[float] = []
    processes: list[float] = []
    for line in read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for folder in _cgroup_folders(controllers, path):
            quota, _, period = read_text(f"{folder}/cpu.max").partition(" ")
            if not quota:
                quota, period = read_text(f"{folder}/cpu.cfs_quota_us"), read_text(f"{folder}/cpu.cfs_period_us")
            if quota.isdigit() and period.isdigit():
                cores.append(int(quota) / int(period))
            memory += _number(f"{folder}/memory.max", f"{folder}/memory.limit_in_bytes")
            processes += _number(f"{folder}/pids.max")
    bounded = [value for value in memory if value < _NO_LIMIT_BYTES]
    return {
        "cores": min(cores, default=None),
        "memory": min(bounded, default=None),
        "processes": min(processes, default=None),
    }


def _cgroup_folders(controllers: str, path: str) -> Iterator[str]:
    """From this group up to the root of its hierarchy; in a container the path may be one of the outside."""
    root = f"/sys/fs/cgroup/{controllers}".rstrip("/") if controllers else "/sys/fs/cgroup"
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        yield "/".join([root, *parts[:depth]])


def _number(*paths: str) -> list[float]:
    return [float(text) for text in map(read_text, paths) if text.isdigit()]


def find_container() -> str:
    """The kind of container that this is, `wsl`, or nothing."""
    if "microsoft" in read_text("/proc/sys/kernel/osrelease").lower():
        return "wsl"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if os.path.exists("/.dockerenv"):
        return "docker"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    return read_text("/run/systemd/container") or os.environ.get("container", "")  # noqa: SIM112  # systemd's own spelling


class Resolver:
    """Asks what the host's own name resolves to, in a thread: a resolver may not answer at all."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._answer: dict[str, Any] = {"addresses": [], "problem": "", "elapsed_s": 0.0}
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            self._answer["addresses"] = sorted({str(entry[4][0]) for entry in found})
        except (OSError, UnicodeError) as error:
            self._answer["problem"] = getattr(error, "strerror", None) or str(error)
        self._answer["elapsed_s"] = time.monotonic() - self._began_s

    def wait(self, limit_s: float) -> dict[str, Any]:
        """{`addresses`, `problem`, `elapsed_s`}, `limit_s` after the start at the latest."""
        self._thread.join(max(0.0, self._began_s + limit_s - time.monotonic()))
        if self._thread.is_alive():
            return {"addresses": [], "problem": "no answer", "elapsed_s": limit_s}
        return self._answer


def find_processes(our_run: str) -> list[dict[str, Any]]:
    """Processes of other runs of ours: whoever has an agent among its ancestors belongs to a run that is going on."""
    found: list[dict[str, Any]] = []
    mark = f"{LEASE_VARIABLE}=".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environ = file.read()
        except OSError:
            continue  # it has ended, or belongs to somebody else
        lease = next((word for word in environ.split(b"\0") if word.startswith(mark)), b"")
        run = lease[len(mark) :].decode(errors="replace").rpartition("/")[0]
        if run and run != our_run and is_alive(int(name)):
            found.append(
                {
                    "pid": int(name),
                    "run": run,
                    "age_s": _age_s(int(name)),
                    "command": _command(int(name)).replace(b"\0", b" ").decode(errors="replace").strip()[:200],
                    "is_led": _is_led(int(name)),
                }
            )
    return found[:_MOST_LISTED]


def _is_led(pid: int) -> bool:
    while pid > 1:
        if _AGENT_SIGN in _command(pid) and read_text(f"/proc/{pid}/comm") != ERRAND_NAME:
            return True
        stat = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        pid = int(stat[1]) if len(stat) > 1 else 0
    return False


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _age_s(pid: int) -> float:
    stat = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(stat) < 20:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / os.sysconf("SC_CLK_TCK"))


def find_shm_leftovers() -> list[dict[str, Any]]:
    """This user's files of NCCL and PyTorch in /dev/shm that no process has mapped any more."""
    paths = glob.glob("/dev/shm/nccl-*") + glob.glob("/dev/shm/torch_*")
    if not paths:
        return []
    used = _mapped_shm()
    found: list[dict[str, Any]] = []
    for path in sorted(paths):
        try:
            stat = os.stat(path)
        except OSError:
            continue
        if path not in used and stat.st_uid == os.getuid():
            found.append({"path": path, "bytes": stat.st_blocks * 512, "age_s": time.time() - stat.st_mtime})
    return found[:_MOST_LISTED]


def _mapped_shm() -> set[str]:
    used: set[str] = set()
    for path in glob.glob("/proc/[0-9]*/maps"):
        used.update(word for word in read_text(path).split() if word.startswith("/dev/shm/"))
    return used
