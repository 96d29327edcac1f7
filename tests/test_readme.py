"""The README's blocks do what they show; `tests/snippets.py` says how a block is written.

Blocks for the lab run in `tests/lab/test_readme_in_lab.py`, where the lab's fixture lives.
"""

from __future__ import annotations

import ast
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import paceline
import snippets

ROOT = pathlib.Path(__file__).parents[1]
BLOCKS = snippets.find_blocks((ROOT / "README.md").read_text())
COMMAND_LIMIT_S = 170


def blocks_of(*languages: str) -> list[object]:
    return [pytest.param(block, id=f"line{block.line}") for block in BLOCKS if block.language in languages]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy, so that nobody's own checkpoints are read or written; its .venv is the one here."""
    if any(block.text.find("$ scripts/") >= 0 and not block.not_run_because for block in BLOCKS):
        subprocess.run([ROOT / "scripts" / "install", "torch,dev"], check=True, timeout=150)
    copy = tmp_path_factory.mktemp("readme") / "paceline"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(ROOT / ".venv")
    return copy


@pytest.mark.launcher
@pytest.mark.timeout(180)
@pytest.mark.parametrize("block", blocks_of("console"))
def test_console(block: snippets.Block, checkout: pathlib.Path, tmp_path: pathlib.Path) -> None:
    if block.not_run_because:
        pytest.skip(f"README line {block.line}: {block.not_run_because}")
    if block.host:
        pytest.skip(f"README line {block.line}: runs in the lab tier")
    environ = {
        **os.environ,
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]),
        "COLUMNS": "100",
    }
    steps = snippets.split_steps(block.text)
    assert steps, f"README line {block.line}: no line begins with '$ '"
    for step in steps:
        result = subprocess.run(
            ["sh", "-c", step.command], cwd=checkout, env=environ, text=True, timeout=COMMAND_LIMIT_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        expected_code = block.exit_code if step is steps[-1] else 0
        assert result.returncode == expected_code, f"$ {step.command}\n{result.stdout}"
        mismatch = snippets.find_mismatch(step.expected, result.stdout)
        assert not mismatch, f"$ {step.command}\n{mismatch}\n{result.stdout}"


@pytest.mark.parametrize("block", blocks_of("python", "diff"))
def test_python(block: snippets.Block) -> None:
    public, members = set(paceline.__all__), read_members("train/run.py", "Run")
    assert not snippets.find_unknown_names(snippets.python_of(block), public=public, run_members=members)


def read_members(path: str, class_name: str) -> set[str]:
    """The public names in a class's body, read without importing PyTorch."""
    tree = ast.parse((ROOT / "src" / "paceline" / path).read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    names |= {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}
    return {name for name in names if not name.startswith("_")}
