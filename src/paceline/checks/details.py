"""The raw details of one host, read on it in one go: the errand of every host check. It judges nothing.

Standard library only, and no import of torch: this module runs on every host, while the user waits.
"""

from __future__ import annotations

import glob
import importlib.util
import locale
import os
import re
import resource
import site
import sys
import tempfile
import time
from typing import Any

from paceline.checks import details_machine
from paceline.launch.facts import find_torch, state_folder
from paceline.records import Record

QUICK_RESOLVE_LIMIT_S = 0.25
"""For a run's start, which must not wait for a resolver that doesn't answer."""
RESOLVE_LIMIT_S = 3.0
_TELLING = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "CUDA_",
    "PYTORCH_",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONNOUSERSITE",
    "OMP_",
)
_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "stack": resource.RLIMIT_STACK,
    "nproc": resource.RLIMIT_NPROC,
}
OTHER_NAMES = {
    "cv2": ("opencv-python", "opencv-python-headless", "opencv-contrib-python"),
    "PIL": ("pillow", "pillow-simd"),
    "sklearn": ("scikit-learn",),
    "skimage": ("scikit-image",),
    "yaml": ("pyyaml",),
    "bs4": ("beautifulsoup4",),
    "dateutil": ("python-dateutil",),
    "google": ("protobuf",),
    "pytorch_lightning": ("pytorch-lightning", "lightning"),
}
"""Imports whose package has another name, of those that training scripts use most."""


class Details(Record):
    """One host, as its own interpreter sees it. Sizes in bytes; None: there is no such thing, or it can't be read."""

    environment: str
    """`venv`, `conda`, `conda base` or `system`."""
    prefix: str
    """The environment's folder."""
    user_site: str
    """The user's own packages, which this interpreter looks into as well; empty where it doesn't."""
    packages: dict[str, str]
    """Every installed package, in lower case with hyphens, and its version."""
    imports: dict[str, Any]
    """Of each module that was asked for: {`found`: whether it can be imported, `version`: of its package or None}."""
    torch_path: str | None
    torch_version: str | None
    torch_cuda: str | None
    gpu: dict[str, Any]
    """What `details_machine.read_gpu` says."""
    nccl_libraries: list[str]
    """Every libnccl.so.2 that this interpreter could come to load."""
    shm: dict[str, int] | None
    """{`total`, `free`} of /dev/shm."""
    limits: dict[str, list[int]]
    """[soft, hard] of `nofile`, `memlock`, `stack`, `nproc`; -1 is no limit."""
    disks: dict[str, dict[str, Any]]
    """Of `state` and `temporary`: {`path`, `free`, `total`, `free_inodes`, `inodes`, `is_writable`}."""
    cgroup: dict[str, float | None]
    """{`cores`, `memory`, `processes`}: what the control group allows."""
    memory: dict[str, int]
    """{`total`, `available`}."""
    num_cpus: int
    """All that the machine has, whatever this process may use."""
    load: float
    """Processes that ran or waited for a core, as a mean over the last minute."""
    wall_s: float
    monotonic_s: float
    encoding: str
    time_zone: str
    hostname: str
    resolved: dict[str, Any]
    """{`addresses`, `problem`, `elapsed_s`} of the host's own name."""
    boot_id: str
    machine_id: str
    namespaces: dict[str, str]
    """`net`, `ipc`, `mnt`: which of the kernel's worlds this process lives in."""
    container: str
    """`docker`, `podman`, `kubernetes`, `lxc`, ..., `wsl`, or empty."""
    rdma_devices: list[str]
    variables: dict[str, str]
    """NCCL_*, GLOO_*, TORCH_*, CUDA_*, PYTORCH_* and the like, as they are set there."""
    nccl_conf: dict[str, str]
    """NCCL's settings from its files: name -> `value (path)`."""
    processes: list[dict[str, Any]]
    """Of other runs of ours: {`pid`, `run`, `age_s`, `command`, `is_led`: its agent lives}."""
    shm_leftovers: list[dict[str, Any]]
    """Files in /dev/shm that nobody uses any more: {`path`, `bytes`, `age_s`}."""
    data: dict[str, Any] | None
    """{`path`, `files`, `bytes`, `is_complete`, `is_readable`} of the data folder, where one was asked for."""


def main(argument: dict[str, Any]) -> dict[str, Any]:
    """`argument`: {`run`: our own run's id, `imports`: module names, `resolve_limit_s`, `data`: a folder or None}."""
    resolver = details_machine.Resolver()
    folders = _package_folders()
    packages = _read_packages(folders)
    torch_path, torch_version, torch_cuda = find_torch()
    details = Details(
        environment=_environment(),
        prefix=sys.prefix,
        user_site=site.getusersitepackages() if site.ENABLE_USER_SITE else "",
        packages=packages,
        imports={name: _find_import(name, packages) for name in argument["imports"]},
        torch_path=torch_path,
        torch_version=torch_version,
        torch_cuda=torch_cuda,
        gpu=details_machine.read_gpu(),
        nccl_libraries=_find_nccl(folders),
        shm=details_machine.read_space("/dev/shm"),
        limits={name: list(resource.getrlimit(number)) for name, number in _LIMITS.items()},
        disks={"state": _read_disk(state_folder()), "temporary": _read_disk(_temporary_folder())},
        cgroup=details_machine.read_cgroup(),
        memory=details_machine.read_memory(),
        num_cpus=os.cpu_count() or 1,
        load=os.getloadavg()[0],
        encoding=locale.getpreferredencoding(False),
        time_zone=time.strftime("%z"),
        hostname=os.uname().nodename,
        boot_id=details_machine.read_text("/proc/sys/kernel/random/boot_id"),
        machine_id=details_machine.read_text("/etc/machine-id"),
        namespaces={name: details_machine.read_link(f"/proc/self/ns/{name}") for name in ("net", "ipc", "mnt")},
        container=details_machine.find_container(),
        rdma_devices=sorted(os.path.basename(path) for path in glob.glob("/sys/class/infiniband/*")),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(_TELLING)},
        nccl_conf=_read_nccl_conf(),
        processes=details_machine.find_processes(str(argument["run"])),
        shm_leftovers=details_machine.find_shm_leftovers(),
        data=_measure_data(argument["data"]),
        resolved=resolver.wait(float(argument["resolve_limit_s"])),
        wall_s=time.time(),
        monotonic_s=time.monotonic(),
    )
    return details.as_dict()


def _environment() -> str:
    if os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
        return "conda base" if os.path.isdir(os.path.join(sys.prefix, "condabin")) else "conda"
    return "venv" if sys.prefix != sys.base_prefix else "system"


def _package_folders() -> list[str]:
    return [folder for folder in dict.fromkeys(sys.path) if os.path.isdir(folder)]


def _read_packages(folders: list[str]) -> dict[str, str]:
    """From the names of the folders alone: a hundred times faster than reading what is in them."""
    packages: dict[str, str] = {}
    for folder in folders:
        for entry in os.listdir(folder):
            stem, dot, _ = entry.rpartition(".dist-info") if entry.endswith(".dist-info") else ("", "", "")
            name, _, version = stem.rpartition("-")
            if dot and name:
                packages.setdefault(normalise(name), version)  # the first on the path is the one that is imported
    return dict(sorted(packages.items()))


def normalise(name: str) -> str:
    """`Foo_Bar.baz` -> `foo-bar-baz`: names that an index takes for the same."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _find_import(name: str, packages: dict[str, str]) -> dict[str, Any]:
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    names = [normalise(name), *OTHER_NAMES.get(name, ())]
    return {"found": found, "version": next((packages[n] for n in names if n in packages), None)}


def _find_nccl(folders: list[str]) -> list[str]:
    asked = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    places = [
        *asked,
        *(os.path.join(folder, "nvidia", "nccl", "lib") for folder in folders),
        os.path.join(sys.prefix, "lib"),
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/local/cuda/lib64",
        "/usr/local/lib",
    ]
    paths = (os.path.join(place, "libnccl.so.2") for place in dict.fromkeys(places))
    return [path for path in paths if os.path.exists(path)]


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # no folder can be written to
        return os.environ.get("TMPDIR", "/tmp")


def _read_disk(path: str) -> dict[str, Any]:
    space = details_machine.read_space(path) or {"total": 0, "free": 0}
    try:
        stat = os.statvfs(path)
    except OSError:
        return {"path": path, **space, "free_inodes": 0, "inodes": 0, "is_writable": False}
    is_writable = os.access(path, os.W_OK) and not stat.f_flag & os.ST_RDONLY
    return {"path": path, **space, "free_inodes": stat.f_favail, "inodes": stat.f_files, "is_writable": is_writable}


def _read_nccl_conf() -> dict[str, str]:
    paths = ["/etc/nccl.conf", os.path.expanduser("~/.nccl.conf"), os.environ.get("NCCL_CONF_FILE", "")]
    found: dict[str, str] = {}
    for path in filter(None, paths):
        for line in details_machine.read_text(path).splitlines():
            name, equals, value = line.partition("#")[0].partition("=")
            if equals:
                found[name.strip()] = f"{value.strip()} ({path})"
    return found


_DATA_LIMIT_S = 2.0


def _measure_data(folder: str | None) -> dict[str, Any] | None:
    """Number and size of all files below it, as far as two seconds reach."""
    if folder is None:
        return None
    if not os.path.isdir(folder) or not os.access(folder, os.R_OK | os.X_OK):
        return {"path": folder, "files": 0, "bytes": 0, "is_complete": True, "is_readable": False}
    files = num_bytes = 0
    deadline_s = time.monotonic() + _DATA_LIMIT_S
    todo = [folder]
    while todo and time.monotonic() < deadline_s:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    elif entry.is_file():
                        files, num_bytes = files + 1, num_bytes + entry.stat().st_size
        except OSError:
            continue
    return {"path": folder, "files": files, "bytes": num_bytes, "is_complete": not todo, "is_readable": True}
