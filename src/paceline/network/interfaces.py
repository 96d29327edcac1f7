"""The network interfaces of this host, and how much each deserves to carry a training run.

Read over rtnetlink, as `ip` does, in about a millisecond: no program is started and no privilege needed.
Standard library only: this module runs on every host.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

from paceline.records import Record

WIRED, WIRELESS, BRIDGED, OVERLAY, NEVER = range(5)
"""Tiers, best first. WIRELESS is also where an interface of unknown kind goes; NEVER is not used at all."""


class Interface(Record):
    """One network interface, as the kernel tells it."""

    name: str
    index: int
    kind: str
    """`bond`, `veth`, ... as `ip -d link` shows, or `loopback`, `infiniband`; empty for a plain card."""
    up: bool
    """Switched on, and with a carrier."""
    mtu: int
    """Bytes."""
    speed_mbps: int | None
    """Megabits per second; None where unknown, and for virtual interfaces, which make one up."""
    wireless: bool
    addresses: tuple[tuple[str, str, int], ...]
    """(`inet` or `inet6`, address, prefix length) in the kernel's order; workers take the first."""
    master: str | None
    """The bond or bridge that this interface is a part of; its traffic then goes through that one."""
    has_device: bool
    """Hardware stands behind it: its own, or that of a member or of the interface below."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for the channel."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Interface:
        """The interface in an agent's facts. Raises TypeError for another version's record."""
        fields: dict[str, Any] = {**record, "addresses": tuple((f, a, n) for f, a, n in record["addresses"])}
        return cls(**fields)


def rank_interface(interface: Interface) -> tuple[int, str]:
    """The tier of an interface, and why in a word or two."""
    kind, name = interface.kind, interface.name
    if kind == "loopback" or name == "lo":
        return NEVER, "loopback"
    if not interface.up:
        return NEVER, "down or not plugged in"
    if interface.master is not None:
        return NEVER, f"part of {interface.master}"
    if not usable_addresses(interface):
        return NEVER, "only a link-local address" if interface.addresses else "no address"
    family = _overlay_family(name)
    if family:
        return OVERLAY, family
    if kind in _KINDS:
        tier, reason = _KINDS[kind]
        if kind == "bridge" and interface.has_device:
            return WIRED, "bridge over a wired card"
        return tier, reason
    if interface.wireless:
        return WIRELESS, "wireless"
    if kind == "" and interface.has_device:
        return WIRED, "wired"
    return WIRELESS, f"of unknown kind {kind}" if kind else "of unknown kind"


def usable_addresses(interface: Interface) -> tuple[tuple[str, str, int], ...]:
    """Its addresses that other hosts could reach: neither loopback nor link-local."""
    return tuple(entry for entry in interface.addresses if not entry[1].startswith(_LOCAL_PREFIXES))


# 127.0.0.0/8 and 169.254.0.0/16; fe80::/10 is written fe8... to feb...
_LOCAL_PREFIXES = ("127.", "169.254.", "0.", "fe8", "fe9", "fea", "feb", "::1")

_KINDS = {
    "bond": (WIRED, "bond"),
    "team": (WIRED, "bond"),
    "vlan": (WIRED, "VLAN"),
    "infiniband": (WIRED, "InfiniBand"),
    "ipoib": (WIRED, "InfiniBand"),
    "bridge": (BRIDGED, "bridge"),
    "openvswitch": (BRIDGED, "virtual switch"),
    "macvlan": (BRIDGED, "macvlan"),
    "macvtap": (BRIDGED, "macvlan"),
    "ipvlan": (BRIDGED, "ipvlan"),
    "veth": (BRIDGED, "virtual cable"),
    "netkit": (BRIDGED, "virtual cable"),
    "dummy": (OVERLAY, "dummy"),
    "ppp": (OVERLAY, "tunnel"),
    "vxlan": (OVERLAY, "overlay"),
    "geneve": (OVERLAY, "overlay"),
    **dict.fromkeys(("tun", "wireguard", "ipip", "sit", "ip6tnl", "vti", "vti6", "xfrm"), (OVERLAY, "tunnel")),
    **dict.fromkeys(("gre", "gretap", "ip6gre", "ip6gretap", "erspan", "bareudp"), (OVERLAY, "tunnel")),
}

_OVERLAY_NAMES = {
    "container bridge": ("docker", "podman", "cni", "lxcbr", "lxdbr", "incusbr", "nerdctl"),
    "virtual machine bridge": ("virbr", "vnet", "vmnet", "vboxnet"),
    "Kubernetes overlay": ("flannel", "cali", "cilium", "weave", "kube-", "lxc_"),
    "overlay": ("tailscale", "zt", "nebula", "ham", "vxlan"),
    "tunnel": ("tun", "tap", "wg", "utun", "ppp", "ipsec"),
}


def _overlay_family(name: str) -> str:
    """What a well-known name says, whatever the kind; empty for other names."""
    if name.startswith("br-") and len(name) == 15 and all(char in "0123456789abcdef" for char in name[3:]):
        return "container bridge"
    for family, prefixes in _OVERLAY_NAMES.items():
        if name.startswith(prefixes):
            return family
    return ""


# rtnetlink (linux/netlink.h, linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h)

_RTM_NEWLINK, _RTM_GETLINK, _RTM_NEWADDR, _RTM_GETADDR = 16, 18, 20, 22
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST_DUMP = 0x301
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINK, _IFLA_MASTER, _IFLA_LINKINFO = 1, 3, 4, 5, 10, 18
_IFLA_INFO_KIND = 1
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_IFA_F_TEMPORARY, _IFA_F_UNUSABLE = 0x01, 0x08 | 0x20 | 0x40  # duplicate, deprecated, tentative
_NLA_TYPE_MASK = 0x3FFF
_HARDWARE_KINDS = {
    772: "loopback",
    32: "infiniband",
    512: "ppp",
    768: "ipip",
    769: "ip6tnl",
    776: "sit",
    778: "gre",
}
_TIMEOUT_S = 2.0


def list_interfaces() -> list[Interface]:
    """All interfaces of this host, in the kernel's order. Raises OSError where the kernel does not answer."""
    addresses: dict[int, list[tuple[str, str, int]]] = {}
    for payload in _dump(_RTM_GETADDR, _RTM_NEWADDR):
        entry = _read_address(payload)
        if entry is not None:
            addresses.setdefault(entry[0], []).append(entry[1])
    links = {link.index: link for link in map(_Link, _dump(_RTM_GETLINK, _RTM_NEWLINK))}
    with_device = _spread_device(links)
    return [
        Interface(
            name=link.name,
            index=link.index,
            kind=link.kind,
            up=link.flags & (_IFF_UP | _IFF_RUNNING) == _IFF_UP | _IFF_RUNNING,
            mtu=link.mtu,
            speed_mbps=_read_speed(link.name) if link.index in with_device else None,
            wireless=link.wireless,
            addresses=tuple(addresses.get(link.index, ())),
            master=links[link.master].name if link.master in links else None,
            has_device=link.index in with_device,
        )
        for link in links.values()
    ]


class _Link:
    """An interface without its addresses. A plain class: each dataclass costs a host's start a millisecond."""

    def __init__(self, payload: bytes) -> None:
        _, hardware, self.index, self.flags, _ = struct.unpack_from("=BxHiII", payload)
        found = _attributes(payload, 16)
        info = _attributes(found.get(_IFLA_LINKINFO, b""))
        self.name = _text(found[_IFLA_IFNAME])
        self.kind = _text(info.get(_IFLA_INFO_KIND, b"")) or _HARDWARE_KINDS.get(hardware, "")
        self.mtu = _number(found.get(_IFLA_MTU), 0)
        self.master = _number(found.get(_IFLA_MASTER), 0)
        # Of a veth or macvlan it may be a number of another namespace, and so another interface of ours.
        self.below = _number(found.get(_IFLA_LINK), 0) if self.kind == "vlan" else 0
        folder = f"/sys/class/net/{self.name}"
        # In a network namespace of its own, /sys may still show the machine's interfaces, with other addresses.
        known = _read_file(f"{folder}/address") == found.get(_IFLA_ADDRESS, b"").hex(":")
        self.device = known and os.path.exists(f"{folder}/device")
        self.wireless = self.name.startswith("wl") or (known and os.path.exists(f"{folder}/phy80211"))


def _dump(request: int, answer: int) -> Iterator[bytes]:
    """The payload of each message that the kernel answers to a dump request."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as channel:
        channel.settimeout(_TIMEOUT_S)
        channel.send(struct.pack("=IHHII16x", 32, request, _NLM_F_REQUEST_DUMP, 1, 0))
        while True:
            data = channel.recv(1 << 18)
            offset = 0
            while offset + 16 <= len(data):
                length, kind = struct.unpack_from("=IH", data, offset)
                if kind == _NLMSG_ERROR:
                    number = -struct.unpack_from("=i", data, offset + 16)[0]
                    raise OSError(number, os.strerror(number), "rtnetlink")
                if kind == _NLMSG_DONE or length < 16:
                    return
                if kind == answer:
                    yield data[offset + 16 : offset + length]
                offset += _align(length)


def _attributes(data: bytes, offset: int = 0) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while offset + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, offset)
        if length < 4:
            break
        found[kind & _NLA_TYPE_MASK] = data[offset + 4 : offset + length]
        offset += _align(length)
    return found


def _align(length: int) -> int:
    return (length + 3) & ~3


def _read_address(payload: bytes) -> tuple[int, tuple[str, str, int]] | None:
    """(interface index, address), or None for one that can't be counted on."""
    family, prefix_length, short_flags, _, index = struct.unpack_from("=BBBBI", payload)
    found = _attributes(payload, 8)
    flags = _number(found.get(_IFA_FLAGS), short_flags)
    # On a point-to-point interface IFA_ADDRESS is the other end.
    raw = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)
    if raw is None or family not in (socket.AF_INET, socket.AF_INET6) or flags & _IFA_F_UNUSABLE:
        return None
    if family == socket.AF_INET:
        return index, ("inet", socket.inet_ntop(family, raw), prefix_length)
    if flags & _IFA_F_TEMPORARY:
        return None  # a privacy address goes away in the middle of a long run
    return index, ("inet6", socket.inet_ntop(family, raw), prefix_length)


def _spread_device(links: dict[int, _Link]) -> set[int]:
    """Indexes of the links with hardware behind them, through bonds, bridges and VLANs of any depth."""
    behind = {link.index for link in links.values() if link.device}
    while True:
        more = {link.master for link in links.values() if link.index in behind and link.master in links}
        more |= {link.index for link in links.values() if link.below in behind}
        if more <= behind:
            return behind
        behind |= more


def _read_speed(name: str) -> int | None:
    text = _read_file(f"/sys/class/net/{name}/speed")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _read_file(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:  # `speed` of an interface that has none can't be read
        return ""


def _number(raw: bytes | None, default: int) -> int:
    return default if raw is None else int(struct.unpack_from("=I", raw)[0])


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
