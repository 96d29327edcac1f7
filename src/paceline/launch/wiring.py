"""Finds the wires of a run: asks the agents to listen and to dial, and lets network/ decide what it means."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

from paceline.errors import HostError
from paceline.launch import protocol
from paceline.launch.facts import Facts
from paceline.launch.hosts import Hosts
from paceline.network.candidates import Candidate, Dial, Nic, list_candidates
from paceline.network.interfaces import Interface
from paceline.network.wires import DIAL_TIMEOUT_S, DialResult, Wire, choose_wires

_ANSWER_LIMIT_S = 10.0


def find_wires(hosts: Hosts, facts: Sequence[Facts], nic: Nic | None) -> tuple[Wire, ...]:
    """The wire of each host, chosen by trying every ordered pair. Raises HostError naming the pairs that can't talk."""
    interfaces = [[Interface.from_json(record) for record in fact.interfaces] for fact in facts]
    if len(hosts.hosts) == 1:
        return choose_wires([[]], lambda dials: [])
    candidates = list_candidates(hosts.hosts, interfaces, nic=nic)
    nonce = secrets.token_hex(16)
    listens = {
        index: protocol.Listen(addresses=[candidate.address for candidate in of_host], nonce=nonce)
        for index, of_host in enumerate(candidates)
    }
    answers = hosts.ask(
        listens, protocol.Listening, timeout_s=_ANSWER_LIMIT_S, doing="listen on its network interfaces"
    )
    candidates = [
        _that_can_listen(hosts.hosts[index].name, of_host, dict(answers[index].failures))
        for index, of_host in enumerate(candidates)
    ]
    ports = {index: {str(address): int(port) for address, port in answer.ports} for index, answer in answers.items()}

    def dial_all(dials: Sequence[Dial]) -> Iterator[DialResult]:
        by_source: dict[int, list[Dial]] = {}
        for dial in dials:
            by_source.setdefault(dial.source_host, []).append(dial)
        questions = {
            index: protocol.Dial(
                targets=[list(dial.target(ports[dial.host])) for dial in of_host],
                nonce=nonce,
                timeout_s=DIAL_TIMEOUT_S,
            )
            for index, of_host in by_source.items()
        }
        dialled = hosts.ask(questions, protocol.Dialled, timeout_s=_ANSWER_LIMIT_S, doing="dial the other hosts")
        for index, of_host in by_source.items():
            for dial, (outcome, elapsed_ms, detail) in zip(of_host, dialled[index].results, strict=True):
                yield DialResult(dial=dial, outcome=outcome, elapsed_ms=elapsed_ms, detail=detail)

    return choose_wires(candidates, dial_all)


def _that_can_listen(name: str, candidates: Sequence[Candidate], failures: dict[str, str]) -> list[Candidate]:
    """The candidates of a host whose address could be bound. Raises HostError where that is none."""
    able = [candidate for candidate in candidates if candidate.address not in failures]
    if not able:
        reasons = "; ".join(f"{address}: {reason}" for address, reason in failures.items())
        raise HostError(f"{name}: nothing can listen on its addresses ({reasons})", hint="try: ip address, there")
    return able
