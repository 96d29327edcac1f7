from __future__ import annotations

import itertools
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import DOCKER, World, card

from paceline.errors import HostError, InputError
from paceline.network import probe
from paceline.network.candidates import Candidate, Dial, dial_rounds, parse_nic
from paceline.network.wires import LOOPBACK, DialResult, choose_wires, explain_failure, find_wires

LAN, SECOND = "10.0.0.0/24", "10.0.1.0/24"


def two_cards(host: int) -> list:
    return [card("eth0", f"10.0.0.{host}/24"), card("eth1", f"10.0.1.{host}/24")]


def where(wires) -> list[str]:
    return [f"{wire.interface} {wire.address}" for wire in wires]


CASES = {
    "only the second subnet is connected": (
        World({"a": two_cards(1), "b": two_cards(2), "c": two_cards(3)}, (SECOND,)),
        ["eth1 10.0.1.1", "eth1 10.0.1.2", "eth1 10.0.1.3"],
    ),
    "names differ": (
        World({"a": [card("enp3s0", "10.0.0.1/24")], "b": [card("eno1", "10.0.0.2/24")]}, (LAN,)),
        ["enp3s0 10.0.0.1", "eno1 10.0.0.2"],
    ),
    "the same docker bridge everywhere": (
        World({"a": [DOCKER, card("eth0", "10.0.0.1/24")], "b": [DOCKER, card("eth0", "10.0.0.2/24")]}, (LAN,)),
        ["eth0 10.0.0.1", "eth0 10.0.0.2"],
    ),
    "wireless first in the list": (
        World(
            {
                "a": [card("wlan0", "192.168.1.1/24"), card("eth0", "10.0.0.1/24")],
                "b": [card("wlp2s0", "192.168.1.2/24"), card("eth0", "10.0.0.2/24")],
            },
            (LAN, "192.168.1.0/24"),
        ),
        ["eth0 10.0.0.1", "eth0 10.0.0.2"],
    ),
    "one host has only wireless, on the same LAN": (
        World({"a": [card("wlan0", "10.0.0.1/24")], "b": [card("eth0", "10.0.0.2/24")]}, (LAN,)),
        ["wlan0 10.0.0.1", "eth0 10.0.0.2"],
    ),
    "overlay only": (
        World(
            {
                "a": [card("eth0", "192.168.1.1/24"), card("tailscale0", "100.64.0.1/32", kind="tun")],
                "b": [card("eth0", "172.20.9.2/24"), card("tailscale0", "100.64.0.2/32", kind="tun")],
            },
            ("100.64.0.0/10",),
        ),
        ["tailscale0 100.64.0.1", "tailscale0 100.64.0.2"],
    ),
    "addresses of the cloud kind, /32 each": (
        World({"a": [card("ens4", "10.128.0.2/32")], "b": [card("ens4", "10.132.0.7/32")]}, ("10.128.0.0/9",)),
        ["ens4 10.128.0.2", "ens4 10.132.0.7"],
    ),
    "routed wired subnets before shared wireless": (
        World(
            {
                "a": [card("eth0", "10.0.0.1/24"), card("wlan0", "192.168.1.1/24")],
                "b": [card("eth0", "10.0.1.2/24"), card("wlan0", "192.168.1.2/24")],
            },
            ("10.0.0.0/16", "192.168.1.0/24"),
        ),
        ["eth0 10.0.0.1", "eth0 10.0.1.2"],
    ),
    "one subnet before two routed ones": (
        World(
            {
                "a": [card("eth0", "10.0.0.1/24"), card("eth1", "10.0.5.1/24")],
                "b": [card("eth0", "10.0.1.2/24"), card("eth1", "10.0.5.2/24")],
            },
            ("10.0.0.0/16",),
        ),
        ["eth1 10.0.5.1", "eth1 10.0.5.2"],
    ),
    "the faster of two networks": (
        World(
            {
                name: [
                    card("eth0", f"10.0.0.{host}/24", speed_mbps=1000),
                    card("eth1", f"10.0.1.{host}/24", speed_mbps=25000),
                ]
                for host, name in enumerate("abc", start=1)
            },
            (LAN, SECOND),
        ),
        ["eth1 10.0.1.1", "eth1 10.0.1.2", "eth1 10.0.1.3"],
    ),
    "the network with the clearly shorter round trip": (
        World(
            {"a": two_cards(1), "b": two_cards(2)},
            (LAN, SECOND),
            elapsed_ms=lambda dial: 20.0 if dial.source.startswith("10.0.0.") else 0.3,
        ),
        ["eth1 10.0.1.1", "eth1 10.0.1.2"],
    ),
    "noise in the round trip decides nothing": (
        World(
            {"a": two_cards(1), "b": two_cards(2)},
            (LAN, SECOND),
            elapsed_ms=lambda dial: 4.0 if dial.source.startswith("10.0.0.") else 0.1,
        ),
        ["eth0 10.0.0.1", "eth0 10.0.0.2"],
    ),
    "IPv4 before IPv6 on one card, as workers take the first": (
        World(
            {name: [card("eth0", f"10.0.0.{host}/24", f"fd00::{host}/64")] for host, name in enumerate("ab", 1)},
            (LAN, "fd00::/64"),
        ),
        ["eth0 10.0.0.1", "eth0 10.0.0.2"],
    ),
    "IPv6 only": (
        World({"a": [card("eth0", "fd00::1/64")], "b": [card("eth0", "10.9.9.9/24", "fd00::2/64")]}, ("fd00::/64",)),
        ["eth0 fd00::1", "eth0 fd00::2"],
    ),
    "containers have a virtual cable each": (
        World({name: [card("eth0", f"10.0.0.{host}/24", kind="veth")] for host, name in enumerate("ab", 1)}, (LAN,)),
        ["eth0 10.0.0.1", "eth0 10.0.0.2"],
    ),
    "one direction of the better network is blocked": (
        World(
            {"a": two_cards(1), "b": two_cards(2)},
            (LAN, SECOND),
            cut=lambda source_host, source, host, address: (
                probe.REFUSED if source_host == "b" and address == "10.0.0.1" else None
            ),
        ),
        ["eth1 10.0.1.1", "eth1 10.0.1.2"],
    ),
    "an address that two machines have is passed over": (
        World(
            {"a": two_cards(1), "b": two_cards(2), "c": [card("eth0", "10.0.0.2/24"), card("eth1", "10.0.1.3/24")]},
            (LAN, SECOND),
            cut=lambda source_host, source, host, address: (
                probe.WRONG_HOST if "10.0.0.2" in (source, address) else None
            ),
        ),
        ["eth1 10.0.1.1", "eth1 10.0.1.2", "eth1 10.0.1.3"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_choice(name: str) -> None:
    world, expected = CASES[name]
    assert where(world.choose()) == expected


def test_one_host_needs_no_wire() -> None:
    world = World({"a": []}, ())
    assert choose_wires([()], world.dial_all) == (LOOPBACK,)
    assert (LOOPBACK.interface, LOOPBACK.address) == ("lo", "127.0.0.1")
    assert world.rounds == []


# What is said


def test_reasons_name_what_was_passed_over() -> None:
    cards = [card("wlan0", "192.168.1.1/24"), DOCKER, card("eth0", "10.0.0.1/24", speed_mbps=1000)]
    others = {name: [DOCKER, card("eth0", f"10.0.0.{host}/24")] for host, name in enumerate("bcd", start=2)}
    wires = World({"a": cards, **others}, (LAN,)).choose()
    assert wires[0].reason == ("eth0 10.0.0.1: reaches all 3 other hosts, wired, 1 Gb/s; wlan0 and docker0 not needed")
    assert wires[1].reason == "eth0 10.0.0.2: reaches all 3 other hosts, wired; docker0 not needed"


def test_reasons_name_what_did_not_work() -> None:
    wires = World({"a": two_cards(1), "b": two_cards(2)}, (SECOND,)).choose()
    assert wires[0].reason == "eth1 10.0.1.1: reaches the other host, wired; eth0 does not reach b"


def test_reasons_name_the_override() -> None:
    world = World({"a": two_cards(1), "b": two_cards(2)}, (LAN, SECOND))
    assert where(world.choose(nic="10.0.1.0/24")) == ["eth1 10.0.1.1", "eth1 10.0.1.2"]
    assert where(world.choose(nic="eth1")) == ["eth1 10.0.1.1", "eth1 10.0.1.2"]
    assert world.choose(nic="eth1")[0].reason == ("eth1 10.0.1.1: reaches the other host, wired; chosen by --nic eth1")
    world.overrides = {"a": "10.0.1.1"}
    wires = world.choose()
    assert where(wires) == ["eth1 10.0.1.1", "eth1 10.0.1.2"]
    assert "chosen by ip= in h.txt:1" in wires[0].reason


def test_overrides_go_before_the_ranking() -> None:
    world = World(
        {
            "a": [card("eth0", "10.0.0.1/24"), card("wg0", "10.9.0.1/24", kind="wireguard")],
            "b": [card("enp1s0", "10.0.0.2/24"), card("wg0", "10.9.0.2/24", kind="wireguard")],
        },
        (LAN, "10.9.0.0/24"),
    )
    assert where(world.choose(nic="wg0")) == ["wg0 10.9.0.1", "wg0 10.9.0.2"]
    assert where(world.choose(nic="eth0,enp1s0")) == ["eth0 10.0.0.1", "enp1s0 10.0.0.2"]
    world.overrides = {"a": "10.9.0.1"}  # per host, and before --nic
    assert where(world.choose(nic="10.9.0.0/24")) == ["wg0 10.9.0.1", "wg0 10.9.0.2"]


def test_loopback_addresses_can_stand_for_hosts_of_one_machine() -> None:
    world = World({"a": [], "b": []}, ("127.0.0.0/8",), overrides={"a": "127.0.0.2", "b": "127.0.0.3"})
    assert where(world.choose()) == ["lo 127.0.0.2", "lo 127.0.0.3"]


@pytest.mark.parametrize(
    ("nic", "ip", "message"),
    [
        ("eth7", None, "--nic eth7 fits no interface of a: it has lo 127.0.0.1 ::1 (loopback); eth0 10.0.0.1 (wired)"),
        ("10.5.0.0/16", None, "--nic 10.5.0.0/16 fits no interface of a"),
        ("eth9", None, "eth9 10.0.9.1 (down or not plugged in)"),
        (None, "10.0.0.77", "h.txt:1: ip=10.0.0.77 is not an address of a: it has lo"),
    ],
)  # fmt: skip
def test_overrides_that_fit_nothing_say_what_there_is(nic: str | None, ip: str | None, message: str) -> None:
    cards = [card("eth0", "10.0.0.1/24"), card("eth9", "10.0.9.1/24", up=False)]
    world = World({"a": cards, "b": cards}, (LAN,), overrides={} if ip is None else {"a": ip})
    with pytest.raises(HostError) as caught:
        world.candidates(nic)
    assert message in caught.value.message


@pytest.mark.parametrize("text", ["", "eth0,", "10.0.0.0/99", "eth 0", "::/200"])
def test_a_nic_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InputError, match="expected an interface name or a network"):
        parse_nic(text)


def test_a_host_without_a_network_is_named() -> None:
    world = World({"a": [card("eth0", "10.0.0.1/24")], "bob": [card("eth0", up=False)]}, (LAN,))
    with pytest.raises(HostError) as caught:
        world.choose()
    assert caught.value.message == (
        "bob has no network interface for other hosts to reach: "
        "it has lo 127.0.0.1 ::1 (loopback); eth0 - (down or not plugged in)"
    )


def lan(*names: str) -> dict[str, list]:
    return {name: [card("eth0", f"10.0.0.{host}/24")] for host, name in enumerate(names, start=5)}


@pytest.mark.parametrize(
    ("outcome", "cause", "hint"),
    [
        (probe.REFUSED, "refused in 1 ms: a firewall on bob or between them", "firewall-cmd"),
        (probe.TIMEOUT, "no answer in 2500 ms: a firewall drops it, or they are not on the same wire", "firewall-cmd"),
        (probe.UNREACHABLE, "unreachable (1 ms): a firewall on bob rejects it, or it is not on", "firewall-cmd"),
        (probe.WRONG_HOST, "another machine answered at 10.0.0.6", "an address of its own"),
    ],
)  # fmt: skip
def test_a_pair_that_cannot_talk_is_named_with_the_likely_cause(outcome: str, cause: str, hint: str) -> None:
    blocked = {("alice", "bob")}
    world = World(
        lan("alice", "bob", "carol"),
        (LAN,),
        cut=lambda source_host, source, host, address: outcome if (source_host, host) in blocked else None,
    )
    with pytest.raises(HostError) as caught:
        world.choose()
    first, *rest = caught.value.message.splitlines()
    assert first == "no network joins all 3 hosts:"
    assert len(rest) == 1
    assert rest[0].startswith(f"  alice (eth0 10.0.0.5) to bob (eth0 10.0.0.6): {cause}")
    assert hint in (caught.value.hint or "")
    if "firewall" in hint:
        assert "On bob:" in (caught.value.hint or "")
        assert "--add-source=10.0.0.0/24" in (caught.value.hint or "")


def test_many_pairs_are_counted() -> None:
    world = World(lan("a", "b", "c", "d"), ())
    with pytest.raises(HostError) as caught:
        world.choose()
    lines = caught.value.message.splitlines()
    assert len(lines) == 5
    assert lines[-1] == "  and 9 more pairs"


def test_subnets_that_are_not_routed_are_called_that() -> None:
    world = World({"a": [card("eth0", "10.0.0.1/24")], "b": [card("eth0", "10.0.1.2/24")]}, (LAN, SECOND))
    with pytest.raises(HostError, match="no route between these subnets"):
        world.choose()


def test_hosts_without_a_common_family() -> None:
    world = World({"a": [card("eth0", "10.0.0.1/24")], "b": [card("eth0", "fd00::2/64")]}, (LAN,))
    with pytest.raises(HostError, match="one has only IPv4 there and the other only IPv6") as caught:
        world.choose()
    assert "name the network that joins them" in (caught.value.hint or "")


def test_one_address_on_two_machines_is_called_that() -> None:
    world = World(
        {"a": [card("eth0", "10.0.0.5/24")], "b": [card("eth0", "10.0.0.5/24")]},
        (LAN,),
        cut=lambda source_host, source, host, address: probe.WRONG_HOST,
    )
    with pytest.raises(HostError, match=re.escape("10.0.0.5 is an address of a and b: another machine")):
        world.choose()


def test_hosts_joined_only_by_turns_are_an_error() -> None:
    """a-b over the first network, b-c over the second, a-c over both: each pair can talk, no single choice works."""
    ways = {("a", "b"): "10.0.0.", ("b", "c"): "10.0.1."}
    world = World(
        {"a": two_cards(1), "b": two_cards(2), "c": two_cards(3)},
        (LAN, SECOND),
        cut=lambda source_host, source, host, address: (
            None if address.startswith(ways.get(tuple(sorted((source_host, host))), "")) else probe.TIMEOUT
        ),
    )
    with pytest.raises(HostError, match="no network joins all 3 hosts"):
        world.choose()


# Rounds


def test_the_common_case_takes_one_round_within_the_subnet() -> None:
    world = World(
        {
            name: [card("eth0", f"10.0.0.{host}/24"), DOCKER, card("wg0", f"10.9.0.{host}/24", kind="wireguard")]
            for host, name in enumerate("abcd", start=1)
        },
        (LAN,),
    )
    world.choose()
    (dials,) = world.rounds
    assert len(dials) == 12
    assert all(dial.source.startswith("10.0.0.") and dial.address.startswith("10.0.0.") for dial in dials)


def test_every_pair_of_one_family_is_dialled_once_in_the_end() -> None:
    world = World({"a": [*two_cards(1), DOCKER], "b": [*two_cards(2), card("eth2", "fd00::2/64")]}, ())
    dials = [dial for dials in dial_rounds(world.candidates()) for dial in dials]
    assert len(dials) == len(set(dials)) == 2 * 3 * 2


def test_a_target_without_a_listener_gets_a_port_that_refuses() -> None:
    dial = Dial(source_host=0, source="10.0.0.1", host=1, address="10.0.0.2")
    assert dial.target({"10.0.0.2": 4711}) == ("10.0.0.1", 1, "10.0.0.2", 4711)
    assert dial.target({}) == ("10.0.0.1", 1, "10.0.0.2", 0)


# Any network at all


def candidate(host: int, order: int, tier: int, network: int) -> Candidate:
    return Candidate(
        host=host,
        host_name=f"h{host}",
        interface=f"eth{order}",
        address=f"10.{network}.{order}.{host}",
        network=f"10.{network}.0.0/16",
        tier=tier,
        why="wired",
        speed_mbps=0,
        order=order,
    )


@st.composite
def any_network(draw: st.DrawFn) -> tuple[tuple[tuple[Candidate, ...], ...], list[DialResult]]:
    num_hosts = draw(st.integers(2, 4))
    candidates = tuple(
        tuple(
            candidate(host, order, draw(st.integers(0, 3)), draw(st.integers(0, 2)))
            for order in range(draw(st.integers(1, 3)))
        )
        for host in range(num_hosts)
    )
    rng = random.Random(draw(st.integers(0, 2**32)))
    share = draw(st.sampled_from([0.5, 0.8, 0.95]))
    outcomes = [probe.REFUSED, probe.TIMEOUT, probe.UNREACHABLE, probe.WRONG_HOST]
    results = [
        DialResult(
            dial=dial,
            outcome=probe.OK if rng.random() < share else rng.choice(outcomes),
            elapsed_ms=rng.choice([0.1, 4.0, 30.0]),
        )
        for dials in dial_rounds(candidates)
        for dial in dials
    ]
    return candidates, results


@settings(max_examples=150)
@given(any_network(), st.randoms(use_true_random=False))
def test_any_network_gives_the_best_complete_choice_or_an_error(network, rng: random.Random) -> None:
    candidates, results = network
    works = {(r.dial.source_host, r.dial.source, r.dial.host, r.dial.address) for r in results if r.outcome == probe.OK}
    complete = [
        choice
        for choice in itertools.product(*candidates)
        if all((a.host, a.address, b.host, b.address) in works for a, b in itertools.permutations(choice, 2))
    ]
    wires = find_wires(candidates, results)
    shuffled = list(results)
    rng.shuffle(shuffled)
    assert find_wires(candidates, shuffled) == wires
    if not complete:
        assert wires is None
        assert "no network joins" in explain_failure(candidates, results).message
        assert explain_failure(candidates, shuffled).message == explain_failure(candidates, results).message
        return
    assert wires is not None
    chosen = next(c for c in complete if [w.address for w in wires] == [a.address for a in c])

    def worst_tier_and_spread(choice: tuple[Candidate, ...]) -> tuple[int, bool]:
        return max(c.tier for c in choice), len({c.network for c in choice}) > 1

    assert worst_tier_and_spread(chosen) == min(map(worst_tier_and_spread, complete))


def test_thirty_two_hosts_with_one_bad_pair_are_decided_quickly() -> None:
    """Three routed networks each: without pruning, a pair that can't talk would take 3^30 tries to find out."""
    cards = {f"h{host}": [card(f"eth{net}", f"10.{net}.0.{host}/24") for net in range(3)] for host in range(1, 33)}
    world = World(
        cards,
        ("10.0.0.0/8",),
        cut=lambda source_host, source, host, address: probe.TIMEOUT if (source_host, host) == ("h30", "h31") else None,
    )
    candidates = world.candidates()
    results = [result for dials in dial_rounds(candidates) for result in world.dial_all(dials)]
    started_s = time.monotonic()
    assert find_wires(candidates, results) is None
    explain_failure(candidates, results)
    assert time.monotonic() - started_s < 5
