"""The lock: exactly what is to be installed. Pure. Its hash names the environment, so it holds all that matters.

It is a requirements file, without any address: where to get packages from is each host's own configuration.
"""

from __future__ import annotations

import dataclasses
import hashlib

from paceline.envs.inventory import Installed, Inventory
from paceline.errors import InputError

_OWN = "paceline"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lock:
    """What the other hosts get."""

    text: str
    packages: dict[str, str]
    """Name and version of each."""
    num_bytes: int
    """Of all their files, roughly."""
    wheels: tuple[str, ...]
    """Paths of the wheel files from which some were installed; they stand in for an index."""
    left_out: tuple[str, ...]
    """What the other hosts do not get, with the reason of each."""
    is_packed: bool = False
    """A conda environment, which travels as a whole."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def name(self) -> str:
        """The environment's name: twelve digits of the hash."""
        return self.sha256[:12]


def make_lock(inventory: Inventory, *, offline: bool) -> Lock:
    """Raises InputError for what can't be had elsewhere in the same form."""
    chosen = [each for each in inventory.installed if each.has_record and each.name != _OWN]
    refuse(chosen, offline=offline)
    is_packed = inventory.has_conda_pack and offline
    lines = [f"# the environment of a host, for Python {inventory.python} on {inventory.machine}\n"]
    lines += [f"# conda {name}\n" for name in inventory.conda_only if is_packed]
    lines += [_line(each) for each in chosen]
    unrecorded = [each for each in inventory.installed if not each.has_record and each.name != _OWN]
    left_out = [f"{each.name} {each.version} has no RECORD of its files" for each in unrecorded]
    left_out += [f"{name} comes from conda alone" for name in inventory.conda_only]
    return Lock(
        text="".join(lines),
        packages={each.name: each.version for each in chosen},
        num_bytes=sum(each.num_bytes for each in chosen),
        wheels=tuple(each.source for each in chosen if each.origin == "wheel"),
        left_out=() if is_packed else tuple(left_out),
        is_packed=is_packed,
    )


def _line(each: Installed) -> str:
    pin = f"{each.name}=={each.version}"
    return f"{pin}  # {each.origin} {each.content}\n" if each.content else f"{pin}\n"


def refuse(chosen: list[Installed], *, offline: bool) -> None:
    """Raises InputError that names everything which no other host can get in this way."""
    editable = [each for each in chosen if each.origin == "editable"]
    if editable:
        raise InputError(
            f"installed as editable, so its files lie elsewhere: {_list(editable)}",
            hint=f"install it as it is, then sync again: pip install {editable[0].source or editable[0].name}",
        )
    elsewhere = [each for each in chosen if each.origin not in ("index", "wheel")]
    if elsewhere and not offline:
        raise InputError(
            f"no index has what was installed here: {_list(elsewhere)}",
            hint="--offline sends the installed files themselves",
        )


def _list(found: list[Installed]) -> str:
    return ", ".join(f"{each.name} {each.version} ({each.origin} {each.source})" for each in found)
