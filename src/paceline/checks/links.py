"""What was measured on the way between hosts: packet sizes, speeds and round trips. Pure."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence

from paceline.checks.ends import End, arrow, join_names
from paceline.checks.findings import Finding, check

Pair = tuple[int, int]
"""The indexes of the host that sends and of the one that receives."""

SLOW_SHARE = 1 / 3
"""A link below this share of what is usual is slow. What a busy host costs is less than that; what a port costs that
has negotiated a tenth of its speed is more."""
SLOW_TRIP_MS = 10.0
"""No cable in a building takes so long; Wi-Fi, a tunnel or another town does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """One direction between two hosts, as it was measured."""

    source: int
    target: int
    round_trip_ms: float | None = None
    """Of a small message, the middle one of several."""
    least_trip_ms: float | None = None
    """The shortest of them: what the wire takes where the hosts are busy."""
    rate_mbps: float | None = None
    """None where it was not asked for, or nothing came of it."""
    is_stalled: bool = False
    """Small messages pass, and a megabyte does not."""
    fits_bytes: int = 0
    """Where it stalled: the largest packet that passes; zero for none."""
    path_bytes: int | None = None
    """The largest packet that the kernel believes to pass."""
    problem: str = ""
    """Why nothing was measured."""

    @property
    def pair(self) -> Pair:
        """From where to where."""
        return self.source, self.target


def find_doubtful(links: Sequence[Link]) -> set[Pair]:
    """Pairs (smaller index first) whose measurement would be a finding: those are worth a second one."""
    slow, late = _find_slow(links), _find_late(links)
    return {
        (min(link.pair), max(link.pair))
        for link in links
        if link.problem or link.is_stalled or link.pair in slow or link.pair in late
    }


def merge(before: Sequence[Link], after: Sequence[Link]) -> list[Link]:
    """The better of two measurements of each direction."""
    best = {link.pair: link for link in before}
    for link in after:
        old = best.get(link.pair)
        best[link.pair] = link if old is None else _better(old, link)
    return [best[pair] for pair in sorted(best)]


def _better(one: Link, two: Link) -> Link:
    if bool(one.problem or one.is_stalled) != bool(two.problem or two.is_stalled):
        return two if one.problem or one.is_stalled else one
    return dataclasses.replace(
        two,
        round_trip_ms=_least(one.round_trip_ms, two.round_trip_ms),
        least_trip_ms=_least(one.least_trip_ms, two.least_trip_ms),
        rate_mbps=max((rate for rate in (one.rate_mbps, two.rate_mbps) if rate is not None), default=None),
    )


def _least(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _by_host(pairs: Collection[Pair]) -> Iterator[tuple[int, list[Pair]]]:
    """The pairs in groups: first all of the host that most of them have in common."""
    left = set(pairs)
    while left:
        counted = collections.Counter(host for pair in sorted(left) for host in pair)
        host = max(counted, key=lambda index: (counted[index], -index))
        mine = sorted(pair for pair in left if host in pair)
        left -= set(mine)
        yield host, mine


def _where(ends: Sequence[End], host: int, pairs: Sequence[Pair]) -> str:
    """`h1 → h2` for one direction, `h1 ↔ h2` for both, and the host for more."""
    if len({index for pair in pairs for index in pair}) > 2:
        return ends[host].name
    source, target = (ends[index] for index in pairs[0])
    return arrow(source, target) if len(pairs) == 1 else f"{source.name} ↔ {target.name}"


def _others(ends: Sequence[End], host: int, pairs: Sequence[Pair]) -> str:
    return join_names([ends[index].name for index in sorted({i for pair in pairs for i in pair} - {host})])


@check("packet-size")
def check_packet_size(ends: Sequence[End], links: Sequence[Link]) -> Iterator[Finding]:
    """Large packets get through, and all hosts send them equally large.

    What it looks at
        The MTU of each interface that was chosen, what the kernel knows of the way between two hosts, and whether a
        megabyte arrives where small messages do.

    Why it matters
        The handshake and the first messages of a run are small. If something on the way drops packets above a size
        without saying so (a switch without jumbo frames, a tunnel), the run starts, finds all its ranks, and hangs in
        the first all-reduce.

    How to mend it
        The same MTU on all hosts, and no larger than everything between them lets through:
        `ip link set dev eth0 mtu 1500`.
    """
    stalled = [link for link in links if link.is_stalled]
    found = [*_tell_stalls(ends, stalled), *_find_odd_mtus(ends), *_tell_unmeasured(ends, links)]
    if not stalled:
        found += _find_narrow_paths(ends, links)
    yield from found
    if not found:
        sizes = join_names(
            [f"{size} bytes" for size in sorted({end.mtu_bytes for end in ends if end.mtu_bytes})] or ["?"]
        )
        text = f"packets of {sizes} pass in all {len(links)} directions"
        yield Finding(check="packet-size", status="ok", where="", text=text)


def _tell_stalls(ends: Sequence[End], stalled: Sequence[Link]) -> Iterator[Finding]:
    fits = {link.pair: link.fits_bytes for link in stalled}
    for host, pairs in _by_host(fits):
        end, others = ends[host], _others(ends, host, pairs)
        size = min(fits[pair] for pair in pairs)
        way = (
            f"from {ends[pairs[0][0]].name} to {ends[pairs[0][1]].name}"
            if len(pairs) == 1
            else (f"between {end.name} and {others}")
        )
        if size:
            why = f"packets of {size} bytes pass, larger ones are lost on the way"
            remedy = f"On every host:  ip link set dev {end.interface} mtu {size}; or mend what lies between them"
        else:
            why = "and no packet size helps, so packets are lost on the way, or a rule limits them"
            remedy = f"On {end.name}:  ping -c 100 -i 0.01 -s 1000 {ends[_partner(host, pairs[0])].address}"
        yield Finding(
            check="packet-size",
            status="failure",
            where=_where(ends, host, pairs),
            text=f"small messages pass {way}, but a transfer of 1 MB stalls: {why}",
            remedy=remedy,
        )


def _tell_unmeasured(ends: Sequence[End], links: Sequence[Link]) -> Iterator[Finding]:
    for link in links:
        if link.problem:
            where = arrow(ends[link.source], ends[link.target])
            text = f"nothing could be measured there, though the ports are open: {link.problem}"
            yield Finding(check="packet-size", status="skipped", where=where, text=text)


def _partner(host: int, pair: Pair) -> int:
    return pair[1] if pair[0] == host else pair[0]


def _find_odd_mtus(ends: Sequence[End]) -> Iterator[Finding]:
    known = [end for end in ends if end.mtu_bytes]
    if len({end.mtu_bytes for end in known}) < 2:
        return
    counted = collections.Counter(end.mtu_bytes for end in known)
    usual = max(counted, key=lambda size: (counted[size], size))
    usual_names = join_names([end.name for end in known if end.mtu_bytes == usual])
    for end in known:
        if end.mtu_bytes != usual:
            yield Finding(
                check="packet-size",
                status="warning",
                where=end.name,
                text=f"{end.interface} of {end.name} has MTU {end.mtu_bytes}, that of {usual_names} {usual}: "
                "what needs whole packets (RDMA, UDP) loses the larger ones",
                remedy=f"On {end.name}:  ip link set dev {end.interface} mtu {usual}",
            )


def _find_narrow_paths(ends: Sequence[End], links: Sequence[Link]) -> Iterator[Finding]:
    for link in links:
        source, target = ends[link.source], ends[link.target]
        widths = [end.mtu_bytes for end in (source, target) if end.mtu_bytes]
        if link.path_bytes and len(widths) == 2 and link.path_bytes < min(widths):
            yield Finding(
                check="packet-size",
                status="warning",
                where=arrow(source, target),
                text=f"only packets of {link.path_bytes} bytes fit between {source.name} and {target.name}, whose "
                f"interfaces have MTU {min(widths)}: a tunnel or a router lies between them",
                remedy=f"On {source.name}:  ip route get {target.address}",
            )


@check("speed")
def check_speed(ends: Sequence[End], links: Sequence[Link]) -> Iterator[Finding]:
    """No link is much slower than the others.

    What it looks at
        How fast each host sends to each other one for a sixth of a second, one pair at a time on each link; with many
        hosts, some of the pairs. What looks slow is measured again.

    Why it matters
        All ranks wait for the slowest link in every step. A cable with a broken pair of wires, or a switch of
        yesteryear, makes 100 Mb/s of a gigabit, and nothing says so.

    How to mend it
        `ethtool eth0` tells what was negotiated. Another cable or port; no Wi-Fi; `--nic` where a better network joins
        the hosts.
    """
    measured = [link for link in links if link.rate_mbps is not None]
    if not measured:
        return
    slow = _find_slow(links)
    if not slow:
        rates = [rate for link in measured if (rate := link.rate_mbps) is not None]
        text = f"{min(rates):.0f} to {max(rates):.0f} Mb/s in {len(measured)} directions"
        yield Finding(check="speed", status="ok", where="", text=text)
        return
    yield from _tell_slow(ends, slow)


def _find_slow(links: Sequence[Link]) -> dict[Pair, tuple[float, float]]:
    """Of each slow direction its rate, and the usual one."""
    rates = {link.pair: link.rate_mbps for link in links if link.rate_mbps is not None}
    if len(rates) < 2:
        return {}
    # Of the upper half: among three hosts, of which one is slow, most directions are slow.
    usual = statistics.median(sorted(rates.values())[len(rates) // 2 :])
    return {pair: (rate, usual) for pair, rate in rates.items() if rate < usual * SLOW_SHARE}


def _tell_slow(ends: Sequence[End], slow: Mapping[Pair, tuple[float, float]]) -> Iterator[Finding]:
    for host, pairs in _by_host(slow):
        end, others = ends[host], _others(ends, host, pairs)
        rate, usual = min(slow[pair] for pair in pairs)
        ways = {"sends to" if source == host else "receives from" for source, _ in pairs}
        yield Finding(
            check="speed",
            status="warning",
            where=_where(ends, host, pairs),
            text=f"{end.name} {' and '.join(sorted(ways, reverse=True))} {others} at {rate:.0f} Mb/s, "
            f"where {usual:.0f} Mb/s are usual between these hosts",
            remedy=f"On {end.name}:  ethtool {end.interface}  tells its speed; then another cable, port or network",
        )


@check("round-trip")
def check_round_trip(ends: Sequence[End], links: Sequence[Link]) -> Iterator[Finding]:
    """Messages take no longer than a cable needs.

    What it looks at
        How long a small message takes to another host and back: the middle one of eleven.

    Why it matters
        A step sends some messages that are too small to fill the link, one after the other. Each costs a round trip,
        whatever the speed. A network in one building needs less than a millisecond.

    How to mend it
        Cable instead of Wi-Fi; a network that joins the hosts without a tunnel (`--nic`). Where the hosts are far from
        each other, let them exchange less often: `paceline run --sync diloco`.
    """
    late = _find_late(links)
    for host, pairs in _by_host(late):
        one, others = ends[host], _others(ends, host, pairs)
        yield Finding(
            check="round-trip",
            status="warning",
            where=_where(ends, host, pairs),
            text=f"a message from {one.name} to {others} and back takes {min(late[pair] for pair in pairs):.0f} ms",
            remedy="paceline run --nic NETWORK, if another network joins them; else exchange less often: --sync diloco",
        )
    trips = [trip for link in links if (trip := link.round_trip_ms) is not None]
    if trips and not late:
        text = f"{statistics.median(trips):.1f} ms there and back, at most {max(trips):.1f} ms"
        yield Finding(check="round-trip", status="ok", where="", text=text)


def _find_late(links: Sequence[Link]) -> dict[Pair, float]:
    """Once per pair: the way back is part of the round trip."""
    return {
        link.pair: link.least_trip_ms
        for link in links
        if link.least_trip_ms is not None and link.least_trip_ms > SLOW_TRIP_MS and link.source < link.target
    }
