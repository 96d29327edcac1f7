"""Which addresses of which hosts to try, and in what order. Pure; runs in the driver."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Iterator, Sequence

from paceline.cluster.spec import Host
from paceline.errors import HostError, InputError
from paceline.network.interfaces import NEVER, OVERLAY, WIRED, Interface, rank_interface, usable_addresses
from paceline.network.probe import Target

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nic:
    """The value of `--nic`: where the addresses of all hosts must be found."""

    text: str
    """As typed."""
    names: tuple[str, ...] = ()
    """Exact interface names; a host need only have one of them."""
    networks: tuple[Network, ...] = ()
    """Networks, which need no names."""

    def admits(self, interface: str, address: str) -> bool:
        """Whether an address on an interface is meant."""
        literal = ipaddress.ip_address(address)
        return interface in self.names or any(literal in network for network in self.networks)


def parse_nic(text: str) -> Nic:
    """`eth0`, `10.0.0.0/24`, or several with commas: `eth0,enp3s0`. Raises InputError."""
    names: list[str] = []
    networks: list[Network] = []
    for word in text.split(","):
        network = _parse_network(word)
        if network is not None:
            networks.append(network)
        elif word and "/" not in word and not any(char.isspace() for char in word):
            names.append(word)
        else:
            found = f"--nic {text}: {word!r}: expected an interface name or a network"
            raise InputError(found, hint="for example --nic eth0 or --nic 10.0.0.0/24")
    return Nic(text=text, names=tuple(names), networks=tuple(networks))


def _parse_network(word: str) -> Network | None:
    try:
        return ipaddress.ip_network(word, strict=False)
    except ValueError:
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """An address that a host might be reached at."""

    host: int
    """Index of the host."""
    host_name: str
    interface: str
    address: str
    network: str
    """The subnet in CIDR form: candidates with equal networks should reach each other without a router."""
    tier: int
    why: str
    """The tier in words, with the speed where known: `wired, 10 Gb/s`."""
    speed_mbps: int
    """Zero where unknown."""
    order: int
    """Place among the host's addresses; workers that are told an interface take its first."""
    override: str = ""
    """What the user wrote to choose it, if anything."""

    @property
    def label(self) -> str:
        """`eth0 10.0.0.5`."""
        return f"{self.interface} {self.address}"


Address = tuple[str, str, int]
"""(`inet` or `inet6`, address, prefix length)."""


def list_candidates(
    hosts: Sequence[Host], interfaces_by_host: Sequence[Sequence[Interface]], *, nic: Nic | None = None
) -> tuple[tuple[Candidate, ...], ...]:
    """Per host, the addresses to try, best tier first.

    A host's own `ip=` goes before `nic`. What the user names is tried even if it would not be by its rank.
    Raises HostError for a host that has none, saying what it has.
    """
    return tuple(
        _of_host(index, host, interfaces, nic)
        for index, (host, interfaces) in enumerate(zip(hosts, interfaces_by_host, strict=True))
    )


def _of_host(index: int, host: Host, interfaces: Sequence[Interface], nic: Nic | None) -> tuple[Candidate, ...]:
    found: list[Candidate] = []
    override = f"ip= in {host.origin}" if host.ip else f"--nic {nic.text}" if nic else ""
    for interface in interfaces:
        tier, why = rank_interface(interface)
        entries = usable_addresses(interface)
        if host.ip is not None:
            tier, entries = WIRED, _pick_ip(host.ip, interface)  # the only one, so it has no rivals
        elif nic is not None:
            tier, entries = min(tier, OVERLAY), _pick_nic(nic, interface)
        if tier == NEVER:
            continue
        for _, address, prefix_length in entries:
            found.append(
                Candidate(
                    host=index,
                    host_name=host.name,
                    interface=interface.name,
                    address=address,
                    network=str(ipaddress.ip_interface(f"{address}/{prefix_length}").network),
                    tier=tier,
                    why=why + _speed_text(interface.speed_mbps),
                    speed_mbps=interface.speed_mbps or 0,
                    order=len(found),
                    override=override,
                )
            )
    if not found:
        raise _nothing_to_try(host, interfaces, override)
    return tuple(sorted(found, key=lambda candidate: (candidate.tier, candidate.order)))


def _pick_ip(ip: str, interface: Interface) -> tuple[Address, ...]:
    wanted = ipaddress.ip_address(ip)
    if not interface.up:
        return ()
    if interface.kind == "loopback" and wanted.version == 4 and wanted.is_loopback:
        return (("inet", ip, 8),)  # all of 127.0.0.0/8 is there, though only 127.0.0.1 is listed
    return tuple(entry for entry in interface.addresses if ipaddress.ip_address(entry[1]) == wanted)


def _pick_nic(nic: Nic, interface: Interface) -> tuple[Address, ...]:
    if not interface.up:
        return ()
    # An IPv6 link-local address means nothing without a zone, which differs from host to host.
    addresses = (entry for entry in interface.addresses if not entry[1].startswith("fe80:"))
    return tuple(entry for entry in addresses if nic.admits(interface.name, entry[1]))


def _speed_text(speed_mbps: int | None) -> str:
    if speed_mbps is None:
        return ""
    return f", {speed_mbps / 1000:g} Gb/s" if speed_mbps >= 1000 else f", {speed_mbps} Mb/s"


def _nothing_to_try(host: Host, interfaces: Sequence[Interface], override: str) -> HostError:
    there = [_describe(interface) for interface in interfaces]
    has = f"it has {'; '.join(there[:8])}" if there else "it has no interface at all"
    if host.ip is not None:
        return HostError(f"{host.origin}: ip={host.ip} is not an address of {host.name}: {has}")
    if override:
        return HostError(f"{override} fits no interface of {host.name}: {has}", hint=_NIC_HINT)
    return HostError(f"{host.name} has no network interface for other hosts to reach: {has}", hint=_NIC_HINT)


_NIC_HINT = "names may differ from host to host: --nic eth0,enp3s0, or a network: --nic 10.0.0.0/24"


def _describe(interface: Interface) -> str:
    addresses = " ".join(address for _, address, _ in interface.addresses)
    return f"{interface.name} {addresses or '-'} ({rank_interface(interface)[1]})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dial:
    """One try: from an address of a host to an address of another."""

    source_host: int
    source: str
    host: int
    address: str

    def target(self, ports: dict[str, int]) -> Target:
        """For `probe.dial` on the source host; `ports` is what the other host's listener answered.

        An address that could not be listened on gets port 0, where a connection is refused at once.
        """
        return (self.source, self.host, self.address, ports.get(self.address, 0))


def dial_rounds(candidates: Sequence[Sequence[Candidate]]) -> Iterator[tuple[Dial, ...]]:
    """What to dial, in rounds: the next is needed only if the results so far allow no complete choice.

    From better to worse tiers, and in each first within a subnet, then across. So what is dead or far (an
    overlay, a second network without a router) costs time only where nothing better works.
    """
    waiting: list[Dial] = []
    covered: set[tuple[int, int]] = set()
    num_pairs = len(candidates) * (len(candidates) - 1)
    for tier in range(NEVER):
        for across in (False, True):
            fresh = [
                Dial(source_host=source.host, source=source.address, host=there.host, address=there.address)
                for source, there in _pairs(candidates)
                if max(source.tier, there.tier) == tier and (source.network != there.network) == across
            ]
            waiting += fresh
            covered |= {(dial.source_host, dial.host) for dial in fresh}
            if fresh and len(covered) == num_pairs:
                yield tuple(waiting)
                waiting = []


def _pairs(candidates: Sequence[Sequence[Candidate]]) -> Iterator[tuple[Candidate, Candidate]]:
    everyone = [candidate for of_host in candidates for candidate in of_host]
    for source in everyone:
        for there in everyone:
            if source.host != there.host and (":" in source.address) == (":" in there.address):
                yield source, there
