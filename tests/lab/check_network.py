"""The doctor's network checks on a lab host, as `paceline check` runs them: `check_network.py DEPTH NIC HOSTS`."""

from __future__ import annotations

import dataclasses
import json
import queue
import sys

from paceline.checks.matrix import render_matrix
from paceline.checks.pairs import check_pairs, check_unwired
from paceline.checks.together import check_together
from paceline.cluster.spec import parse_hosts
from paceline.errors import HostError
from paceline.launch.hosts import open_hosts
from paceline.launch.wiring import find_wires
from paceline.network.candidates import parse_nic


def main(depth: str, nic_text: str, host_text: str) -> None:
    with open_hosts(parse_hosts(host_text), queue.SimpleQueue()) as hosts:
        facts = hosts.open("check", [sys.executable] * len(hosts.hosts), grace_s=0.1)
        nic = parse_nic(nic_text) if nic_text else None
        lines: list[str] = []
        try:
            wires = find_wires(hosts, facts, nic)
        except HostError as error:
            findings = list(check_unwired(hosts, facts, nic, error))
        else:
            findings, matrix = check_pairs(hosts, facts, wires, depth="quick" if depth == "quick" else "full")
            lines = render_matrix(matrix)
            if depth == "together":
                findings = check_together(hosts, facts, wires)
    print(json.dumps({"findings": [dataclasses.asdict(finding) for finding in findings], "matrix": lines}))


if __name__ == "__main__":
    main(*sys.argv[1:])
