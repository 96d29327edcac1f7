"""What a test may not leave behind: processes, threads, descriptors, variables, files, a process group.

A snapshot is taken before and after each test (`tests/conftest.py`); what only the second one has fails the
test. Session fixtures that a test asks for by name are set up before the first snapshot: what they start is
no leak. What such a fixture starts later (a pool that respawns a dead rank) is declared where it is started:

    with police.lasting():
        self._start_rank(2)
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import psutil

# Every descendant inherits it: an orphan is found too, and not mistaken for one of another test session.
MARK = "PACELINE_TEST_SESSION"
GRACE_S = 2.0

# Made by tools, wherever a test runs.
HARMLESS_FILES = {"__pycache__", ".pytest_cache", ".hypothesis", ".ruff_cache", ".import_linter_cache"}
# Opened lazily, once, by the interpreter and by PyTorch; epoll and eventfd come with the loop that owns them.
HARMLESS_TARGETS = ("/dev/null", "/dev/urandom", "/dev/random", "/proc/", "/sys/")
# Python's own helper; it ends with the interpreter.
HARMLESS_COMMAND = "multiprocessing.resource_tracker"

Snapshot = dict[tuple[str, object], str]

_lasting: Snapshot = {}


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """What starts inside outlives the test on purpose."""
    before = take_snapshot()
    try:
        yield
    finally:
        after = take_snapshot()
        _lasting.update({key: after[key] for key in after.keys() - before.keys()})


def take_snapshot() -> Snapshot:
    """What is there now: (kind, identity) -> how to name it in a failure."""
    found: Snapshot = {("folder", os.getcwd()): f"current folder: {os.getcwd()}"}
    for name, value in os.environ.items():
        if name != "PYTEST_CURRENT_TEST":
            found["variable", (name, value)] = f"environment variable: {name}={value}"
    for thread in threading.enumerate():
        found["thread", thread] = f"thread: {thread.name}"
    for pid, command in _find_processes():
        found["process", pid] = f"process {pid}: {command}"
    for descriptor, target in _find_descriptors():
        found["descriptor", (descriptor, target)] = f"open descriptor {descriptor}: {target}"
    for name in set(os.listdir()) - HARMLESS_FILES:
        found["file", os.path.abspath(name)] = f"file: {os.path.abspath(name)}"
    distributed = sys.modules.get("torch.distributed")  # never imported for this
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        found["group", 0] = "torch.distributed's default process group"
    return found


def find_leaks(before: Snapshot) -> Snapshot:
    """What has come since `before` and stays, after a moment for what is just ending."""
    deadline_s = time.monotonic() + GRACE_S
    collected = False
    while True:
        now = take_snapshot()
        new = now.keys() - before.keys() - _lasting.keys()
        leaks = {key: now[key] for key in new if not _is_owned(key, before)}
        if not leaks or time.monotonic() > deadline_s:
            return leaks
        if not collected:
            gc.collect()  # a cycle may hold a socket that nobody uses any more
            collected = True
        time.sleep(0.02)


def describe(leaks: Snapshot) -> str:
    """One line for each leak, and where a leaked thread is."""
    lines: list[str] = []
    frames = sys._current_frames()
    for (_, identity), text in sorted(leaks.items(), key=lambda item: item[1]):
        lines.append(text)
        if isinstance(identity, threading.Thread) and identity.ident in frames:
            stack = "".join(traceback.format_stack(frames[identity.ident]))
            lines += [f"  {line}" for line in stack.splitlines()]
    return "\n".join(lines)


def clean_up(leaks: Snapshot, environ: dict[str, str]) -> None:
    """So that the next test doesn't pay: processes ended, environment and folder as before."""
    for kind, identity in leaks:
        if kind == "process" and isinstance(identity, int):
            with contextlib.suppress(psutil.Error):
                psutil.Process(identity).kill()
        if kind == "group":
            sys.modules["torch.distributed"].destroy_process_group()
    for name in os.environ.keys() - environ.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if name != "PYTEST_CURRENT_TEST"})


def _find_processes() -> Iterator[tuple[int, str]]:
    """Living children and marked descendants of this session."""
    mark = f"{MARK}={os.getpid()}\0".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            with open(f"/proc/{entry}/environ", "rb") as file:
                is_ours = int(parent) == os.getpid() or mark in file.read()
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if is_ours and state not in b"ZX" and HARMLESS_COMMAND not in command:
            yield int(entry), command[:200]


def _find_descriptors() -> Iterator[tuple[int, str]]:
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the one that listdir itself used
        if not target.startswith(HARMLESS_TARGETS):
            yield int(entry), target


def _is_owned(key: tuple[str, object], before: Snapshot) -> bool:
    """Whether a process descends from one that was there before the test, such as a rank of a pool."""
    kind, pid = key
    if kind != "process" or not isinstance(pid, int):
        return False
    try:
        parents = {parent.pid for parent in psutil.Process(pid).parents()}
    except psutil.Error:
        return True  # it has just ended
    return any(("process", parent) in before or ("process", parent) in _lasting for parent in parents)
