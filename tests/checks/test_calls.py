"""Connections that prove who is at either end, and transfers over them, on this machine's loopback."""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline.checks import pair_errand, speed_errand
from paceline.checks.calls import Peer, Station, WrongHostError, receive_exactly
from paceline.checks.findings import Finding
from paceline.checks.pairs import arrange_rounds, check_pairs
from paceline.checks.speed_errand import Plan, receive
from paceline.cluster.spec import parse_hosts
from paceline.launch.hosts import open_hosts
from paceline.network.wires import Wire

HERE = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((HERE, 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def beside(function: Callable[[], Any]) -> Iterator[list[Any]]:
    """Runs it in a thread; its value is in the list afterwards."""
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(function()))
    thread.start()
    yield values
    thread.join(20)


def test_both_ends_know_who_is_there() -> None:
    callee = Station(address=HERE, index=1, nonce="secret")
    with callee.listen(0) as listener:

        def answer() -> int:
            caller = callee.hear(listener.accept()[0])
            assert caller is not None
            with callee.answer(caller) as connection:
                connection.sendall(b"hello")
            return caller.index

        with beside(answer) as heard:
            peer = Peer(index=1, address=HERE, port=listener.getsockname()[1])
            with Station(address=HERE, index=7, nonce="secret").call(peer, connect_s=5, answer_s=5) as connection:
                assert receive_exactly(connection, 5) == b"hello"
    assert heard == [7]


@pytest.mark.parametrize(("index", "nonce"), [(1, "another secret"), (2, "secret")])
def test_another_run_or_another_host_is_no_answer(index: int, nonce: str) -> None:
    callee = Station(address=HERE, index=index, nonce=nonce)
    with callee.listen(0) as listener:

        def answer() -> None:
            caller = callee.hear(listener.accept()[0])
            if caller is not None:
                callee.answer(caller).close()

        with beside(answer):
            peer = Peer(index=1, address=HERE, port=listener.getsockname()[1])
            with pytest.raises((WrongHostError, ConnectionResetError)):
                Station(address=HERE, index=0, nonce="secret").call(peer, connect_s=5, answer_s=5)


def test_a_stranger_gets_no_byte() -> None:
    station = Station(address=HERE, index=0, nonce="secret")
    with station.listen(0) as listener:
        with socket.create_connection(listener.getsockname()) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert station.hear(listener.accept()[0]) is None
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""


def test_a_refusal_is_tried_again_while_the_other_host_starts() -> None:
    port = free_port()
    callee = Station(address=HERE, index=1, nonce="secret")

    def start_late() -> None:
        time.sleep(0.1)
        with callee.listen(port) as listener:
            caller = callee.hear(listener.accept()[0])
            assert caller is not None
            callee.answer(caller).close()

    with beside(start_late):
        peer = Peer(index=1, address=HERE, port=port)
        station = Station(address=HERE, index=0, nonce="secret")
        with pytest.raises(ConnectionRefusedError):
            station.call(peer, connect_s=5, answer_s=5)
        station.call(peer, connect_s=5, answer_s=5, retry_s=10).close()


def test_a_transfer_ends_with_enough_bytes_or_with_silence() -> None:
    one, two = socket.socketpair()
    with one, two:
        one.sendall(bytes(100_000))
        found = receive(two, Plan(transfer_s=5.0, enough_bytes=100_000))
        assert found["num_bytes"] == 100_000 and not found["is_stalled"]
        one.sendall(bytes(1000))
        found = receive(two, Plan(transfer_s=5.0, enough_bytes=100_000, stall_s=0.02))
        assert found["num_bytes"] == 1000 and found["is_stalled"] and found["bytes_per_s"] is None


def test_two_hosts_knock_at_each_other() -> None:
    ports = [free_port(), free_port()]
    addresses = ["127.0.0.1", "127.0.0.2"]  # all of 127.0.0.0/8 is here
    with socket.create_server((addresses[1], 0)) as its_own:
        door = its_own.getsockname()[1]
        one, two = (
            {
                "address": addresses[me],
                "index": me,
                "nonce": "secret",
                "ports": ports,
                "doors": [door] if me == 0 else [],
                "others": [[1 - me, addresses[1 - me]]],
            }
            for me in range(2)
        )
        with beside(lambda: pair_errand.main(two)) as theirs:
            ours = pair_errand.main(one)
    assert [knock[:3] for knock in ours["knocks"]] == [[1, port, "ok"] for port in [*ports, door]]
    assert [knock[:3] for knock in theirs[0]["knocks"]] == [[0, port, "ok"] for port in ports]
    assert ours["firewall"] == {} and ours["taken"] == [], "nobody asks for the firewall of an open host"


def test_a_port_that_somebody_has_is_told() -> None:
    with socket.create_server((HERE, 0)) as holder:
        port = holder.getsockname()[1]
        argument = {"address": HERE, "index": 0, "nonce": "secret", "doors": [], "others": []}
        found = pair_errand.main({**argument, "ports": [port]})
    assert found["taken"] == [port]


def test_a_pair_measures_each_other() -> None:
    ports = [free_port(), free_port()]
    plan = {"transfer_s": 0.03, "enough_bytes": 10**9}
    shared = {"address": HERE, "nonce": "secret", "plan": plan, "limit_s": 10.0}
    leads = {**shared, "index": 0, "port": ports[0], "rounds": [[1, HERE, ports[1], True]]}
    follows = {**shared, "index": 1, "port": ports[1], "rounds": [[0, HERE, ports[0], False]]}
    with beside(lambda: speed_errand.main(follows)) as nothing:
        [found] = speed_errand.main(leads)
    assert nothing == [[]], "what the caller has measured is told by the caller"
    assert found["peer"] == 1 and len(found["trips_ms"]) == 11 and found["path_bytes"] == 65535
    for way in ("there", "back"):
        assert found[way]["num_bytes"] > 10**5 and found[way]["bytes_per_s"] > 10**6 and not found[way]["is_stalled"]


def test_a_whole_tournament_needs_no_clock() -> None:
    """Five hosts; one of them starts when the others have long begun."""
    port, rounds = free_port(), arrange_rounds(5)
    arguments = [
        {
            "address": f"127.0.0.{host + 1}",
            "index": host,
            "nonce": "secret",
            "port": port,
            "plan": {"transfer_s": 0.005, "enough_bytes": 10**6},
            "limit_s": 20.0,
            "rounds": [
                [one + two - host, f"127.0.0.{one + two - host + 1}", port, host == one]
                for pairs in rounds
                for one, two in pairs
                if host in (one, two)
            ],
        }
        for host in range(5)
    ]
    with ThreadPoolExecutor(5) as pool:
        playing = [pool.submit(speed_errand.main, argument) for argument in arguments[1:]]
        time.sleep(0.05)
        found = [speed_errand.main(arguments[0]), *(one.result(20) for one in playing)]
    assert not [game for games in found for game in games if "problem" in game]
    played = {(host, game["peer"]) for host, games in enumerate(found) for game in games}
    assert played == {pair for pairs in rounds for pair in pairs} and len(played) == 10


@pytest.mark.launcher
def test_all_pairs_of_two_agents_of_this_machine() -> None:
    with open_hosts(parse_hosts("localhost,127.0.0.1"), queue.SimpleQueue()) as hosts:
        facts = hosts.open("pairs", [sys.executable] * 2, grace_s=0.1)
        wires = [Wire(address=f"127.0.0.{number}", interface="lo", reason="") for number in (1, 2)]
        findings, matrix = check_pairs(hosts, facts, wires, depth="full")
    assert all(isinstance(finding, Finding) for finding in findings)
    assert {finding.check: finding.status for finding in findings} == {
        "interfaces": "ok",
        "ports": "ok",
        "packet-size": "ok",
        "round-trip": "ok",
        "speed": "ok",
    }
    assert matrix.rates_mbps.keys() == matrix.round_trips_ms.keys() == {(0, 1), (1, 0)} and not matrix.broken
