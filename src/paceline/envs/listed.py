"""What a host says of its files, checked once: it names places on this machine, which another machine has no say in.
Pure."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from paceline.errors import HostError

_KINDS = ("site", "prefix", "conda")


class ListedFile(NamedTuple):
    """One file of the environment."""

    root: int
    """The place of its root in the list of them."""
    path: str
    """Below the root, with forward slashes; never out of it."""
    mode: int
    """0o755 for one that can be run, 0o644 for another."""
    size_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """The reply of envs/listing.py."""

    roots: tuple[tuple[str, str], ...]
    """(kind, folder on the host) of each."""
    files: tuple[ListedFile, ...]
    left_out: tuple[str, ...]
    """Sentences about what the others do not get."""


def read_listing(host: str, reply: Any) -> Listing:
    """Raises HostError where anything in it is not as envs/listing.py would say it."""
    try:
        roots = tuple((str(kind), str(folder)) for kind, folder in reply["roots"])
        if unknown := {kind for kind, _ in roots}.difference(_KINDS):
            raise ValueError(f"a root of an unknown kind: {min(unknown)!r}")
        files = tuple(_read_file(len(roots), *entry) for entry in reply["entries"])
        return Listing(roots=roots, files=files, left_out=tuple(map(str, reply["left_out"])))
    except (KeyError, TypeError, ValueError) as error:
        text = f"{host}: its list of files is none that paceline makes: {error}"
        raise HostError(text, hint=f"find out why before you take anything from there:  ssh {host}") from error


def _read_file(num_roots: int, root: Any, path: Any, mode: Any, size_bytes: Any, sha256: Any) -> ListedFile:
    if type(root) is not int or root not in range(num_roots):
        raise ValueError(f"{path!r} lies below root {root!r}, of {num_roots}")
    # An absolute path has an empty part at its beginning.
    if not isinstance(path, str) or "\0" in path or {"", ".", ".."} & set(path.split("/")):
        raise ValueError(f"a path that leaves the environment: {path!r}")
    if type(mode) is not int or type(size_bytes) is not int or size_bytes < 0 or not isinstance(sha256, str):
        raise ValueError(f"{path!r} has mode {mode!r}, {size_bytes!r} bytes and hash {sha256!r}")
    return ListedFile(root, path, 0o755 if mode & 0o100 else 0o644, size_bytes, sha256)
