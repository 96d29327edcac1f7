"""The lab's hosts are separate, joined and shaped as promised, and nothing of them stays."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import HostError, InputError
from paceline.lab import Lab, LabSpec, format_rate, missing, names, parse_rate, take_down
from paceline.lab.spec import LAB_ROOT, bucket_bytes, folders_to_keep

pytestmark = pytest.mark.lab

CLI = [sys.executable, "-c", "from paceline.cli.lab import app; app()"]

SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7001), timeout=10) as wire:
    for _ in range(int(sys.argv[2])):
        wire.sendall(bytes(1_000_000))
"""
RECEIVE = """
import socket, time
with socket.create_server(("", 7001)) as server:
    print("listening", flush=True)
    server.settimeout(10)
    wire, _ = server.accept()
    wire.settimeout(10)
    num_bytes, began = len(wire.recv(1)), time.monotonic()
    while chunk := wire.recv(1 << 20):
        num_bytes += len(chunk)
    print(num_bytes * 8 / (time.monotonic() - began))
"""
COUNT_INTERRUPTS = """
import signal, sys, time
count = 0
def on_interrupt(number, frame):
    global count
    count += 1
signal.signal(signal.SIGINT, on_interrupt)
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(10 + count))
print("ready", flush=True)
time.sleep(20)
time.sleep(20)
"""
MAKER = """
import os, sys, time
from paceline.lab import Lab
lab = Lab.up(sys.argv[1], num_hosts=1, tied=True)
print(lab.run("h1", ["sh", "-c", "pwd; cat seen; echo; ls /tmp"]).stdout.split(), flush=True)
time.sleep(30)
"""


@pytest.fixture
def own_name(lab_machine: None) -> Iterator[str]:
    """The name for a lab of the test's own."""
    name = f"test-{os.getpid()}-own"
    yield name
    take_down(name)


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {timeout_s:g} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        # The keeper is nobody's child: the machine's own process 1 may take its time to reap it.
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_each_host_has_its_own_places_name_and_processes(lab: Lab) -> None:
    places = "~/mark /tmp/mark /var/tmp/mark /run/mark /var/log/mark /dev/shm/mark"
    assert lab.run("h1", ["sh", "-c", f"for path in {places}; do echo mine > $path; done"]).returncode == 0
    assert lab.run("h1", ["sh", "-c", f"cat {places} | sort | uniq -c"]).stdout.split() == ["6", "mine"]
    seen = lab.run("h2", ["sh", "-c", f"ls {places} /var/lib/paceline-lab"])
    assert seen.stdout.split() == ["/var/lib/paceline-lab:"] or seen.stdout == ""
    assert (lab.home("h1") / "mark").read_text() == "mine\n"
    assert not Path("/var/tmp/mark").exists() and not Path("~/mark").expanduser().exists()

    facts = "hostname; echo $(ls /sys/class/net); ip -o -4 address show eth0; grep 127.0.1.1 /etc/hosts"
    hostname, interfaces, address, own_name = lab.run("h2", ["sh", "-c", facts]).stdout.splitlines()
    assert hostname == "h2" and interfaces.split() == ["eth0", "lo"]
    assert "10.77.0.2/24" in address and own_name.split() == ["127.0.1.1", "h2"]

    with lab.popen("h1", ["sleep", "20"]) as sleeper:
        count = "import glob; print(sum(open(path).read() == 'sleep\\n' for path in glob.glob('/proc/[0-9]*/comm')))"
        wait_until(lambda: ("sleep", "20") in [p.command for p in lab.processes("h1")], timeout_s=5)
        assert lab.run("h1", [sys.executable, "-c", count]).stdout == "1\n"
        assert lab.run("h2", [sys.executable, "-c", count]).stdout == "0\n"
        sleeper.kill()


def test_ssh_works_between_all_ordered_pairs(lab: Lab) -> None:
    started = []
    for host in lab.hosts:
        others = " ".join(other for other in lab.hosts if other != host)
        script = f"for other in {others}; do ssh $other 'echo $(hostname) $HOME'; done"
        started.append(lab.popen(host, ["sh", "-c", script], stdout=subprocess.PIPE, text=True))
    for host, process in zip(lab.hosts, started, strict=True):
        stdout, _ = process.communicate(timeout=30)
        assert stdout.splitlines() == [f"{other} {lab.spec.home}" for other in lab.hosts if other != host]


def test_ssh_by_address_and_to_itself(lab: Lab) -> None:
    assert lab.run("h1", ["ssh", lab.address("h3"), "hostname"]).stdout == "h3\n"
    assert lab.run("h1", ["ssh", "h1", "hostname"]).stdout == "h1\n"


def test_a_host_with_another_key_is_refused(lab: Lab) -> None:
    known_hosts = lab.home("h1") / ".ssh" / "known_hosts"
    text = known_hosts.read_text()
    try:
        known_hosts.write_text(text.replace("h2,", "h0,").replace("h3,", "h2,"))
        refused = lab.run("h1", ["ssh", "h2", "hostname"])
    finally:
        known_hosts.write_text(text)
    assert refused.returncode == 255 and "Host key verification failed" in refused.stderr


def test_the_link_carries_its_rate_and_no_more(lab: Lab) -> None:
    with lab.popen("h2", [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None and receiver.stdout.readline() == "listening\n"
        assert lab.run("h1", [sys.executable, "-c", SEND, lab.address("h2"), "60"]).returncode == 0
        measured_bits_per_s = float(receiver.communicate(timeout=20)[0])
    # The upper bound is exact but for the bucket; the lower one leaves room for a busy machine.
    assert 0.5e9 < measured_bits_per_s < 1.01e9


def test_popen_is_the_command_itself(lab: Lab) -> None:
    process = lab.popen("h3", ["sleep", "20"], env={**os.environ, "MARK": "x"})
    wait_until(lambda: process.pid in [p.pid for p in lab.processes("h3") if p.command[0] == "sleep"], timeout_s=5)
    (seen,) = [p for p in lab.processes("h3") if p.pid == process.pid]
    assert seen.environ["MARK"] == "x" and seen.environ["HOME"] == lab.spec.home
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == -signal.SIGTERM
    assert process.pid not in [p.pid for p in lab.processes("h3")]


def test_run_kills_what_takes_too_long(lab: Lab) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        lab.run("h3", ["sh", "-c", "sleep 21 & sleep 21"], timeout_s=0.5)
    wait_until(lambda: ("sleep", "21") not in [p.command for p in lab.processes("h3")], timeout_s=5)


def test_orphans_are_reaped(lab: Lab) -> None:
    lab.run("h4", ["sh", "-c", "(setsid sleep 0.1 &) ; exit 0"])
    states = (
        "import os; print([p for p in os.listdir('/proc') if p.isdigit() and ') Z ' in open(f'/proc/{p}/stat').read()])"
    )
    wait_until(lambda: "sleep" not in str(lab.processes("h4")), timeout_s=5)
    assert lab.run("h4", [sys.executable, "-c", states]).stdout == "[]\n"


def test_a_cut_link_cuts_and_a_mended_one_carries(lab: Lab) -> None:
    reach = ["ssh", "-o", "ConnectTimeout=1", "h4", "hostname"]
    lab.link("h4", up=False)
    try:
        assert lab.run("h1", reach).returncode == 255
        assert lab.run("h1", ["ssh", "h3", "hostname"]).stdout == "h3\n"
    finally:
        lab.link("h4", up=True)
    assert lab.run("h1", reach).stdout == "h4\n"


def test_exec_passes_exit_code_input_and_folder(lab: Lab) -> None:
    enter = [*CLI, "exec", "--name", lab.name, "h2", "--"]
    script = "cat; hostname; pwd; exit 7"
    done = subprocess.run([*enter, "sh", "-c", script], input="in\n", capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (7, f"in\nh2\n{os.getcwd()}\n")
    killed = subprocess.run([*enter, "sh", "-c", "kill -9 $$"], timeout=20)
    assert killed.returncode == 128 + signal.SIGKILL


def test_exec_passes_each_signal_once_and_its_death_too(lab: Lab) -> None:
    command = [*CLI, "exec", "--name", lab.name, "h2", "--", sys.executable, "-c", COUNT_INTERRUPTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        wait_until(lambda: _sleeps_again(lab), timeout_s=5)
        process.terminate()
        assert process.wait(timeout=10) == 11
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.kill()
    wait_until(lambda: COUNT_INTERRUPTS not in str([p.command for p in lab.processes("h2")]), timeout_s=5)


def test_down_leaves_nothing(own_name: str) -> None:
    lab = Lab.up(own_name, num_hosts=2, rate_bits_per_s=parse_rate("100mbit"))
    assert own_name in names()
    lab.run("h1", ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 &"])
    pids = [process.pid for host in lab.hosts for process in lab.processes(host)]
    assert len(pids) == 3  # two sshd and the sleeper
    pids += [_first_process(folder) for folder in (lab.spec.folder, lab.spec.folder / "h1", lab.spec.folder / "h2")]
    assert all(is_alive(pid) for pid in pids)
    lab.down()
    # A namespace lives on in nothing but a process, a mount or an open descriptor.
    assert not [pid for pid in pids if is_alive(pid)]
    assert not lab.spec.folder.exists() and own_name not in names()
    assert own_name not in Path("/proc/self/mountinfo").read_text()
    assert not {"switch", *lab.hosts} & set(os.listdir("/sys/class/net"))
    lab.down()  # a second time: nothing happens


def test_up_works_over_the_remains_of_a_crash(own_name: str) -> None:
    lab = Lab.up(own_name, num_hosts=2)
    with pytest.raises(InputError, match="is up already"):
        Lab.up(own_name, num_hosts=2)
    os.kill(_first_process(lab.spec.folder / "h2"), signal.SIGKILL)
    wait_until(lambda: lab.processes("h1") != [] and _has_ended(lab, "h2"), timeout_s=5)
    os.kill(_first_process(lab.spec.folder), signal.SIGKILL)
    wait_until(lambda: own_name not in names(), timeout_s=5)
    assert lab.spec.folder.exists()
    with Lab.up(own_name, num_hosts=2) as again:
        assert again.run("h1", ["ssh", "h2", "hostname"]).stdout == "h2\n"
    assert not lab.spec.folder.exists()


def test_a_tied_lab_ends_with_its_maker_and_keeps_the_current_folder(own_name: str) -> None:
    folder, other = (Path(tempfile.mkdtemp(dir="/tmp")) for _ in range(2))
    try:
        (folder / "seen").write_text("shared")
        command = [sys.executable, "-c", MAKER, own_name]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as maker:
            assert maker.stdout is not None
            said = maker.stdout.readline()
            maker.kill()
        wait_until(lambda: not (LAB_ROOT / own_name).exists(), timeout_s=10)
        where, seen, *in_tmp = ast.literal_eval(said)
        assert (where, seen) == (str(folder), "shared")
        assert folder.name in in_tmp and other.name not in in_tmp
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(other)


def test_what_cannot_be_asked_is_refused_in_words(lab: Lab) -> None:
    with pytest.raises(InputError, match="no lab called 'nothing' is up"):
        Lab.find("nothing")
    with pytest.raises(InputError, match=r"can't be called '\.\./etc'"):
        take_down("../etc")
    with pytest.raises(InputError, match="can have 1 to 64"):
        LabSpec(name="a", num_hosts=65, rate_bits_per_s=None, home="/root", keep=())
    with pytest.raises(InputError, match="the least is 10kbit"):
        LabSpec(name="a", num_hosts=1, rate_bits_per_s=1, home="/root", keep=())
    with pytest.raises(InputError, match="--rate 1: expected a number with kbit, mbit or gbit"):
        parse_rate("1")
    with pytest.raises(InputError, match="has no host 'h9'; its hosts are h1, h2, h3, h4"):
        lab.run("h9", ["true"])
    with pytest.raises(InputError, match="--keep /tmp: each host has its own"):
        folders_to_keep([], asked=["/tmp"], home="/root")
    assert Lab.find(lab.name).hosts == lab.hosts


def test_who_is_not_root_is_told_so(lab_machine: None) -> None:
    os.seteuid(65534)
    try:
        (absent,) = missing()
        with pytest.raises(InputError, match=r"root \(this is uid 65534\)"):
            Lab.up("refused")
    finally:
        os.seteuid(0)
    assert absent.hint.startswith("sudo")


def test_rates_and_buckets() -> None:
    assert [format_rate(parse_rate(text)) for text in ("1gbit", "2.5gbit", "100mbit", "64kbit")] == [
        "1gbit",
        "2.5gbit",
        "100mbit",
        "64kbit",
    ]
    assert format_rate(None) == "unshaped"
    assert bucket_bytes(10**9) == 125_000 and bucket_bytes(10**6) == 16 * 1024


def test_only_what_would_be_hidden_is_kept(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    home = str(tmp_path)
    needed = [home, "/usr", str(inner), str(tmp_path / "a"), str(tmp_path / "missing"), "/tmp"]
    assert folders_to_keep(needed, asked=[], home=home) == (str(tmp_path / "a"),)


def _sleeps_again(lab: Lab) -> bool:
    # The first of the two sleeps goes on after an interrupt (PEP 475), so only the handler's end can be seen: none
    # is pending or blocked any more.
    pids = [p.pid for p in lab.processes("h2") if COUNT_INTERRUPTS in p.command and p.command[0] == sys.executable]
    return bool(pids) and all(
        "\nShdPnd:\t0000000000000000\n" in Path(f"/proc/{pid}/status").read_text() for pid in pids
    )


def _first_process(folder: Path) -> int:
    return int((folder / "pid").read_text().split()[0])


def _has_ended(lab: Lab, host: str) -> bool:
    try:
        lab.run(host, ["true"])
    except HostError:
        return True
    return False
