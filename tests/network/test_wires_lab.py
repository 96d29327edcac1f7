"""Real hosts as network namespaces: two switches, each host with a cable to both; then cables are cut."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

from paceline.cluster.spec import Host
from paceline.errors import HostError
from paceline.network.candidates import Candidate, Dial, list_candidates
from paceline.network.interfaces import Interface, rank_interface
from paceline.network.wires import DialResult, choose_wires

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2"),
]

NONCE = "f" * 32
DIAL_TIMEOUT_S = 1.0
AGENT = """
import json, sys
from paceline.network.interfaces import list_interfaces
from paceline.network.probe import Listener, dial
index, nonce, timeout_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
listener = None
for line in sys.stdin:
    what, argument = json.loads(line)
    if what == "list":
        answer = [interface.to_json() for interface in list_interfaces()]
    elif what == "listen":
        if listener is not None:
            listener.close()
        listener = Listener(argument, nonce, index)
        answer = listener.ports
    else:
        answer = dial(argument, nonce, timeout_s)
    print(json.dumps(answer), flush=True)
if listener is not None:
    listener.close()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class Lab:
    """Three hosts, two switches, all in namespaces of their own."""

    def __init__(self, num_hosts: int) -> None:
        self.prefix = f"plw{os.getpid()}"
        self.switch = f"{self.prefix}s"
        self.hosts = [Host(name=f"h{index}") for index in range(num_hosts)]
        self.agents: list[subprocess.Popen[str]] = []

    def build(self) -> None:
        ip("netns", "add", self.switch)
        for net in range(2):
            ip("-n", self.switch, "link", "add", f"br{net}", "type", "bridge")
            ip("-n", self.switch, "link", "set", f"br{net}", "up")
        for index in range(len(self.hosts)):
            name = f"{self.prefix}h{index}"
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            for net in range(2):
                plug, inside = f"p{net}h{index}", f"{'abc'[index]}net{net}"
                ip("-n", self.switch, "link", "add", plug, "type", "veth", "peer", "name", inside, "netns", name)
                ip("-n", self.switch, "link", "set", plug, "master", f"br{net}", "up")
                ip("-n", name, "address", "add", f"10.77.{net}.{index + 1}/24", "dev", inside)
                ip("-n", name, "link", "set", inside, "up")
            # The same on every host, as docker's is.
            ip("-n", name, "link", "add", "docker0", "type", "bridge")
            ip("-n", name, "address", "add", "172.17.0.1/16", "dev", "docker0")
            ip("-n", name, "link", "set", "docker0", "up")
            command = ["ip", "netns", "exec", name, sys.executable, "-c", AGENT]
            self.agents.append(
                subprocess.Popen(
                    [*command, str(index), NONCE, str(DIAL_TIMEOUT_S)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def tear_down(self) -> None:
        for agent in self.agents:
            assert agent.stdin is not None
            assert agent.stdout is not None
            agent.stdin.close()
            agent.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(5)
            agent.kill()
            agent.wait()
        for name in (self.switch, *(f"{self.prefix}h{index}" for index in range(len(self.hosts)))):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False)

    def ask(self, requests: Sequence[tuple[str, object]]) -> list:
        """One request to each agent, all at the same time."""
        for agent, request in zip(self.agents, requests, strict=True):
            assert agent.stdin is not None
            agent.stdin.write(json.dumps(request) + "\n")
            agent.stdin.flush()
        return [json.loads(agent.stdout.readline()) for agent in self.agents if agent.stdout is not None]

    def interfaces(self) -> list[list[Interface]]:
        records = self.ask([("list", None)] * len(self.agents))
        return [[Interface.from_json(record) for record in of_host] for of_host in records]

    def candidates(self) -> tuple[tuple[Candidate, ...], ...]:
        return list_candidates(self.hosts, self.interfaces())

    def choose(self) -> list[str]:
        candidates = self.candidates()
        ports = self.ask([("listen", [c.address for c in of_host]) for of_host in candidates])

        def dial_all(dials: Sequence[Dial]) -> list[DialResult]:
            per_host = [[d for d in dials if d.source_host == index] for index in range(len(self.hosts))]
            answers = self.ask([("dial", [d.target(ports[d.host]) for d in part]) for part in per_host])
            return [
                DialResult(dial=dial, outcome=outcome, elapsed_ms=elapsed_ms, detail=detail)
                for part, rows in zip(per_host, answers, strict=True)
                for dial, (outcome, elapsed_ms, detail) in zip(part, rows, strict=True)
            ]

        return [f"{wire.interface} {wire.address}" for wire in choose_wires(candidates, dial_all)]


@pytest.fixture
def lab() -> Iterator[Lab]:
    made = Lab(3)
    try:
        made.build()
        yield made
    finally:
        made.tear_down()


def wait_for_carrier(lab: Lab, count: int) -> None:
    """The kernel reports a carrier a moment after the cable is plugged or pulled."""
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        up = [c for of_host in lab.interfaces() for c in of_host if "net" in c.name and rank_interface(c)[0] < 4]
        if len(up) == count:
            return
        time.sleep(0.02)
    pytest.fail(f"expected {count} cables with a carrier: {lab.interfaces()}")


def test_the_network_that_joins_all_is_found_as_cables_are_cut(lab: Lab) -> None:
    wait_for_carrier(lab, 6)
    started_s = time.monotonic()
    assert lab.choose() == ["anet0 10.77.0.1", "bnet0 10.77.0.2", "cnet0 10.77.0.3"]
    assert time.monotonic() - started_s < 0.8, "a sound network must cost no waiting"

    # A cable that is pulled is seen without dialling.
    ip("-n", lab.switch, "link", "set", "p0h1", "down")
    wait_for_carrier(lab, 5)
    assert lab.choose() == ["anet1 10.77.1.1", "bnet1 10.77.1.2", "cnet1 10.77.1.3"]
    ip("-n", lab.switch, "link", "set", "p0h1", "up")
    wait_for_carrier(lab, 6)

    # A dead switch port: the link is up, but nothing comes through.
    ip("-n", lab.switch, "link", "set", "p0h2", "nomaster")
    started_s = time.monotonic()
    assert lab.choose() == ["anet1 10.77.1.1", "bnet1 10.77.1.2", "cnet1 10.77.1.3"]
    assert time.monotonic() - started_s < 2 * DIAL_TIMEOUT_S

    # Both dead for one host: named, in bounded time.
    ip("-n", lab.switch, "link", "set", "p1h2", "nomaster")
    started_s = time.monotonic()
    with pytest.raises(HostError) as caught:
        lab.choose()
    assert time.monotonic() - started_s < 4 * DIAL_TIMEOUT_S
    first, *lines = caught.value.message.splitlines()
    assert first == "no network joins all 3 hosts:"
    assert lines[0].startswith("  h0 (anet0 10.77.0.1) to h2 (cnet0 10.77.0.3): no answer in 1")
    assert lines[-1] == "  and 1 more pair"


def test_what_the_kernel_says_of_each_interface(lab: Lab) -> None:
    name = f"{lab.prefix}h0"
    ip("-n", name, "link", "add", "br0", "type", "bridge")
    ip("-n", name, "link", "set", "anet1", "master", "br0")
    ip("-n", name, "link", "set", "br0", "up")
    ip("-n", name, "address", "add", "10.99.0.1/32", "peer", "10.99.0.2/32", "dev", "br0")
    wait_for_carrier(lab, 5)  # a part of a bridge is not used
    deadline_s = time.monotonic() + 5
    while True:  # a bridge is ready a moment after its first cable
        found = {interface.name: interface for interface in lab.interfaces()[0]}
        if found["br0"].up or time.monotonic() > deadline_s:
            break
        time.sleep(0.02)
    assert (found["anet0"].kind, found["anet0"].up, found["anet0"].has_device) == ("veth", True, False)
    assert ("inet", "10.77.0.1", 24) in found["anet0"].addresses
    assert found["anet0"].speed_mbps is None
    assert found["anet1"].master == "br0"
    assert rank_interface(found["anet1"])[1] == "part of br0"
    assert (found["br0"].kind, found["br0"].up) == ("bridge", True)
    assert ("inet", "10.99.0.1", 32) in found["br0"].addresses, "our own end, not the other"
    assert found["lo"].kind == "loopback"
