"""The police catches each kind of leak, names it, and lets a clean test and a session fixture be."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

LEAKS = """
import os, socket, subprocess, sys, threading, time
import police, pytest

police.GRACE_S = 0.2
SLEEP = [sys.executable, "-c", "import time; time.sleep(30)"]
kept = []

@pytest.fixture(scope="session")
def pool():
    processes = [subprocess.Popen(SLEEP)]
    yield processes
    for process in processes:
        process.kill(), process.wait()

def test_leaks_child():
    kept.append(subprocess.Popen(SLEEP))

def test_leaks_orphan():
    child = f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", child])

def test_leaks_thread():
    threading.Thread(target=time.sleep, args=(5,), name="forgotten", daemon=True).start()

def test_leaks_descriptor():
    kept.append(os.pipe())

def test_leaks_variable():
    os.environ["FORGOTTEN"] = "1"

def test_leaks_removal():
    del os.environ["HOME"]

def test_leaks_file():
    open("forgotten.txt", "w").close()

def test_leaks_folder():
    os.chdir("/")

def test_clean(pool):
    assert "FORGOTTEN" not in os.environ and "HOME" in os.environ
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_clean_respawn(pool):
    with police.lasting():
        pool.append(subprocess.Popen(SLEEP))

def test_clean_again(pool):
    pass
"""

EXPECTED = {
    "child": "process",
    "orphan": "process",
    "thread": "thread: forgotten",
    "descriptor": "open descriptor",
    "variable": "environment variable: FORGOTTEN=1",
    "removal": "environment variable removed: HOME",
    "file": "forgotten.txt",
    "folder": "current folder: /",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("leaks")
    for name in ("conftest.py", "police.py", "rank_pool.py"):
        shutil.copy(pathlib.Path(__file__).parent / name, folder)
    (folder / "test_leaks.py").write_text(LEAKS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50).stdout


@pytest.mark.parametrize("kind", EXPECTED)
def test_each_leak_fails_the_test_that_made_it(report: str, kind: str) -> None:
    sections = [part for part in report.split("\n_____") if part.strip(" _").startswith("ERROR at teardown")]
    mine = [section for section in sections if f"test_leaks_{kind} " in section.splitlines()[0]]
    assert len(mine) == 1, report
    assert EXPECTED[kind] in mine[0]


def test_nothing_else_fails(report: str) -> None:
    assert report.count("ERROR at teardown") == len(EXPECTED), report
    assert f"11 passed, {len(EXPECTED)} errors" in report, report


def test_last_lines_name_the_tiers(report: str) -> None:
    lines = report[report.index("= tiers =") :].splitlines()
    assert any(line.startswith("pure") and "ran" in line and "11 passed" in line for line in lines), report
    assert any(line.startswith("lab") and "not run" in line for line in lines), report
