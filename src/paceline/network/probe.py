"""Who can reach whom: a listener on each address of a host, and a dialler that asks who answers.

The dialler sends a challenge; the listener answers with its host index. Both are signed with the run's nonce,
so that a machine with the same address, a proxy or another run is not taken for the host, and a stranger
learns nothing.

    dialler  -> 16 random bytes, keyed hash of them                       (32 bytes)
    listener -> host index, keyed hash of the random bytes and the index  (18 bytes)

Standard library only: this module runs on every host.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Sequence

OK, REFUSED, TIMEOUT, UNREACHABLE, WRONG_HOST = "ok", "refused", "timeout", "unreachable", "wrong host"

Target = tuple[str, int, str, int]
"""(source address, destination host's index, destination address, destination port)."""
Outcome = tuple[str, float, str]
"""(one of OK, REFUSED, TIMEOUT, UNREACHABLE, WRONG_HOST; milliseconds; what was found, may be empty)."""

MAX_SOCKETS = 256
"""Open at once, for a listener and for a dialler."""
STRAGGLER_S = 0.5
"""Once every host has answered at some address, the other addresses get this long."""
STRANGER_S = 2.0
"""How long a connection may stay silent before the listener drops it."""

_TAG_BYTES = 16
_HELLO_BYTES = 16 + _TAG_BYTES
_ANSWER_BYTES = 2 + _TAG_BYTES


def _sign(nonce: str, purpose: bytes, data: bytes) -> bytes:
    key = hashlib.blake2b(nonce.encode(), digest_size=32).digest()
    return hashlib.blake2b(data, digest_size=_TAG_BYTES, key=key, person=purpose).digest()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class Listener:
    """Listens on each address, at a port of its own, until closed; a thread answers. A context manager.

    `ports` maps each address to its port. One that can't be bound is in `failures` with the reason instead.
    """

    def __init__(self, addresses: Iterable[str], nonce: str, host_index: int) -> None:
        self.ports: dict[str, int] = {}
        self.failures: dict[str, str] = {}
        self._nonce = nonce
        self._index = host_index.to_bytes(2, "big")
        self._connections: dict[socket.socket, tuple[bytearray, float]] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listening: list[socket.socket] = []
        for address in dict.fromkeys(addresses):
            self._listen(address)
        self._thread = threading.Thread(target=self._serve, name="paceline-listener", daemon=True)
        self._thread.start()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all sockets and end the thread. Closing twice does nothing."""
        if self._wake.fileno() >= 0:
            self._wake.close()
            self._thread.join(STRANGER_S)

    def _listen(self, address: str) -> None:
        try:
            listener = socket.create_server((address, 0), family=_family(address), backlog=MAX_SOCKETS)
        except OSError as error:
            self.failures[address] = os.strerror(error.errno) if error.errno else str(error)
            return
        listener.setblocking(False)
        self.ports[address] = listener.getsockname()[1]
        self._listening.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _serve(self) -> None:
        try:
            while True:
                timeout_s = STRANGER_S / 4 if self._connections else None
                for key, _ in self._selector.select(timeout_s):
                    if key.fileobj is self._woken:
                        return
                    key.data(key.fileobj)
                now_s = time.monotonic()
                for connection, (_, limit_s) in list(self._connections.items()):
                    if now_s > limit_s:
                        self._drop(connection)
        finally:
            for open_socket in (*self._connections, *self._listening, self._woken):
                open_socket.close()
            self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            # Gone already, or no descriptor left: then a moment's rest, as it is reported again at once.
            time.sleep(0.001)
            return
        if len(self._connections) >= MAX_SOCKETS:
            self._drop(next(iter(self._connections)))  # the oldest: silent strangers must not fill it
        connection.setblocking(False)
        self._connections[connection] = (bytearray(), time.monotonic() + STRANGER_S)
        self._selector.register(connection, selectors.EVENT_READ, self._answer)

    def _answer(self, connection: socket.socket) -> None:
        received, _ = self._connections.get(connection, (bytearray(), 0.0))
        with contextlib.suppress(OSError):
            data = connection.recv(_HELLO_BYTES - len(received))
            received += data
            if data and len(received) < _HELLO_BYTES:
                return
            challenge = bytes(received[:16])
            if len(received) == _HELLO_BYTES and bytes(received[16:]) == _sign(self._nonce, b"dial", challenge):
                connection.send(self._index + _sign(self._nonce, b"answer", challenge + self._index))
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        if self._connections.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()


def dial(targets: Sequence[Target], nonce: str, timeout_s: float) -> list[Outcome]:
    """Connect to all targets at once, each from its source address; one outcome per target, in order.

    Returns within `timeout_s`, and earlier when all is known: see STRAGGLER_S. Never raises for a target.
    """
    return _Dialler(targets, nonce, timeout_s).run()


class _Dialler:
    def __init__(self, targets: Sequence[Target], nonce: str, timeout_s: float) -> None:
        self._targets = targets
        self._nonce = nonce
        self._outcomes: dict[int, Outcome] = {}
        self._waiting = list(range(len(targets)))[::-1]
        self._open: dict[int, _Call] = {}
        self._unanswered = {target[1] for target in targets}
        self._selector = selectors.DefaultSelector()
        self._limit_s = time.monotonic() + timeout_s
        # So that each target has its turn even if all before it are silent.
        self._turn_s = timeout_s / max(1, -(-len(targets) // MAX_SOCKETS))

    def run(self) -> list[Outcome]:
        with self._selector:
            while self._waiting or self._open:
                while self._waiting and len(self._open) < MAX_SOCKETS:
                    self._start(self._waiting.pop())
                if not self._open:
                    continue
                first_limit_s = min(self._limit_s, min(call.limit_s for call in self._open.values()))
                for key, _ in self._selector.select(max(0.0, first_limit_s - time.monotonic())):
                    self._go_on(key.data)
                self._expire(time.monotonic())
        return [self._outcomes[index] for index in range(len(self._targets))]

    def _start(self, index: int) -> None:
        source, host, address, port = self._targets[index]
        try:
            call = _Call(host, socket.socket(_family(address), socket.SOCK_STREAM), self._turn_s)
        except OSError as error:  # no IPv6 here, or no descriptor left
            self._outcomes[index] = (UNREACHABLE, 0.0, _name(error.errno))
            return
        self._open[index] = call
        try:
            call.socket.setblocking(False)
            call.socket.bind((source, 0))
            number = call.socket.connect_ex((address, port))
        except OSError as error:
            number = error.errno or errno.EINVAL
        if number in (0, errno.EINPROGRESS):
            self._selector.register(call.socket, selectors.EVENT_WRITE, index)
        else:
            self._end(index, _classify(number), _name(number))

    def _go_on(self, index: int) -> None:
        call = self._open[index]
        try:
            if call.challenge:
                self._hear(index, call)
                return
            number = call.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                self._end(index, _classify(number), _name(number))
                return
            # The handshake is the kernel's alone: the best measure of the wire that a busy host can give.
            call.connected_s = time.monotonic()
            call.challenge = os.urandom(16)
            call.socket.send(call.challenge + _sign(self._nonce, b"dial", call.challenge))
            self._selector.modify(call.socket, selectors.EVENT_READ, index)
        except OSError as error:
            self._end(index, WRONG_HOST, _name(error.errno))

    def _hear(self, index: int, call: _Call) -> None:
        data = call.socket.recv(_ANSWER_BYTES - len(call.received))
        call.received += data
        if not data:
            self._end(index, WRONG_HOST, "not a host of this run")
        elif len(call.received) == _ANSWER_BYTES:
            who = bytes(call.received[:2])
            if bytes(call.received[2:]) != _sign(self._nonce, b"answer", call.challenge + who):
                self._end(index, WRONG_HOST, "not a host of this run")
            elif int.from_bytes(who, "big") != call.host:
                self._end(index, WRONG_HOST, f"host {int.from_bytes(who, 'big')} answered")
            else:
                self._end(index, OK, "")

    def _expire(self, now_s: float) -> None:
        for index, call in list(self._open.items()):
            if now_s >= min(call.limit_s, self._limit_s):
                self._end(index, TIMEOUT, "connected, but no answer" if call.challenge else "")

    def _end(self, index: int, outcome: str, detail: str) -> None:
        call = self._open.pop(index)
        now_s = time.monotonic()
        took_s = (call.connected_s if outcome == OK else now_s) - call.started_s
        self._outcomes[index] = (outcome, round(took_s * 1000, 3), detail)
        if call.socket in self._selector.get_map():
            self._selector.unregister(call.socket)
        call.socket.close()
        if outcome == OK:
            self._unanswered.discard(call.host)
            if not self._unanswered and not self._waiting:
                self._limit_s = min(self._limit_s, now_s + STRAGGLER_S)


class _Call:
    """A dial under way."""

    def __init__(self, host: int, new_socket: socket.socket, turn_s: float) -> None:
        self.host = host
        self.socket = new_socket
        self.started_s = self.connected_s = time.monotonic()
        self.limit_s = self.started_s + turn_s
        self.challenge = b""
        self.received = bytearray()


def _name(number: int | None) -> str:
    return errno.errorcode.get(number or 0, f"error {number}")


def _classify(number: int) -> str:
    # EPERM is this host's own firewall; EHOSTUNREACH at once is how firewalld rejects.
    if number in (errno.ECONNREFUSED, errno.EPERM, errno.EACCES, errno.ECONNRESET):
        return REFUSED
    return TIMEOUT if number == errno.ETIMEDOUT else UNREACHABLE
