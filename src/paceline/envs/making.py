"""Makes the environment on a host: the errand that comes after everything has arrived.

Standard library only: this module runs on every host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Generator
from typing import Any

from paceline.checks.details import normalise
from paceline.envs.inventory import find_distributions
from paceline.envs.looking import MARKER, read_state
from paceline.envs.scripts import copy_script, write_entry_points
from paceline.launch.facts import state_folder

LOCK_FILE = "requirements.lock"
_VENV_LIMIT_S = 120
_PIP_LIMIT_S = 7200
_IMPORT_LIMIT_S = 300
_REPORT = """\
import importlib.metadata, json, os, sys
packages = [(found.metadata["Name"], found.version) for found in importlib.metadata.distributions()]
print(json.dumps({"python": "%d.%d" % sys.version_info[:2], "machine": os.uname().machine, "packages": packages}))
"""


class MakingError(Exception):
    """Why there is no environment, in one sentence."""


def main(argument: dict[str, Any]) -> str:
    """`argument`: {`folder`, `sha256`, `lock`: its text, `packages`, `python`: major and minor, `machine`,
    `is_offline`, `parcels`: [kind, folder] of what has arrived}.

    Says why there is no environment; nothing where there is one.
    """
    folder = argument["folder"]
    try:
        with _lock(folder):
            if read_state(folder, argument["sha256"]) != "finished":
                _begin(folder, argument["sha256"])
                _fill(folder, argument)
                _check(os.path.join(folder, "bin", "python"), argument)
                _mark(folder, argument["sha256"], is_finished=True)
    except (OSError, MakingError, tarfile.TarError) as error:
        return str(error)
    for _, parcel in argument["parcels"]:
        _remove(parcel)
    return ""


def _fill(folder: str, argument: dict[str, Any]) -> None:
    with open(os.path.join(folder, LOCK_FILE), "w", encoding="utf-8") as file:
        file.write(argument["lock"])
    if not argument["is_offline"]:
        _install(folder, [parcel for _, parcel in argument["parcels"]])
    elif [kind for kind, _ in argument["parcels"]] == ["conda"]:
        _unpack_conda(folder, argument["parcels"][0][1])
    else:
        _make_venv(folder, with_pip=False)
        unpack(folder, argument["parcels"])


def _make_venv(folder: str, *, with_pip: bool) -> None:
    # This interpreter may be that of the environment which has just made way: its links lead to one that stays.
    python = os.path.realpath(sys.executable)
    _run([python, "-m", "venv", *([] if with_pip else ["--without-pip"]), folder], _VENV_LIMIT_S, "make a venv")


def _begin(folder: str, sha256: str) -> None:
    """An empty folder that is known as ours. Raises MakingError for somebody else's."""
    state = read_state(folder, sha256)
    if state == "foreign":
        raise MakingError(f"{folder} is there, and was not made by paceline")
    if state != "absent":
        shutil.rmtree(folder)
    os.makedirs(folder, exist_ok=True)
    _mark(folder, sha256, is_finished=False)


def _mark(folder: str, sha256: str, *, is_finished: bool) -> None:
    part = os.path.join(folder, MARKER + ".part")
    with open(part, "w", encoding="utf-8") as file:
        json.dump({"lock": sha256, "is_finished": is_finished}, file)
    os.replace(part, os.path.join(folder, MARKER))


@contextlib.contextmanager
def _lock(folder: str) -> Generator[None]:
    """One at a time makes an environment. The lock lies in our own folder: beside `folder` may be somebody's."""
    base = os.path.join(state_folder(), "environments")
    os.makedirs(base, mode=0o700, exist_ok=True)
    name = hashlib.sha256(folder.encode()).hexdigest()[:12]
    with open(os.path.join(base, f".{name}.lock"), "w", encoding="utf-8") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def unpack(folder: str, parcels: list[list[str]]) -> None:
    """Puts what has arrived in place: as further names of the same files where that can be, else as copies."""
    python = os.path.join(folder, "bin", "python")
    bin_folder = os.path.join(folder, "bin")
    site = os.path.join(folder, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    for kind, parcel in parcels:
        base = site if kind == "site" else folder
        for source_folder, _, files in os.walk(parcel):
            target_folder = os.path.normpath(os.path.join(base, os.path.relpath(source_folder, parcel)))
            os.makedirs(target_folder, exist_ok=True)
            for name in files:
                source, target = os.path.join(source_folder, name), os.path.join(target_folder, name)
                if target_folder == bin_folder:
                    copy_script(source, target, python)
                else:
                    _link(source, target)
    write_entry_points(list(find_distributions([site])), bin_folder, python)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        return  # what the venv itself has made stays
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copy(source, target)


def _install(folder: str, parcels: list[str]) -> None:
    """From the host's own index, with its own configuration. `parcels`: folders of wheels, which go before the index.

    Raises MakingError.
    """
    install = _prepare_installer(folder)
    wheels = [os.path.join(parcel, name) for parcel in parcels for name in os.listdir(parcel)]
    if wheels:
        _run([*install, "--no-deps", *wheels], _PIP_LIMIT_S, "install the wheels")
    # All that is needed is in the lock: what it leaves out was left out on purpose.
    _run([*install, "--no-deps", "-r", os.path.join(folder, LOCK_FILE)], _PIP_LIMIT_S, "install from the index")


def _prepare_installer(folder: str) -> list[str]:
    """Makes a venv; the command that installs into it: uv where it is there, else pip, in it or from outside."""
    uv = shutil.which("uv")
    has_pip = uv is None and importlib.util.find_spec("ensurepip") is not None  # Debian keeps that back
    _make_venv(folder, with_pip=has_pip)
    python = os.path.join(folder, "bin", "python")
    if uv is not None:
        return [uv, "pip", "install", "--python", python]
    if has_pip:
        return [python, "-m", "pip", "install", "--no-input"]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--python", python, "install", "--no-input"]
    raise MakingError("there is neither uv nor pip to install with (on Debian: apt install python3-venv)")


def _unpack_conda(folder: str, parcel: str) -> None:
    """An archive of conda-pack's, and the program in it that puts the new path into its files."""
    [archive] = os.listdir(parcel)
    with tarfile.open(os.path.join(parcel, archive)) as packed:
        extract(packed, folder)
    bin_folder = os.path.join(folder, "bin")
    command = [os.path.join(bin_folder, "python"), os.path.join(bin_folder, "conda-unpack")]
    _run(command, _VENV_LIMIT_S, "finish what conda-pack began")


def extract(packed: tarfile.TarFile, folder: str) -> None:
    """All of an archive that comes from another host. Raises MakingError or tarfile.TarError for a member that would
    lie, or be a further name of a file, outside the folder."""
    members = _watch_members(packed, os.path.realpath(folder))
    if hasattr(tarfile, "tar_filter"):
        packed.extractall(folder, members, filter="tar")
    else:  # a Python from before May 2023
        packed.extractall(folder, members)


def _watch_members(packed: tarfile.TarFile, folder: str) -> Generator[tarfile.TarInfo]:
    """Each is looked at when all before it are in place: one of them may be a link that leads out of the folder."""
    for member in packed:
        for name in (member.name, *([member.linkname] if member.islnk() else [])):
            if os.path.commonpath([folder, os.path.realpath(os.path.join(folder, name))]) != folder:
                raise MakingError(f"the archive has a file that leaves the environment: {name}")
        member.mode &= 0o755  # nobody else's rights, and nobody's but the user's to write
        yield member


def _check(python: str, argument: dict[str, Any]) -> None:
    """Raises MakingError where the new interpreter can't import torch, or has other packages than it should."""
    if "torch" in argument["packages"]:
        _run([python, "-c", "import torch"], _IMPORT_LIMIT_S, "import torch in it")
    report = json.loads(_run([python, "-c", _REPORT], _IMPORT_LIMIT_S, "list its packages").splitlines()[-1])
    differs = compare(report, argument)
    if differs:
        raise MakingError(f"what was made differs: {differs}")


def compare(report: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What the new environment has otherwise than `wanted`: {`python`, `machine`, `packages`}; empty for nothing."""
    if (report["python"], report["machine"]) != (wanted["python"], wanted["machine"]):
        return f"it is Python {report['python']} on {report['machine']}"
    found: dict[str, str] = {}
    for name, version in report["packages"]:
        found.setdefault(normalise(name or ""), version)
    wrong = [
        f"{name} {found.get(name, 'missing')} instead of {version}"
        for name, version in wanted["packages"].items()
        if found.get(name) != version
    ]
    return ", ".join(wrong[:3]) + (f", and {len(wrong) - 3} more" if len(wrong) > 3 else "")


def _run(command: list[str], limit_s: float, doing: str) -> str:
    """What it printed. Raises MakingError with its last words."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env=env,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise MakingError(f"could not {doing} within {limit_s:.0f} s") from None
    if done.returncode != 0:
        raise MakingError(f"could not {doing}: {last_words(done.stderr or done.stdout)}")
    return done.stdout


def last_words(text: str) -> str:
    """The line of an error that says most, without users and passwords of addresses."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.upper().startswith("ERROR")]
    return re.sub(r"//[^/\s]*@", "//", (errors or lines or ["no word"])[-1])


def _remove(parcel: str) -> None:
    """What has arrived has done its work."""
    shutil.rmtree(parcel, ignore_errors=True)
    for end in (".json", ".lock"):
        with contextlib.suppress(OSError):
            os.unlink(parcel + end)
