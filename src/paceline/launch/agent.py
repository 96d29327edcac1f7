"""The agent: one process per host, started by the driver over the channel that is its stdin and stdout.

The channel is the lease. When it closes, or nothing is heard for `lease_s`, the agent ends every process of the run on
this host and exits. A watchdog, forked at the start, does the same if the agent itself is killed.
Standard library only; one loop (and a thread of the network probe's, until the ranks start); every wait has an end.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable

from paceline.launch import protocol, receive
from paceline.launch.facts import gather_facts, state_folder
from paceline.launch.forks import start_errand
from paceline.launch.ports import PortTakenError, hold_port
from paceline.launch.process import (
    Ending,
    RankProcess,
    adopt_orphans,
    kernel_says,
    reap_orphans,
    session_is_empty,
    start_rank,
)
from paceline.launch.watchdog import Watchdog
from paceline.network.probe import Listener, dial

OUTBOX_LIMIT_BYTES = 8 << 20
"""Above this the ranks' output is not read, so that a slow channel slows the ranks down instead of filling memory."""
_SETUP_LIMIT_S = 30.0
"""For the driver's first message."""
_END_LIMIT_S = 30.0
"""Beyond the grace: what SIGKILL has not ended by then (a process that waits for a dead disk) is left."""
_DRAIN_BYTES = 1 << 20
"""Of a rank that has ended, more than any pipe holds: what comes after it is its children's, and not waited for."""
_LONGEST_SLEEP_S = 0.5
_READ_BYTES = 1 << 16
_BEAT_S = 2.0
_PAUSE_S = 2.0
"""An agent that was busy or stopped for so long could not hear: that is no silence of the driver's."""


class Agent:
    """Serves one driver until the channel ends."""

    def __init__(self, in_fd: int, out_fd: int) -> None:
        self._in_fd, self._out_fd = in_fd, out_fd
        self._selector = selectors.DefaultSelector()
        self._decoder = protocol.Decoder()
        self._outbox = bytearray()
        self._setup: protocol.Setup | None = None
        self._last_heard_s = self._last_sent_s = self._last_beat_s = time.monotonic()
        self._ranks: dict[int, RankProcess] = {}
        self._ending: Ending | None = None
        self._must_exit = ""
        self._copies: dict[str, receive.ProjectCopy] = {}
        self._listener: Listener | None = None
        self._held_port: socket.socket | None = None
        self._watchdog: Watchdog | None = None
        self._handlers: dict[type[protocol.Message], Callable[..., None]] = {
            protocol.Setup: self._on_setup,
            protocol.Heartbeat: self._on_heartbeat,
            protocol.Listen: self._on_listen,
            protocol.Dial: self._on_dial,
            protocol.FindToken: self._on_find_token,
            protocol.OfferFiles: self._on_offer_files,
            protocol.HoldPort: self._on_hold_port,
            protocol.StartRanks: self._on_start_ranks,
            protocol.StartErrand: self._on_start_errand,
            protocol.StopRanks: self._on_stop_ranks,
        }

    def serve(self) -> None:
        """Until the channel closes, the lease runs out or a signal comes; then end everything and return."""
        wake_fd = self._catch_signals()
        os.set_blocking(self._in_fd, False)
        os.set_blocking(self._out_fd, False)
        self._selector.register(self._in_fd, selectors.EVENT_READ, self._read_channel)
        self._selector.register(wake_fd, selectors.EVENT_READ, lambda: os.read(wake_fd, 4096))
        facts = gather_facts().as_dict()
        self._send(protocol.Hello(monotonic_s=time.monotonic(), facts=facts))
        while not self._must_exit:
            self._turn()
        with contextlib.suppress(OSError):  # the driver may be gone, and with it whoever reads this
            os.write(2, f"{self._must_exit}\n".encode())
        self._end_everything()

    def _turn(self) -> None:
        """One round: wait for something to happen, deal with it, and with what time has brought."""
        self._flush()
        self._watch_ranks()
        began_s = time.monotonic()
        timeout_s = 0.05 if self._ending else _LONGEST_SLEEP_S
        for key, _ in self._selector.select(timeout_s):
            key.data()
        now = time.monotonic()
        self._reap(now)
        if self._ending and self._ending.step(now):
            self._ending = None
            self._forget_ranks()
            self._send(protocol.AllStopped())
        if now - began_s > _PAUSE_S:
            self._last_heard_s = now
        if self._setup is not None and now - self._last_sent_s >= self._setup.heartbeat_s:
            self._send(protocol.Heartbeat())
        if self._watchdog is not None and now - self._last_beat_s >= _BEAT_S:
            self._last_beat_s = now
            self._watchdog.beat()
        lease_s = self._setup.lease_s if self._setup is not None else _SETUP_LIMIT_S
        if now - self._last_heard_s > lease_s:
            self._must_exit = f"nothing heard from the driver for {lease_s:.0f} s"

    # The channel

    def _read_channel(self) -> None:
        try:
            data = os.read(self._in_fd, 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._must_exit = "the channel is closed"
            return
        self._last_heard_s = time.monotonic()
        for message, payload in self._decoder.feed(data):
            self._handle(message, payload)

    def _handle(self, message: protocol.Message, payload: bytes) -> None:
        try:
            if isinstance(message, protocol.FileData):
                self._on_file_data(message, payload)
            else:
                self._handlers[type(message)](message)
        except (OSError, ValueError) as error:
            self._send(protocol.problem_of(error))

    def _send(self, message: protocol.Message, payload: bytes = b"") -> None:
        self._outbox += protocol.encode(message, payload)
        self._last_sent_s = time.monotonic()
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                sent = os.write(self._out_fd, self._outbox[: 1 << 18])
                del self._outbox[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._must_exit = "the channel is closed"
        self._watch(self._out_fd, bool(self._outbox) and not self._must_exit, selectors.EVENT_WRITE, self._flush)

    def _watch_ranks(self) -> None:
        readable = len(self._outbox) < OUTBOX_LIMIT_BYTES
        for rank in self._ranks.values():
            for descriptor, stream in rank.streams.items():
                reader = self._reader(rank, descriptor, stream)
                self._watch(descriptor, readable, selectors.EVENT_READ, reader)

    def _watch(self, descriptor: int, wanted: bool, event: int, handler: Callable[[], object]) -> None:
        watched = descriptor in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(descriptor, event, handler)
        elif watched and not wanted:
            self._selector.unregister(descriptor)

    # What the driver asks

    def _on_setup(self, message: protocol.Setup) -> None:
        self._setup = message
        self._watchdog = Watchdog(self._lease())

    def _on_heartbeat(self, message: protocol.Heartbeat) -> None:
        """All that it says is in its arrival."""

    def _on_listen(self, message: protocol.Listen) -> None:
        assert self._setup is not None
        self._listener = Listener(message.addresses, message.nonce, self._setup.host_index)
        ports, failures = self._listener.ports.items(), self._listener.failures.items()
        self._send(protocol.Listening(ports=[list(pair) for pair in ports], failures=[list(pair) for pair in failures]))

    def _on_dial(self, message: protocol.Dial) -> None:
        targets = [(str(a), int(host), str(b), int(port)) for a, host, b, port in message.targets]
        results = dial(targets, message.nonce, message.timeout_s)
        self._send(protocol.Dialled(results=[list(result) for result in results]))

    def _on_find_token(self, message: protocol.FindToken) -> None:
        try:
            with open(message.path, encoding="utf-8") as file:
                found = file.read() == message.token
        except OSError:
            found = False
        self._send(protocol.TokenFound(found=found))

    def _on_offer_files(self, message: protocol.OfferFiles) -> None:
        base = os.path.join(state_folder(), "projects")
        try:
            copy = receive.ProjectCopy(base, message.project, take_another=message.take_another)
        except receive.CopyInUseError:
            self._send(protocol.MissingFiles(folder="", paths=[], digest="", busy=True))
            return
        self._copies[message.project] = copy
        paths = copy.missing(message.entries)
        digest = "" if paths else copy.digest()
        self._send(protocol.MissingFiles(folder=copy.folder, paths=paths, digest=digest, busy=False))

    def _on_file_data(self, message: protocol.FileData, payload: bytes) -> None:
        copy = self._copies.get(message.project)
        if copy is None:
            return  # it could not be written, and the driver has been told
        try:
            copy.write(message.path, payload, last=message.last_of_file)
        except OSError:
            self._copies.pop(message.project).close()
            raise
        if message.last_of_all:
            self._send(protocol.Shipped(folder=copy.folder, digest=copy.digest()))

    def _on_hold_port(self, message: protocol.HoldPort) -> None:
        if self._held_port is not None:
            self._held_port.close()
            self._held_port = None
        try:
            self._held_port = hold_port(message.port)
        except PortTakenError as taken:
            self._send(protocol.PortHeld(port=0, holder=str(taken)))
            return
        self._send(protocol.PortHeld(port=self._held_port.getsockname()[1], holder=""))

    def _on_start_ranks(self, message: protocol.StartRanks) -> None:
        self._close_listener()
        for spec in message.ranks:
            self._take_in(start_rank(spec))

    def _on_start_errand(self, message: protocol.StartErrand) -> None:
        self._close_listener()  # and with it our only other thread
        lease, cwd = self._lease(), state_folder()
        try:
            errand, start = start_errand(message.number, message.module, message.argument, lease=lease, cwd=cwd)
        except OSError as error:  # no reason for the host's other errands to end
            self._send(protocol.Output(rank=message.number, stream="stderr"), f"cannot start: {error}".encode())
            self._send(protocol.RankEnded(rank=message.number, exit_code=1, at_s=time.monotonic(), kernel_says=""))
            return
        self._take_in(errand)
        os.write(start, b"\n")
        os.close(start)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _take_in(self, rank: RankProcess) -> None:
        self._ranks[rank.rank] = rank
        if self._watchdog is not None:
            self._watchdog.add(rank.pid)
        self._send(protocol.RankBegan(rank=rank.rank, pid=rank.pid))

    def _on_stop_ranks(self, message: protocol.StopRanks) -> None:
        now = time.monotonic()
        if self._ending is None:
            self._ending = self._end_ranks(message.grace_s, now)
        else:
            self._ending.hasten(grace_s=message.grace_s, now=now)

    def _lease(self) -> str:
        assert self._setup is not None
        return f"{self._setup.run_id}/{self._setup.host_index}"

    def _end_ranks(self, grace_s: float, now: float) -> Ending:
        assert self._watchdog is not None
        return Ending(self._lease(), self._ranks.values(), spare={self._watchdog.pid}, grace_s=grace_s, now=now)

    # The ranks

    def _reader(self, rank: RankProcess, descriptor: int, stream: str) -> Callable[[], None]:
        def read() -> None:
            self._read_rank(rank, descriptor, stream)

        return read

    def _read_rank(self, rank: RankProcess, descriptor: int, stream: str) -> bool:
        """One piece of what a rank wrote; False when there is none now."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._let_go(rank, descriptor)
            return False
        if stream == "events":
            self._pass_events(rank, data)
        else:
            self._send(protocol.Output(rank=rank.rank, stream=stream), data)
        return True

    def _pass_events(self, rank: RankProcess, data: bytes) -> None:
        *lines, rank.unfinished_line = (rank.unfinished_line + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                self._send(protocol.RankSaid(rank=rank.rank, record=record))

    def _reap(self, now: float) -> None:
        for rank in self._ranks.values():
            exit_code = None if rank.ended else rank.process.poll()
            if exit_code is None:
                continue
            rank.ended = True
            self._drain(rank)
            if session_is_empty(rank.pid):
                rank.has_session = False  # its number may soon be somebody else's
                if self._watchdog is not None:
                    self._watchdog.remove(rank.pid)
            words = kernel_says(rank.pid) if exit_code == -signal.SIGKILL else ""
            self._send(protocol.RankEnded(rank=rank.rank, exit_code=exit_code, at_s=now, kernel_says=words))

        if self._watchdog is not None:
            reap_orphans({self._watchdog.pid, *(rank.pid for rank in self._ranks.values())})

    def _drain(self, rank: RankProcess) -> None:
        for descriptor, stream in list(rank.streams.items()):
            for _ in range(_DRAIN_BYTES // _READ_BYTES):
                if descriptor not in rank.streams or not self._read_rank(rank, descriptor, stream):
                    break

    def _forget_ranks(self) -> None:
        self._reap(time.monotonic())
        for rank in self._ranks.values():
            for descriptor in list(rank.streams):
                self._let_go(rank, descriptor)
        self._ranks.clear()

    def _let_go(self, rank: RankProcess, descriptor: int) -> None:
        self._watch(descriptor, False, selectors.EVENT_READ, self._flush)
        rank.close_stream(descriptor)

    # The end

    def _catch_signals(self) -> int:
        """SIGCHLD wakes the loop; the signals that ask a process to end make the agent end the run on this host."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        return read_fd

    def _on_signal(self, number: int, frame: object) -> None:
        self._must_exit = f"got {signal.Signals(number).name}"

    def _end_everything(self) -> None:
        if self._setup is None or self._watchdog is None:
            return
        now = time.monotonic()
        ending = self._ending or self._end_ranks(self._setup.grace_s, now)
        give_up_at_s = now + self._setup.grace_s + _END_LIMIT_S
        while not ending.step(now) and now < give_up_at_s:
            time.sleep(0.05)
            now = time.monotonic()
        for copy in self._copies.values():
            copy.close()
        self._watchdog.dismiss()


def main() -> None:
    """Take over stdin and stdout as the channel; nothing else may write there."""
    in_fd, out_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.write(out_fd, protocol.MARKER)
    adopt_orphans()
    agent = Agent(in_fd, out_fd)
    agent.serve()
    os._exit(0)
