"""The lab's inside: `python -m paceline.lab.keeper FOLDER` becomes process 1 of the lab and of each host.

    keeper              process 1 of the lab's PID namespace; its network namespace holds the switch
    ├── process 1 of h1     own network, name, IPC, process and mount namespaces; reaps orphans; starts sshd
    └── process 1 of h2     ...

The kernel ends all processes of a PID namespace with its process 1. So killing the keeper ends the whole lab,
killing one host's process 1 ends that host, and namespaces, links and mounts go with their last process.

Standard input is the lease. The maker of the lab holds its other end: "stay" makes the lab independent of it;
an end without that word, for whatever reason, ends the lab and removes its folder. Standard output gets one
JSON line per host when its sshd listens, or why it does not. The inherited lock on the folder says that the
lab is alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from paceline.lab import namespaces
from paceline.lab.requirements import tool
from paceline.lab.spec import LAB_ROOT, STAY, LabSpec, bucket_bytes, cores_of

SWITCH = "switch"

_COMMAND_TIMEOUT_S = 10.0
_SSHD_TIMEOUT_S = 10.0
_SSHD_LISTENS = ":0016 "
"""Port 22 as /proc/net/tcp writes local addresses."""


def main() -> None:
    """Become the keeper; this process itself ends at once, so that the keeper is nobody's child."""
    folder = Path(sys.argv[1])
    spec = LabSpec.read(folder)
    namespaces.unshare(namespaces.NEW_PIDS | namespaces.NEW_NETWORK)
    if os.fork() == 0:
        _keep(spec)


def _keep(spec: LabSpec) -> NoReturn:
    _write_pid(spec.folder)
    _run("ip", "link", "add", SWITCH, "type", "bridge")
    _run("ip", "link", "set", SWITCH, "up")
    for host in spec.hosts:
        with namespaces.children_in(None):
            if os.fork() == 0:
                _be_host(spec, host)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # from here on the kernel reaps what ends
    _let_go_of(sys.stdout.fileno())
    if os.read(sys.stdin.fileno(), len(STAY)) == STAY:
        while True:
            signal.pause()
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, 0)  # returns, by raising, when the last host has ended
    shutil.rmtree(spec.folder, ignore_errors=True)
    os._exit(0)


def _be_host(spec: LabSpec, host: str) -> NoReturn:
    try:
        sshd = _set_up(spec, host)
        report = {"host": host}
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        sshd = None
        report = {"host": host, "error": str(error)}
    os.write(sys.stdout.fileno(), f"{json.dumps(report)}\n".encode())  # at once, or lines of hosts would mix
    if sshd is None:
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _let_go_of(sys.stdout.fileno())
    _let_go_of(sys.stdin.fileno())
    while True:
        signal.pause()


def _set_up(spec: LabSpec, host: str) -> subprocess.Popen[bytes]:
    os.sched_setaffinity(0, cores_of(spec, host, os.sched_getaffinity(0)))
    _write_pid(spec.folder / host)
    switch = os.open("/proc/self/ns/net", os.O_RDONLY)
    kinds = (namespaces.NEW_MOUNTS, namespaces.NEW_NETWORK, namespaces.NEW_HOSTNAME, namespaces.NEW_IPC)
    namespaces.unshare(sum(kinds))
    socket.sethostname(host)
    _plug_in(spec, host, switch)
    os.close(switch)
    _lay_mounts(spec, spec.folder / host)
    return _start_sshd()


def _plug_in(spec: LabSpec, host: str, switch: int) -> None:
    """A cable from eth0 to the switch's port named like the host; the rate holds in both directions."""
    there = f"/proc/self/fd/{switch}"
    port = f"link add eth0 type veth peer name {host} netns {there}"
    own = f"{port}\naddress add {spec.address(host)}/24 dev eth0\nlink set eth0 up\nlink set lo up\n"
    _run("ip", "-batch", "-", script=own, descriptor=switch)
    plug = f"link set {host} master {SWITCH} up\n"
    into_switch = ("nsenter", f"--net={there}")
    _run(*into_switch, _path("ip"), "-batch", "-", script=plug, descriptor=switch)
    rate = spec.rate_bits_per_s
    if rate is not None:
        shape = f"root tbf rate {rate}bit burst {bucket_bytes(rate)} latency 50ms\n"
        _run("tc", "qdisc", "add", "dev", "eth0", *shape.split())
        _run(*into_switch, _path("tc"), "qdisc", "add", "dev", host, *shape.split(), descriptor=switch)


def _lay_mounts(spec: LabSpec, own: Path) -> None:
    """The host's own places over the machine's, and back on top of them what is to stay shared."""
    namespaces.keep_mounts_private()
    kept = {path: os.open(path, os.O_PATH) for path in ("/sys/fs/cgroup", *spec.keep) if os.path.isdir(path)}
    for place, name in sorted(spec.own_places.items()):  # sorted: a place comes before what lies in it
        Path(place).mkdir(parents=True, exist_ok=True)
        namespaces.bind(own / name, place)
    for name in ("hosts", "shadow"):
        if Path("/etc", name).exists():
            namespaces.bind(own / name, Path("/etc", name))
    namespaces.mount("tmpfs", "/dev/shm", "mode=1777")
    namespaces.mount("proc", "/proc")
    namespaces.mount("sysfs", "/sys")  # /sys/class/net shows the network of whoever mounted it
    namespaces.mount("tmpfs", LAB_ROOT, "mode=0755")  # no host sees another's places
    for path, descriptor in sorted(kept.items()):
        os.makedirs(path, exist_ok=True)
        namespaces.bind(f"/proc/self/fd/{descriptor}", path)
        os.close(descriptor)


def _start_sshd() -> subprocess.Popen[bytes]:
    log = "/var/log/sshd.log"
    command = [_path("sshd"), "-D", "-f", "/run/paceline-lab/sshd_config", "-E", log]
    sshd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/")
    deadline = time.monotonic() + _SSHD_TIMEOUT_S
    while _SSHD_LISTENS not in Path("/proc/net/tcp").read_text():
        if sshd.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"sshd does not listen (exit code {sshd.poll()}): {Path(log).read_text().strip()}")
        time.sleep(0.005)
    return sshd


def _run(program: str, *arguments: str, script: str = "", descriptor: int | None = None) -> None:
    command = [_path(program), *arguments]
    passed = () if descriptor is None else (descriptor,)
    done = subprocess.run(
        command,
        input=script,
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT_S,
        check=False,
        pass_fds=passed,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} {script!r} ended with {done.returncode}: {done.stderr.strip()}")


def _path(program: str) -> str:
    return tool(program) or program


def _write_pid(folder: Path) -> None:
    # /proc is still the machine's own: its "self" counts as the machine counts. With the namespace, for the
    # number may be another process's one day.
    (folder / "pid").write_text(f"{os.readlink('/proc/self')} {os.readlink('/proc/self/ns/pid')}")


def _let_go_of(descriptor: int) -> None:
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), descriptor)


if __name__ == "__main__":
    main()
