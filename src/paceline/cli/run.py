"""`paceline run`: start a training script on every machine."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from paceline.checks.quick import quick_findings
from paceline.cli import render
from paceline.cli.hosts import choose_hosts
from paceline.errors import HostError, InputError
from paceline.events import Event
from paceline.launch.facts import Facts
from paceline.launch.hosts import Hosts
from paceline.launch.logs import Screen
from paceline.launch.options import RunOptions
from paceline.launch.prepare import Prepared
from paceline.launch.run import dry_run as plan_run
from paceline.launch.run import run as start_run
from paceline.network.candidates import parse_nic
from paceline.strategy import Strategy, parse_sync
from paceline.watch.fold import RunView, fold

Kind = Literal["script", "module", "command"]

_PATH = click.Path(path_type=Path)
_LIMIT_S = 86_400.0
_OURS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}
_LATE = {"-H", "--hosts", "--hostfile", "--dry-run", "--restarts", "--no-ship", "--sync"}
_COUNT = click.IntRange(min=0)
_SECONDS = click.FloatRange(min=0)


class _RunCommand(click.Command):
    """Options of ours come first; from the script, the module or the command on, all words are its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        valued = {name for option in self.params if not getattr(option, "is_flag", False) for name in option.opts}
        own, kind, words = split_words(args, valued)
        super().parse_args(ctx, own)
        ctx.params.update(kind=kind, words=words)
        return []


def split_words(args: list[str], valued: set[str]) -> tuple[list[str], Kind, tuple[str, ...]]:
    """(our options, what is to run, its words). `valued`: our options that take a value. Raises InputError."""
    index = 0
    while index < len(args):
        word = args[index]
        if word == "--":
            return args[:index], "command", tuple(args[index + 1 :])
        if word in ("-m", "--module"):
            return args[:index], "module", tuple(args[index + 1 :])
        if word.startswith("--module="):
            return args[:index], "module", (word.partition("=")[2], *args[index + 1 :])
        if not word.startswith("-"):
            return args[:index], "script", tuple(args[index:])
        index += 2 if word in valued else 1
    return args, "script", ()


@click.command(
    cls=_RunCommand,
    options_metavar="[OPTIONS] SCRIPT | -m MODULE | -- COMMAND [ARGS]...",
)
@click.option("--hosts", "-H", metavar="HOST[:SLOTS],...", help="Machines, and ranks on each.")
@click.option("--hostfile", type=_PATH, metavar="FILE", help="The same, one host a line: alice slots=4.")
@click.option("--module", "-m", metavar="MODULE", expose_value=False, help="Run a module, as python -m does.")
@click.option("--python", metavar="PATH", help="The interpreter on every host.  [this one's path]")
@click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="Give the ranks a variable; may be repeated.")
@click.option("--nic", metavar="NAME|NETWORK", help="Use this interface or network.  [found by trying]")
@click.option("--sync", metavar="TEXT", help="How hosts synchronise: every:int4, diloco:H=100, ... (see README).")
@click.option("--ship/--no-ship", default=True, help="Copy the project to hosts that don't share it.  [yes]")
@click.option("--restarts", type=_COUNT, default=0, metavar="N", help="Start all ranks again after a failure.  [0]")
@click.option(
    "--grace", type=_SECONDS, default=5.0, metavar="SECONDS", help="Between asking ranks to end and forcing them.  [5]"
)
@click.option(
    "--stall-warning",
    type=_SECONDS,
    default=60.0,
    metavar="SECONDS",
    help="Say where ranks stand that don't move for so long; 0: never.  [60]",
)
@click.option("--allow-mismatch", is_flag=True, help="Start although the hosts differ.")
@click.option("--dry-run", is_flag=True, help="Show what would run where, and why; start nothing.")
@click.option("--json", is_flag=True, help="With --dry-run: as JSON.")
def run(
    kind: Kind,
    words: tuple[str, ...],
    hosts: str | None,
    hostfile: Path | None,
    python: str | None,
    env: tuple[str, ...],
    nic: str | None,
    sync: str | None,
    ship: bool,
    restarts: int,
    grace: float,
    stall_warning: float,
    allow_mismatch: bool,
    dry_run: bool,
    json: bool,
) -> None:
    """Start a training script on every machine.

    Anything that runs under torchrun runs here, unchanged.
    """
    chosen, hosts_reason = choose_hosts(hosts, hostfile)
    for name, seconds in (("--grace", grace), ("--stall-warning", stall_warning)):
        if not seconds < _LIMIT_S:  # also nan
            raise InputError(f"{name} {seconds}: expected seconds, at most {_LIMIT_S:.0f} (a day)")
    if not words:
        raise InputError("nothing to run", hint="paceline run [OPTIONS] train.py [ARGS], -m MODULE, or -- COMMAND")
    options = RunOptions(
        hosts=chosen,
        hosts_reason=hosts_reason,
        kind=kind,
        target=words[0],
        arguments=words[1:],
        cwd=_find_cwd(),
        python=python,
        env=_parse_env(env),
        nic=parse_nic(nic) if nic is not None else None,
        sync=_parse_sync(sync, kind) if sync is not None else None,
        ship=ship,
        allow_mismatch=allow_mismatch,
        restarts=restarts,
        grace_s=grace,
        stall_warning_s=stall_warning,
    )
    _check_script(options)
    _notice_late_options(options)
    if json and not dry_run:
        raise InputError("--json only goes with --dry-run")
    if dry_run:
        planned = plan_run(options, functools.partial(_look, options))
        print(render.plan_json(planned) if json else render.plan_text(planned))
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
    result = start_run(options, make_screen, on_event, functools.partial(_look, options))
    explained = _explain(result.folder) if result.outcome.failures else []
    with contextlib.suppress(OSError):  # the terminal has gone
        for line in render.closing(result, view, width, explained):
            print(line, file=sys.stderr)
    return result.outcome.exit_code


def _look(options: RunOptions, hosts: Hosts, facts: Sequence[Facts], layout: Sequence[tuple[int, int]]) -> None:
    """Stops what would break. Raises HostError."""
    if options.allow_mismatch:
        return
    found = quick_findings(hosts, facts, layout, needs_torch=options.kind != "command")
    failures = [finding for finding in found if finding.status == "failure"]
    if failures:
        lines = ["this will not run there"]
        for finding in failures:
            lines += [f"  {finding.where}: {finding.text}", *(f"    {line}" for line in finding.remedy.splitlines())]
        raise HostError("\n".join(lines), hint="or, at your own risk: --allow-mismatch")


def _explain(folder: Path) -> list[str]:
    from paceline.explain import explain_run  # a run that goes well has no use for it, and starts sooner without

    return explain_run(folder)


def _find_cwd() -> Path:
    if os.path.expanduser("~").startswith("~"):
        raise InputError("HOME is not set, and this user has no home folder", hint="HOME=/some/folder paceline run ...")
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise InputError("the folder where this was typed is gone", hint="change into one that is there") from None


def _parse_sync(text: str, kind: Kind) -> Strategy:
    if kind == "command":
        raise InputError(
            "--sync goes with a Python script or module: a command starts processes that it can't reach",
            hint="paceline run --sync TEXT train.py, or -m MODULE",
        )
    return parse_sync(text)


def _check_script(options: RunOptions) -> None:
    if options.script is None or options.script.is_file():
        return
    hint = "for a command that is no Python script, put -- before it: paceline run -- COMMAND"
    raise InputError(f"there is no script {options.target} in {options.cwd}", hint=hint)


def _notice_late_options(options: RunOptions) -> None:
    """`paceline run train.py -H a,b` gives -H to the script, which most often is not what was meant."""
    late = [word for word in options.arguments if word.partition("=")[0] in _LATE]
    if late and options.kind != "command":
        text = f"{late[0]} stands after {options.target}, so it is given to it; paceline's own options stand before"
        print(f"paceline: note: {text}", file=sys.stderr)


def _parse_env(words: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    pairs: list[tuple[str, str]] = []
    for word in words:
        name, has_value, value = word.partition("=")
        if not name.replace("_", "a").isalnum() or name[0].isdigit():
            raise InputError(f"--env {word}: {name!r} is no variable name", hint="--env NAME or --env NAME=VALUE")
        if not has_value:
            if name not in os.environ:
                raise InputError(f"--env {name}: it is not set here", hint=f"--env {name}=VALUE")
            value = os.environ[name]
        if name in _OURS:
            raise InputError(f"--env {word}: {name} is paceline's to set", hint="hosts and ranks: -H; addresses: ip=")
        if name == "MASTER_PORT" and not (value.isascii() and value.isdigit() and 0 < int(value) < 65536):
            raise InputError(f"--env {word}: expected a port from 1 to 65535", hint="leave it out for a free one")
        pairs.append((name, value))
    return tuple(pairs)
