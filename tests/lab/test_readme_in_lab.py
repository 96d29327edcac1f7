"""The README's blocks that need several hosts, on those of the lab."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import snippets
from paceline.lab import Lab

pytestmark = pytest.mark.lab

README = (snippets.ROOT / "README.md").read_text()
BLOCKS = [block for block in snippets.find_blocks(README) if block.host]
COMMAND_LIMIT_S = 110.0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("block", [pytest.param(block, id=f"line{block.line}") for block in BLOCKS])
def test_console(block: snippets.Block, lab: Lab) -> None:
    host = str(block.host)
    copy = lab.home(host) / "paceline"
    if not copy.exists():
        snippets.copy_repository(copy)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "COLUMNS": "100"}

    def shell(command: str) -> tuple[int, str]:
        # As in a terminal: both outputs in the order in which they come.
        argv = ["sh", "-c", f"exec 2>&1; {command}"]
        cwd = f"{lab.spec.home}/paceline"
        result = lab.run(host, argv, timeout_s=COMMAND_LIMIT_S, cwd=cwd, env=environ)
        return result.returncode, result.stdout

    snippets.check_block(block, shell)
