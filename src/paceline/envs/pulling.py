"""Writes files to stdout, one after the other: how what is installed on another host
comes to the driver. Nothing stands between them, as envs/listing.py has said how long each is.

Standard library only: this module runs on every host.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from paceline.envs.listing import find_files, find_packed


def main(argument: dict[str, Any]) -> None:
    """`argument`: that of envs/listing.py, and {`start`: how many of its files the driver has already}."""
    found = find_packed() if argument["is_packed"] else find_files(argument["names"])
    for file in found.files[argument["start"] :]:
        with open(os.path.join(found.roots[file.root][1], file.path), "rb") as opened:
            shutil.copyfileobj(opened, sys.stdout.buffer, 1 << 20)
    sys.stdout.buffer.flush()
