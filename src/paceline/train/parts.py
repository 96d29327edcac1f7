"""What one rank alone knows at a checkpoint, in a file on its own disk.

Between two rounds hosts differ: in their weights, in the state of their optimizers, in what a codec still owes them.
Gathering that would push several models per host through the wire that the rounds spare. So each rank keeps its own

    folder/parts/<training>/<checkpoint>/rank-3.safetensors

and the checkpoint, which rank 0 writes when all parts are on disk, names them by their SHA-256. A part without its
checkpoint is nothing; a checkpoint without its parts still holds what all hosts share.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.errors import CheckpointError
from paceline.train import checkpoint, tree

_PARTS = "parts"
_STATE = "state"
"""The entry of a file's metadata that holds, as JSON, what is no tensor."""


def write(folder: Path, training: str, name: str, rank: int, value: Any) -> str:
    """Writes `value`, of what `tree.flatten` knows, whole or not at all; returns the SHA-256 of the file.

    Raises CheckpointError when the disk is full or refuses.
    """
    tensors: dict[str, Any] = {}
    state = json.dumps(tree.flatten(value, "part", tensors))
    path = _path(folder, training, name, rank)
    temporary = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(checkpoint.writable(tensors), temporary, metadata={_STATE: state})
            checkpoint.force_to_disk(temporary)
            sha256 = checkpoint.sha256_of(temporary)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        for above in list(path.parents)[:4]:  # up to `folder`
            checkpoint.force_to_disk(above)
    except (OSError, SafetensorError) as error:
        raise checkpoint.refused(folder, checkpoint.size_bytes(tensors), error) from error
    return sha256


def read(folder: Path, training: str, name: str, rank: int, sha256: str) -> Any:
    """What was written. Raises CheckpointError that says why it can't be had."""
    path = _path(folder, training, name, rank)
    try:
        if checkpoint.sha256_of(path) != sha256:
            raise CheckpointError(f"{path} has other content than was written")
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no dictionary
            return tree.rebuild(json.loads(file.metadata()[_STATE]), tensors)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None


def remove_others(folder: Path, training: str, names: list[str]) -> None:
    """Removes the parts of this training's checkpoints that are not in `names`."""
    with contextlib.suppress(OSError):  # nothing there, or not ours: they cost disk and nothing else
        for path in (folder / _PARTS / training).iterdir():
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)


def _path(folder: Path, training: str, name: str, rank: int) -> Path:
    return folder / _PARTS / training / name / f"rank-{rank}.safetensors"
