"""Errands: a function of this package that runs on a host in a process of its own, with JSON in and JSON out.

A process of its own, because a crash or a hang there must not touch the agent; watched as a rank is, so that the same
lease and the same time limits hold for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import queue
import time
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.errors import HostError
from paceline.launch import protocol
from paceline.launch.hosts import Hosts, InterruptedEarlyError
from paceline.launch.transport import Closed, Received, Signalled

_LOOK_S = 1.0
"""How often hosts are looked for that were not heard for long."""
_numbers = itertools.count(-1, -1)
"""No rank's: an errand that was given up may end while ranks run."""
_END_OF_STREAM = b"\nnull\n"
"""What an errand's process prints last where `main` gives None."""
_KEPT_ERRORS_BYTES = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errand:
    """What is to be done where."""

    host: int
    module: str
    """A module of this package with a function `main(argument)` whose value can be written as JSON."""
    argument: Any = None
    """Can be written as JSON too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What came of an errand."""

    value: Any = None
    problem: str = ""
    """Why there is no value: the process's last words, or that it took too long."""


def run_errands(hosts: Hosts, errands: Sequence[Errand], *, timeout_s: float) -> list[Reply]:
    """Runs all errands at the same time; a reply for each, in their order, after `timeout_s` at the latest.

    Nothing that happens on a host raises: it is in the reply. Raises InterruptedEarlyError for a signal.
    """
    running = {next(_numbers): place for place in range(len(errands))}
    for number, place in running.items():
        errand = errands[place]
        start = protocol.StartErrand(number=number, module=errand.module, argument=errand.argument)
        hosts.channels[errand.host].send(start)
    replies: dict[int, Reply] = {}

    def give_up(host: int, problem: str) -> None:
        for place, errand in enumerate(errands):
            if errand.host == host:
                replies.setdefault(place, Reply(problem=problem))

    said: dict[tuple[int, str], bytes] = {}
    deadline_s = time.monotonic() + timeout_s
    while len(replies) < len(errands):
        hosts.closed.update(hosts.find_silent())
        for host, reason in hosts.closed.items():
            give_up(host, str(reason))
        if len(replies) == len(errands):
            break
        try:
            received = hosts.inbox.get(timeout=min(_LOOK_S, max(0.0, deadline_s - time.monotonic())))
        except queue.Empty:
            if time.monotonic() >= deadline_s:
                break
            continue
        match received:
            case Signalled():
                raise InterruptedEarlyError(received.number)
            case Closed():
                hosts.closed[received.host_index] = received.reason
            case Received(message=protocol.Output() as output) if output.rank in running:
                key = running[output.rank], output.stream
                said[key] = said.get(key, b"") + received.payload
            case Received(message=protocol.RankEnded() as ended) if ended.rank in running:
                place = running[ended.rank]
                out, err = (said.get((place, stream), b"").decode(errors="replace") for stream in ("stdout", "stderr"))
                replies.setdefault(place, _reply(out, err, ended.exit_code))
            case Received(message=protocol.Problem() as problem):
                give_up(received.host_index, problem.message)
            case _:  # a heartbeat, or the last words of an errand that nobody waits for any more
                continue
    late = Reply(problem=f"no answer within {timeout_s:.0f} s")
    return [replies.get(place, late) for place in range(len(errands))]


def _reply(out: str, err: str, exit_code: int) -> Reply:
    """The value is the last line: libraries may have printed before."""
    lines = out.splitlines()
    if exit_code == 0 and lines:
        try:
            return Reply(value=json.loads(lines[-1]))
        except ValueError:  # something of it went on after its end, and has printed as well
            return Reply(problem=f"its answer can't be read: {lines[-1][:200]}")
    words = err.strip().splitlines() or [f"it ended with exit code {exit_code} and no word"]
    return Reply(problem=words[-1])


def stream_errand(hosts: Hosts, errand: Errand, *, doing: str, idle_limit_s: float) -> Iterator[bytes]:
    """The bytes that an errand writes to its stdout, as they come; its `main` gives None.

    Raises HostError with its last words where it fails, or where nothing comes for `idle_limit_s`;
    InterruptedEarlyError for a signal.
    """
    host = hosts.hosts[errand.host]
    if errand.host in hosts.closed:
        raise hosts.closed[errand.host]
    number = next(_numbers)
    start = protocol.StartErrand(number=number, module=errand.module, argument=errand.argument)
    hosts.channels[errand.host].send(start)
    held = errors = b""
    moved_s = time.monotonic()
    while True:
        try:
            received = hosts.inbox.get(timeout=max(0.0, moved_s + idle_limit_s - time.monotonic()))
        except queue.Empty:
            text = f"{host.name}: cannot {doing}: nothing came for {idle_limit_s:.0f} s"
            raise HostError(text, hint=f"does a disk hang there?  ssh {host.ssh_destination} dmesg | tail") from None
        match received:
            case Signalled():
                raise InterruptedEarlyError(received.number)
            case Closed():
                hosts.closed[received.host_index] = received.reason
                if received.host_index == errand.host:
                    raise received.reason
            case Received(message=protocol.Output(rank=rank, stream="stdout")) if rank == number:
                moved_s = time.monotonic()
                held += received.payload
                yield held[: -len(_END_OF_STREAM)]
                held = held[-len(_END_OF_STREAM) :]
            case Received(message=protocol.Output(rank=rank)) if rank == number:
                errors = (errors + received.payload)[-_KEPT_ERRORS_BYTES:]
            case Received(message=protocol.RankEnded(rank=rank) as ended) if rank == number:
                if ended.exit_code == 0 and held == _END_OF_STREAM:
                    return
                words = _reply("", errors.decode(errors="replace"), ended.exit_code).problem
                raise HostError(f"{host.name}: cannot {doing}: {words}")
            case Received(message=protocol.Problem() as problem) if received.host_index == errand.host:
                raise HostError(f"{host.name}: cannot {doing}: {problem.message}", hint=problem.hint or None)
            case _:
                continue
