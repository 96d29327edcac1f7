"""What the knocks of all hosts at each other's ports mean: who can't be reached, why, and what opens it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from paceline.checks import pair_errand as errand
from paceline.checks.ends import End, arrow, join_names
from paceline.checks.findings import Finding, check


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knock:
    """One try to connect to a port."""

    source: int
    """Index of the host that tried."""
    target: int
    port: int
    outcome: str
    """Of `pair_errand`."""
    elapsed_ms: float
    detail: str = ""

    @property
    def pair(self) -> tuple[int, int]:
        """From where to where."""
        return self.source, self.target


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Closed:
    """What one host found at another: at least one port that it should have reached, and didn't."""

    source: int
    target: int
    knock: Knock
    """The first that failed."""
    num_open: int
    """Of the random ports."""
    num_tried: int
    open_doors: tuple[int, ...]
    """Ports that are always the same, and open."""


@check("ports")
def check_ports(ends: Sequence[End], knocks: Sequence[Knock], fixed_ports: Sequence[int]) -> Iterator[Finding]:
    """Every host reaches every other one on any high port.

    What it looks at
        Each host listens on a few ports chosen at random from those that the kernel gives to programs, and each other
        host connects to them. Refused at once, no answer at all, and no route each tell of another cause.

    Why it matters
        Beside the port that they meet at, PyTorch's processes listen on ports that the kernel chooses, new ones in
        each run, and every process connects to every other. One direction that a firewall closes is enough for a run
        that hangs in its first step.

    How to mend it
        Let everything through between the hosts of the cluster: `firewall-cmd --zone=trusted --add-source=10.0.0.0/24`,
        or `ufw allow from 10.0.0.0/24`, on each host. To open the one port of MASTER_PORT does not suffice.
    """
    closed = [found for found in _read_pairs(knocks, set(fixed_ports)) if found is not None]
    groups: dict[tuple[int, str, bool, tuple[int, ...]], list[_Closed]] = {}
    for one in closed:
        groups.setdefault((one.target, one.knock.outcome, one.num_open == 0, one.open_doors), []).append(one)
    failing = {(one.source, one.target) for one in closed}
    for group in groups.values():
        yield _tell(group, ends, failing)
    if not closed:
        num_pairs = len({(knock.source, knock.target) for knock in knocks})
        num_ports = len({knock.port for knock in knocks} - set(fixed_ports))
        text = f"all {num_pairs} directions are open, on {num_ports} ports chosen at random"
        yield Finding(check="ports", status="ok", where="", text=text)


def _read_pairs(knocks: Sequence[Knock], fixed_ports: set[int]) -> Iterator[_Closed | None]:
    by_pair: dict[tuple[int, int], list[Knock]] = {}
    for knock in knocks:
        by_pair.setdefault((knock.source, knock.target), []).append(knock)
    for (source, target), tried in sorted(by_pair.items()):
        at_random = [knock for knock in tried if knock.port not in fixed_ports]
        failed = [knock for knock in at_random if knock.outcome != errand.OK]
        if failed:
            yield _Closed(
                source=source,
                target=target,
                knock=failed[0],
                num_open=len(at_random) - len(failed),
                num_tried=len(at_random),
                open_doors=tuple(sorted({k.port for k in tried if k.port in fixed_ports and k.outcome == errand.OK})),
            )


def _tell(group: Sequence[_Closed], ends: Sequence[End], failing: set[tuple[int, int]]) -> Finding:
    """One finding for all hosts that found the same at a host."""
    first = group[0]
    source, target = ends[first.source], ends[first.target]
    names = join_names([ends[one.source].name for one in group])
    verb = "cannot reach" if len(group) == 1 else "can't reach"
    how = "no answer" if first.knock.outcome in (errand.SILENT, errand.ABSENT) else f"{first.knock.outcome}"
    tried = f"tried {target.address} from {source.address}: {how} in {first.knock.elapsed_ms:.0f} ms"
    which = (
        f"on ports above 1024 ({tried})"
        if first.num_open == 0
        else f"on {first.num_tried - first.num_open} of {first.num_tried} random ports, such as "
        f"{first.knock.port} ({tried})"
    )
    notes = [f"{names} {verb} {target.name} {which}", _guess(first, source, target)]
    if first.open_doors and first.knock.outcome in (errand.REFUSED, errand.SILENT, errand.UNREACHABLE):
        are = "is" if len(first.open_doors) == 1 else "are"
        notes.append(
            f"only {join_names(list(map(str, first.open_doors)))} {are} open, and workers talk on random ports"
        )
    if not any((one.target, one.source) in failing for one in group):
        notes.append("the other direction is open")
    return Finding(
        check="ports",
        status="failure",
        where=arrow(source, target) if len(group) == 1 else f"{names} → {target.name}",
        text="; ".join(notes),
        remedy=_find_remedy(group, ends),
    )


def _guess(closed: _Closed, source: End, target: End) -> str:
    outcome = closed.knock.outcome
    is_near = source.network == target.network
    if outcome == errand.REFUSED:
        return f"a firewall on {target.name}, or between them, rejects it"
    if outcome == errand.SILENT and _drops_answers(source, target):
        return f"a firewall on {source.name}, or between them, drops the answers"
    if outcome == errand.SILENT:
        return f"a firewall on {target.name}, or between them, drops it" + (
            "" if is_near else ", or there is no way back to the other subnet"
        )
    if _is_own_route(closed) and is_near:
        return f"a route on {source.name} itself leads nowhere ({closed.knock.detail})"
    if outcome == errand.UNREACHABLE:
        return (
            f"a firewall on {target.name} rejects it ({closed.knock.detail})"
            if is_near
            else f"there is no route from {source.network} to {target.network}"
        )
    if outcome == errand.ABSENT:
        return f"nobody on {source.interface}'s wire has {target.address}: another switch, VLAN or Wi-Fi, or a cable"
    if outcome == errand.FORBIDDEN:
        return f"a rule on {source.name} itself forbids it"
    return f"another machine has {target.address} ({closed.knock.detail})"


def _is_own_route(closed: _Closed) -> bool:
    """This host's kernel refused at once, without sending anything: a blackhole, or no route at all."""
    return closed.knock.outcome == errand.UNREACHABLE and closed.knock.detail in ("EINVAL", "ENETUNREACH")


def _drops_answers(source: End, target: End) -> bool:
    """Whether the only firewall that was found is that of the host which gets no answer."""
    return bool(source.firewall) and not target.firewall


def _find_remedy(group: Sequence[_Closed], ends: Sequence[End]) -> str:
    first = group[0]
    source, target = ends[first.source], ends[first.target]
    outcome = first.knock.outcome
    if outcome == errand.ABSENT:
        return f"On {target.name}:  ip -s link show dev {target.interface}; then its cable and the switch's port"
    if outcome == errand.WRONG_HOST:
        return (
            f"On {target.name}:  give {target.interface} an address of its own; ip neigh, on {source.name}, tells whose"
        )
    if _is_own_route(first) and source.network == target.network:
        return f"On {source.name}:  ip route get {target.address}   (then: ip route del what is in the way)"
    if outcome == errand.UNREACHABLE and source.network != target.network:
        return "paceline run --nic NETWORK, with a network that joins them; or ip=ADDRESS for each host in the hostfile"
    if outcome == errand.FORBIDDEN:
        return f"On {source.name}:  {allow_command(source, [target.network], is_out=True)}"
    if outcome == errand.SILENT and _drops_answers(source, target):
        allowed = target.network if source.network == target.network else target.address
        return f"On {source.name}:  {allow_command(source, [allowed])}"
    near = [ends[one.source] for one in group]
    allowed = [end.network if end.network == target.network else end.address for end in near]
    return f"On {target.name}:  {allow_command(target, list(dict.fromkeys(allowed)))}"


def allow_command(end: End, sources: Sequence[str], *, is_out: bool = False) -> str:
    """What makes a host's firewall let through all from these networks, or, `is_out`, to them."""
    tool = end.firewall.get("tool", "")
    if is_out:
        return f"nft list ruleset, and remove what keeps packets to {', '.join(sources)} from going out"
    if tool == "nftables":
        family = "ip6" if ":" in sources[0] else "ip"
        wanted = sources[0] if len(sources) == 1 else f"{{ {', '.join(sources)} }}"
        return f"nft insert rule {end.firewall['chain']} {family} saddr {wanted} accept"
    if tool == "iptables":
        program = "ip6tables" if ":" in sources[0] else "iptables"
        return "; ".join(f"{program} -I INPUT -s {source} -j ACCEPT" for source in sources)
    trust = "; ".join(f"firewall-cmd --zone=trusted --add-source={source}" for source in sources)
    allow = "; ".join(f"ufw allow from {source}" for source in sources)
    return {"firewalld": trust, "ufw": allow}.get(tool, f"{trust}  (or: {allow})")
