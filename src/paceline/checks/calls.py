"""How the checks' processes on different hosts find each other: connections that prove who is at either end.

    caller -> 16 random bytes, its index, keyed hash of both   (34 bytes)
    callee -> keyed hash of the random bytes and its index     (16 bytes), when it is ready to talk

Who does not know the nonce gets no answer. Standard library only: this module runs on every host.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time

from paceline.records import Record

_TAG_BYTES = 16
_HELLO_BYTES = 16 + 2 + _TAG_BYTES
_STRANGER_S = 1.0
_RETRY_S = 0.05


class WrongHostError(OSError):
    """Somebody is there, but not the host that was called."""


class Peer(Record):
    """Another host, as it can be called."""

    index: int
    address: str
    port: int


class Caller(Record):
    """A host that has called, and waits for the answer."""

    index: int
    connection: socket.socket
    challenge: bytes


class Station:
    """One host's end of all its connections."""

    def __init__(self, *, address: str, index: int, nonce: str) -> None:
        self.address = address
        self._index = index.to_bytes(2, "big")
        self._key = hashlib.blake2b(nonce.encode(), digest_size=32).digest()

    def listen(self, port: int) -> socket.socket:
        """A listening socket on this host's wire, and on no other address. Raises OSError."""
        return socket.create_server((self.address, port), family=_family(self.address), backlog=256)

    def call(
        self, peer: Peer, *, connect_s: float, answer_s: float, retry_s: float = 0.0, segment_bytes: int = 0
    ) -> socket.socket:
        """A connection to a host that has proved who it is.

        Refused at first is tried again for `retry_s`: its process may only just be starting. `segment_bytes` limits
        what a packet carries, in both directions. Raises OSError, of which WrongHostError.
        """
        limit_s = time.monotonic() + retry_s
        while True:
            try:
                return self._call(peer, connect_s, answer_s, segment_bytes)
            except (ConnectionRefusedError, ConnectionResetError):
                if time.monotonic() > limit_s:
                    raise
                time.sleep(_RETRY_S)

    def _call(self, peer: Peer, connect_s: float, answer_s: float, segment_bytes: int) -> socket.socket:
        connection = socket.socket(_family(peer.address), socket.SOCK_STREAM)
        try:
            connection.settimeout(connect_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if segment_bytes:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
            connection.bind((self.address, 0))
            connection.connect((peer.address, peer.port))
            hello = os.urandom(16) + self._index
            connection.sendall(hello + self._sign(b"call", hello))
            connection.settimeout(answer_s)
            try:
                answer = receive_exactly(connection, _TAG_BYTES)
            except TimeoutError:
                raise WrongHostError("connected, but nobody answered") from None
            if answer != self._sign(b"answer", hello[:16] + peer.index.to_bytes(2, "big")):
                raise WrongHostError("not the host that was called")
        except BaseException:
            connection.close()
            raise
        return connection

    def hear(self, connection: socket.socket) -> Caller | None:
        """Who is at the other end of an accepted connection; None, and it is closed, for a stranger."""
        try:
            connection.settimeout(_STRANGER_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            data = receive_exactly(connection, _HELLO_BYTES)
        except OSError:
            data = b""
        hello, tag = data[:-_TAG_BYTES], data[-_TAG_BYTES:]
        if not data or tag != self._sign(b"call", hello):
            connection.close()
            return None
        return Caller(index=int.from_bytes(hello[16:], "big"), connection=connection, challenge=hello[:16])

    def answer(self, caller: Caller) -> socket.socket:
        """The connection, now that the caller knows that we are there. Raises OSError."""
        caller.connection.sendall(self._sign(b"answer", caller.challenge + self._index))
        return caller.connection

    def _sign(self, purpose: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=_TAG_BYTES, key=self._key, person=purpose).digest()


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Raises ConnectionResetError where the other end has closed before, TimeoutError by the socket's own limit."""
    data = b""
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionResetError("closed by the other end")
        data += piece
    return data


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
