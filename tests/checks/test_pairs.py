"""How pairs of hosts are arranged, and what is read from what they found: no host is needed for that."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import pytest

from paceline.checks import pair_errand
from paceline.checks.ends import End, check_interfaces, join_names, make_end
from paceline.checks.findings import Finding
from paceline.checks.links import (
    Link,
    check_packet_size,
    check_round_trip,
    check_speed,
    find_doubtful,
    merge,
)
from paceline.checks.matrix import Matrix, render_matrix
from paceline.checks.pairs import arrange_rounds, choose_likely
from paceline.checks.ports import Knock, allow_command, check_ports
from paceline.network.candidates import Candidate
from paceline.network.interfaces import Interface
from paceline.network.wires import Wire

GIGABIT = 940.0


def interface(name: str, *addresses: str, kind: str = "", speed_mbps: int | None = 1000, mtu: int = 1500) -> Interface:
    return Interface(
        name=name,
        index=2,
        kind=kind,
        up=True,
        mtu=mtu,
        speed_mbps=speed_mbps,
        wireless=False,
        addresses=tuple(("inet", address, 24) for address in addresses),
        master=None,
        has_device=kind == "",
    )


def end(number: int, *more: Interface, **changes: object) -> End:
    own = interface("eth0", f"10.0.0.{number}")
    made = make_end(
        number - 1, f"h{number}", [own, *more], Wire(address=f"10.0.0.{number}", interface="eth0", reason="")
    )
    return dataclasses.replace(made, **changes)


FOUR = [end(number) for number in range(1, 5)]


def knocks(
    changes: Mapping[tuple[int, int], str], ports: tuple[int, ...] = (40001, 40002), num: int = 4
) -> list[Knock]:
    return [
        Knock(
            source=source,
            target=target,
            port=port,
            outcome=changes.get((source, target), pair_errand.OK) if port > 30000 else pair_errand.OK,
            elapsed_ms=1.0,
        )
        for source, target in itertools.permutations(range(num), 2)
        for port in ports
    ]


def links(rates: Mapping[tuple[int, int], float], num: int = 4, **changes: object) -> list[Link]:
    made = [
        Link(source=i, target=j, round_trip_ms=0.2, least_trip_ms=0.1, rate_mbps=rates.get((i, j), GIGABIT))
        for i, j in itertools.permutations(range(num), 2)
    ]
    return [dataclasses.replace(link, **changes) for link in made]


def told(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.status, finding.where) for finding in findings]


@pytest.mark.parametrize("num_hosts", range(2, 33))
def test_a_tournament_plays_each_pair_once_and_no_host_twice_in_a_round(num_hosts: int) -> None:
    rounds = arrange_rounds(num_hosts, max_rounds=99)
    played = [pair for pairs in rounds for pair in pairs]
    assert sorted(played) == list(itertools.combinations(range(num_hosts), 2))
    assert len(rounds) == num_hosts - 1 + num_hosts % 2, "and there is no shorter one"
    for pairs in rounds:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)


def test_with_many_hosts_some_rounds_are_taken_and_each_host_has_its_share() -> None:
    rounds = arrange_rounds(32)
    assert len(rounds) == 10 and all(len(pairs) == 16 for pairs in rounds)
    assert len({pair for pairs in rounds for pair in pairs}) == 160


def test_open_ports_are_one_line() -> None:
    [finding] = check_ports(FOUR, knocks({}), ())
    assert finding.text == "all 12 directions are open, on 2 ports chosen at random"


def test_a_one_way_firewall() -> None:
    [finding] = check_ports(FOUR, knocks({(0, 1): pair_errand.SILENT}), ())
    assert (finding.where, finding.status) == ("h1 → h2", "failure")
    assert "no answer in 1 ms" in finding.text and "h2, or between them, drops it" in finding.text
    assert finding.text.endswith("the other direction is open")
    assert "On h2:  firewall-cmd --zone=trusted --add-source=10.0.0.0/24  (or: ufw allow from" in finding.remedy


def test_what_all_find_at_a_host_is_told_once() -> None:
    refused = {(source, 2): pair_errand.REFUSED for source in (0, 1, 3)}
    [finding] = check_ports(FOUR, knocks(refused, (22, 29500, 40001)), (22, 29500))
    assert finding.where == "h1, h2 and h4 → h3"
    assert "rejects it; only 22 and 29500 are open, and workers talk on random ports" in finding.text


def test_some_ports_of_several_are_closed() -> None:
    found = [*knocks({}, (40001, 40002)), *knocks({(1, 0): pair_errand.REFUSED}, (50001,))]
    [finding] = check_ports(FOUR, found, ())
    assert finding.text.startswith("h2 cannot reach h1 on 1 of 3 random ports, such as 50001 (tried 10.0.0.1 from")


@pytest.mark.parametrize(
    ("outcome", "network", "cause", "remedy"),
    [
        (pair_errand.UNREACHABLE, "10.0.0.0/24", "a firewall on h2 rejects it", "On h2:  firewall-cmd"),
        (pair_errand.UNREACHABLE, "10.9.0.0/24", "no route from 10.0.0.0/24 to 10.9.0.0/24", "--nic NETWORK"),
        (pair_errand.SILENT, "10.9.0.0/24", "or there is no way back to the other subnet", "--add-source=10.0.0.1"),
        (pair_errand.ABSENT, "10.0.0.0/24", "nobody on eth0's wire has 10.0.0.2", "On h2:  ip -s link show dev eth0"),
        (pair_errand.FORBIDDEN, "10.0.0.0/24", "a rule on h1 itself forbids it", "On h1:  nft list ruleset"),
        (pair_errand.WRONG_HOST, "10.0.0.0/24", "another machine has 10.0.0.2", "ip neigh, on h1"),
    ],
)
def test_each_outcome_has_its_cause(outcome: str, network: str, cause: str, remedy: str) -> None:
    ends = [FOUR[0], dataclasses.replace(FOUR[1], network=network)]
    [finding] = check_ports(ends, knocks({(0, 1): outcome}, num=2), ())
    assert cause in finding.text and remedy in finding.remedy


def test_the_only_firewall_there_is_drops_the_answers() -> None:
    ends = [FOUR[0], dataclasses.replace(FOUR[1], firewall={"tool": "ufw"})]
    there, back = check_ports(ends, knocks({(0, 1): pair_errand.SILENT, (1, 0): pair_errand.SILENT}, num=2), ())
    assert "a firewall on h2, or between them, drops it" in there.text
    assert "a firewall on h2, or between them, drops the answers" in back.text
    assert there.remedy == back.remedy == "On h2:  ufw allow from 10.0.0.0/24"


@pytest.mark.parametrize(
    ("firewall", "sources", "command"),
    [
        ({"tool": "firewalld"}, ["10.0.0.0/24"], "firewall-cmd --zone=trusted --add-source=10.0.0.0/24"),
        ({"tool": "ufw"}, ["10.0.0.7", "10.0.0.8"], "ufw allow from 10.0.0.7; ufw allow from 10.0.0.8"),
        ({"tool": "iptables"}, ["fd00::/64"], "ip6tables -I INPUT -s fd00::/64 -j ACCEPT"),
        (
            {"tool": "nftables", "chain": "inet filter input"},
            ["10.0.0.7", "10.0.0.8"],
            "nft insert rule inet filter input ip saddr { 10.0.0.7, 10.0.0.8 } accept",
        ),
    ],
)
def test_commands_for_each_firewall(firewall: dict[str, str], sources: list[str], command: str) -> None:
    assert allow_command(dataclasses.replace(FOUR[0], firewall=firewall), sources) == command


RULES = """\
table ip nat {
\tchain INPUT {
\t\ttype nat hook input priority 100; policy accept;
\t\ttcp dport 80 accept
\t}
}
table inet filter {
\tset known {
\t\ttype ipv4_addr
\t}
\tchain idle {
\t\ttype filter hook input priority filter; policy accept;
\t}
\tchain input {
\t\ttype filter hook input priority filter; policy %s;
%s\t}
}
"""


@pytest.mark.parametrize(
    ("policy", "rules", "chain"),
    [
        ("drop", "", "inet filter input"),
        ("accept", "\t\ttcp dport 22 accept\n", "inet filter input"),
        ("accept", "", ""),
    ],
)
def test_the_chain_that_filters_what_comes_in(policy: str, rules: str, chain: str) -> None:
    assert pair_errand.read_input_chain(RULES % (policy, rules)) == chain


def test_equal_interfaces_are_fine_and_so_are_dockers() -> None:
    docker = interface("docker0", "172.17.0.1", kind="bridge")
    assert told(list(check_interfaces([end(1, docker), end(2, docker)]))) == [("ok", "")]


def test_two_interfaces_in_one_subnet() -> None:
    [finding] = check_interfaces([end(1), end(2, interface("eth1", "10.0.0.22"))])
    assert (finding.status, finding.where) == ("warning", "h2")
    assert "eth0 and eth1 of h2 are both in 10.0.0.0/24" in finding.text
    assert finding.remedy == "On h2:  ip link set dev eth1 down"


def test_one_address_on_two_hosts() -> None:
    twin = dataclasses.replace(end(1), name="twin", host=1)
    found = list(check_interfaces([end(1), twin]))
    assert told(found) == [("failure", "h1 and twin")]
    assert "10.0.0.1" in found[0].text and "On twin:  ip address del 10.0.0.1 dev eth0" in found[0].remedy


def test_a_port_that_has_negotiated_less() -> None:
    [finding] = check_interfaces([*FOUR[:2], end(3, speed_mbps=100), end(4, speed_mbps=0)])
    assert (finding.status, finding.where) == ("warning", "h3")
    assert "runs at 100 Mb/s, that of h1 and h2 at 1000 Mb/s" in finding.text


def test_an_end_whose_interface_is_not_known() -> None:
    made = make_end(0, "h1", [], Wire(address="10.0.0.1", interface="eth0", reason=""))
    assert (made.network, made.mtu_bytes) == ("10.0.0.1", 0)
    assert told(list(check_interfaces([made, made])))[0][0] == "ok"


def test_equal_links_are_fine() -> None:
    made = links({})
    assert find_doubtful(made) == set()
    found = [*check_speed(FOUR, made), *check_packet_size(FOUR, made), *check_round_trip(FOUR, made)]
    assert told(found) == [("ok", "")] * 3
    assert found[0].text == "940 to 940 Mb/s in 12 directions"


@pytest.mark.parametrize("num", [3, 4, 8])
def test_a_host_that_is_slow_both_ways_is_told_once(num: int) -> None:
    slow = {pair: 94.0 for pair in itertools.permutations(range(num), 2) if 2 in pair}
    made = links(slow, num)
    [finding] = check_speed([end(number) for number in range(1, num + 1)], made)
    assert (finding.status, finding.where) == ("warning", "h3")
    assert "h3 sends to and receives from h1" in finding.text
    assert "at 94 Mb/s, where 940 Mb/s are usual" in finding.text and "On h3:  ethtool eth0" in finding.remedy
    assert find_doubtful(made) == {(min(pair), max(pair)) for pair in slow}


def test_a_host_that_is_slow_in_sending() -> None:
    [finding] = check_speed(FOUR, links({(2, target): 94.0 for target in (0, 1, 3)}))
    assert finding.text.startswith("h3 sends to h1, h2 and h4 at 94 Mb/s")


def test_one_slow_direction_of_two_hosts() -> None:
    [finding] = check_speed(FOUR[:2], links({(0, 1): 94.0}, 2))
    assert finding.where == "h1 → h2" and finding.text.startswith("h1 sends to h2 at 94 Mb/s, where 940 Mb/s")


def test_speeds_that_were_not_asked_for_are_not_told() -> None:
    assert list(check_speed(FOUR, links({}, rate_mbps=None))) == []


def test_what_is_slow_once_is_not_slow() -> None:
    first = links({(0, 1): 90.0})
    again = [
        dataclasses.replace(link, rate_mbps=930.0, round_trip_ms=0.4) for link in first if set(link.pair) == {0, 1}
    ]
    merged = merge(first, again)
    assert told(list(check_speed(FOUR, merged))) == [("ok", "")]
    assert next(link for link in merged if link.pair == (0, 1)).round_trip_ms == 0.2
    assert merge(links({}), links({}, is_stalled=True)) == links({}), "what came through can come through"
    assert merge(links({}, is_stalled=True), links({})) == links({})


def test_transfers_that_stall() -> None:
    made = [dataclasses.replace(link, is_stalled=1 in link.pair, fits_bytes=1400) for link in links({})]
    [finding] = check_packet_size(FOUR, made)
    assert (finding.status, finding.where) == ("failure", "h2")
    assert "small messages pass between h2 and h1, h3 and h4, but a transfer of 1 MB stalls" in finding.text
    assert "packets of 1400 bytes pass" in finding.text and "ip link set dev eth0 mtu 1400" in finding.remedy
    assert find_doubtful(made) == {(0, 1), (1, 2), (1, 3)}


def test_a_stall_that_no_packet_size_mends() -> None:
    [finding] = check_packet_size(FOUR[:2], links({}, 2, is_stalled=True))
    assert finding.where == "h1 ↔ h2" and "no packet size helps" in finding.text
    assert "ping" in finding.remedy and finding.remedy.endswith("10.0.0.2")


def test_another_mtu_on_one_side() -> None:
    [finding] = check_packet_size([*FOUR[:3], end(4, mtu_bytes=9000)], links({}))
    assert (finding.status, finding.where) == ("warning", "h4")
    assert finding.remedy == "On h4:  ip link set dev eth0 mtu 1500"


def test_a_tunnel_between_two_hosts() -> None:
    found = list(check_packet_size(FOUR[:2], links({}, 2, path_bytes=1420)))
    assert told(found) == [("warning", "h1 → h2"), ("warning", "h2 → h1")]
    assert "only packets of 1420 bytes fit" in found[0].text and "ip route get 10.0.0.2" in found[0].remedy


def test_a_pair_that_could_not_be_measured() -> None:
    made = [Link(source=0, target=1, problem="timed out")]
    assert find_doubtful(made) == {(0, 1)}
    [finding] = check_packet_size(FOUR[:2], made)
    assert told([finding]) == [("skipped", "h1 → h2")] and "timed out" in finding.text


def test_a_host_that_is_far_away() -> None:
    made = [dataclasses.replace(link, least_trip_ms=30.0 if 0 in link.pair else 0.1) for link in links({})]
    [finding] = check_round_trip(FOUR, made)
    assert (finding.status, finding.where) == ("warning", "h1")
    assert "from h1 to h2, h3 and h4 and back takes 30 ms" in finding.text and "--sync diloco" in finding.remedy


def test_a_host_that_is_busy_is_not_far_away() -> None:
    assert told(list(check_round_trip(FOUR, links({}, round_trip_ms=30.0)))) == [("ok", "")]


def candidate(host: int, address: str, network: str, tier: int = 0) -> Candidate:
    return Candidate(
        host=host,
        host_name=f"h{host + 1}",
        interface="eth0",
        address=address,
        network=network,
        tier=tier,
        why="wired",
        speed_mbps=0,
        order=0,
    )


def test_without_wires_the_subnet_that_most_hosts_have_is_looked_at() -> None:
    chosen = choose_likely(
        [
            candidate(0, "192.168.1.5", "192.168.1.0/24"),
            candidate(0, "10.0.0.1", "10.0.0.0/24"),
            candidate(1, "10.0.0.2", "10.0.0.0/24"),
            candidate(2, "10.9.0.3", "10.9.0.0/24"),
            *(candidate(host, "172.17.0.1", "172.17.0.0/16", tier=3) for host in range(3)),
        ]
    )
    assert [one.address for one in chosen] == ["10.0.0.1", "10.0.0.2", "10.9.0.3"]


def test_the_matrix_of_eight_hosts_fits_a_terminal() -> None:
    pairs = list(itertools.permutations(range(8), 2))
    rates = {pair: 94312.4 if pair == (0, 1) else 941.3 for pair in pairs if pair != (7, 0)}
    names = [f"gpu-server-of-the-lab-{number}" for number in range(8)]
    made = Matrix(names=names, rates_mbps=rates, round_trips_ms=dict.fromkeys(pairs, 0.21), broken=frozenset({(0, 2)}))
    lines = render_matrix(made)
    assert len(lines) == 18 and max(map(len, lines)) == 80
    assert lines[0].split()[:4] == ["Mb/s", "from", "↓", "→"] and lines[0].split()[4:6] == ["…-lab-0", "…-lab-1"]
    assert lines[1].split() == ["…r-of-the-lab-0", "·", "94312", "✗", "941", "941", "941", "941", "941"]
    assert lines[8].split()[1:3] == ["?", "941"], "not measured"
    assert lines[9].startswith("ms  from ↓ →") and lines[11].split()[1:3] == ["0.2", "·"]


def test_more_hosts_are_a_line_each() -> None:
    pairs = list(itertools.permutations(range(12), 2))
    names = [f"h{number}" for number in range(12)]
    made = Matrix(
        names=names,
        rates_mbps={pair: 100.0 if pair[0] == 3 else GIGABIT for pair in pairs},
        round_trips_ms=dict.fromkeys(pairs, 12.3),
        broken=frozenset({(5, 6)}),
    )
    lines = render_matrix(made)
    assert len(lines) == 14 and max(map(len, lines)) <= 80
    assert lines[2 + 3].split() == ["h3", "100", "940", "12", "·"]
    assert lines[2 + 5].split() == ["h5", "940", "940", "12", "1"]


def test_nothing_measured_is_no_matrix() -> None:
    assert render_matrix(Matrix(names=["h1", "h2"], rates_mbps={}, round_trips_ms={})) == []


def test_names_in_a_sentence() -> None:
    assert join_names(["h1"]) == "h1"
    assert join_names(["h1", "h2", "h3"]) == "h1, h2 and h3"
    assert join_names([f"h{number}" for number in range(1, 33)]) == "h1, h2, h3 and 29 more"


def test_a_route_of_the_callers_own_is_no_firewall_of_the_other() -> None:
    found = [
        dataclasses.replace(knock, detail="EINVAL" if knock.outcome != pair_errand.OK else "")
        for knock in knocks({(0, 1): pair_errand.UNREACHABLE}, num=2)
    ]
    [finding] = check_ports([FOUR[0], FOUR[1]], found, ())
    assert "a route on h1 itself leads nowhere (EINVAL)" in finding.text
    assert finding.remedy.startswith("On h1:  ip route get 10.0.0.2")
