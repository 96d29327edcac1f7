"""Which packages a script can't start without."""

from __future__ import annotations

from pathlib import Path

from paceline.checks.imports import find_required
from paceline.checks.reading import Reader


def required(folder: Path, **files: str) -> tuple[str, ...]:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    reader = Reader(folder / "train.py", folder)
    reader.read()
    return find_required(reader.sources, reader.holds)


def test_packages_but_not_pythons_own_nor_what_paceline_brings(tmp_path: Path) -> None:
    text = "import os, torch, numpy as np, PIL.Image\nfrom einops import rearrange\nimport paceline, safetensors\n"
    assert required(tmp_path, train=text) == ("PIL", "einops", "numpy")


def test_what_may_never_be_imported(tmp_path: Path) -> None:
    text = """
try:
    import wandb
except ImportError:
    wandb = None
if TYPE_CHECKING:
    import pandas
def plot():
    import matplotlib
if __name__ == "__main__":
    import tqdm
"""
    assert required(tmp_path, train=text) == ("tqdm",)


def test_the_projects_own_modules_are_followed(tmp_path: Path) -> None:
    found = required(
        tmp_path,
        train="import model\nfrom data import loader\nfrom data.loader import *\nimport utils.text as t\n",
        model="import timm",
        data__loader="from . import cache\nimport cv2",
        data__cache="import lmdb",
        utils__text="import regex",
        unused="import jax",
    )
    assert found == ("cv2", "lmdb", "regex", "timm")


def test_a_script_in_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("import helper, shared\n")
    (tmp_path / "scripts" / "helper.py").write_text("import yaml\n")
    (tmp_path / "shared.py").write_text("import scipy\n")
    reader = Reader(tmp_path / "scripts" / "train.py", tmp_path)
    reader.read()
    assert find_required(reader.sources, reader.holds) == ("scipy", "yaml")


def test_a_folder_of_data_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "words.txt").write_text("a b c")
    assert required(tmp_path, train="import datasets\n") == ("datasets",)
    assert required(tmp_path, train="import datasets.own\n", datasets__own="") == ()
