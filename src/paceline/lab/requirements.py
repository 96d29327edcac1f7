"""What a machine needs to hold a lab, and how to get what is missing."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys

from paceline.errors import InputError

_PACKAGES = {
    "iproute2": ("ip", "tc"),
    "openssh-server": ("sshd",),
    "openssh-client": ("ssh", "ssh-keygen"),
    "util-linux": ("nsenter", "unshare", "setpriv"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Missing:
    """One thing that stands in the way of a lab."""

    what: str
    """One line for a person."""
    hint: str
    """The command that mends it."""


def tool(name: str) -> str | None:
    """Where a program is, also in the folders that an ordinary user's PATH lacks."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin")


def missing() -> tuple[Missing, ...]:
    """All that this machine lacks for a lab, in the order in which to mend it."""
    if sys.platform != "linux":
        return (Missing(what=f"Linux (this is {sys.platform})", hint="use a Linux machine"),)
    found: list[Missing] = []
    for package, names in _PACKAGES.items():
        absent = [name for name in names if tool(name) is None]
        if absent:
            found.append(Missing(what=f"{', '.join(absent)} (package {package})", hint=f"apt-get install {package}"))
    if os.geteuid() != 0:
        found.append(
            Missing(
                what=f"root (this is uid {os.geteuid()})",
                hint='sudo "$(command -v paceline)" lab up',
            )
        )
    elif not found and not _may_unshare():
        hint = "outside a container, or in one started with --privileged"
        found.append(Missing(what="the right to make namespaces (CAP_SYS_ADMIN)", hint=hint))
    return tuple(found)


def require_all() -> None:
    """Raises InputError with one line for each thing that is missing."""
    absent = missing()
    if absent:
        lines = "".join(f"\n  {item.what}" for item in absent)
        raise InputError(
            f"this machine can't hold a lab yet; it needs{lines}", hint="\n  ".join(i.hint for i in absent)
        )


def _may_unshare() -> bool:
    command = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "true"]
    return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
