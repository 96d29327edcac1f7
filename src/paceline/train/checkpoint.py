"""Checkpoints on disk: written whole or not at all, and believed only when every byte is the one that was
written.

    folder/
      000007-step-400/         the seventh checkpoint written here; a higher number is newer, whatever the
      step
        model.safetensors      the plain module's state_dict
        state.safetensors      tensors of the optimizer and of `extra`
        state.json             everything else
        manifest.json          size and SHA-256 of the three above
      .writing-000008-4711/    a checkpoint that is being written, or what a killed writer left
      parts/                   what single ranks keep for themselves; see `parts.py`

This module knows files only; who writes and who is told is `run.py`'s business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from paceline.errors import CheckpointError
from paceline.units import format_bytes

FORMAT = 1
_MODEL, _TENSORS, _STATE, _MANIFEST = "model.safetensors", "state.safetensors", "state.json", "manifest.json"
_FILES = (_MODEL, _TENSORS, _STATE)
_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_WRITING, _REMOVING = ".writing-", ".removing-"
_DAMAGED = "damaged.txt"
"""Put into a checkpoint that was refused, so that it does not count as one of the `keep` to be kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a checkpoint holds."""

    model: dict[str, torch.Tensor]
    """The plain module's state_dict."""
    tensors: dict[str, torch.Tensor]
    """Tensors that `state` refers to."""
    state: dict[str, Any]
    """JSON values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is on disk."""

    path: Path
    num_bytes: int


def save(folder: Path, snapshot: Snapshot, *, step: int, keep: int) -> Saved:
    """Writes a new checkpoint into `folder`, then removes all but the newest `keep` of the same training.

    Raises CheckpointError when the disk is full or refuses, or when another process is writing there; the
    checkpoints that were there before are then untouched.
    """
    needed = size_bytes(snapshot.model) + size_bytes(snapshot.tensors)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _sole_writer(folder):
            _remove_leftovers(folder)
            final = folder / next_name(folder, step=step)
            temporary = folder / f"{_WRITING}{_number(final):06d}-{os.getpid()}"
            try:
                num_bytes = _write(temporary, snapshot)
                temporary.rename(final)
                force_to_disk(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            _remove_old(folder, newest=final, training=snapshot.state.get("training"), keep=keep)
    except (OSError, SafetensorError) as error:
        raise refused(folder, needed, error) from error
    return Saved(path=final, num_bytes=num_bytes)


def next_name(folder: Path, *, step: int) -> str:
    """What the next checkpoint written into `folder` is called."""
    number = max((_number(path) for path in newest_first(folder)), default=0) + 1
    return f"{number:06d}-step-{step}"


def load_newest(folder: Path, *, say: Callable[[str], None]) -> tuple[Path, Snapshot] | None:
    """The newest whole checkpoint; None when there has never been one here.

    Each damaged one that is passed over is told to `say` with its name and the reason. Raises CheckpointError
    when there are checkpoints and none is whole, or `folder` is no folder or can't be read.
    """
    try:
        paths = newest_first(folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} can't be read: {error.strerror}", hint="give the folder that was given to run.checkpoint"
        ) from None
    reasons: list[str] = []
    for path in paths:
        reason = damage(path)
        if reason is None:
            try:
                return path, _read(path)
            except (OSError, ValueError, SafetensorError) as error:
                reason = str(error)
        reasons.append(f"{path.name}: {reason}")
        with contextlib.suppress(OSError):
            (path / _DAMAGED).write_text(f"{reason}\n")
        say(f"paceline: checkpoint {path} is damaged ({reason}); trying the one before")
    if paths:
        raise CheckpointError(f"{folder} holds {len(paths)} checkpoints and none is whole: {'; '.join(reasons)}")
    return None


def newest_first(folder: Path) -> list[Path]:
    """Every checkpoint in `folder` that was ever completed, damaged or not; none when there is no such folder.
    Raises OSError when it can't be read."""
    try:
        paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return sorted(paths, key=_number, reverse=True)


def damage(path: Path) -> str | None:
    """What is wrong with the files of a checkpoint; None when every byte is as written."""
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        version, files = manifest["paceline_checkpoint"], manifest["files"]
        told = {name: (int(files[name]["num_bytes"]), str(files[name]["sha256"])) for name in _FILES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_MANIFEST} can't be read: {type(error).__name__} {error}"
    if version != FORMAT:
        return f"written in format {version}; this paceline reads {FORMAT}"
    return next(filter(None, (_file_damage(path / name, *facts) for name, facts in told.items())), None)


def _file_damage(path: Path, num_bytes: int, sha256: str) -> str | None:
    try:
        found_bytes = path.stat().st_size
        if found_bytes != num_bytes:
            return f"{path.name} has {found_bytes} bytes instead of {num_bytes}"
        if sha256_of(path) != sha256:
            return f"{path.name} has other content than was written"
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return None


def require_same_shapes(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], path: Path) -> None:
    """Raises CheckpointError that names the first tensors in which the checkpoint and the model differ."""

    def shape(tensors: dict[str, torch.Tensor], name: str) -> str:
        return str(list(tensors[name].shape)) if name in tensors else "missing"

    names = [*expected, *(name for name in found if name not in expected)]
    differing = [name for name in names if shape(expected, name) != shape(found, name)]
    if differing:
        told = [f"{name} is {shape(found, name)} there and {shape(expected, name)} here" for name in differing[:3]]
        more = f"; {len(differing) - 3} more" if len(differing) > 3 else ""
        raise CheckpointError(
            f"{path} belongs to another model: {'; '.join(told)}{more}",
            hint="resume with the model settings it was trained with, or choose another checkpoint folder",
        )


@contextlib.contextmanager
def _sole_writer(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; the kernel drops it when the process dies, however it dies.

    On a file system without locks there is none: it guards against a mistake, and a checkpoint is worth more.
    """
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another process is writing a checkpoint into {folder}", hint="give each run a folder of its own"
            ) from None
        except OSError:
            pass  # no locks here
        yield
    finally:
        os.close(descriptor)


def _write(temporary: Path, snapshot: Snapshot) -> int:
    temporary.mkdir()
    save_file(writable(snapshot.model), temporary / _MODEL)
    save_file(writable(snapshot.tensors), temporary / _TENSORS)
    (temporary / _STATE).write_text(json.dumps(snapshot.state))
    files = {
        name: {"num_bytes": (temporary / name).stat().st_size, "sha256": sha256_of(temporary / name)} for name in _FILES
    }
    (temporary / _MANIFEST).write_text(json.dumps({"paceline_checkpoint": FORMAT, "files": files}, indent=1))
    for name in (*_FILES, _MANIFEST):
        force_to_disk(temporary / name)
    force_to_disk(temporary)
    return sum((temporary / name).stat().st_size for name in (*_FILES, _MANIFEST))


def writable(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On the CPU, contiguous, and none sharing memory with another (tied weights do), as safetensors wants
    them."""
    seen: set[int] = set()
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        result[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    return result


def size_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _read(path: Path) -> Snapshot:
    return Snapshot(
        model=load_file(path / _MODEL),
        tensors=load_file(path / _TENSORS),
        state=json.loads((path / _STATE).read_bytes()),
    )


def _remove_leftovers(folder: Path) -> None:
    """What killed writers left; we hold the lock, so nobody is writing."""
    for path in [*folder.glob(f"{_WRITING}*"), *folder.glob(f"{_REMOVING}*")]:
        shutil.rmtree(path, ignore_errors=True)


def _training_of(path: Path) -> str | None:
    try:
        return json.loads((path / _STATE).read_bytes())["training"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _remove_old(folder: Path, *, newest: Path, training: str | None, keep: int) -> None:
    """Only once the new one is seen in its place, so that there is a whole one at every moment."""
    paths = newest_first(folder)
    if paths[0] != newest or not all((newest / name).is_file() for name in (*_FILES, _MANIFEST)):
        raise CheckpointError(f"{newest} was written and is not there; nothing was removed from {folder}")
    # Another training that writes here (a second start without --resume) must not cost anybody a night's work.
    ours = [path for path in paths if _training_of(path) == training]
    whole = [path for path in ours if not (path / _DAMAGED).exists()]
    for path in ours:
        if len(whole) > keep and _number(path) < _number(whole[keep - 1]):
            # Out of its name first: a half-removed checkpoint must not look like one.
            leaving = folder / f"{_REMOVING}{path.name}"
            path.rename(leaving)
            shutil.rmtree(leaving, ignore_errors=True)


def refused(folder: Path, needed_bytes: int, error: Exception) -> CheckpointError:
    free = ""
    with contextlib.suppress(OSError):
        free = f" and {format_bytes(shutil.disk_usage(folder).free)} are free"
    return CheckpointError(
        f"no checkpoint could be written into {folder}: {error}; it needs about {format_bytes(needed_bytes)}{free}",
        hint="make room there, or give run.checkpoint another folder; earlier checkpoints are untouched",
    )


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def force_to_disk(path: Path) -> None:
    """Asks the disk to keep a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
