"""Networks broken on purpose: the doctor names the pair or the host, the cause, and the command that mends it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(150)]

PACELINE = str(Path(sys.executable).parent / "paceline")
ALL = "h1,h2,h3,h4"
NETWORK = {"reachable", "wires", "interfaces", "ports", "packet-size", "round-trip", "speed", "gloo"}
SHAPE = "tc qdisc replace dev eth0 root tbf"
GIGABIT = "rate 1gbit burst 125000 latency 50ms"
"""As the lab shapes its links."""
needs_nft = pytest.mark.skipif(shutil.which("nft") is None, reason="needs nftables")


def check(lab: Lab, *arguments: str, hosts: str = ALL) -> str:
    done = lab.run(
        "h1", [PACELINE, "check", "-H", hosts, *arguments], timeout_s=140, env={**os.environ, "COLUMNS": "300"}
    )
    assert not done.stderr, done.stderr
    return done.stdout


def look(lab: Lab, *arguments: str, hosts: str = ALL) -> list[dict[str, str]]:
    """What is found of the network that is not "ok"."""
    found: list[dict[str, str]] = json.loads(check(lab, "--json", *arguments, hosts=hosts))["findings"]
    of_network = [finding for finding in found if finding["check"] in NETWORK]
    assert of_network, "whatever was looked at says so"
    return [finding for finding in of_network if finding["status"] not in ("ok", "skipped")]


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
        lines = check(lab, "--verbose").splitlines()
    [speeds] = [place for place, line in enumerate(lines) if line.startswith("Mb/s")]
    assert lines[speeds].split()[4:] == lines[speeds + 5].split()[4:] == [*lab.hosts]
    rows = [line.split() for line in lines[speeds + 1 : speeds + 5]]
    assert [row[0] for row in rows] == [*lab.hosts]
    assert [row[1 + place] for place, row in enumerate(rows)] == ["·"] * 4
    rates = [float(cell) for row in rows for cell in row[1:] if cell != "·"]
    assert len(rates) == 12 and max(rates) < 1100, "the links carry one gigabit, and each carried one measurement"
    text = "\n".join(lines)
    assert "✓ all 12 directions are open, on 4 ports chosen at random" in text
    assert "✓ packets of 1500 bytes pass in all 12 directions" in text
    assert "✓ eth0: an own address and subnet each" in text, "and not docker0, though it is the same on all hosts"
    assert "✓ 4 hosts add up 64.0 MB in" in text, "PyTorch itself forms a group"
    assert "✗" not in text and "docker0" not in text


@needs_nft
def test_three_kinds_of_firewalls(lab: Lab) -> None:
    high = "tcp flags syn / fin,syn,rst,ack tcp dport 1024-65535"
    with contextlib.ExitStack() as stack:
        stack.enter_context(filtering(lab, "h2", f"ip saddr {lab.address('h1')} {high} drop"))
        stack.enter_context(filtering(lab, "h3", "tcp dport 29500 accept", f"{high} reject with tcp reset"))
        stack.enter_context(filtering(lab, "h4", f"{high} reject with icmpx admin-prohibited"))
        findings = look(lab, "--quick")
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


@pytest.mark.large
@needs_nft
def test_the_command_that_was_named_opens_the_firewall(lab: Lab) -> None:
    with filtering(lab, "h2", "tcp dport 30000-65535 drop"):
        findings = look(lab, "--quick", hosts="h1,h2")
        assert [finding["where"] for finding in findings] == ["h1 → h2", "h2 → h1"], "answers to h2 are dropped as well"
        [(place, command)] = {tuple(finding["remedy"].split(":  ")) for finding in findings}
        do(lab, place.removeprefix("On "), command)
        assert look(lab, "--quick", hosts="h1,h2") == []


@pytest.mark.large
def test_a_host_in_another_subnet(lab: Lab) -> None:
    near, far = "ip address {verb} 10.88.0.{}/24 dev eth0", "ip address {verb} 10.99.0.{}/24 dev eth0"
    with changed(lab, ["h1", "h3"], near.replace("{verb}", "add"), near.replace("{verb}", "del")):
        with changed(lab, ["h2"], far.replace("{verb}", "add"), far.replace("{verb}", "del")):
            findings = look(lab, "--quick", "--nic", "10.88.0.0/24,10.99.0.0/24", hosts="h1,h2,h3")
    assert {finding["where"] for finding in findings} == {"h1 and h3 → h2", "h2 → h1", "h2 → h3"}
    assert all(finding["status"] == "failure" for finding in findings)
    assert any("there is no route from 10.88.0.0/24 to 10.99.0.0/24" in finding["text"] for finding in findings)
    assert all("--nic" in finding["remedy"] for finding in findings)


@pytest.mark.large
def test_a_link_that_is_down(lab: Lab) -> None:
    make = "ip link add eth1 link eth0 type macvlan mode bridge; ip address add 10.55.0.{}/24 dev eth1"
    with changed(lab, lab.hosts, make, "ip link del eth1"):
        for host in ("h1", "h2", "h4"):
            do(lab, host, "ip link set eth1 up")
        [finding] = look(lab, "--quick", "--nic", "10.55.0.0/24")
    assert (finding["where"], finding["status"]) == ("h3", "failure")
    assert "eth1 10.55.0.3 (down or not plugged in)" in finding["text"] and "--nic" in finding["remedy"]


@pytest.mark.large
def test_another_mtu_on_one_side(lab: Lab) -> None:
    with changed(lab, ["h2"], "ip link set dev eth0 mtu 1400", "ip link set dev eth0 mtu 1500"):
        [finding] = look(lab, "--quick")
    assert (finding["check"], finding["status"], finding["where"]) == ("packet-size", "warning", "h2")
    assert "eth0 of h2 has MTU 1400, that of h1, h3 and h4 1500" in finding["text"]
    assert finding["remedy"] == "On h2:  ip link set dev eth0 mtu 1500"


@pytest.mark.large
@needs_nft
def test_large_packets_that_get_lost(lab: Lab) -> None:
    # So small a bucket makes the kernel cut into packets what a virtual cable would else carry as one piece.
    make = f"{SHAPE} rate 1gbit burst 3000 latency 50ms"
    with changed(lab, lab.hosts[:2], make, f"{SHAPE} {GIGABIT}"):
        with filtering(lab, "h2", "tcp dport 22 accept", "tcp sport 22 accept", "meta length > 1420 drop"):
            [finding] = look(lab, hosts="h1,h2")
    assert (finding["check"], finding["status"], finding["where"]) == ("packet-size", "failure", "h1 → h2")
    assert "a transfer of 1 MB stalls: packets of 1420 bytes pass" in finding["text"]
    assert "ip link set dev eth0 mtu 1420" in finding["remedy"]


@pytest.mark.large
def test_one_link_of_four_is_slow(lab: Lab) -> None:
    with changed(lab, ["h3"], f"{SHAPE} rate 100mbit burst 16384 latency 50ms", f"{SHAPE} {GIGABIT}"):
        lines = check(lab).splitlines()
    [place] = [place for place, line in enumerate(lines) if "h3 sends to h1, h2 and h4 at " in line]
    assert lines[place].startswith("! ")
    slow, usual = map(float, re.findall(r"(\d+) Mb/s", lines[place]))
    assert slow < 110 and usual > 3 * slow
    assert lines[place + 1].strip().startswith("On h3:  ethtool eth0")
    assert sum("Mb/s are usual" in line for line in lines) == 1, "and no other link is"
