"""The README's blocks do what they show; `tests/snippets.py` says how a block is written.

Blocks for the lab run in `tests/lab/test_readme_in_lab.py`, where the lab's fixture lives.
"""

from __future__ import annotations

import ast
import os
import pathlib
import subprocess
import sys

import pytest
from _pytest.mark import ParameterSet

import paceline
import snippets

BLOCKS = snippets.find_blocks((snippets.ROOT / "README.md").read_text())
COMMAND_LIMIT_S = 170


def blocks_of(*languages: str) -> list[ParameterSet]:
    return [pytest.param(block, id=f"line{block.line}") for block in BLOCKS if block.language in languages]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy of the repository; its .venv is the one here."""
    if any("$ scripts/" in block.text and not block.not_run_because for block in BLOCKS):
        # The scripts must find .venv up to date, or they would bind it to the copy.
        subprocess.run([snippets.ROOT / "scripts" / "install", "torch,dev"], check=True, timeout=150)
    copy = tmp_path_factory.mktemp("readme") / "paceline"
    snippets.copy_repository(copy)
    (copy / ".venv").symlink_to(snippets.ROOT / ".venv")
    return copy


@pytest.mark.launcher
@pytest.mark.timeout(180)
@pytest.mark.parametrize("block", [param for param in blocks_of("console") if not param.values[0].host])
def test_console(block: snippets.Block, checkout: pathlib.Path, tmp_path: pathlib.Path) -> None:
    if block.not_run_because:
        pytest.skip(f"README line {block.line}: {block.not_run_because}")
    environ = {
        **os.environ,
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]),
        "COLUMNS": "100",
    }

    def shell(command: str) -> tuple[int, str]:
        result = subprocess.run(
            ["sh", "-c", command], cwd=checkout, env=environ, text=True, timeout=COMMAND_LIMIT_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return result.returncode, result.stdout

    snippets.check_block(block, shell)


@pytest.mark.parametrize("block", blocks_of("python", "diff"))
def test_python(block: snippets.Block) -> None:
    public, members = set(paceline.__all__), read_members("train/run.py", "Run")
    assert not snippets.find_unknown_names(snippets.python_of(block), public=public, run_members=members)


def read_members(path: str, class_name: str) -> set[str]:
    """The public names in a class's body, read without importing PyTorch."""
    tree = ast.parse((snippets.ROOT / "src" / "paceline" / path).read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    names |= {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}
    return {name for name in names if not name.startswith("_")}
