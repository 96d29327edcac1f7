"""The host's copy of the user's project: what is there, what is missing, and putting it in place.

One folder per project and host, kept between runs, so that only what changed travels and what a script writes beside
its code (checkpoints, say) is still there for the next run. A folder that another run is using is left alone, and the
next one is taken if the driver says so. Only the user may look into any of them, as the project may lie in a private
folder. Standard library only: this module runs on every host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

Entry = Sequence[Any]
"""[path, mode, size, sha256, link target]: the path is relative, with forward slashes; a link has no sha256."""


def digest_of(entries: Iterable[Entry]) -> str:
    """One hash for a whole project: the same on every host that holds the same files."""
    lines = sorted(f"{path}\0{mode & 0o100:o}\0{sha256}\0{link}" for path, mode, _, sha256, link in entries)
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def file_sha256(path: str) -> str:
    """The hash of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


_MOST_COPIES = 100


class CopyInUseError(Exception):
    """Another run is using the copy."""


class ProjectCopy:
    """The copy of one project on this host, locked for one run. Raises CopyInUseError, or OSError."""

    def __init__(self, base: str, project: str, *, take_another: bool) -> None:
        os.makedirs(base, mode=0o700, exist_ok=True)
        self.folder, self._lock = _lock_a_folder(base, project, _MOST_COPIES if take_another else 1)
        self._index_path = self.folder + ".json"
        self._entries: dict[str, Entry] = {}
        self._writing: tuple[str, BinaryIO] | None = None

    def close(self) -> None:
        """Let other runs use the folder."""
        if self._writing is not None:
            self._writing[1].close()
        self._lock.close()

    def missing(self, entries: Sequence[Entry]) -> list[str]:
        """Remove what an earlier run put here and the project no longer has; the paths that must be sent."""
        self._entries = {entry[0]: entry for entry in entries}
        for path in self._earlier_paths() - self._entries.keys():
            self._remove(path)
        # Written before the files are, so that the next run knows what a run that ended half-way put here.
        with open(self._index_path, "w", encoding="utf-8") as file:
            json.dump(sorted(self._entries), file)
        return [entry[0] for entry in entries if not self._place_without_data(entry)]

    def write(self, path: str, data: bytes, *, last: bool) -> None:
        """The next piece of a file; it takes its final name with the last one."""
        if self._writing is None or self._writing[0] != path:
            target = self._inside(path)
            self._make_folder(os.path.dirname(target))
            self._writing = (path, _open_part(_part_of(target), self._entries[path][1]))
        file = self._writing[1]
        file.write(data)
        if last:
            file.close()
            self._writing = None
            target = self._inside(path)
            part = _part_of(target)
            os.chmod(part, self._entries[path][1])
            _make_way(target)
            os.replace(part, target)

    def digest(self) -> str:
        """The hash of what now lies on the disk, read again."""
        found: list[Entry] = []
        for path, mode, size, _, link in self._entries.values():
            target = self._inside(path)
            if link is not None:
                found.append((path, mode, size, None, os.readlink(target)))
            else:
                found.append((path, os.stat(target).st_mode, size, file_sha256(target), None))
        return digest_of(found)

    def _earlier_paths(self) -> set[str]:
        try:
            with open(self._index_path, encoding="utf-8") as file:
                return set(json.load(file))
        except (OSError, ValueError):
            return set()

    def _place_without_data(self, entry: Entry) -> bool:
        """True when the entry is in place already, or could be put there without any data."""
        path, mode, size, sha256, link = entry
        target = self._inside(path)
        if self._linked_parent(target) is not None and link is None:
            return False  # what is seen there lies elsewhere
        if link is not None:
            if not (os.path.islink(target) and os.readlink(target) == link):
                self._make_folder(os.path.dirname(target))
                _make_way(target)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(target)
                os.symlink(link, target)
            return True
        if os.path.islink(target) or not os.path.isfile(target) or os.path.getsize(target) != size:
            return False
        if file_sha256(target) != sha256:
            return False
        os.chmod(target, mode)
        return True

    def _remove(self, path: str) -> None:
        """The file, and the folders that are empty without it."""
        target = self._inside(path)
        if self._linked_parent(target) is not None:
            return  # not ours: it lies where a link of an earlier state of the project leads
        with contextlib.suppress(OSError):
            os.unlink(target)
            while (target := os.path.dirname(target)) != self.folder:
                os.rmdir(target)

    def _make_folder(self, folder: str) -> None:
        """Make the folder; a file or link of an earlier state of the project that stands in its way is removed."""
        while (link := self._linked_parent(os.path.join(folder, "x"))) is not None:
            os.unlink(link)
        while True:
            try:
                os.makedirs(folder, exist_ok=True)
                return
            except (FileExistsError, NotADirectoryError):
                blocking = folder
                while not os.path.lexists(blocking) or os.path.isdir(blocking):
                    blocking = os.path.dirname(blocking)
                os.unlink(blocking)

    def _linked_parent(self, target: str) -> str | None:
        """The outermost folder above the target, inside the copy, that is a link: nothing is done through it."""
        parent = self.folder
        for part in os.path.relpath(os.path.dirname(target), self.folder).split(os.sep):
            parent = os.path.join(parent, part)
            if os.path.islink(parent):
                return parent
        return None

    def _inside(self, path: str) -> str:
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"a path that leaves the project: {path}")
        return os.path.join(self.folder, path)


def _make_way(target: str) -> None:
    """An empty folder where a file must go is removed; a full one is somebody's, and stays an error."""
    if os.path.isdir(target) and not os.path.islink(target):
        os.rmdir(target)


def _part_of(target: str) -> str:
    """Where a file is written before it takes its name; one at a time, so one name will do, whatever the file's."""
    return os.path.join(os.path.dirname(target), ".paceline-part")


def _open_part(path: str, mode: int) -> BinaryIO:
    """A new file that nobody may read, not even for a moment, who may not read it in the end."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & 0o777), "wb")


def _lock_a_folder(base: str, project: str, most: int) -> tuple[str, Any]:
    """`base/project`, or the first of `project.2`, `project.3` ... that no other run holds; at most so many.

    On a file system without locks the first is taken unlocked: two runs of a project on one host at the same time are
    rare, and a home folder that can't lock is not. Raises CopyInUseError, or OSError where even the last is taken.
    """
    for number in range(1, most + 1):
        folder = os.path.join(base, project if number == 1 else f"{project}.{number}")
        lock = open(folder + ".lock", "w", encoding="utf-8")  # noqa: SIM115  # held as long as the run
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        except OSError:
            pass  # no locks here
        os.makedirs(folder, exist_ok=True)
        return folder, lock
    if most == 1:
        raise CopyInUseError
    raise OSError(errno.EBUSY, f"other runs are using all {most} copies of the project", os.path.join(base, project))
