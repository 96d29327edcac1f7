"""The files of all distributions, by their RECORD: the errand that says what there is to send.

Standard library only: this module runs on every host.
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from paceline.checks.details import normalise
from paceline.envs.inventory import find_distributions
from paceline.launch.facts import state_folder
from paceline.launch.receive import file_sha256
from paceline.records import Record

SCRIPT_GROUPS = ("console_scripts", "gui_scripts")
_HASHERS = 4
_PACK_LIMIT_S = 1500.0


def main(argument: dict[str, Any]) -> dict[str, Any]:
    """`argument`: {`names`: of the distributions, `is_packed`: the whole conda environment instead}.

    {`roots`: [kind, folder], `entries`: [root, path, mode, size, sha256], `left_out`: sentences}; kind is `site`
    (site-packages), `prefix` (the environment's folder) or `conda` (an archive).
    """
    if argument["is_packed"]:
        _pack()
    found = find_packed() if argument["is_packed"] else find_files(argument["names"])
    folders = [folder for _, folder in found.roots]
    with ThreadPoolExecutor(_HASHERS) as pool:  # hashing leaves the interpreter free
        entries = list(pool.map(functools.partial(_describe, folders), found.files))
    return {"roots": [list(root) for root in found.roots], "entries": entries, "left_out": found.left_out}


class File(NamedTuple):
    """One file that is to be sent."""

    root: int
    path: str
    sha256: str
    """From RECORD; empty where that does not say, or the file is newer than it."""


class Found(Record):
    """All files, always in the same order."""

    roots: list[tuple[str, str]]
    files: list[File]
    left_out: list[str]


def find_files(names: Iterable[str]) -> Found:
    """What there is of these distributions."""
    wanted = set(names)
    roots: dict[tuple[str, str], int] = {}
    files: dict[tuple[str, str], File] = {}
    left_out: list[str] = []
    for distribution in find_distributions():
        name = normalise(distribution.metadata["Name"])
        if name not in wanted:
            continue
        site = os.path.normpath(str(distribution.locate_file("")))
        written_s = _written_s(distribution)
        gone = 0
        for path, sha256 in read_record(distribution):
            place = place_file(site, path)
            if place is None:
                left_out.append(f"{path} of {name} lies outside the environment")
                continue
            kind, root, relative = place
            try:
                status = os.stat(os.path.join(root, relative))
            except OSError:
                gone += 1
                continue
            if (kind, relative) not in files:
                number = roots.setdefault((kind, root), len(roots))
                files[kind, relative] = File(number, relative, sha256 if status.st_mtime <= written_s else "")
        if gone:
            left_out.append(f"{gone} files of {name} are in its RECORD, but not there")
    return Found(roots=list(roots), files=list(files.values()), left_out=left_out)


def _archive() -> str:
    name = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    return os.path.join(state_folder(), "environments", f"packed-{name}", "environment.tar")


def _pack() -> None:
    """Make conda-pack's archive of the whole environment. Raises RuntimeError with its reason for not doing so: files
    that pip has changed behind conda's back, for instance."""
    archive = _archive()
    os.makedirs(os.path.dirname(archive), mode=0o700, exist_ok=True)
    program = "import sys; from conda_pack.cli import main; main(sys.argv[1:])"
    # Of editable packages only our own can be there: others have been refused.
    options = ["--prefix", sys.prefix, "--output", archive, "--format", "tar", "--force", "--quiet"]
    command = [sys.executable, "-c", program, *options, "--ignore-editable-packages"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PACK_LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"conda-pack refuses: {' '.join((done.stderr or done.stdout).split())[-500:]}")


def find_packed() -> Found:
    """conda-pack's archive, as the only file."""
    folder, name = os.path.split(_archive())
    return Found(roots=[("conda", folder)], files=[File(0, name, "")], left_out=[])


def _written_s(distribution: importlib.metadata.Distribution) -> float:
    """When RECORD was written, which is the last that an installer does; what is newer was changed since."""
    folder = getattr(distribution, "_path", None)
    try:
        return os.stat(os.path.join(str(folder), "RECORD")).st_mtime
    except OSError:
        return 0.0


def read_record(distribution: importlib.metadata.Distribution) -> Iterator[tuple[str, str]]:
    """(path, sha256 or nothing) in RECORD of what is to be sent: not what each interpreter makes by itself, and no
    address."""
    scripts = {point.name for point in distribution.entry_points if point.group in SCRIPT_GROUPS}
    for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        if not row:
            continue
        folder, _, file = row[0].rpartition("/")
        is_compiled = folder.rpartition("/")[2] == "__pycache__"
        is_script = folder.rpartition("/")[2] == "bin" and folder.startswith("..") and file in scripts
        if not is_compiled and not is_script and file != "direct_url.json":
            yield row[0], _read_hash(row[1] if len(row) > 1 else "")


def _read_hash(text: str) -> str:
    kind, _, value = text.partition("=")
    try:
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex() if kind == "sha256" else ""
    except ValueError:
        return ""


def place_file(site: str, path: str) -> tuple[str, str, str] | None:
    """(kind, root, path below it) of a path in RECORD; None for one that lies outside the environment."""
    full = os.path.normpath(os.path.join(site, path))
    prefix = os.path.normpath(os.path.join(site, "..", "..", ".."))  # of lib/python3.x/site-packages
    for kind, root in (("site", site), ("prefix", prefix)):
        if full.startswith(root + os.sep):
            return kind, root, os.path.relpath(full, root)
    return None


def _describe(folders: list[str], file: File) -> list[Any]:
    full = os.path.join(folders[file.root], file.path)
    status = os.stat(full)
    mode = 0o755 if status.st_mode & 0o100 else 0o644
    return [file.root, file.path, mode, status.st_size, file.sha256 or file_sha256(full)]
