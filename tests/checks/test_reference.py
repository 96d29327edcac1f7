"""The page of all checks, and what is told of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from paceline.checks.findings import CHECKS
from paceline.checks.reference import describe, write_page

PAGE = Path(__file__).parents[2] / "docs" / "checks.md"


def test_the_page_is_up_to_date() -> None:
    """UPDATE_GOLDEN=1 pytest tests/checks/test_reference.py writes it anew."""
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(write_page())
    assert PAGE.read_text() == write_page()


def test_each_check_is_there_once() -> None:
    page = write_page()
    assert len(CHECKS) > 30
    assert [name for name in CHECKS if page.count(f"\n### {name}\n") != 1] == []


def test_one_check() -> None:
    told = describe("shared-memory")
    assert told is not None and told.startswith("shared-memory: Room in /dev/shm.\n\nWhat it looks at\n  The size of")
    assert "\nHow to mend it\n  `mount -o remount" in told
    assert describe("no-such-check") is None


def test_all_checks_are_there_whatever_was_imported_before() -> None:
    code = "from paceline.checks.reference import describe; print(bool(describe('disk') and describe('own-workers')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.stdout == "True\n", done.stderr
