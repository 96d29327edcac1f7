"""Networks broken on purpose: the doctor names the pair or the host, the cause, and the command that mends it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(150)]

DRIVER = str(Path(__file__).parent / "check_network.py")
ALL = "h1,h2,h3,h4"
SHAPE = "tc qdisc replace dev eth0 root tbf"
GIGABIT = "rate 1gbit burst 125000 latency 50ms"
"""As the lab shapes its links."""
needs_nft = pytest.mark.skipif(shutil.which("nft") is None, reason="needs nftables")


def look(lab: Lab, depth: str, *, nic: str = "", hosts: str = ALL) -> tuple[list[dict[str, str]], list[str]]:
    """The findings that are not "ok", and the matrix."""
    done = lab.run("h1", [sys.executable, DRIVER, depth, nic, hosts], timeout_s=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["findings"], "whatever was looked at says so"
    return [finding for finding in found["findings"] if finding["status"] != "ok"], found["matrix"]


def do(lab: Lab, host: str, *commands: str, input: str | None = None) -> None:
    for command in commands:
        done = lab.run(host, command.split(), input=input)
        assert done.returncode == 0, f"{host}: {command}: {done.stderr}"


@contextlib.contextmanager
def changed(lab: Lab, hosts: Sequence[str], make: str, undo: str) -> Iterator[None]:
    """`{}` stands for the host's number."""
    with contextlib.ExitStack() as stack:
        for host in hosts:
            stack.callback(do, lab, host, *undo.replace("{}", host[1:]).split("; "))
            do(lab, host, *make.replace("{}", host[1:]).split("; "))
        yield


@contextlib.contextmanager
def filtering(lab: Lab, host: str, *rules: str) -> Iterator[None]:
    text = "table inet cluster {\n chain incoming {\n  type filter hook input priority 0; policy accept;\n"
    do(lab, host, "nft -f -", input=text + "".join(f"  {rule}\n" for rule in rules) + " }\n}\n")
    try:
        yield
    finally:
        do(lab, host, "nft delete table inet cluster")


def test_a_healthy_network_with_dockers_bridges(lab: Lab) -> None:
    bridge = "ip link add docker0 type bridge; ip address add 172.17.0.1/16 dev docker0; ip link set docker0 up"
    container = "ip link add inside type veth peer name plug; ip link set plug master docker0 up; ip link set inside up"
    with changed(lab, lab.hosts, f"{bridge}; {container}", "ip link del plug; ip link del docker0"):
        findings, matrix = look(lab, "full")
    assert findings == []
    speeds, trips = matrix[:5], matrix[5:]
    assert speeds[0].split() == ["Mb/s", "from", "↓", "→", *lab.hosts]
    assert [line.split()[0] for line in trips] == ["ms", *lab.hosts]
    assert [line.split()[1 + row] for row, line in enumerate(speeds[1:])] == ["·"] * 4
    rates = [float(cell) for line in speeds[1:] for cell in line.split()[1:] if cell != "·"]
    assert len(rates) == 12 and max(rates) < 1100, "the links carry one gigabit, so no link carried two at once"


@needs_nft
def test_three_kinds_of_firewalls(lab: Lab) -> None:
    high = "tcp flags syn / fin,syn,rst,ack tcp dport 1024-65535"
    with contextlib.ExitStack() as stack:
        stack.enter_context(filtering(lab, "h2", f"ip saddr {lab.address('h1')} {high} drop"))
        stack.enter_context(filtering(lab, "h3", "tcp dport 29500 accept", f"{high} reject with tcp reset"))
        stack.enter_context(filtering(lab, "h4", f"{high} reject with icmpx admin-prohibited"))
        findings, _ = look(lab, "quick")
    assert [(finding["check"], finding["status"], finding["where"]) for finding in findings] == [
        ("ports", "failure", "h1 → h2"),
        ("ports", "failure", "h1, h2 and h4 → h3"),
        ("ports", "failure", "h1, h2 and h3 → h4"),
    ]
    one_way, one_port, rejects = (finding["text"] for finding in findings)
    assert one_way.startswith("h1 cannot reach h2 on ports above 1024 (tried 10.77.0.2 from 10.77.0.1: no answer in 2")
    assert "a firewall on h2, or between them, drops it" in one_way and "the other direction is open" in one_way
    assert "refused in" in one_port and "only 22 and 29500 are open" in one_port
    assert "a firewall on h4 rejects it (EHOSTUNREACH)" in rejects and "only 22 is open" in rejects
    assert [finding["remedy"] for finding in findings] == [
        f"On {host}:  nft insert rule inet cluster incoming ip saddr 10.77.0.0/24 accept" for host in ("h2", "h3", "h4")
    ]


@needs_nft
def test_the_command_that_was_named_opens_the_firewall(lab: Lab) -> None:
    with filtering(lab, "h2", "tcp dport 30000-65535 drop"):
        findings, _ = look(lab, "quick", hosts="h1,h2")
        assert [finding["where"] for finding in findings] == ["h1 → h2", "h2 → h1"], "answers to h2 are dropped as well"
        [(place, command)] = {tuple(finding["remedy"].split(":  ")) for finding in findings}
        do(lab, place.removeprefix("On "), command)
        assert look(lab, "quick", hosts="h1,h2")[0] == []


def test_a_host_in_another_subnet(lab: Lab) -> None:
    near, far = "ip address {verb} 10.88.0.{}/24 dev eth0", "ip address {verb} 10.99.0.{}/24 dev eth0"
    with changed(lab, ["h1", "h3"], near.replace("{verb}", "add"), near.replace("{verb}", "del")):
        with changed(lab, ["h2"], far.replace("{verb}", "add"), far.replace("{verb}", "del")):
            findings, _ = look(lab, "quick", nic="10.88.0.0/24,10.99.0.0/24", hosts="h1,h2,h3")
    assert {finding["where"] for finding in findings} == {"h1 and h3 → h2", "h2 → h1", "h2 → h3"}
    assert all(finding["status"] == "failure" for finding in findings)
    assert any("there is no route from 10.88.0.0/24 to 10.99.0.0/24" in finding["text"] for finding in findings)
    assert all("--nic" in finding["remedy"] for finding in findings)


def test_a_link_that_is_down(lab: Lab) -> None:
    make = "ip link add eth1 link eth0 type macvlan mode bridge; ip address add 10.55.0.{}/24 dev eth1"
    with changed(lab, lab.hosts, make, "ip link del eth1"):
        for host in ("h1", "h2", "h4"):
            do(lab, host, "ip link set eth1 up")
        findings, _ = look(lab, "quick", nic="10.55.0.0/24")
    [finding] = findings
    assert (finding["where"], finding["status"]) == ("h3", "failure")
    assert "eth1 10.55.0.3 (down or not plugged in)" in finding["text"] and "--nic" in finding["remedy"]


def test_another_mtu_on_one_side(lab: Lab) -> None:
    with changed(lab, ["h2"], "ip link set dev eth0 mtu 1400", "ip link set dev eth0 mtu 1500"):
        [finding], _ = look(lab, "quick")
    assert (finding["check"], finding["status"], finding["where"]) == ("packet-size", "warning", "h2")
    assert "eth0 of h2 has MTU 1400, that of h1, h3 and h4 1500" in finding["text"]
    assert finding["remedy"] == "On h2:  ip link set dev eth0 mtu 1500"


@needs_nft
def test_large_packets_that_get_lost(lab: Lab) -> None:
    # So small a bucket makes the kernel cut into packets what a virtual cable would else carry as one piece.
    make = f"{SHAPE} rate 1gbit burst 3000 latency 50ms"
    with changed(lab, lab.hosts[:2], make, f"{SHAPE} {GIGABIT}"):
        with filtering(lab, "h2", "tcp dport 22 accept", "tcp sport 22 accept", "meta length > 1420 drop"):
            [finding], matrix = look(lab, "full", hosts="h1,h2")
    assert (finding["check"], finding["status"], finding["where"]) == ("packet-size", "failure", "h1 → h2")
    assert "a transfer of 1 MB stalls: packets of 1420 bytes pass" in finding["text"]
    assert "ip link set dev eth0 mtu 1420" in finding["remedy"]
    assert matrix[1].split()[-1] == "✗", "and the table shows where"


def test_one_link_of_four_is_slow(lab: Lab) -> None:
    with changed(lab, ["h3"], f"{SHAPE} rate 100mbit burst 16384 latency 50ms", f"{SHAPE} {GIGABIT}"):
        [finding], _ = look(lab, "full")
    assert (finding["check"], finding["status"], finding["where"]) == ("speed", "warning", "h3")
    assert finding["text"].startswith("h3 sends to h1, h2 and h4 at ")
    slow, usual = map(float, re.findall(r"(\d+) Mb/s", finding["text"]))
    assert slow < 110 and usual > 3 * slow
    assert finding["remedy"].startswith("On h3:  ethtool eth0")


def test_pytorch_forms_a_group(lab: Lab) -> None:
    findings, _ = look(lab, "together", hosts="h1,h2")
    assert findings == []
