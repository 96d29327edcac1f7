"""Every host against every other: which ports are open, what passes, and how fast."""

from __future__ import annotations

import collections
import dataclasses
import random
import secrets
import statistics
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

from paceline.checks import pair_errand
from paceline.checks.ends import End, check_interfaces, make_end
from paceline.checks.findings import Finding
from paceline.checks.links import Link, Pair, check_packet_size, check_round_trip, check_speed, find_doubtful, merge
from paceline.checks.matrix import Matrix
from paceline.checks.ports import Knock, check_ports
from paceline.checks.results import catch_crash
from paceline.errors import HostError
from paceline.launch.errands import Errand, Reply, run_errands
from paceline.launch.facts import Facts
from paceline.launch.hosts import Hosts
from paceline.network.candidates import Candidate, Nic, list_candidates
from paceline.network.interfaces import Interface
from paceline.network.wires import Wire

Depth = Literal["quick", "full"]

NUM_PORTS = 4
"""Chosen at random for each examination."""
MAX_ROUNDS = 10
"""Of the tournament: with more than eleven hosts, each is measured with ten others."""
# What Linux gives to programs unless told otherwise.
_PORTS = range(32768, 61000)
_SSH_PORT, _MASTER_PORT = 22, 29500
_PLANS: dict[Depth, dict[str, Any]] = {
    "quick": {"transfer_s": 0.1, "enough_bytes": 10**6},
    "full": {"transfer_s": 0.15, "enough_bytes": 10**12},
}
_START_LIMIT_S = 8.0
"""For a process that starts on a busy host."""
_ROUND_LIMIT_S = 4.0
_TOURNAMENT_LIMIT_S = 30.0
_NUM_MEASUREMENTS = 3
"""At most, of what looks wrong: a finding must come each time."""


def check_pairs(
    hosts: Hosts, facts: Sequence[Facts], wires: Sequence[Wire], *, depth: Depth
) -> tuple[list[Finding], Matrix]:
    """All that there is to say of the ways between hosts that have wires. Speeds are told in full depth only.

    Raises InterruptedEarlyError.
    """
    ends = [
        make_end(index, hosts.hosts[index].name, _interfaces(facts[index]), wire) for index, wire in enumerate(wires)
    ]
    if len(ends) < 2:
        return [], Matrix(names=[end.name for end in ends], rates_mbps={}, round_trips_ms={})
    ends, knocks, findings = _knock_everywhere(hosts, ends, doors=(), served=())
    closed = {knock.pair for knock in knocks if knock.outcome != pair_errand.OK}
    links = _measure(hosts, ends, closed | {(target, source) for source, target in closed}, depth)
    findings += catch_crash("interfaces", check_interfaces, ends)
    findings += catch_crash("ports", check_ports, ends, knocks, ())
    findings += catch_crash("packet-size", check_packet_size, ends, links)
    findings += catch_crash("round-trip", check_round_trip, ends, links)
    findings += catch_crash("speed", check_speed, ends, links)
    return findings, _make_matrix(ends, links, closed)


def check_unwired(hosts: Hosts, facts: Sequence[Facts], nic: Nic | None, error: HostError) -> Iterator[Finding]:
    """Why `find_wires` has raised, pair by pair, on the addresses that fit together best; findings of "wires" and
    "ports". Raises InterruptedEarlyError.
    """
    candidates, findings = list_all_candidates(hosts, facts, nic)
    ends = [
        make_end(
            one.host,
            one.host_name,
            _interfaces(facts[one.host]),
            Wire(address=one.address, interface=one.interface, reason=one.why),
        )
        for one in choose_likely(candidates)
    ]
    if len(ends) > 1:
        ends, knocks, problems = _knock_everywhere(hosts, ends, doors=(_SSH_PORT,), served=(_MASTER_PORT,))
        findings += [*check_interfaces(ends), *check_ports(ends, knocks, (_SSH_PORT, _MASTER_PORT)), *problems]
    yield from (finding for finding in findings if finding.status != "ok")
    if not any(finding.status == "failure" for finding in findings):
        first, *rest = error.message.splitlines()
        text = " ".join([first, "; ".join(line.strip() for line in rest)]).strip()
        yield Finding(check="wires", status="failure", where="", text=text, remedy=error.hint or "")


def list_all_candidates(hosts: Hosts, facts: Sequence[Facts], nic: Nic | None) -> tuple[list[Candidate], list[Finding]]:
    """Those of all hosts, and a finding for each host that has none."""
    candidates: list[Candidate] = []
    findings: list[Finding] = []
    for index, host in enumerate(hosts.hosts):
        try:
            of_host = list_candidates([host], [_interfaces(facts[index])], nic=nic)[0]
        except HostError as error:
            findings.append(
                Finding(check="wires", status="failure", where=host.name, text=error.message, remedy=error.hint or "")
            )
            continue
        candidates += [dataclasses.replace(candidate, host=index) for candidate in of_host]
    return candidates, findings


def choose_likely(candidates: Sequence[Candidate]) -> list[Candidate]:
    """One of each host: in the subnet that joins most hosts, of these the best tier, where there is one."""
    hosts_of: dict[str, set[int]] = collections.defaultdict(set)
    for one in candidates:
        hosts_of[one.network].add(one.host)
    best: dict[int, Candidate] = {}
    for one in sorted(candidates, key=lambda c: (-len(hosts_of[c.network]) if c.tier < 2 else 0, c.tier, c.order)):
        best.setdefault(one.host, one)
    return [best[host] for host in sorted(best)]


def _interfaces(fact: Facts) -> list[Interface]:
    return [Interface.from_json(record) for record in fact.interfaces]


def _knock_everywhere(
    hosts: Hosts, ends: Sequence[End], *, doors: Sequence[int], served: Sequence[int]
) -> tuple[list[End], list[Knock], list[Finding]]:
    """The ends with their firewalls, what came of the knocks, and what kept hosts from taking part.

    A knock fails if it fails twice: processes may start at different times, and packets get lost.
    """
    best: dict[tuple[int, int, int], Knock] = {}
    findings: list[Finding] = []
    ports = [*random.sample(_PORTS, NUM_PORTS), *served]
    for _ in range(2):
        replies = _run_everywhere(
            hosts,
            ends,
            pair_errand.__name__,
            [{"ports": ports, "doors": list(doors), "others": _others(ends, index)} for index in range(len(ends))],
            timeout_s=_START_LIMIT_S + pair_errand.ERRAND_S + 2,
        )
        findings = _tell_problems(ends, replies, "ports")
        ends = [
            dataclasses.replace(end, firewall=reply.value["firewall"]) if reply.value else end
            for end, reply in zip(ends, replies, strict=True)
        ]
        knocks = list(_read_knocks(replies))
        for knock in knocks:
            key = (*knock.pair, knock.port)
            if key not in best or best[key].outcome != pair_errand.OK:
                best[key] = knock
        if not findings and all(knock.outcome == pair_errand.OK for knock in knocks):
            break
    return list(ends), list(best.values()), findings


def _others(ends: Sequence[End], index: int) -> list[list[Any]]:
    return [[other, end.address] for other, end in enumerate(ends) if other != index]


def _read_knocks(replies: Sequence[Reply]) -> Iterator[Knock]:
    """Without those at hosts that did not take part, or at ports that somebody else has there."""
    for source, reply in enumerate(replies):
        for target, port, outcome, elapsed_ms, detail in reply.value["knocks"] if reply.value else ():
            there = replies[int(target)].value
            if there and port not in there["taken"]:
                yield Knock(
                    source=source, target=target, port=port, outcome=outcome, elapsed_ms=elapsed_ms, detail=detail
                )


def _run_everywhere(
    hosts: Hosts,
    ends: Sequence[End],
    module: str,
    arguments: Sequence[dict[str, Any]],
    *,
    timeout_s: float,
) -> list[Reply]:
    nonce = secrets.token_hex(16)
    errands = [
        Errand(
            host=end.host, module=module, argument={"address": end.address, "index": index, "nonce": nonce, **argument}
        )
        for index, (end, argument) in enumerate(zip(ends, arguments, strict=True))
    ]
    return run_errands(hosts, errands, timeout_s=timeout_s)


def _tell_problems(ends: Sequence[End], replies: Sequence[Reply], name: str) -> list[Finding]:
    return [
        Finding(check=name, status="skipped", where=end.name, text=f"{end.name} took no part: {reply.problem}")
        for end, reply in zip(ends, replies, strict=True)
        if reply.problem
    ]


def _measure(hosts: Hosts, ends: Sequence[End], closed: Collection[Pair], depth: Depth) -> list[Link]:
    """What is wrong is measured again, so that a host that was busy for a moment is no finding."""
    rounds = arrange_rounds(len(ends))
    links: list[Link] = []
    for _ in range(_NUM_MEASUREMENTS):
        chosen = [[pair for pair in pairs if pair not in closed] for pairs in rounds]
        links = merge(links, _play(hosts, ends, [pairs for pairs in chosen if pairs], depth))
        doubtful = find_doubtful(links)
        if not doubtful:
            break
        rounds = [[pair for pair in pairs if pair in doubtful] for pairs in rounds]
    return links


def arrange_rounds(num_hosts: int, max_rounds: int = MAX_ROUNDS) -> list[list[Pair]]:
    """A tournament: in each round every host has at most one opponent, and over all rounds each other one once.

    Of more than `max_rounds` that many are taken, evenly. In each pair the smaller index comes first.
    """
    places = [*range(num_hosts), *([-1] if num_hosts % 2 else [])]  # -1 has no game
    rounds: list[list[Pair]] = []
    for _ in range(len(places) - 1):
        games = [(places[place], places[-1 - place]) for place in range(len(places) // 2)]
        rounds.append(sorted((min(pair), max(pair)) for pair in games if -1 not in pair))
        places = [places[0], places[-1], *places[1:-1]]  # all but the first move on by one
    num_taken = min(max_rounds, len(rounds))
    return [rounds[place * len(rounds) // num_taken] for place in range(num_taken)]


def _play(hosts: Hosts, ends: Sequence[End], rounds: Sequence[Sequence[Pair]], depth: Depth) -> list[Link]:
    port = random.choice(_PORTS)
    games: list[list[list[Any]]] = [[] for _ in ends]
    for one, two in (pair for pairs in rounds for pair in pairs):
        games[one].append([two, ends[two].address, port, True])
        games[two].append([one, ends[one].address, port, False])
    limit_s = min(_TOURNAMENT_LIMIT_S, _START_LIMIT_S + _ROUND_LIMIT_S * len(rounds))
    arguments = [{"port": port, "plan": _PLANS[depth], "rounds": of_host, "limit_s": limit_s} for of_host in games]
    module = "paceline.checks.speed_errand"
    replies = _run_everywhere(hosts, ends, module, arguments, timeout_s=limit_s + 2 * _START_LIMIT_S)
    links = [
        link for source, reply in enumerate(replies) for game in reply.value or () for link in _read_game(source, game)
    ]
    # A megabyte is too short to tell a speed by.
    return links if depth == "full" else [dataclasses.replace(link, rate_mbps=None) for link in links]


def _read_game(source: int, game: dict[str, Any]) -> Iterator[Link]:
    """Both directions of a pair, as its caller has measured them."""
    target: int = game["peer"]
    if "problem" in game:
        yield Link(source=source, target=target, problem=game["problem"])
        return
    for pair, way in (((source, target), game["there"]), ((target, source), game["back"])):
        rate = way["bytes_per_s"]
        yield Link(
            source=pair[0],
            target=pair[1],
            round_trip_ms=statistics.median(game["trips_ms"]),
            least_trip_ms=min(game["trips_ms"]),
            rate_mbps=None if rate is None or way["is_stalled"] else rate * 8 / 1e6,
            is_stalled=way["is_stalled"],
            fits_bytes=way.get("fits_bytes", 0),
            path_bytes=game["path_bytes"],
        )


def _make_matrix(ends: Sequence[End], links: Sequence[Link], closed: Collection[Pair]) -> Matrix:
    rates = {link.pair: link.rate_mbps for link in links if link.rate_mbps is not None}
    return Matrix(
        names=[end.name for end in ends],
        rates_mbps=rates,
        round_trips_ms={link.pair: link.round_trip_ms for link in links if link.round_trip_ms is not None},
        broken=frozenset(closed) | {link.pair for link in links if link.is_stalled or link.problem},
    )
