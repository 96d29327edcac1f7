"""Runs on each host: round trips, transfers and packet sizes between pairs of hosts, one pair at a time on each link.

A host goes through its rounds in order, and in each has one opponent; a round begins when both are there. So no clock
is needed, and no link ever carries two measurements. Within a pair the caller leads, over a connection of its own:

    ping               the same line back
    receive PLAN       a second connection comes: read it as planned; then one line of JSON
    send               a second connection comes: write into it until it is closed

Standard library only: this module runs on every host.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import struct
import termios
import time
from typing import Any

from paceline.checks.calls import Caller, Peer, Station
from paceline.records import Record

CONNECT_S = 2.0
OPPONENT_S = 6.0
"""How long an opponent may still be busy with its round before this one."""
_NUM_PINGS = 11
_WARM_SHARE = 1 / 3
"""Of a transfer: TCP still feels its way, and buckets of shaped links are full."""
_CHUNK_BYTES = 256 * 1024
_ROOM_FOR_HEADERS_BYTES = 40


class Plan(Record):
    """When a transfer is over."""

    transfer_s: float
    """So long after its first byte,"""
    enough_bytes: int
    """or with so many,"""
    stall_s: float = 1.0
    """or when nothing has arrived for so long: it has stalled."""


_TRIAL = Plan(transfer_s=0.4, enough_bytes=64 * 1024, stall_s=0.4)
PACKET_SIZES = (1280, 1300, 1350, 1400, 1420, 1450, 1492, 1500, 2000, 4000, 8900)
"""What networks let through: IPv6's minimum, tunnels, WireGuard, VXLAN, PPPoE, Ethernet, jumbo frames."""


def main(argument: dict[str, Any]) -> list[dict[str, Any]]:
    """Plays `rounds`, each [index, address, port, whether we call], until `limit_s`; gives what the calls measured."""
    limit_s = time.monotonic() + argument["limit_s"]
    station = Station(address=argument["address"], index=argument["index"], nonce=argument["nonce"])
    plan = Plan(**argument["plan"])
    found: list[dict[str, Any]] = []
    with station.listen(argument["port"]) as listener:
        door = _Door(station, listener)
        for index, address, port, is_caller in argument["rounds"]:
            if time.monotonic() > limit_s:
                break
            peer = Peer(index=index, address=address, port=port)
            try:
                if is_caller:
                    found.append(_lead(station, peer, plan))
                else:
                    _follow(door, index)
            except (OSError, ValueError) as error:  # a line that isn't whole is a ValueError
                if is_caller:
                    found.append({"peer": index, "problem": str(error) or type(error).__name__})
        door.close()
    return found


class _Door:
    """Who has called before its turn waits here."""

    def __init__(self, station: Station, listener: socket.socket) -> None:
        self._station = station
        self._listener = listener
        self._early: list[Caller] = []

    def open_to(self, index: int, timeout_s: float) -> socket.socket:
        """The next connection of that host. Raises OSError, TimeoutError among it."""
        limit_s = time.monotonic() + timeout_s
        while True:
            for caller in self._early:
                if caller.index == index:
                    self._early.remove(caller)
                    return self._station.answer(caller)
            self._listener.settimeout(max(0.001, limit_s - time.monotonic()))
            caller = self._station.hear(self._listener.accept()[0])
            if caller is not None:
                self._early.append(caller)

    def close(self) -> None:
        for caller in self._early:
            caller.connection.close()


def _lead(station: Station, peer: Peer, plan: Plan) -> dict[str, Any]:
    with station.call(peer, connect_s=CONNECT_S, answer_s=OPPONENT_S, retry_s=CONNECT_S) as control:
        control.settimeout(OPPONENT_S)
        with control.makefile("rwb", buffering=0) as line:
            measured: dict[str, Any] = {"peer": peer.index, "trips_ms": _ping(line)}
            for way in ("there", "back"):
                measured[way] = _transfer(station, peer, line, way, plan, 0)
                if measured[way]["is_stalled"]:
                    measured[way]["fits_bytes"] = _find_packet_size(station, peer, line, way)
            measured["path_bytes"] = _read_path_bytes(control)
    return measured


def _ping(line: socket.SocketIO) -> list[float]:
    trips_ms: list[float] = []
    for _ in range(_NUM_PINGS):
        began_s = time.perf_counter()
        line.write(b"ping\n")
        if line.readline() != b"ping\n":
            raise ConnectionResetError("the other host has left")
        trips_ms.append(round((time.perf_counter() - began_s) * 1000, 3))
    return trips_ms


def _transfer(
    station: Station, peer: Peer, line: socket.SocketIO, way: str, plan: Plan, segment_bytes: int
) -> dict[str, Any]:
    line.write(b"receive %s\n" % json.dumps(plan.as_dict()).encode() if way == "there" else b"send\n")
    with station.call(peer, connect_s=CONNECT_S, answer_s=CONNECT_S, segment_bytes=segment_bytes) as data:
        if way == "back":
            return receive(data, plan)
        _send(data)
    return json.loads(line.readline())


def _find_packet_size(station: Station, peer: Peer, line: socket.SocketIO, way: str) -> int:
    """The largest of PACKET_SIZES that gets through; 0 for none."""
    low, high = 0, len(PACKET_SIZES)
    while low < high:
        middle = (low + high) // 2
        segment_bytes = PACKET_SIZES[middle] - _ROOM_FOR_HEADERS_BYTES
        if _transfer(station, peer, line, way, _TRIAL, segment_bytes)["num_bytes"] >= _TRIAL.enough_bytes:
            low = middle + 1
        else:
            high = middle
    return PACKET_SIZES[low - 1] if low else 0


def _follow(door: _Door, index: int) -> None:
    with door.open_to(index, OPPONENT_S) as control:
        control.settimeout(OPPONENT_S)
        with control.makefile("rwb", buffering=0) as line:
            while words := line.readline().split(maxsplit=1):
                if words[0] == b"ping":
                    line.write(b"ping\n")
                    continue
                with door.open_to(index, CONNECT_S) as data:
                    if words[0] == b"send":
                        _send(data)
                        continue
                    found = receive(data, Plan(**json.loads(words[1])))
                line.write(json.dumps(found).encode() + b"\n")


def receive(connection: socket.socket, plan: Plan) -> dict[str, Any]:
    """Reads for `transfer_s` from the first byte on: how much, how fast after the first third, and whether it stalled.

    The rate is None where there was too little to tell.
    """
    buffer = bytearray(_CHUNK_BYTES)
    num_bytes = warm_bytes = 0
    first_s = warm_s = now_s = time.monotonic()
    is_stalled = is_warm = False
    connection.settimeout(plan.stall_s)
    # To close is to reset: a sender whose packets get lost would not notice an ordinary end for seconds.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    while num_bytes < plan.enough_bytes:
        try:
            size = connection.recv_into(buffer)
        except TimeoutError:
            is_stalled = True
            break
        if not size:
            break
        now_s = time.monotonic()
        num_bytes += size
        if num_bytes == size:
            first_s, warm_s, warm_bytes = now_s, now_s, num_bytes + _count_waiting(connection)
        if not is_warm and now_s - first_s >= plan.transfer_s * _WARM_SHARE:
            is_warm = True
            if now_s - first_s < plan.transfer_s / 2:  # else this process has slept, and the rest would be too short
                warm_s, warm_bytes = now_s, num_bytes + _count_waiting(connection)
        if now_s - first_s >= plan.transfer_s:
            break
    arrived_bytes = num_bytes + _count_waiting(connection) - warm_bytes
    rate = arrived_bytes / (now_s - warm_s) if now_s > warm_s else None
    return {"num_bytes": num_bytes, "bytes_per_s": rate, "is_stalled": is_stalled}


def _count_waiting(connection: socket.socket) -> int:
    """Bytes that have arrived and were not read yet: a busy host is late to read, and its wire is not slower for it."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))[0]


def _send(connection: socket.socket) -> None:
    """Until the other end has had enough, and closes."""
    connection.settimeout(OPPONENT_S)
    chunk = bytes(_CHUNK_BYTES)
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(chunk)


def _read_path_bytes(connection: socket.socket) -> int | None:
    """The largest packet that this host's kernel believes to fit all the way; None for IPv6."""
    if connection.family != socket.AF_INET:
        return None
    return connection.getsockopt(socket.IPPROTO_IP, 14)  # IP_MTU, which Python's socket does not name
