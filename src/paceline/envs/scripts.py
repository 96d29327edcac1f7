"""The commands of an environment: written anew, as they name the interpreter.

Standard library only: this module runs on every host.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil

from paceline.envs.listing import SCRIPT_GROUPS

_LONGEST_FIRST_LINE = 127
"""The kernel's limit in older versions."""


def first_lines(python: str) -> str:
    """What makes the kernel start a script with this interpreter, however long its path is."""
    direct = f"#!{python}\n"
    if len(direct) <= _LONGEST_FIRST_LINE and " " not in python:
        return direct
    return f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"


def write_entry_points(distributions: list[importlib.metadata.Distribution], bin_folder: str, python: str) -> None:
    """One script for each command that a distribution declares."""
    for distribution in distributions:
        for point in distribution.entry_points:
            module, _, attribute = point.value.partition("[")[0].strip().partition(":")
            if point.group in SCRIPT_GROUPS and attribute and os.sep not in point.name:
                first = attribute.partition(".")[0]
                lines = f"import sys\nfrom {module} import {first}\n\nif __name__ == '__main__':\n"
                _write(
                    os.path.join(bin_folder, point.name), f"{first_lines(python)}{lines}    sys.exit({attribute}())\n"
                )


def copy_script(source: str, target: str, python: str) -> None:
    """A file of `bin`: one that names a Python in its first line gets the new one; another is copied."""
    with open(source, "rb") as file:
        first = file.readline(4096)
        if first.startswith(b"#!") and b"python" in first:
            rest = file.read()
            with open(target, "wb") as made:
                made.write(first_lines(python).encode() + rest)
            os.chmod(target, 0o755)
            return
    shutil.copy(source, target)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, 0o755)
