"""What is installed in an interpreter, and where each of it came from: the errand of the host that is copied.

Standard library only: this module runs on every host.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import urllib.parse
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.checks.details import normalise
from paceline.records import Record


class Installed(Record):
    """One distribution."""

    name: str
    """In lower case with hyphens."""
    version: str
    origin: str
    """`index`, `editable`, `folder`, `wheel`, `archive`, `git` (or another version control) or `url`."""
    source: str
    """The path or the address that it was installed from, without what may be secret; empty for an index."""
    has_record: bool
    """Whether RECORD says which files are its own."""
    content: str
    """Of what came from no index: a hash of its RECORD, as its version alone does not say what is in it."""
    num_bytes: int
    """All its files, as RECORD says."""


class Inventory(Record):
    """One interpreter."""

    python: str
    """Major and minor, such as 3.11."""
    python_path: str
    machine: str
    libc: str
    """`glibc`, or empty for another one."""
    installed: list[Installed]
    conda_only: list[str]
    """Packages of a conda environment that Python does not know, with version and build: libraries, compilers."""
    has_conda_pack: bool
    """It can be packed as a whole."""

    def to_json(self) -> dict[str, Any]:
        """For the channel."""
        return {**self.as_dict(), "installed": [each.as_dict() for each in self.installed]}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Inventory:
        """What `to_json` made."""
        fields: dict[str, Any] = {**record, "installed": [Installed(**each) for each in record["installed"]]}
        return cls(**fields)


def main(argument: None) -> dict[str, Any]:
    """The inventory of the interpreter that runs this."""
    installed = [describe(found) for found in find_distributions()]
    is_conda = os.path.isdir(os.path.join(sys.prefix, "conda-meta"))
    inventory = Inventory(
        python=f"{sys.version_info[0]}.{sys.version_info[1]}",
        python_path=sys.executable,
        machine=os.uname().machine,
        libc=platform.libc_ver()[0],
        installed=installed,
        conda_only=_find_conda_only({each.name for each in installed}) if is_conda else [],
        has_conda_pack=is_conda and importlib.util.find_spec("conda_pack") is not None,
    )
    return inventory.to_json()


def find_distributions(path: list[str] | None = None) -> Iterator[importlib.metadata.Distribution]:
    """Each once, the one that is imported; by name. `path`: folders to look in instead of sys.path."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in _iterate(path):
        name = distribution.metadata["Name"]
        if name and distribution.version:
            found.setdefault(normalise(name), distribution)
    yield from (found[name] for name in sorted(found))


def _iterate(path: list[str] | None) -> Iterable[importlib.metadata.Distribution]:
    return importlib.metadata.distributions() if path is None else importlib.metadata.distributions(path=path)


def describe(distribution: importlib.metadata.Distribution) -> Installed:
    """One distribution from its metadata."""
    record = distribution.read_text("RECORD")
    origin, source = read_origin(distribution.read_text("direct_url.json"))
    return Installed(
        name=normalise(distribution.metadata["Name"]),
        version=distribution.version,
        origin=origin,
        source=source,
        has_record=record is not None,
        content=hashlib.sha256((record or "").encode()).hexdigest()[:16] if origin != "index" else "",
        num_bytes=sum(
            int(size) for line in (record or "").splitlines() if (size := line.rpartition(",")[2]).isdecimal()
        ),
    )


def read_origin(text: str | None) -> tuple[str, str]:
    """(origin, source) from direct_url.json, which an installer writes for whatever it did not take from an index."""
    try:
        record = json.loads(text or "")
        url = urllib.parse.urlsplit(str(record["url"]))
    except (ValueError, KeyError, TypeError):
        return "index", ""
    path = urllib.parse.unquote(url.path)
    # User, password and query may be secret.
    source = path if url.scheme == "file" else f"{url.scheme}://{url.hostname or ''}{path}"
    if "vcs_info" in record:
        return str(record["vcs_info"].get("vcs") or "git"), source
    if "dir_info" in record:
        return "editable" if record["dir_info"].get("editable") else "folder", source
    if url.scheme != "file":
        return "url", source
    return "wheel" if path.endswith(".whl") else "archive", source


def _find_conda_only(names: set[str]) -> list[str]:
    """From the names of conda's records: NAME-VERSION-BUILD.json."""
    stems = [os.path.basename(path)[:-5] for path in glob.glob(os.path.join(sys.prefix, "conda-meta", "*.json"))]
    return sorted(stem for stem in stems if stem.count("-") >= 2 and normalise(stem.rsplit("-", 2)[0]) not in names)
