from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paceline.network.interfaces import (
    BRIDGED,
    NEVER,
    OVERLAY,
    WIRED,
    WIRELESS,
    Interface,
    list_interfaces,
    rank_interface,
    usable_addresses,
)


def make(name: str, kind: str = "", **changes: object) -> Interface:
    fields: dict[str, object] = {
        "name": name,
        "index": 2,
        "kind": kind,
        "up": True,
        "mtu": 1500,
        "speed_mbps": None,
        "wireless": False,
        "addresses": (("inet", "10.0.0.5", 24),),
        "master": None,
        "has_device": False,
    }
    return Interface(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        (make("enp3s0", has_device=True), (WIRED, "wired")),
        (make("bond0", "bond"), (WIRED, "bond")),
        (make("eth0.100", "vlan"), (WIRED, "VLAN")),
        (make("ib0", "infiniband", has_device=True), (WIRED, "InfiniBand")),
        (make("ibp1.8001", "ipoib"), (WIRED, "InfiniBand")),
        (make("vmbr0", "bridge", has_device=True), (WIRED, "bridge over a wired card")),
        (make("wlp2s0", wireless=True, has_device=True), (WIRELESS, "wireless")),
        (make("eth0"), (WIRELESS, "of unknown kind")),
        (make("x0", "netdevsim"), (WIRELESS, "of unknown kind netdevsim")),
        (make("br0", "bridge"), (BRIDGED, "bridge")),
        (make("br-lan", "bridge"), (BRIDGED, "bridge")),
        (make("eth0", "veth"), (BRIDGED, "virtual cable")),
        (make("eth0", "macvlan"), (BRIDGED, "macvlan")),
        (make("docker0", "bridge"), (OVERLAY, "container bridge")),
        (make("br-0123456789ab", "bridge"), (OVERLAY, "container bridge")),
        (make("virbr0", "bridge"), (OVERLAY, "virtual machine bridge")),
        (make("cni0", "bridge"), (OVERLAY, "container bridge")),
        (make("flannel.1", "vxlan"), (OVERLAY, "Kubernetes overlay")),
        (make("cali123", "veth"), (OVERLAY, "Kubernetes overlay")),
        (make("tailscale0", "tun"), (OVERLAY, "overlay")),
        (make("ztabc", "tun"), (OVERLAY, "overlay")),
        (make("vpn", "tun"), (OVERLAY, "tunnel")),
        (make("corp", "wireguard"), (OVERLAY, "tunnel")),
        (make("wg0", "wireguard"), (OVERLAY, "tunnel")),
        (make("dummy0", "dummy"), (OVERLAY, "dummy")),
        (make("lo", "loopback"), (NEVER, "loopback")),
        (make("eth0", has_device=True, up=False), (NEVER, "down or not plugged in")),
        (make("eth1", has_device=True, master="bond0"), (NEVER, "part of bond0")),
        (make("eth0", has_device=True, addresses=()), (NEVER, "no address")),
        (make("eth0", addresses=(("inet", "169.254.3.4", 16),)), (NEVER, "only a link-local address")),
        (make("eth0", addresses=(("inet6", "fe80::1", 64),)), (NEVER, "only a link-local address")),
        (make("eth0", addresses=(("inet6", "febf::1", 64),)), (NEVER, "only a link-local address")),
    ],
    ids=lambda value: value.name if isinstance(value, Interface) else value[1],
)
def test_each_kind_has_its_tier_and_reason(interface: Interface, expected: tuple[int, str]) -> None:
    assert rank_interface(interface) == expected


def test_only_addresses_that_others_can_reach_are_usable() -> None:
    addresses = (
        ("inet6", "fe80::1", 64),
        ("inet6", "fd00::2", 64),
        ("inet6", "fec0::2", 64),
        ("inet", "127.0.1.1", 8),
        ("inet", "169.254.0.1", 16),
        ("inet", "10.0.0.5", 24),
    )
    assert usable_addresses(make("eth0", addresses=addresses)) == (addresses[1], addresses[2], addresses[5])


def test_the_channel_carries_an_interface_unchanged() -> None:
    interface = make("bond0", "bond", addresses=(("inet", "10.0.0.5", 24), ("inet6", "fd00::5", 64)))
    assert Interface.from_json(json.loads(json.dumps(interface.to_json()))) == interface


def test_this_machine_has_its_loopback() -> None:
    found = {interface.name: interface for interface in list_interfaces()}
    loopback = found["lo"]
    assert loopback.kind == "loopback"
    assert loopback.mtu >= 1500
    if loopback.up:
        assert ("inet", "127.0.0.1", 8) in loopback.addresses


def test_what_runs_on_hosts_stays_light() -> None:
    """No module that costs more than it brings, in the interpreter of a host without site-packages."""
    code = (
        "import sys; import paceline.network.interfaces, paceline.network.probe;"
        "print([name for name in ('asyncio', 'ctypes', 'ipaddress', 'subprocess', 'typer') if name in sys.modules])"
    )
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.strip() == "[]"
