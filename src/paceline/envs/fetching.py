"""The installed files of another host on their way to this machine, from which they are sent on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from paceline.envs import pulling
from paceline.envs.listed import ListedFile
from paceline.errors import HostError
from paceline.launch.errands import Errand, stream_errand
from paceline.launch.hosts import Hosts
from paceline.launch.receive import file_sha256

_STALL_LIMIT_S = 120.0
_AGAIN = "the same command again goes on from what has come"


class Spool:
    """Bytes in, files out, in the order of the list. What an earlier try has brought stays."""

    def __init__(self, folder: Path, files: Sequence[ListedFile]) -> None:
        self._folder = folder
        self._files = files
        self.start = self._count_complete()
        self._number = self.start
        self._file: BinaryIO | None = None
        self._left_bytes = 0
        self._hash = hashlib.sha256()

    @property
    def is_complete(self) -> bool:
        return self._number == len(self._files)

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
        return self._file is None and self._files[self._number].size_bytes == 0

    def _path(self, number: int) -> Path:
        return self.root(self._files[number].root) / self._files[number].path

    def _count_complete(self) -> int:
        for number, file in enumerate(self._files):
            path = self._path(number)
            if not path.is_file() or path.stat().st_size != file.size_bytes or file_sha256(str(path)) != file.sha256:
                return number
        return len(self._files)

    def _open(self) -> None:
        path = self._path(self._number)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "wb")  # noqa: SIM115  # closed when its last byte has come
        self._left_bytes = self._files[self._number].size_bytes
        self._hash = hashlib.sha256()

    def _close(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None
        file = self._files[self._number]
        if self._hash.hexdigest() != file.sha256:
            raise HostError(
                f"{file.path} was changed while it was fetched", hint="let whatever installs there end first"
            )
        self._path(self._number).chmod(file.mode)
        self._number += 1


def fetch(hosts: Hosts, asked: dict[str, Any], spool: Spool, on_bytes: Callable[[int], None]) -> None:
    """Bring the files of the first of `hosts` into the spool. `asked`: the argument of envs/listing.py.

    Raises HostError, InterruptedEarlyError.
    """
    if spool.is_complete:
        return
    host = hosts.hosts[0]
    errand = Errand(host=0, module=pulling.__name__, argument={**asked, "start": spool.start})
    num_bytes = 0
    try:
        for data in stream_errand(hosts, errand, doing="read its files", idle_limit_s=_STALL_LIMIT_S):
            spool.feed(data)
            num_bytes += len(data)
            on_bytes(num_bytes)
    except HostError as error:
        hint = error.hint or f"mend it there:  ssh {host.ssh_destination}"
        raise HostError(error.message, hint=f"{hint}\n  {_AGAIN}") from error
    finally:
        spool.close()
    if not spool.is_complete:
        raise HostError(f"{host.name}: its files ended too early: were packages removed meanwhile?", hint=_AGAIN)
