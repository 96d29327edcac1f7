"""The installed files of another host on their way to this machine, from which they are sent on."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import HostError
from paceline.launch import protocol
from paceline.launch.facts import Facts
from paceline.launch.hosts import Hosts, InterruptedEarlyError
from paceline.launch.process import LEASE_VARIABLE
from paceline.launch.receive import file_sha256
from paceline.launch.transport import Closed, Received, Signalled

_STALL_LIMIT_S = 120.0
_RANK = 1_000_000  # no errand has this number
_CALL = "import json, sys\nfrom paceline.envs.pulling import main\nmain(json.loads(sys.argv[1]))\n"

Entries = Sequence[Sequence[Any]]
"""[root, path, mode, size, sha256] of each file, see envs/listing.py."""


class Spool:
    """Bytes in, files out, in the order of the entries. What an earlier try has brought stays."""

    def __init__(self, folder: Path, entries: Entries) -> None:
        self._folder = folder
        self._entries = entries
        self.start = self._count_complete()
        self._number = self.start
        self._file: BinaryIO | None = None
        self._left_bytes = 0
        self._hash = hashlib.sha256()

    @property
    def is_complete(self) -> bool:
        return self._number == len(self._entries)

    def root(self, number: int) -> Path:
        """Where the files of this root lie."""
        return self._folder / str(number)

    def feed(self, data: bytes) -> None:
        """The next bytes. Raises HostError where a file is not what it was when it was listed."""
        view = memoryview(data)
        while not self.is_complete and (view or self._is_empty()):
            if self._file is None:
                self._open()
            assert self._file is not None
            piece = view[: self._left_bytes]
            self._file.write(piece)
            self._hash.update(piece)
            self._left_bytes -= len(piece)
            view = view[len(piece) :]
            if not self._left_bytes:
                self._close()

    def close(self) -> None:
        """Whatever has come."""
        if self._file is not None:
            self._file.close()

    def _is_empty(self) -> bool:
        return self._file is None and self._entries[self._number][3] == 0

    def _path(self, number: int) -> Path:
        root, path, *_ = self._entries[number]
        if os.path.isabs(path) or ".." in path.split("/"):
            raise HostError(f"a path that leaves the environment: {path}")
        return self.root(root) / path

    def _count_complete(self) -> int:
        for number, (_, _, _, size, sha256) in enumerate(self._entries):
            path = self._path(number)
            if not path.is_file() or path.stat().st_size != size or file_sha256(str(path)) != sha256:
                return number
        return len(self._entries)

    def _open(self) -> None:
        path = self._path(self._number)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "wb")  # noqa: SIM115  # closed when its last byte has come
        self._left_bytes = self._entries[self._number][3]
        self._hash = hashlib.sha256()

    def _close(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None
        _, path, mode, _, sha256 = self._entries[self._number]
        if self._hash.hexdigest() != sha256:
            raise HostError(f"{path} was changed while it was fetched", hint="start again")
        self._path(self._number).chmod(mode)
        self._number += 1


def fetch(hosts: Hosts, facts: Facts, asked: dict[str, Any], spool: Spool, on_bytes: Callable[[int], None]) -> None:
    """Bring the files of the first of `hosts` into the spool. `asked`: the argument of envs/listing.py.

    Raises HostError, InterruptedEarlyError.
    """
    if spool.is_complete:
        return
    argument = json.dumps({**asked, "start": spool.start})
    env = {
        "PYTHONPATH": f"{facts.state_folder}/runtime/{hosts.runtime_digest}",
        LEASE_VARIABLE: f"{hosts.run_id}/0",
    }
    argv = [facts.python_path, "-c", _CALL, argument]
    process = {"rank": _RANK, "argv": argv, "env": env, "cwd": facts.state_folder}
    hosts.channels[0].send(protocol.StartRanks(ranks=[process]))
    num_bytes = 0
    try:
        for data in _read(hosts):
            spool.feed(data)
            num_bytes += len(data)
            on_bytes(num_bytes)
    finally:
        spool.close()
    if not spool.is_complete:
        raise HostError(f"{hosts.hosts[0].name}: its files ended too early", hint="start again")


def _read(hosts: Hosts) -> Iterator[bytes]:
    """What the process there writes, until it ends."""
    name = hosts.hosts[0].name
    errors = b""
    moved_s = time.monotonic()
    while time.monotonic() - moved_s < _STALL_LIMIT_S:
        try:
            received = hosts.inbox.get(timeout=1.0)
        except queue.Empty:
            continue
        match received:
            case Signalled():
                raise InterruptedEarlyError(received.number)
            case Closed():
                raise received.reason
            case Received(message=protocol.Output(rank=rank, stream="stdout")) if rank == _RANK:
                moved_s = time.monotonic()
                yield received.payload
            case Received(message=protocol.Output(rank=rank)) if rank == _RANK:
                errors = (errors + received.payload)[-10_000:]
            case Received(message=protocol.Problem() as problem):
                raise HostError(f"{name}: {problem.message}", hint=problem.hint or None)
            case Received(message=protocol.RankEnded() as ended) if ended.rank == _RANK:
                if ended.exit_code != 0:
                    last = (errors.decode(errors="replace").strip().splitlines() or ["no word"])[-1]
                    raise HostError(f"{name}: its files could not be read: {last}")
                return
            case _:
                continue
    raise HostError(f"{name}: nothing came for {_STALL_LIMIT_S:.0f} s")
