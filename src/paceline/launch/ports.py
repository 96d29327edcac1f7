"""The port that rank 0 will listen on: found free, held until it is used, and its holder named where it is taken.

Standard library only: this module runs on every host.
"""

from __future__ import annotations

import os
import socket


class PortTakenError(Exception):
    """Somebody else has the port; the text says who, where that can be seen."""


def hold_port(port: int) -> socket.socket:
    """Bind a port (0: any free one) without listening. Raises PortTakenError.

    Nobody else gets it as a free port, while rank 0, which sets SO_REUSEADDR as this does, may listen on it.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(("", port))
    except (OSError, OverflowError) as error:
        held.close()
        raise PortTakenError(find_listener(port) or str(error)) from error
    return held


def find_listener(port: int) -> str:
    """Who listens on a port: `pid 123 (python train.py)`; empty where it can't be seen."""
    inodes = _listening_inodes(port)
    for name in os.listdir("/proc") if inodes else ():
        if not name.isdigit():
            continue
        try:
            descriptors = [os.readlink(f"/proc/{name}/fd/{number}") for number in os.listdir(f"/proc/{name}/fd")]
            if inodes.isdisjoint(descriptors):
                continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it has ended, or belongs to somebody else
        return f"pid {name} has it ({command[:80]})"
    return ""


def _listening_inodes(port: int) -> set[str]:
    """The sockets that listen on a port, as /proc/<pid>/fd names them."""
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        found |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    return found
