"""Distributions that nobody has published."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.envs.inventory import Installed, Inventory


def installed(name: str, version: str = "1.0", **changes: object) -> Installed:
    values = {"origin": "index", "source": "", "has_record": True, "content": "", "num_bytes": 10}
    return Installed(name=name, version=version, **{**values, **changes})


def inventory(*found: Installed, **changes: object) -> Inventory:
    values = {
        "python": "3.11",
        "python_path": "/opt/env/bin/python",
        "machine": "x86_64",
        "libc": "glibc",
        "conda_only": [],
        "has_conda_pack": False,
    }
    return Inventory(installed=list(found), **{**values, **changes})


def make_venv(folder: Path) -> Path:
    """An empty environment; returns its site-packages."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def install(
    site: Path, name: str, version: str = "1.0", files: Mapping[str, str] | None = None, more: str = ""
) -> None:
    """As an installer would: files (paths below site-packages), metadata, and RECORD with `more` lines."""
    info = f"{name}-{version}.dist-info"
    written = {
        f"{name}/__init__.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/INSTALLER": "pip\n",
        **(files or {}),
    }
    record = ""
    for path, text in written.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    (site / info / "RECORD").write_text(f"{record}{more}{info}/RECORD,,\n")


def info_of(name: str, version: str = "1.0") -> str:
    return f"{name}-{version}.dist-info"
