"""What is made of the kernel's files, which here are made up; and of the folders of packages."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.checks import details, details_machine
from paceline.launch.process import LEASE_VARIABLE

V2 = "0::/user.slice/session.scope"
V1 = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n3:pids:/docker/abc"


def pretend(monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    """Files of the kernel, by their path with `__` for each slash."""
    texts = {f"/{name.replace('__', '/')}": text for name, text in files.items()}
    monkeypatch.setattr(details_machine, "read_text", lambda path: texts.get(path, ""))


@pytest.mark.parametrize(
    ("line", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (x@y)", "580.65.06"),
        ("", None),
    ],
)
def test_the_driver(monkeypatch: pytest.MonkeyPatch, line: str, driver: str | None) -> None:
    pretend(monkeypatch, proc__driver__nvidia__version=f"{line}\nGCC version:  gcc version 12.3.0")
    assert details_machine.read_gpu()["driver"] == driver


def test_the_tightest_bound_of_the_groups_above(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/self/cgroup": V2,
        "/sys/fs/cgroup/user.slice/session.scope/cpu.max": "max 100000",
        "/sys/fs/cgroup/user.slice/session.scope/memory.max": "8000000000",
        "/sys/fs/cgroup/user.slice/cpu.max": "250000 100000",
        "/sys/fs/cgroup/user.slice/memory.max": "4000000000",
        "/sys/fs/cgroup/user.slice/pids.max": "max",
    }
    monkeypatch.setattr(details_machine, "read_text", lambda path: texts.get(path, ""))
    assert details_machine.read_cgroup() == {"cores": 2.5, "memory": 4e9, "processes": None}


def test_groups_of_the_first_version_whose_path_is_one_of_the_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/self/cgroup": V1,
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "/sys/fs/cgroup/pids/pids.max": "512",
    }
    monkeypatch.setattr(details_machine, "read_text", lambda path: texts.get(path, ""))
    assert details_machine.read_cgroup() == {"cores": 1.5, "memory": None, "processes": 512.0}


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, proc__meminfo="MemTotal:  1000 kB\nMemAvailable:  10 kB\nSwapTotal: 5 kB")
    assert details_machine.read_memory() == {"total": 1024000, "available": 10240}


def test_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, proc__sys__kernel__osrelease="5.15.153.1-microsoft-standard-WSL2")
    assert details_machine.find_container() == "wsl"


def test_a_resolver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def wait(*_: object, **__: object) -> list[object]:
        release.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    resolver = details_machine.Resolver()
    began_s = time.monotonic()
    assert resolver.wait(0.05) == {"addresses": [], "problem": "no answer", "elapsed_s": 0.05}
    assert time.monotonic() - began_s < 5
    release.set()
    assert resolver.wait(5.0)["problem"] == ""


def test_a_name_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert details_machine.Resolver().wait(5.0)["problem"] == "Name or service not known"


def test_processes_of_other_runs() -> None:
    """One that nobody leads, one whose parent is an agent by its command line, and one of our own run."""
    sleep = "import time; time.sleep(30)"
    follow = "import subprocess; print(subprocess.Popen(['sleep', '30']).pid, flush=True)"
    lead = f"'exec(eval(f.readline()))'; {follow}; {sleep}"

    def start(run: str, code: str) -> subprocess.Popen[str]:
        env = {**os.environ, LEASE_VARIABLE: f"{run}/0"}
        return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)

    with start("test-lost", f"print(1, flush=True); {sleep}") as lost, start("test-led", lead) as leader:
        try:
            assert lost.stdout is not None and lost.stdout.readline()
            assert leader.stdout is not None
            led = int(leader.stdout.readline())
            found: dict[int, Any] = {}
            while not {lost.pid, led} <= found.keys():  # a process that has just begun may have no environment yet
                found = {process["pid"]: process for process in details_machine.find_processes("another")}
            assert not found[lost.pid]["is_led"] and found[lost.pid]["run"] == "test-lost"
            assert found[led]["is_led"] and found[led]["command"] == "sleep 30" and found[led]["age_s"] < 60
            assert lost.pid not in {process["pid"] for process in details_machine.find_processes("test-lost")}
        finally:
            os.kill(led, 9)
            lost.kill()
            leader.kill()


def test_packages_are_known_by_their_folders(tmp_path: Path) -> None:
    (tmp_path / "first" / "Foo_Bar-1.2.dist-info").mkdir(parents=True)
    (tmp_path / "second" / "foo.bar-1.1.dist-info").mkdir(parents=True)
    (tmp_path / "second" / "nvidia_nccl_cu12-2.27.3.dist-info").mkdir(parents=True)
    found = details._read_packages([str(tmp_path / "first"), str(tmp_path / "second")])
    assert found == {"foo-bar": "1.2", "nvidia-nccl-cu12": "2.27.3"}, "the first on the path is the one that counts"


def test_packages_of_another_name_than_the_module() -> None:
    packages = {"scikit-learn": "1.9", "pyyaml": "6.0"}
    assert details._find_import("sklearn", packages)["version"] == "1.9"
    assert details._find_import("no_such_module", packages) == {"found": False, "version": None}


def test_nccls_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nccl.conf"
    path.write_text("# a comment\nNCCL_ALGO=Tree  # why\n\nNCCL_DEBUG = INFO\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(path))
    monkeypatch.setenv("HOME", str(tmp_path))
    found = details._read_nccl_conf()
    assert found["NCCL_ALGO"] == f"Tree ({path})" and found["NCCL_DEBUG"] == f"INFO ({path})"


def test_data(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"12345")
    (tmp_path / "y").write_bytes(b"12")
    assert details._measure_data(str(tmp_path)) == {
        "path": str(tmp_path),
        "files": 2,
        "bytes": 7,
        "is_complete": True,
        "is_readable": True,
    }
    assert details._measure_data(None) is None
    lacking = details._measure_data(str(tmp_path / "no"))
    assert lacking is not None and lacking["files"] == 0 and not lacking["is_readable"]


def test_shared_memory_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(f"/dev/shm/torch_{os.getpid()}_test")
    path.write_bytes(b"1234")
    try:
        assert str(path) in {file["path"] for file in details_machine.find_shm_leftovers()}
        monkeypatch.setattr(details_machine, "_mapped_shm", lambda: {str(path)})
        assert str(path) not in {file["path"] for file in details_machine.find_shm_leftovers()}
    finally:
        path.unlink()
