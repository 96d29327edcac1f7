"""The user's project on its way to the other hosts: which folder it is, which files, and what must travel.

One mechanism for all hosts: the driver offers path, size and hash of every file, the host names those that it lacks,
and these come over the channel that is there already.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import secrets
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import InputError
from paceline.launch import protocol
from paceline.launch.receive import Entry, digest_of, file_sha256
from paceline.units import format_bytes

SHIP_LIMIT_BYTES = 1 << 30
"""More than this is no code: data must be on the hosts already, or be ignored by git."""
_SKIPPED_FOLDERS = {"__pycache__", ".git", ".hg", ".venv", "venv", "node_modules", ".ruff_cache", ".tox"}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Project:
    """The folder that the run takes along."""

    root: Path
    cwd: Path
    """Where the ranks start, inside the root."""
    reason: str

    @property
    def cwd_below_root(self) -> str:
        return self.cwd.relative_to(self.root).as_posix()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cargo:
    """The files of a project (or of a package), as they are offered to a host."""

    name: str
    root: Path
    entries: list[Entry]
    digest: str

    @property
    def num_bytes(self) -> int:
        return sum(entry[2] for entry in self.entries)


def find_project(cwd: Path, script: Path | None) -> Project:
    """The project that belongs to this command: git's idea of it, else the folder where the command was typed.

    `script` is an absolute path, or None for a module or another command. Raises InputError for a home folder.
    """
    top = _git_top(cwd)
    if top is not None and (script is None or script.is_relative_to(top)):
        return Project(root=top, cwd=cwd, reason=f"git repository {top}")
    if script is not None:
        top = _git_top(script.parent)
        if top is not None and not cwd.is_relative_to(top):
            return Project(root=top, cwd=script.parent, reason=f"git repository of the script, {top}")
    whole_machine = {Path.home(), Path("/"), Path("/tmp")}
    if (script is None or script.is_relative_to(cwd)) and cwd not in whole_machine:
        return Project(root=cwd, cwd=cwd, reason=f"the folder {cwd}")
    if script is not None and script.parent not in whole_machine:
        return Project(root=script.parent, cwd=script.parent, reason=f"the script's folder, {script.parent}")
    raise InputError(
        f"{cwd} is no project folder: all of it would be copied to the other hosts",
        hint="change into the project's folder, or say --no-ship if it lies at the same path everywhere",
    )


def _git_top(folder: Path) -> Path | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--show-toplevel"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Path(answer.stdout.strip()) if answer.returncode == 0 and answer.stdout.strip() else None


def load_project(project: Project) -> Cargo:
    """Hash every file of the project. Raises InputError when it is too large to be code."""
    entries: list[Entry] = []
    total_bytes = 0
    for path in _list_files(project.root):
        entry = _entry(project.root, path)
        if entry is not None:
            entries.append(entry)
            total_bytes += entry[2]
        if total_bytes > SHIP_LIMIT_BYTES:
            raise _too_large(project.root)
    name = f"{project.root.name or 'root'}-{digest_of([(str(project.root), 0, 0, os.uname().nodename, None)])[:12]}"
    return Cargo(name=name, root=project.root, entries=entries, digest=digest_of(entries))


def load_package(name: str) -> Cargo | None:
    """The files of an installed package, for a host that lacks it; None when it is not installed here either."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations))).parent
    paths = [path.relative_to(root).as_posix() for path in (root / name).rglob("*") if "__pycache__" not in path.parts]
    entries = [entry for path in sorted(paths) if (entry := _entry(root, path)) is not None]
    digest = digest_of(entries)
    return Cargo(name=f"package-{name}-{digest[:12]}", root=root, entries=entries, digest=digest)


def _list_files(root: Path) -> list[str]:
    """Relative paths: what git tracks or does not ignore; without git all but caches."""
    try:
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            timeout=60,
        )
        if listed.returncode == 0:
            return sorted({os.fsdecode(path) for path in listed.stdout.split(b"\0") if path})
    except (OSError, subprocess.TimeoutExpired):
        pass  # no git here: walk
    paths: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        paths += [os.path.relpath(os.path.join(folder, name), root) for name in [*files, *links]]
    return sorted(paths)


def _entry(root: Path, path: str) -> Entry | None:
    """[path, mode, size, sha256, link]; None for what is no longer there, or is neither file nor link."""
    full = os.path.join(root, path)
    try:
        status = os.lstat(full)
        if stat.S_ISLNK(status.st_mode):
            link = os.readlink(full)
            inside = os.path.normpath(os.path.join(os.path.dirname(path), link))
            if not os.path.isabs(link) and not inside.startswith(".."):
                return (path, 0o777, 0, None, link)
            status = os.stat(full)  # a link that leaves the project: its content travels
        if not stat.S_ISREG(status.st_mode):
            return None
        return (path, stat.S_IMODE(status.st_mode), status.st_size, file_sha256(full), None)
    except FileNotFoundError:
        return None


def _too_large(root: Path) -> InputError:
    sizes: dict[str, int] = {}
    for path in _list_files(root):
        try:
            top = path.split("/")[0]
            sizes[top] = sizes.get(top, 0) + os.lstat(os.path.join(root, path)).st_size
        except OSError:
            continue
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} ({format_bytes(size)})" for name, size in largest)
    return InputError(
        f"the project {root} is over {format_bytes(SHIP_LIMIT_BYTES)}, too much to copy to every host: {listed}",
        hint="add data to .gitignore and put it on the hosts, or say --no-ship if the project is there already",
    )


def pieces(cargo: Cargo, missing: list[str]) -> Iterator[tuple[protocol.FileData, bytes]]:
    """The content of the missing files as messages, in order."""
    for number, path in enumerate(missing):
        last_file = number == len(missing) - 1
        with open(cargo.root / path, "rb") as file:
            data = file.read(protocol.MAX_PAYLOAD_BYTES)
            while True:
                following = file.read(protocol.MAX_PAYLOAD_BYTES)
                last = not following
                message = protocol.FileData(
                    project=cargo.name, path=path, last_of_file=last, last_of_all=last and last_file
                )
                yield message, data
                if last:
                    break
                data = following


def write_token(root: Path) -> tuple[Path, str] | None:
    """Put a secret into the project's folder: a host that reads it there shares the file system.

    None where nothing can be written; then every host but this one gets a copy.
    """
    token = secrets.token_hex(16)
    path = root / f".paceline-token-{token[:8]}"
    try:
        path.write_text(token, encoding="utf-8")
    except OSError:
        return None
    return path, token
