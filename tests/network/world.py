"""A pretended network: hosts with interfaces, and who reaches whom."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable, Sequence

from paceline.cluster.spec import Host
from paceline.network import probe
from paceline.network.candidates import Candidate, Dial, list_candidates, parse_nic
from paceline.network.interfaces import Interface
from paceline.network.wires import DialResult, Wire, choose_wires

Cut = Callable[[str, str, str, str], str | None]
"""(source host, source, host, address) -> outcome, or None for what the subnets say."""


def card(name: str, *addresses: str, kind: str = "", **changes: object) -> Interface:
    """A wired card unless told otherwise; addresses as `10.0.0.5/24`."""
    entries: list[tuple[str, str, int]] = []
    for text in addresses:
        parsed = ipaddress.ip_interface(text)
        entries.append(("inet" if parsed.version == 4 else "inet6", str(parsed.ip), parsed.network.prefixlen))
    fields: dict[str, object] = {
        "name": name,
        "index": 2,
        "kind": kind,
        "up": True,
        "mtu": 1500,
        "speed_mbps": None,
        "wireless": name.startswith("wl"),
        "addresses": tuple(entries),
        "master": None,
        "has_device": kind == "",
    }
    return Interface(**{**fields, **changes})  # type: ignore[arg-type]


LO = card("lo", "127.0.0.1/8", "::1/128", kind="loopback")
DOCKER = card("docker0", "172.17.0.1/16", kind="bridge")


@dataclasses.dataclass
class World:
    """Subnets that are listed are connected, others are dead, unless `cut` says otherwise."""

    interfaces: dict[str, list[Interface]]
    connected: tuple[str, ...]
    cut: Cut = lambda source_host, source, host, address: None
    elapsed_ms: Callable[[Dial], float] = lambda dial: 0.2
    overrides: dict[str, str] = dataclasses.field(default_factory=dict)
    rounds: list[tuple[Dial, ...]] = dataclasses.field(default_factory=list)

    def candidates(self, nic: str | None = None) -> tuple[tuple[Candidate, ...], ...]:
        hosts = [Host(name=name, ip=self.overrides.get(name), origin="h.txt:1") for name in self.interfaces]
        parsed = None if nic is None else parse_nic(nic)
        return list_candidates(hosts, [[LO, *cards] for cards in self.interfaces.values()], nic=parsed)

    def dial_all(self, dials: Sequence[Dial]) -> list[DialResult]:
        self.rounds.append(tuple(dials))
        return [self._dial(dial) for dial in dials]

    def choose(self, nic: str | None = None) -> tuple[Wire, ...]:
        return choose_wires(self.candidates(nic), self.dial_all)

    def _dial(self, dial: Dial) -> DialResult:
        names = list(self.interfaces)
        outcome = self.cut(names[dial.source_host], dial.source, names[dial.host], dial.address)
        if outcome is None:
            outcome = self._by_subnet(dial, names[dial.source_host])
        failed_ms = {probe.OK: self.elapsed_ms(dial), probe.TIMEOUT: 2500.0}.get(outcome, 1.0)
        return DialResult(dial=dial, outcome=outcome, elapsed_ms=failed_ms)

    def _by_subnet(self, dial: Dial, source_name: str) -> str:
        if dial.address in {address for card in self.interfaces[source_name] for _, address, _ in card.addresses}:
            return probe.REFUSED  # it is the dialling host's own
        networks = [ipaddress.ip_network(text) for text in self.connected]
        ends = (ipaddress.ip_address(dial.source), ipaddress.ip_address(dial.address))
        return probe.OK if any(all(end in network for end in ends) for network in networks) else probe.TIMEOUT
