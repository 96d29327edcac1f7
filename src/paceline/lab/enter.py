"""How a command comes to run on a host: its environment and its command line. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.lab.requirements import tool

_OF_THE_CALLER = {"TMPDIR", "TMP", "TEMP", "PWD", "OLDPWD", "HOSTNAME", "DISPLAY", "DBUS_SESSION_BUS_ADDRESS"}
_OF_THE_CALLER_PREFIXES = ("XDG_", "SSH_")

_CHANGE_FOLDER = 'cd -- "$0" 2>/dev/null || cd; exec "$@"'


def host_environment(environ: Mapping[str, str], *, home: str) -> dict[str, str]:
    """The caller's environment, PATH and all, but for what names places or sessions of its own machine."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _OF_THE_CALLER and not name.startswith(_OF_THE_CALLER_PREFIXES)
    }
    return {**kept, "HOME": home, "USER": "root", "LOGNAME": "root"}


def wrap_command(argv: Sequence[str], *, pid: int, cwd: str) -> list[str]:
    """Enters the namespaces of the host's process 1, but for that of processes, which only a fork can enter.

    Each link of the chain replaces itself by the next, so that the process number is the command's own.
    """
    enter = [tool("nsenter") or "nsenter", f"--target={pid}", "--mount", "--net", "--uts", "--ipc", "--"]
    return [*enter, "/bin/sh", "-c", _CHANGE_FOLDER, cwd, *argv]
