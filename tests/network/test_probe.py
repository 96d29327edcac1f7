"""Real sockets on loopback addresses."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from paceline.network import probe
from paceline.network.probe import OK, REFUSED, TIMEOUT, UNREACHABLE, WRONG_HOST, Listener, dial

NONCE = "0123456789abcdef0123456789abcdef"


@contextlib.contextmanager
def plain_server(*, answer: bytes | None = None) -> Iterator[int]:
    """A server of somebody else: accepts and is silent, or answers and closes; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        if answer is None:
            yield server.getsockname()[1]  # the kernel accepts, nobody speaks
            return

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.sendall(answer)
                connection.recv(64)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join(5)


def test_every_address_gets_a_port_of_its_own_and_answers() -> None:
    addresses = ["127.0.0.1", "127.0.0.2", "::1"] if socket.has_dualstack_ipv6() else ["127.0.0.1", "127.0.0.2"]
    with Listener(addresses, NONCE, 7) as listener:
        assert list(listener.ports) == addresses
        assert listener.failures == {}
        targets = [(address, 7, address, port) for address, port in listener.ports.items()]
        results = dial(targets, NONCE, 5.0)
    assert [(outcome, detail) for outcome, _, detail in results] == [(OK, "")] * len(addresses)
    assert all(0 < elapsed_ms < 1000 for _, elapsed_ms, _ in results)


def test_it_listens_on_that_address_only() -> None:
    with Listener(["127.0.0.2"], NONCE, 0) as listener:
        ((outcome, _, _),) = dial([("127.0.0.1", 0, "127.0.0.1", listener.ports["127.0.0.2"])], NONCE, 2.0)
    assert outcome == REFUSED


def test_the_source_address_is_the_one_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        dial([("127.0.0.9", 0, "127.0.0.1", server.getsockname()[1])], NONCE, 0.05)
        connection, (source, _) = server.accept()
        connection.close()
    assert source == "127.0.0.9"


def test_an_address_that_is_not_here_is_named() -> None:
    with Listener(["192.0.2.99", "127.0.0.1"], NONCE, 0) as listener:
        assert list(listener.ports) == ["127.0.0.1"]
        assert listener.failures == {"192.0.2.99": "Cannot assign requested address"}
    ((outcome, _, detail),) = dial([("192.0.2.99", 0, "127.0.0.1", 9)], NONCE, 2.0)
    assert (outcome, detail) == (UNREACHABLE, "EADDRNOTAVAIL")


def test_another_host_and_another_run_are_not_taken_for_the_host() -> None:
    with Listener(["127.0.0.1"], NONCE, 3) as ours, Listener(["127.0.0.1"], "another" + NONCE, 4) as theirs:
        targets = [
            ("127.0.0.1", 4, "127.0.0.1", ours.ports["127.0.0.1"]),
            ("127.0.0.1", 4, "127.0.0.1", theirs.ports["127.0.0.1"]),
        ]
        results = dial(targets, NONCE, 5.0)
    assert [(outcome, detail) for outcome, _, detail in results] == [
        (WRONG_HOST, "host 3 answered"),
        (WRONG_HOST, "not a host of this run"),
    ]


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.2\r\n" * 4, b"short"])
def test_a_server_of_somebody_else_is_a_wrong_host(answer: bytes) -> None:
    with plain_server(answer=answer) as port:
        ((outcome, _, _),) = dial([("127.0.0.1", 0, "127.0.0.1", port)], NONCE, 5.0)
    assert outcome == WRONG_HOST


def test_a_silent_server_times_out_in_time() -> None:
    with plain_server() as port:
        started_s = time.monotonic()
        ((outcome, elapsed_ms, detail),) = dial([("127.0.0.1", 0, "127.0.0.1", port)], NONCE, 0.3)
        took_s = time.monotonic() - started_s
    assert (outcome, detail) == (TIMEOUT, "connected, but no answer")
    assert 0.3 <= took_s < 0.8
    assert elapsed_ms >= 300


def test_a_refused_port_is_known_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started_s = time.monotonic()
    results = dial([("127.0.0.1", 0, "127.0.0.1", port), ("127.0.0.1", 0, "127.0.0.1", 0)], NONCE, 5.0)
    assert [(outcome, detail) for outcome, _, detail in results] == [(REFUSED, "ECONNREFUSED")] * 2
    assert time.monotonic() - started_s < 1


def test_what_is_dead_costs_little_once_every_host_has_answered() -> None:
    with plain_server() as dead, Listener(["127.0.0.1"], NONCE, 1) as listener:
        targets = [("127.0.0.1", 1, "127.0.0.1", dead), ("127.0.0.1", 1, "127.0.0.1", listener.ports["127.0.0.1"])]
        started_s = time.monotonic()
        results = dial(targets, NONCE, 30.0)
        took_s = time.monotonic() - started_s
    assert [outcome for outcome, _, _ in results] == [TIMEOUT, OK]
    assert took_s < probe.STRAGGLER_S + 0.5


def test_a_host_that_has_not_answered_keeps_its_whole_time() -> None:
    with plain_server() as dead, Listener(["127.0.0.1"], NONCE, 1) as listener:
        targets = [("127.0.0.1", 2, "127.0.0.1", dead), ("127.0.0.1", 1, "127.0.0.1", listener.ports["127.0.0.1"])]
        started_s = time.monotonic()
        results = dial(targets, NONCE, probe.STRAGGLER_S + 0.2)
        took_s = time.monotonic() - started_s
    assert [outcome for outcome, _, _ in results] == [TIMEOUT, OK]
    assert took_s >= probe.STRAGGLER_S + 0.2


def test_more_targets_than_sockets_all_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_SOCKETS", 4)
    with plain_server() as dead, Listener(["127.0.0.1"], NONCE, 1) as listener:
        alive = ("127.0.0.1", 1, "127.0.0.1", listener.ports["127.0.0.1"])
        targets = [("127.0.0.1", 2, "127.0.0.1", dead)] * 8 + [alive] * 4
        started_s = time.monotonic()
        results = dial(targets, NONCE, 0.6)
        took_s = time.monotonic() - started_s
    assert [outcome for outcome, _, _ in results] == [TIMEOUT] * 8 + [OK] * 4
    assert took_s < 1.1


def test_no_targets_is_no_work() -> None:
    assert dial([], NONCE, 5.0) == []


def test_strangers_learn_nothing_and_do_no_harm() -> None:
    with Listener(["127.0.0.1"], NONCE, 1) as listener:
        where = ("127.0.0.1", listener.ports["127.0.0.1"])
        for garbage in (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"\0" * 32, b"x" * 100_000):
            with socket.create_connection(where, timeout=5) as stranger, contextlib.suppress(ConnectionError):
                stranger.sendall(garbage)
                assert stranger.recv(64) == b""
        with contextlib.ExitStack() as stack:  # silent ones, more than it holds
            strangers = [
                stack.enter_context(socket.create_connection(where, timeout=5)) for _ in range(probe.MAX_SOCKETS + 20)
            ]
            results = dial([("127.0.0.1", 1, *where)], NONCE, 5.0)
            strangers[0].settimeout(probe.STRANGER_S / 4)
            assert strangers[0].recv(1) == b"", "the oldest gives way"
    assert [outcome for outcome, _, _ in results] == [OK]


def test_silent_strangers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "STRANGER_S", 0.1)
    with Listener(["127.0.0.1"], NONCE, 1) as listener:
        with socket.create_connection(("127.0.0.1", listener.ports["127.0.0.1"]), timeout=5) as stranger:
            assert stranger.recv(1) == b""


def test_closing_ends_thread_and_ports() -> None:
    listener = Listener(["127.0.0.1"], NONCE, 1)
    port = listener.ports["127.0.0.1"]
    listener.close()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
