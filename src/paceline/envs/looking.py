"""What is where an environment is to be made: the errand that comes before anything is sent.

Standard library only: this module runs on every host.
"""

from __future__ import annotations

import glob
import json
import os
import platform
import shutil
from typing import Any

from paceline.launch.facts import state_folder
from paceline.records import Record

MARKER = "paceline-environment.json"
"""Lies in every environment that was made here, and says whether it is finished."""


class Look(Record):
    """What there is on one host."""

    folder: str
    """Where the environment is, or is to be."""
    state: str
    """`absent`, `finished`, `unfinished`, `other` (one of ours, but another one) or `foreign` (not ours)."""
    free_bytes: int
    """On the file system of that folder."""
    is_apart: bool
    """That is not the file system on which what is sent arrives."""
    libc: str
    arrived_bytes: int
    """What an earlier try has brought."""


def main(argument: dict[str, Any]) -> dict[str, Any]:
    """`argument`: {`sha256`: of the lock, `name`: the environment's, `to`: a folder or None}."""
    folder = find_folder(argument["name"], argument["to"])
    parent = folder
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    return Look(
        folder=folder,
        state=read_state(folder, argument["sha256"]),
        free_bytes=shutil.disk_usage(parent).free,
        is_apart=os.stat(parent).st_dev != os.stat(state_folder()).st_dev,
        libc=platform.libc_ver()[0],
        arrived_bytes=_measure(
            glob.glob(os.path.join(state_folder(), "projects", f"environment-{argument['name']}-*"))
        ),
    ).as_dict()


def _measure(folders: list[str]) -> int:
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for top in folders
        for folder, _, files in os.walk(top)
        for name in files
    )


def find_folder(name: str, to: str | None) -> str:
    """The environment's folder on this host."""
    if to is not None:
        return os.path.abspath(os.path.expanduser(to))
    return os.path.join(state_folder(), "environments", name)


def read_state(folder: str, sha256: str) -> str:
    """See Look."""
    if not os.path.lexists(folder):
        return "absent"
    try:
        with open(os.path.join(folder, MARKER), encoding="utf-8") as file:
            marker = json.load(file)
        # The interpreter is a link to the system's, which may be another version by now.
        if not marker["is_finished"] or not os.path.exists(os.path.join(folder, "bin", "python")):
            return "unfinished"
        return "finished" if marker["lock"] == sha256 else "other"
    except (OSError, ValueError, KeyError, TypeError):
        is_empty = os.path.isdir(folder) and not os.listdir(folder)
        return "absent" if is_empty else "foreign"
