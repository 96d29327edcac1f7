"""Parcels on their way to several hosts at once. A host that fails does not hold up the others.

What has arrived stays on the host until the environment is finished: a second try is offered the same parcels, and only
what is missing is sent.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from paceline.envs.parcels import Parcel
from paceline.launch import protocol, ship
from paceline.launch.deliver import IN_USE_LIMIT_S, copy_name
from paceline.launch.hosts import HEARTBEAT_S, Hosts, InterruptedEarlyError
from paceline.launch.transport import Closed, Received, Signalled

_STALL_LIMIT_S = 120.0
_TURN_S = 0.5
_AHEAD = 4
"""Pieces of a megabyte at most that wait for the channel."""

Piece = tuple[protocol.FileData, bytes]

Progress = Callable[[int, int], None]
"""(host, bytes that are there by now)."""


@dataclasses.dataclass
class Arrival:
    """How far one host is."""

    folders: list[str] = dataclasses.field(default_factory=list[str])
    """Where each parcel lies there, in order."""
    problem: str = ""
    num_bytes: int = 0
    num_sent_bytes: int = 0
    """Of these, how many had to travel."""
    moved_s: float = dataclasses.field(default_factory=time.monotonic)
    ask_again_s: float | None = None
    """When to offer a parcel again that another sync is using."""
    busy_since_s: float | None = None


def send_parcels(
    hosts: Hosts, parcels: Sequence[Parcel], indices: Collection[int], on_progress: Progress
) -> dict[int, Arrival]:
    """Bring all parcels to these hosts. Raises InterruptedEarlyError for a signal; else all is in the Arrivals."""
    sender = _Sender(hosts, parcels, indices)
    for index in sender.waiting():
        sender.offer(index)
    while waiting := sender.waiting():
        try:
            received = hosts.inbox.get(timeout=_TURN_S)
        except queue.Empty:
            received = None
        if isinstance(received, Signalled):
            raise InterruptedEarlyError(received.number)
        if received is not None and received.host_index in waiting:
            sender.take(received)
        sender.watch_time()
        for index in waiting:
            on_progress(index, sender.arrivals[index].num_bytes)
    return sender.arrivals


class _Sender:
    def __init__(self, hosts: Hosts, parcels: Sequence[Parcel], indices: Collection[int]) -> None:
        self._hosts = hosts
        self._parcels = parcels
        self.arrivals = {index: Arrival() for index in indices}

    def waiting(self) -> list[int]:
        """The hosts for which something is still to be done."""
        return [
            index
            for index, arrival in self.arrivals.items()
            if not arrival.problem and len(arrival.folders) < len(self._parcels)
        ]

    def _cargo(self, index: int) -> ship.Cargo:
        """The parcel that this host is at, under its name there."""
        cargo = self._parcels[len(self.arrivals[index].folders)].cargo
        return dataclasses.replace(cargo, name=copy_name(cargo, self._hosts.hosts[index].name))

    def offer(self, index: int) -> None:
        cargo = self._cargo(index)
        entries = [list(entry) for entry in cargo.entries]
        offer = protocol.OfferFiles(project=cargo.name, entries=entries, take_another=False)
        self._hosts.channels[index].send(offer)
        self.arrivals[index].moved_s = time.monotonic()

    def take(self, received: Received | Closed) -> None:
        """What a host says."""
        index = received.host_index
        arrival = self.arrivals[index]
        if isinstance(received, Closed):
            arrival.problem = received.reason.message
            return
        match received.message:
            case protocol.Problem() as problem:
                arrival.problem = problem.message
            case protocol.MissingFiles(busy=True):
                now = time.monotonic()
                arrival.busy_since_s = arrival.busy_since_s or now
                arrival.ask_again_s = now + 1.0
                if now - arrival.busy_since_s > IN_USE_LIMIT_S:
                    arrival.problem = "another sync is bringing the same environment there"
            case protocol.MissingFiles() as answer:
                cargo = self._cargo(index)
                missing = set(answer.paths)
                arrival.num_bytes += sum(entry[2] for entry in cargo.entries if entry[0] not in missing)
                if answer.paths:
                    pieces = self._count(arrival, ship.pieces(cargo, answer.paths))
                    self._hosts.channels[index].send_pieces(pieces)
                else:
                    self._arrived(index, answer.folder, answer.digest)
            case protocol.Shipped() as shipped:
                self._arrived(index, shipped.folder, shipped.digest)
            case _:
                return

    def _count(self, arrival: Arrival, pieces: Iterable[Piece]) -> Iterator[bytes]:
        for piece in keep_alive(pieces):
            if piece is None:
                yield protocol.encode(protocol.Heartbeat())
                continue
            message, data = piece
            arrival.num_bytes += len(data)
            arrival.num_sent_bytes += len(data)
            arrival.moved_s = time.monotonic()
            yield protocol.encode(message, data)

    def _arrived(self, index: int, folder: str, digest: str) -> None:
        arrival = self.arrivals[index]
        if digest != self._cargo(index).digest:
            arrival.problem = "what arrived is not what was sent: was a package changed meanwhile? start again"
            return
        arrival.folders.append(folder)
        arrival.busy_since_s = None
        if len(arrival.folders) < len(self._parcels):
            self.offer(index)

    def watch_time(self) -> None:
        """Ask again where it is time, and give up where nothing moves."""
        now = time.monotonic()
        for index in self.waiting():
            arrival = self.arrivals[index]
            if arrival.ask_again_s is not None and now >= arrival.ask_again_s:
                arrival.ask_again_s = None
                self.offer(index)
            elif now - arrival.moved_s > _STALL_LIMIT_S:
                arrival.problem = f"nothing has moved for {_STALL_LIMIT_S:.0f} s"


def keep_alive(pieces: Iterable[Piece], beat_s: float = HEARTBEAT_S) -> Iterator[Piece | None]:
    """The same pieces, read ahead in a thread; None whenever the next one takes so long.

    While a channel waits for a piece it sends nothing else, and a host that hears nothing takes its driver for dead:
    a disk that stands still for a while must not end the sync.
    """
    ready: queue.Queue[Piece | None] = queue.Queue(_AHEAD)
    is_over = threading.Event()

    def put(piece: Piece | None) -> bool:
        while not is_over.is_set():
            try:
                ready.put(piece, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False

    def read() -> None:
        for piece in pieces:
            if not put(piece):
                return
        put(None)

    reader = threading.Thread(target=read, name="read-ahead", daemon=True)
    reader.start()
    try:
        while True:
            try:
                piece = ready.get(timeout=beat_s)
            except queue.Empty:
                yield None
                continue
            if piece is None:
                return
            yield piece
    finally:
        is_over.set()  # also where the channel has closed, and nobody wants the rest
