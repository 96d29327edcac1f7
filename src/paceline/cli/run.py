"""`paceline run`: start a training script on every machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli import render
from paceline.cluster.hostfile import read_hostfile
from paceline.cluster.spec import Host, parse_hosts
from paceline.errors import InputError
from paceline.events import Event
from paceline.launch.logs import Screen
from paceline.launch.options import RunOptions
from paceline.launch.prepare import Prepared
from paceline.launch.run import dry_run as plan_run
from paceline.launch.run import run as start_run
from paceline.network.candidates import parse_nic
from paceline.watch.fold import RunView, fold


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments; or -m MODULE, or -- COMMAND."),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", "-H", metavar="HOST[:SLOTS],...", help="Machines, and ranks on each."),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The same, one host a line: alice slots=4.")
    ] = None,
    module: Annotated[
        str | None, typer.Option("--module", "-m", metavar="MODULE", help="Run a module, as python -m does.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="The interpreter on every host. [this one's path]")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="Give the ranks a variable; may be repeated."),
    ] = None,
    nic: Annotated[
        str | None,
        typer.Option(metavar="NAME|NETWORK", help="Use this interface or network. [found by trying]"),
    ] = None,
    ship: Annotated[
        bool, typer.Option("--ship/--no-ship", help="Copy the project to hosts that don't share it.")
    ] = True,
    restarts: Annotated[
        int, typer.Option(metavar="N", min=0, help="Start all ranks again after a failure, up to N times.")
    ] = 0,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Between asking ranks to end and forcing them.")
    ] = 5.0,
    allow_mismatch: Annotated[bool, typer.Option("--allow-mismatch", help="Start although the hosts differ.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run where, and why; start nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="With --dry-run: as JSON.")] = False,
) -> None:
    """Start a training script on every machine: anything that runs under torchrun, unchanged."""
    chosen, hosts_reason = _choose_hosts(hosts, hostfile)
    kind, target, arguments = _what_to_run(command or [], module)
    options = RunOptions(
        hosts=chosen,
        hosts_reason=hosts_reason,
        kind=kind,
        target=target,
        arguments=arguments,
        cwd=Path.cwd(),
        python=python,
        env=_parse_env(env or []),
        nic=parse_nic(nic) if nic is not None else None,
        ship=ship,
        allow_mismatch=allow_mismatch,
        restarts=restarts,
        grace_s=grace,
    )
    _check_script(options)
    if json and not dry_run:
        raise InputError("--json only goes with --dry-run")
    if dry_run:
        print(render.plan_json(plan_run(options)) if json else render.plan_text(plan_run(options)))
        return
    sys.exit(_run(options))


def _run(options: RunOptions) -> int:
    view = RunView()

    def on_event(event: Event, rank: int | None) -> None:
        nonlocal view
        view = fold(view, event, rank)

    def make_screen(prepared: Prepared) -> Screen:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        screen = Screen(render.prefixes(prepared), sys.stdout, sys.stderr, colour=colour)
        for line in render.opening(prepared, width):
            screen.say(line)
        return screen

    width = shutil.get_terminal_size().columns
    result = start_run(options, make_screen, on_event)
    with contextlib.suppress(OSError):  # the terminal has gone
        for line in render.closing(result, view, width):
            print(line, file=sys.stderr)
    return result.outcome.exit_code


def _choose_hosts(hosts: str | None, hostfile: Path | None) -> tuple[tuple[Host, ...], str]:
    if hosts is not None and hostfile is not None:
        raise InputError("-H and --hostfile were both given", hint="name the hosts in one place")
    if hosts is not None:
        return parse_hosts(hosts), "from -H"
    if hostfile is not None:
        return read_hostfile(hostfile), f"from {hostfile}"
    return parse_hosts("localhost", origin="this machine"), "this machine, as neither -H nor --hostfile was given"


def _what_to_run(
    command: list[str], module: str | None
) -> tuple[Literal["script", "module", "command"], str, tuple[str, ...]]:
    if module is not None:
        return "module", module, tuple(command)
    if not command:
        raise InputError("nothing to run", hint="paceline run [OPTIONS] train.py [ARGS], -m MODULE, or -- COMMAND")
    if _stands_after_dashes(command):
        return "command", command[0], tuple(command[1:])
    return "script", command[0], tuple(command[1:])


def _stands_after_dashes(command: list[str]) -> bool:
    """The parser drops the `--`; whether it stood right before the command is to be seen in what was typed."""
    before = sys.argv[: len(sys.argv) - len(command)]
    return bool(before) and before[-1] == "--"


def _check_script(options: RunOptions) -> None:
    if options.script is None or options.script.is_file():
        return
    if options.target.startswith("-"):
        raise InputError(
            f"no such option: {options.target}",
            hint="options of paceline stand before the script; see paceline run --help",
        )
    hint = "for a command that is no Python script, put -- before it: paceline run -- COMMAND"
    raise InputError(f"there is no script {options.target} in {options.cwd}", hint=hint)


def _parse_env(words: list[str]) -> tuple[tuple[str, str], ...]:
    pairs: list[tuple[str, str]] = []
    for word in words:
        name, has_value, value = word.partition("=")
        if not name.replace("_", "a").isalnum() or name[0].isdigit():
            raise InputError(f"--env {word}: {name!r} is no variable name", hint="--env NAME or --env NAME=VALUE")
        if not has_value:
            if name not in os.environ:
                raise InputError(f"--env {name}: it is not set here", hint=f"--env {name}=VALUE")
            value = os.environ[name]
        if name == "MASTER_PORT" and not (value.isdigit() and 0 < int(value) < 65536):
            raise InputError(f"--env {word}: expected a port from 1 to 65535", hint="leave it out for a free one")
        pairs.append((name, value))
    return tuple(pairs)
