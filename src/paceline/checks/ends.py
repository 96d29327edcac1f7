"""The hosts as the network checks see them: one end of all its wires each. Pure."""

from __future__ import annotations

import collections
import dataclasses
import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from paceline.checks.findings import Finding, check
from paceline.network.interfaces import OVERLAY, WIRED, Interface, rank_interface, usable_addresses
from paceline.network.wires import Wire


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """One host, and the interface on which it is to talk."""

    host: int
    """Index among all hosts."""
    name: str
    address: str
    interface: str
    network: str
    """In CIDR form; the address alone where the interface is not known."""
    mtu_bytes: int
    """Zero where unknown, as the next one."""
    speed_mbps: int
    interfaces: tuple[Interface, ...] = ()
    """All that the host has."""
    firewall: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """As `pair_errand.find_firewall` tells it; empty where it was not looked for."""


def make_end(host: int, name: str, interfaces: Sequence[Interface], wire: Wire) -> End:
    """The end of a host that talks over this wire."""
    for interface in interfaces:
        for _, address, prefix_length in interface.addresses:
            if interface.name == wire.interface and address == wire.address:
                return End(
                    host=host,
                    name=name,
                    address=address,
                    interface=interface.name,
                    network=str(ipaddress.ip_interface(f"{address}/{prefix_length}").network),
                    mtu_bytes=interface.mtu,
                    speed_mbps=interface.speed_mbps or 0,
                    interfaces=tuple(interfaces),
                )
    return End(
        host=host,
        name=name,
        address=wire.address,
        interface=wire.interface,
        network=wire.address,
        mtu_bytes=0,
        speed_mbps=0,
    )


def arrow(source: End, target: End) -> str:
    """`h1 → h2`."""
    return f"{source.name} → {target.name}"


def join_names(names: Sequence[str]) -> str:
    """`h1, h2 and h3`; at most four of them; empty for none."""
    named = [*names] if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]]))


@check("interfaces")
def check_interfaces(ends: Sequence[End]) -> Iterator[Finding]:
    """The interfaces of all hosts beside each other.

    What it looks at
        Whether a host has two interfaces in one subnet, whether two hosts have the same address, and whether the
        interfaces that were chosen have the same speed.

    Why it matters
        With two interfaces in one subnet the kernel sends over one of them whatever a program asks for, and answers
        for the addresses of both. An address that two machines have leads to either of them, by chance. A port that
        has negotiated 100 Mb/s among gigabit ports makes every host wait for it. The bridges that Docker and virtual
        machines bring have the same address everywhere, and do no harm: no host is reached over them.

    How to mend it
        Take the second interface down or give it a subnet of its own; give each machine an address of its own; for
        the speed, look at the cable and at the switch's port.
    """
    found = [*_find_double_subnets(ends), *_find_shared_addresses(ends), *_find_slow_ports(ends)]
    yield from found
    if not found:
        names = ", ".join(dict.fromkeys(end.interface for end in ends))
        yield Finding(check="interfaces", status="ok", where="", text=f"{names}: an own address and subnet each")


def _find_double_subnets(ends: Sequence[End]) -> Iterator[Finding]:
    for end in ends:
        owners: dict[str, list[str]] = {}
        for interface in end.interfaces:
            if rank_interface(interface)[0] > OVERLAY:
                continue
            for network in _networks_of(interface):
                owners.setdefault(network, []).append(interface.name)
        for network, names in owners.items():
            if len(names) > 1:
                other = next(name for name in names if name != end.interface)
                yield Finding(
                    check="interfaces",
                    status="warning",
                    where=end.name,
                    text=f"{join_names(names)} of {end.name} are both in {network}: "
                    "the kernel uses one of them, whichever a program asks for",
                    remedy=f"On {end.name}:  ip link set dev {other} down",
                )


def _networks_of(interface: Interface) -> set[str]:
    entries = usable_addresses(interface)
    return {str(ipaddress.ip_interface(f"{address}/{prefix_length}").network) for _, address, prefix_length in entries}


def _find_shared_addresses(ends: Sequence[End]) -> Iterator[Finding]:
    owners: dict[str, list[tuple[End, Interface]]] = collections.defaultdict(list)
    for end in ends:
        for interface in end.interfaces:
            # A bridge or tunnel of that kind is the same everywhere, and nobody is reached over it.
            is_meant = interface.name == end.interface or rank_interface(interface)[0] == WIRED
            for _, address, _ in usable_addresses(interface) if is_meant else ():
                owners[address].append((end, interface))
    for address, having in owners.items():
        names = list(dict.fromkeys(end.name for end, _ in having))
        if len(names) > 1:
            end, interface = having[-1]
            yield Finding(
                check="interfaces",
                status="failure" if any(address == end.address for end, _ in having) else "warning",
                where=join_names(names),
                text=f"{join_names(names)} all have the address {address}: who is reached there is chance",
                remedy=f"On {end.name}:  ip address del {address} dev {interface.name}, and give it one of its own",
            )


def _find_slow_ports(ends: Sequence[End]) -> Iterator[Finding]:
    known = [end for end in ends if end.speed_mbps]
    if not known:
        return
    usual = max(collections.Counter(end.speed_mbps for end in known).items(), key=lambda item: (item[1], item[0]))[0]
    for end in known:
        if end.speed_mbps < usual:
            others = [other.name for other in known if other.speed_mbps == usual]
            yield Finding(
                check="interfaces",
                status="warning",
                where=end.name,
                text=f"{end.interface} of {end.name} runs at {end.speed_mbps} Mb/s, "
                f"that of {join_names(others)} at {usual} Mb/s",
                remedy=f"On {end.name}:  ethtool -s {end.interface} autoneg on; "
                "if that changes nothing: another cable or port",
            )
