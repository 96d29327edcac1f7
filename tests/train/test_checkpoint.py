"""A checkpoint is whole or not believed, whatever happens to its bytes, the disk or the writer."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paceline import CheckpointError
from paceline.train import tree
from paceline.train.checkpoint import (
    Snapshot,
    damage,
    load_newest,
    newest_first,
    require_same_shapes,
    save,
)

FILES = ["model.safetensors", "state.safetensors", "state.json", "manifest.json"]


def snapshot(value: float = 1.0) -> Snapshot:
    weight = torch.full((8, 8), value)
    model = {
        "weight": weight,
        "tied": weight,
        "across": torch.arange(6.0).reshape(2, 3).t(),
        "half": torch.full((3,), value, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "none": torch.empty(0),
    }
    return Snapshot(model=model, tensors={"m": torch.full((8,), -value)}, state={"step": int(value)})


def fail(line: str) -> None:
    raise AssertionError(line)


def flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size * 6 // 10)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Holds checkpoints of the steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path / "run", snapshot(step), step=step, keep=2)
    return tmp_path / "run"


def test_what_is_loaded_is_what_was_saved(folder: pathlib.Path) -> None:
    loaded = load_newest(folder, say=fail)
    assert loaded is not None
    path, found = loaded
    assert path.name == "000002-step-2" and found.state == {"step": 2}
    expected = snapshot(2)
    for name, tensor in {**expected.model, **expected.tensors}.items():
        again = {**found.model, **found.tensors}[name]
        assert again.dtype == tensor.dtype and torch.equal(again, tensor)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [flip, truncate, pathlib.Path.unlink])
def test_a_damaged_file_is_named_and_the_one_before_is_taken(
    harm: Callable[[pathlib.Path], None], name: str, folder: pathlib.Path
) -> None:
    harm(folder / "000002-step-2" / name)
    said: list[str] = []
    loaded = load_newest(folder, say=said.append)
    assert loaded is not None and loaded[1].state == {"step": 1}
    assert len(said) == 1 and "000002-step-2 is damaged" in said[0]
    # A bit of the manifest may be one of another file's size or hash.
    assert name in said[0] or (harm, name) == (flip, "manifest.json")


def test_every_single_byte_counts(folder: pathlib.Path) -> None:
    """Each bit of the state file is flipped in turn; the manifest's may be one that means nothing."""
    path = folder / "000002-step-2" / "state.json"
    whole = path.read_bytes()
    for position, bit in itertools.product(range(len(whole)), range(8)):
        content = bytearray(whole)
        content[position] ^= 1 << bit
        path.write_bytes(content)
        assert damage(path.parent) == "state.json has other content than was written"
    path.write_bytes(whole)
    assert damage(path.parent) is None


def test_none_whole_is_an_error_and_none_at_all_is_not(folder: pathlib.Path) -> None:
    for path in newest_first(folder):
        flip(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"2 checkpoints and none is whole: 000002-step-2: model"):
        load_newest(folder, say=lambda line: None)
    assert load_newest(folder / "elsewhere", say=fail) is None


def test_a_checkpoint_of_another_format_is_refused(folder: pathlib.Path) -> None:
    manifest = folder / "000002-step-2" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "paceline_checkpoint": 2}))
    assert damage(manifest.parent) == "written in format 2; this paceline reads 1"


def test_the_newest_are_kept_and_a_new_run_counts_as_newer(folder: pathlib.Path) -> None:
    saved = save(folder, snapshot(1), step=1, keep=2)
    assert [path.name for path in newest_first(folder)] == ["000003-step-1", "000002-step-2"]
    assert saved.path.name == "000003-step-1"
    assert saved.num_bytes == sum((saved.path / name).stat().st_size for name in FILES)


def test_what_another_training_wrote_stays(folder: pathlib.Path) -> None:
    for step in (10, 20, 30):
        fresh = snapshot(step)
        fresh.state["training"] = "another"
        save(folder, fresh, step=step, keep=2)
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert names == ["000001-step-1", "000002-step-2", "000004-step-20", "000005-step-30"]


def test_a_damaged_one_does_not_count_as_kept(folder: pathlib.Path) -> None:
    flip(folder / "000002-step-2" / "model.safetensors")
    load_newest(folder, say=lambda line: None)
    save(folder, snapshot(3), step=3, keep=2)
    assert {path.name for path in newest_first(folder)} >= {"000003-step-3", "000001-step-1"}
    save(folder, snapshot(4), step=4, keep=2)
    assert [path.name for path in newest_first(folder)] == ["000004-step-4", "000003-step-3"]


def test_what_a_killed_writer_left_goes_at_the_next_write(folder: pathlib.Path) -> None:
    (folder / ".writing-000003-1").mkdir()
    (folder / ".writing-000003-1" / "model.safetensors").write_bytes(b"half")
    (folder / ".removing-000001-step-1").mkdir()
    save(folder, snapshot(3), step=3, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "000002-step-2", "000003-step-3"]


def test_a_second_writer_is_refused(folder: pathlib.Path) -> None:
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is writing a checkpoint into"):
            save(folder, snapshot(3), step=3, keep=2)
    assert len(newest_first(folder)) == 2


def test_a_file_system_without_locks_costs_no_checkpoint(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)  # no such file system can be had here
    open_before = len(os.listdir("/proc/self/fd"))
    save(folder, snapshot(3), step=3, keep=3)
    assert len(newest_first(folder)) == 3
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_another_model_is_refused_by_the_names_that_differ() -> None:
    def of(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
        return {name: torch.empty(shape) for name, shape in shapes.items()}

    found = of(a=(2, 3), b=(4,), d=())
    require_same_shapes(of(a=(2, 3), b=(4,), d=()), found, pathlib.Path("x"))
    with pytest.raises(CheckpointError) as caught:
        require_same_shapes(of(a=(2, 4), b=(4,), c=(1,)), found, pathlib.Path("runs/x"))
    assert caught.value.message == (
        "runs/x belongs to another model: a is [2, 3] there and [2, 4] here; "
        "c is missing there and [1] here; d is [] there and missing here"
    )


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    if os.getuid() != 0:
        pytest.skip("needs root to mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=False).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_one_clear_error_and_leaves_what_was_there(small_disk: pathlib.Path) -> None:
    folder = small_disk / "run"
    save(folder, snapshot(1), step=1, keep=2)
    before = sorted(path.name for path in folder.iterdir())
    large = Snapshot(model={"w": torch.zeros(10**6)}, tensors={}, state={"step": 2})
    with pytest.raises(CheckpointError, match=r"into .*/disk/run: .*needs about 4.0 MB and .* are free"):
        save(folder, large, step=2, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == before
    loaded = load_newest(folder, say=fail)
    assert loaded is not None and loaded[1].state == {"step": 1}


def test_a_folder_that_is_a_file_is_one_clear_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match="no checkpoint could be written into"):
        save(tmp_path / "run", snapshot(), step=1, keep=2)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": 1, 2: (True, 3.5, ["x", None]), (1, 2): {}},
        [torch.arange(3), {"deep": (torch.tensor(1.0),)}],
        {"$tensor": "not one"},
        float("inf"),
    ],
)
def test_a_tree_comes_back_as_it_went(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(tree.flatten(value, "extra", tensors))
    assert repr(tree.rebuild(json.loads(text), tensors)) == repr(value)


def test_a_tree_refuses_what_it_can_not_keep_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"extra\.names\.1 is a set and can't be kept"):
        tree.flatten({"names": [1, {2}]}, "extra", {})


def ring() -> list[Any]:
    inner: list[Any] = []
    inner.append({"again": inner})
    return inner


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2, dtype=torch.complex64), r"extra\.a\.0 is a complex64 tensor and can't be kept"),
        (torch.eye(2).to_sparse(), r"extra\.a\.0 is a sparse or nested tensor"),
        (torch.ones(2, device="meta"), r"extra\.a\.0 is a tensor without content"),
        (1j, r"extra\.a\.0 is a complex and"),
        (ring(), r"extra\.a\.0\.0\.again holds itself and"),
        (deep(), r"extra\.a\.0\.0.* is more than 100 containers deep and"),
        ({(1, torch.ones(1)): 2}, r"extra\.a\.0 has a key that is a Tensor"),
        ({frozenset(): 2}, r"extra\.a\.0 has a key that is a frozenset"),
        ({"\x1b[2J": {1}}, r"extra\.a\.0\.\\x1b\[2J is a set"),
    ],
)
def test_what_can_not_be_kept_is_named_by_its_place(value: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{text}"):
        tree.flatten({"a": [value]}, "extra", {})


def test_one_list_in_two_places_is_no_ring() -> None:
    shared = [1]
    assert tree.rebuild(tree.flatten([shared, shared], "extra", {}), {}) == [[1], [1]]


def test_a_file_where_checkpoints_should_be_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run").write_text("")
    for path in (tmp_path / "run", tmp_path / "run" / "inside"):
        with pytest.raises(CheckpointError, match="can't be read: Not a directory"):
            load_newest(path, say=fail)


@pytest.mark.ranks
@pytest.mark.timeout(130)
def test_killed_at_a_hundred_moments_of_writing(tmp_path: pathlib.Path) -> None:
    """In a process of its own, because it forks one that has loaded PyTorch. 11 s on a quiet machine."""
    script = pathlib.Path(__file__).with_name("kill_writers.py")
    command = [sys.executable, str(script), str(tmp_path), "100"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["kills"] == 100
    # Enough of them must have hit a checkpoint that was half written for the test to mean anything.
    assert told["left_half_written"] >= 20, told
    shutil.rmtree(tmp_path, ignore_errors=True)
