"""The user's project on its way to the other hosts: which folder it is, which files, and what must travel.

One mechanism for all hosts: the driver offers path, size and hash of every file, the host names those that it lacks,
and these come over the channel that is there already.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import os
import secrets
import shlex
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from paceline.errors import InputError
from paceline.launch import protocol
from paceline.launch.receive import Entry, digest_of, file_sha256
from paceline.units import format_bytes

SHIP_LIMIT_BYTES = 1 << 30
"""More than this is no code: data must be on the hosts already, or be ignored by git."""
_GIT_LIMIT_S = 60.0
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
    left_behind: tuple[str, ...] = ()
    """What git ignores and is no mere cache, so it may be data that the script needs."""

    @property
    def num_bytes(self) -> int:
        return sum(entry[2] for entry in self.entries)


def find_project(cwd: Path, script: Path | None) -> Project:
    """The project that belongs to this command: git's idea of it, else the folder where the command was typed.

    `script` is an absolute path, or None for a module or another command. Raises InputError for a home folder.
    """
    script = None if script is None else Path(os.path.normpath(script))  # `../train.py` lies outside, not inside
    top = _git_top(cwd)
    if top is not None and (script is None or script.is_relative_to(top)):
        return Project(root=top, cwd=cwd, reason=f"the git repository {top}")
    if script is not None:
        top = _git_top(script.parent)
        if top is not None and not cwd.is_relative_to(top):
            return Project(root=top, cwd=script.parent, reason=f"the git repository of the script, {top}")
    if (script is None or script.is_relative_to(cwd)) and not _is_no_project(cwd):
        return Project(root=cwd, cwd=cwd, reason=f"the folder {cwd}")
    if script is not None and not _is_no_project(script.parent):
        return Project(root=script.parent, cwd=script.parent, reason=f"the script's folder, {script.parent}")
    raise InputError(
        f"{cwd} is no project folder: all of it would be copied to the other hosts",
        hint="change into the project's folder, or say --no-ship if it lies at the same path everywhere",
    )


def _is_no_project(folder: Path) -> bool:
    return folder in {Path.home(), Path("/"), Path("/tmp")}


def _git_top(folder: Path) -> Path | None:
    """The repository that the folder lies in; one that is a whole home folder (dotfiles) is no project."""
    top = os.fsdecode(_git(folder, "rev-parse", "--show-toplevel") or b"").removesuffix("\n")
    return Path(top) if top and not _is_no_project(Path(top)) else None


def _git(folder: Path, *words: str) -> bytes | None:
    """What git prints; None without git, or outside of any repository.

    Raises InputError when git fails otherwise: going on without it would ship what it is told to ignore.
    """
    command = ["git", "-C", str(folder), *words]
    try:
        # Its words in English, as one answer is told from the others by them.
        done = subprocess.run(command, capture_output=True, timeout=_GIT_LIMIT_S, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        said = f"no answer within {_GIT_LIMIT_S:.0f} s"
    except OSError as error:
        said = str(error)
    else:
        said = done.stderr.decode(errors="replace").strip()
        if done.returncode == 0:
            return done.stdout
        # With a path instead of "(or any ...)" there is a repository, and it is broken.
        if "not a git repository (or any" in said:
            return None
    remedies = [line.strip() for line in said.splitlines() if line.strip().startswith("git config ")]
    raise InputError(
        f"git can't say which files belong to {folder}: {' '.join(said.split())}",
        hint=remedies[0] if remedies else f"mend what stops: {shlex.join(command)}",
    )


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
    return Cargo(
        name=name,
        root=project.root,
        entries=entries,
        digest=digest_of(entries),
        left_behind=tuple(_list_ignored(project.root)),
    )


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
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is not None:
        return sorted(set(_with_inner_repositories(root, listed)))
    paths: list[str] = []
    for folder, subfolders, files in os.walk(root):
        if {"manifest.json", "model.safetensors"} <= set(files):
            subfolders.clear()
            continue  # a checkpoint: only rank 0 needs it, which has it
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        paths += [os.path.relpath(os.path.join(folder, name), root) for name in [*files, *links]]
    return sorted(paths)


def _list_ignored(root: Path) -> list[str]:
    """Files, and folders as a whole, that git ignores; without caches, environments and compiled files."""
    listed = _git(root, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory") or b""
    paths = sorted(os.fsdecode(path) for path in listed.split(b"\0") if path)
    return [
        path
        for path in paths
        if not _SKIPPED_FOLDERS & set(path.rstrip("/").split("/"))
        and not path.rstrip("/").endswith((".pyc", ".egg-info", "_cache"))
    ]


def _with_inner_repositories(root: Path, listed: bytes) -> Iterator[str]:
    """Git names a submodule, or a repository inside another, as a folder: what is in it belongs to the project."""
    for path in filter(None, map(os.fsdecode, listed.split(b"\0"))):
        full = root / path
        if full.is_symlink() or not full.is_dir():
            yield path
        elif (full / ".git").exists():
            yield from (os.path.join(path, inner) for inner in _list_files(full))


def _entry(root: Path, path: str) -> Entry | None:
    """[path, mode, size, sha256, link]; None for what is no longer there, or is neither file nor link.

    Raises InputError for a file that can't be read.
    """
    full = os.path.join(root, path)
    if os.path.realpath(os.path.dirname(full)) != os.path.join(os.path.realpath(root), os.path.dirname(path)).rstrip(
        "/"
    ):
        return None  # git still lists it, but a link has taken its folder's place
    try:
        status = os.lstat(full)
        if stat.S_ISLNK(status.st_mode):
            link = os.readlink(full)
            inside = os.path.normpath(os.path.join(os.path.dirname(path), link))
            if not os.path.isabs(link) and not inside.startswith(".."):
                return (path, 0o777, 0, None, link)
            status = os.stat(full)  # a link that leaves the project: its content travels, if it is a file
            if stat.S_ISDIR(status.st_mode) and os.path.isabs(link):
                return (path, 0o777, 0, None, link)  # a data folder, which every host may have at the same place
        if not stat.S_ISREG(status.st_mode):
            return None
        return (path, stat.S_IMODE(status.st_mode), status.st_size, file_sha256(full), None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"{full} can't be copied to the other hosts: {error.strerror}",
            hint="set its rights, or add it to .gitignore",
        ) from error


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
        hint=f"let git ignore {largest[0][0]} (.gitignore, in a git repository) and put it on the hosts; or --no-ship",
    )


def pieces(cargo: Cargo, missing: list[str]) -> Iterator[tuple[protocol.FileData, bytes]]:
    """The content of the missing files as messages, in order. A file that has just gone is sent as empty.

    What can't be read is left out, and the hash of the copy tells: nothing is raised here.
    """
    for number, path in enumerate(missing):
        last_file = number == len(missing) - 1
        with _open_or_empty(cargo.root / path) as file:
            data = _read_or_end(file)
            while True:
                following = _read_or_end(file)
                last = not following
                message = protocol.FileData(
                    project=cargo.name, path=path, last_of_file=last, last_of_all=last and last_file
                )
                yield message, data
                if last:
                    break
                data = following


def _open_or_empty(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError:
        return io.BytesIO()


def _read_or_end(file: BinaryIO) -> bytes:
    try:
        return file.read(protocol.MAX_PAYLOAD_BYTES)
    except OSError:
        return b""


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
