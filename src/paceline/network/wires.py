"""One address and interface per host, such that every host reaches every other. Pure; runs in the driver.

The driver lets every agent listen on its host's candidates, then dial, in rounds, until there is a choice:

    candidates = list_candidates(hosts, interfaces_by_host, nic=nic)
    wires = choose_wires(candidates, dial_all)
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence

from paceline.errors import HostError
from paceline.network import probe
from paceline.network.candidates import Candidate, Dial, dial_rounds
from paceline.network.interfaces import NEVER

DIAL_TIMEOUT_S = 2.5
"""A first packet that is lost is sent again after one second."""
_NOISE_MS = 5.0
"""A difference in round trip up to this is the host being busy, not the wire."""
_MAX_PAIRS_NAMED = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class DialResult:
    """What came of a dial."""

    dial: Dial
    outcome: str
    """OK, REFUSED, TIMEOUT, UNREACHABLE or WRONG_HOST of `network/probe.py`."""
    elapsed_ms: float
    """OK: the handshake. Otherwise how long it took to fail."""
    detail: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wire:
    """How one host is reached, and over which interface it talks."""

    address: str
    interface: str
    reason: str
    """For people: `eth0 10.0.0.5: reaches all 3 other hosts, wired; docker0 not needed`."""


LOOPBACK = Wire(address="127.0.0.1", interface="lo", reason="lo 127.0.0.1: one host only, nothing leaves it")

Candidates = Sequence[Sequence[Candidate]]
Choice = tuple[Candidate, ...]
_Key = tuple[int, str, int, str]


def choose_wires(
    candidates: Candidates, dial_all: Callable[[Sequence[Dial]], Iterable[DialResult]]
) -> tuple[Wire, ...]:
    """The wire of each host, in order. `dial_all` performs a round of dials on the hosts.

    Raises HostError naming the pairs of hosts that can't talk.
    """
    if len(candidates) == 1:
        return (LOOPBACK,)
    results: list[DialResult] = []
    for dials in dial_rounds(candidates):
        results += dial_all(dials)
        wires = find_wires(candidates, results)
        if wires is not None:
            return wires
    raise explain_failure(candidates, results)


def find_wires(candidates: Candidates, results: Iterable[DialResult]) -> tuple[Wire, ...] | None:
    """The best complete choice that these results allow, or None.

    Better is: the worst tier in use is lower; all in one subnet; the slowest link faster; the round trip
    clearly shorter; first in the hosts' own order. The order of the results does not matter.
    """
    best = _by_dial(results)
    works = {key for key, result in best.items() if result.outcome == probe.OK}
    for tier in range(NEVER):
        pool = [[candidate for candidate in of_host if candidate.tier <= tier] for of_host in candidates]
        subnets = sorted({candidate.network for of_host in pool for candidate in of_host})
        per_subnet = ([[c for c in of_host if c.network == subnet] for of_host in pool] for subnet in subnets)
        choices = [choice for part in per_subnet if (choice := _solve(part, works)) is not None]
        if not choices and (choice := _solve(pool, works)) is not None:
            choices = [choice]
        if choices:
            choice = _pick(choices, best)
            return tuple(_describe(chosen, choice, candidates, best) for chosen in choice)
    return None


def _by_dial(results: Iterable[DialResult]) -> dict[_Key, DialResult]:
    """The best result of each dial, should one have been made twice."""
    best: dict[_Key, DialResult] = {}
    for result in results:
        key = (result.dial.source_host, result.dial.source, result.dial.host, result.dial.address)
        if key not in best or _merit(result) < _merit(best[key]):
            best[key] = result
    return best


def _merit(result: DialResult) -> tuple[bool, float, str]:
    return (result.outcome != probe.OK, result.elapsed_ms, result.outcome)


def _key(source: Candidate, there: Candidate) -> _Key:
    return (source.host, source.address, there.host, there.address)


def _solve(domains: Candidates, works: set[_Key]) -> Choice | None:
    """One candidate per host, all reaching each other; earlier and faster ones first. None if there is none.

    A search that, after each step, throws out what can't be part of an answer any more: so a single pair of
    hosts that can't talk is seen at once instead of after trying all combinations of the others.
    """
    left = _prune(domains, works)
    if not all(left):
        return None
    undecided = [index for index, of_host in enumerate(left) if len(of_host) > 1]
    if not undecided:
        return tuple(of_host[0] for of_host in left)
    index = undecided[0]
    for candidate in sorted(left[index], key=lambda c: (c.tier, -c.speed_mbps, c.order)):
        choice = _solve((*left[:index], (candidate,), *left[index + 1 :]), works)
        if choice is not None:
            return choice
    return None


def _prune(domains: Candidates, works: set[_Key]) -> list[tuple[Candidate, ...]]:
    left = [tuple(of_host) for of_host in domains]
    changed = True
    while changed and all(left):
        changed = False
        for index, of_host in enumerate(left):
            others = [other for position, other in enumerate(left) if position != index]
            kept = tuple(
                one for one in of_host if all(any(_talk(one, two, works) for two in other) for other in others)
            )
            changed |= len(kept) < len(of_host)
            left[index] = kept
    return left


def _talk(one: Candidate, two: Candidate, works: set[_Key]) -> bool:
    return _key(one, two) in works and _key(two, one) in works


def _pick(choices: Sequence[Choice], best: dict[_Key, DialResult]) -> Choice:
    """Among choices of equal tier: see `find_wires`."""
    fastest = max(map(_slowest_link, choices))
    times_ms = {choice: _round_trip_ms(choice, best) for choice in choices if _slowest_link(choice) == fastest}
    limit_ms = min(times_ms.values()) + _NOISE_MS
    near = [choice for choice, elapsed_ms in times_ms.items() if elapsed_ms <= limit_ms]
    return min(near, key=lambda choice: ([c.order for c in choice], [c.address for c in choice]))


def _slowest_link(choice: Choice) -> int:
    return min(candidate.speed_mbps for candidate in choice)


def _round_trip_ms(choice: Choice, best: dict[_Key, DialResult]) -> float:
    return statistics.median(best[_key(a, b)].elapsed_ms for a in choice for b in choice if a.host != b.host)


def _describe(chosen: Candidate, choice: Choice, candidates: Candidates, best: dict[_Key, DialResult]) -> Wire:
    others = len(choice) - 1
    reach = "the other host" if others == 1 else f"all {others} other hosts"
    parts = [f"{chosen.label}: reaches {reach}, {chosen.why}"]
    if chosen.override:
        parts.append(f"chosen by {chosen.override}")
    idle: dict[str, None] = {}
    for candidate in candidates[chosen.host]:
        if candidate.interface == chosen.interface or candidate.interface in idle:
            continue
        failed = _find_unreached(candidate, candidates, best) if candidate.tier <= chosen.tier else None
        if failed is None:
            idle[candidate.interface] = None
        else:
            parts.append(f"{candidate.interface} does not reach {failed}")
    if idle:
        parts.append(f"{_join(list(idle))} not needed")
    return Wire(address=chosen.address, interface=chosen.interface, reason="; ".join(parts))


def _find_unreached(candidate: Candidate, candidates: Candidates, best: dict[_Key, DialResult]) -> str | None:
    """The first host that a candidate was tried to, in vain."""
    for there in candidates:
        tried = [best[key] for other in there if (key := _key(candidate, other)) in best]
        if tried and all(result.outcome != probe.OK for result in tried):
            return there[0].host_name
    return None


def _join(words: Sequence[str]) -> str:
    named = list(words[:3]) + ([f"{len(words) - 3} more"] if len(words) > 3 else [])
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def explain_failure(candidates: Candidates, results: Iterable[DialResult]) -> HostError:
    """The error for results that allow no complete choice: the failing pairs, why, what mends the first."""
    best = _by_dial(results)
    nearest = [max(of_host, key=lambda c: (_num_working(c, best), -c.tier, -c.order)) for of_host in candidates]
    failing = [
        (source, there, best.get(_key(source, there)))
        for source in nearest
        for there in nearest
        if source.host != there.host and not _is_ok(best.get(_key(source, there)))
    ]
    lines = [_explain_pair(*pair, candidates) for pair in failing[:_MAX_PAIRS_NAMED]]
    if len(failing) > _MAX_PAIRS_NAMED:
        left = len(failing) - _MAX_PAIRS_NAMED
        lines.append(f"and {left} more pair{'s' if left > 1 else ''}")
    everyone = "both hosts" if len(candidates) == 2 else f"all {len(candidates)} hosts"
    return HostError("\n  ".join([f"no network joins {everyone}:", *lines]), hint=_find_hint(*failing[0]))


def _is_ok(result: DialResult | None) -> bool:
    return result is not None and result.outcome == probe.OK


def _num_working(candidate: Candidate, best: dict[_Key, DialResult]) -> int:
    """With how many other hosts it works, each direction counted."""
    me = (candidate.host, candidate.address)
    outward = {key[2] for key, result in best.items() if key[:2] == me and _is_ok(result)}
    inward = {key[0] for key, result in best.items() if key[2:] == me and _is_ok(result)}
    return len(outward) + len(inward)


def _explain_pair(source: Candidate, there: Candidate, result: DialResult | None, candidates: Candidates) -> str:
    pair = f"{source.host_name} ({source.label}) to {there.host_name} ({there.label})"
    if result is None:
        if (":" in source.address) != (":" in there.address):
            return f"{pair}: one has only IPv4 there and the other only IPv6"
        return f"{pair}: not tried"
    same_subnet = source.network == there.network
    took = f"{result.elapsed_ms:.0f} ms"
    if result.outcome == probe.REFUSED:
        return f"{pair}: refused in {took}: a firewall on {there.host_name} or between them"
    if result.outcome == probe.TIMEOUT:
        if same_subnet:
            return f"{pair}: no answer in {took}: a firewall drops it, or they are not on the same wire"
        return f"{pair}: no answer in {took}: no route between these subnets, or a firewall drops it"
    if result.outcome == probe.UNREACHABLE:
        wire = f"a firewall on {there.host_name} rejects it, or it is not on that wire"
        cause = wire if same_subnet else "no route between these subnets"
        return f"{pair}: unreachable ({result.detail or took}): {cause}"
    owners = sorted({c.host_name for of_host in candidates for c in of_host if c.address == there.address})
    if len(owners) > 1:
        return f"{pair}: {there.address} is an address of {_join(owners)}: another machine answered"
    return f"{pair}: another machine answered at {there.address} ({result.detail or 'wrong host'})"


def _find_hint(source: Candidate, there: Candidate, result: DialResult | None) -> str:
    other = "another network: --nic NAME or --nic 10.0.0.0/24"
    if result is not None and result.outcome == probe.WRONG_HOST:
        return f"give each machine an address of its own, or name {other}"
    if result is None or (result.outcome == probe.UNREACHABLE and source.network != there.network):
        return "name the network that joins them: --nic NAME|CIDR, or ip=ADDRESS for each host in a hostfile"
    allowed = source.network if source.network == there.network else source.address
    return (
        f"On {there.host_name}:  firewall-cmd --zone=trusted --add-source={allowed}  "
        f"(or: ufw allow from {allowed}); or {other}"
    )
