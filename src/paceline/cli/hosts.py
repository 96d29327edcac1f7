"""Which hosts a command is about: -H, a hostfile, or this machine."""

from __future__ import annotations

from pathlib import Path

from paceline.cluster.hostfile import read_hostfile
from paceline.cluster.spec import Host, parse_hosts
from paceline.errors import InputError


def choose_hosts(hosts: str | None, hostfile: Path | None) -> tuple[tuple[Host, ...], str]:
    """The hosts, and where they were named. Raises InputError."""
    if hosts is not None and hostfile is not None:
        raise InputError("-H and --hostfile were both given", hint="name the hosts in one place")
    if hosts is not None:
        return parse_hosts(hosts), "from -H"
    if hostfile is not None:
        return read_hostfile(hostfile), f"from {hostfile}"
    return parse_hosts("localhost", origin="this machine"), "this machine, as neither -H nor --hostfile was given"
