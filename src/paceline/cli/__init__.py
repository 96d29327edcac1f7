"""The command line: parse, call, render. No torch, no work at import."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys

import click

from paceline import __version__
from paceline.errors import PacelineError

_COMMANDS = {"run": "run", "check": "check", "explain": "explain", "env": "app", "lab": "app"}
"""By name: what the command is called in the module of that name."""


class _Commands(click.Group):
    """Each is imported when it is asked for: a run would wait for the doctor's modules, and use none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return getattr(importlib.import_module(f"paceline.cli.{cmd_name}"), _COMMANDS[cmd_name])


@click.group(cls=_Commands, no_args_is_help=True)
@click.version_option(__version__, message="paceline %(version)s")
def app() -> None:
    """Train PyTorch models on the machines and the network you already have."""


def main() -> None:
    """The entry point of the `paceline` command: an error of ours is one message, without a traceback."""
    _open_standard_streams()
    try:
        app()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # A path that can't be looked at, a folder that is gone, a full disk under our output: the user's world.
        where = f": {error.filename}" if error.filename else ""
        print(f"paceline: {error.strerror or error}{where}", file=sys.stderr)
        if error.errno == errno.ENOENT and not where:
            print("  the folder that you are in may be gone: cd somewhere else", file=sys.stderr)
        sys.exit(2)
    finally:
        _flush()


def _open_standard_streams() -> None:
    """`paceline run ... >&-` closes a descriptor, whose number the next pipe would get: it leads nowhere instead."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale without our signs is no reason to stop
            os.set_blocking(stream.fileno(), True)  # whoever shares it may have made it otherwise


def _flush() -> None:
    """Whoever read our output may have gone (`paceline run ... | head`): that is no error, so say nothing of it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
