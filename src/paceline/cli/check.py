"""`paceline check`: what will go wrong on these machines, before anything is started on them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from paceline.checks.examine import CheckOptions, Examined, examine
from paceline.checks.findings import exit_code
from paceline.checks.matrix import render_matrix
from paceline.cli import findings as render
from paceline.cli.hosts import choose_hosts
from paceline.errors import InputError
from paceline.launch.hosts import InterruptedEarlyError
from paceline.launch.ship import find_project
from paceline.network.candidates import parse_nic

_PATH = click.Path(path_type=Path)


@click.command(options_metavar="[OPTIONS]")
@click.argument("script", type=_PATH, required=False)
@click.option("--hosts", "-H", metavar="HOST[:SLOTS],...", help="Machines, and ranks on each.")
@click.option("--hostfile", type=_PATH, metavar="FILE", help="The same, one host a line: alice slots=4.")
@click.option("--python", metavar="PATH", help="The interpreter on every host.  [this one's path]")
@click.option("--nic", metavar="NAME|NETWORK", help="Use this interface or network.  [found by trying]")
@click.option("--data", metavar="FOLDER", help="Compare the number and size of its files on all hosts.")
@click.option("--quick", is_flag=True, help="Only what takes about a second: no speed, no collective.")
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too.")
@click.option("--verbose", "-v", is_flag=True, help="List what is fine as well.")
@click.option("--json", is_flag=True, help="For programs.")
def check(
    script: Path | None,
    hosts: str | None,
    hostfile: Path | None,
    python: str | None,
    nic: str | None,
    data: str | None,
    quick: bool,
    strict: bool,
    verbose: bool,
    json: bool,
) -> None:
    """Look for what would go wrong on these machines, and in a script.

    Exit codes: 0 nothing that breaks a run, 1 a warning (with --strict), 2 something will break.
    """
    chosen, _ = choose_hosts(hosts, hostfile)
    options = CheckOptions(
        hosts=chosen,
        python=python,
        nic=parse_nic(nic) if nic is not None else None,
        depth="quick" if quick else "full",
        script=None if script is None else _find_script(script),
        project=None if script is None else _find_project(script),
        data=os.path.abspath(data) if data is not None else None,
    )
    try:
        examined = examine(options)
    except InterruptedEarlyError as interrupted:
        print("paceline: stopped", file=sys.stderr)
        sys.exit(interrupted.exit_code)
    code = exit_code(list(examined.findings), is_strict=strict)
    print(render.as_json(examined, code) if json else _text(examined, is_verbose=verbose))
    sys.exit(code)


def _find_script(script: Path) -> Path:
    if not script.is_file():
        raise InputError(f"there is no script {script} in {Path.cwd()}", hint="check the spelling: ls")
    return script.absolute()


def _find_project(script: Path) -> Path:
    """The folder that a run would copy, else the script's."""
    try:
        return find_project(Path.cwd(), script.absolute()).root
    except InputError:
        return script.absolute().parent


def _text(examined: Examined, *, is_verbose: bool) -> str:
    width = shutil.get_terminal_size().columns
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    table = render.table(examined.states)
    matrix = render_matrix(examined.matrix) if examined.matrix is not None else []
    found = render.lines(
        examined.findings, num_hosts=len(examined.states), width=width, is_verbose=is_verbose, colour=colour
    )
    blocks = [block for block in (table, matrix, list(found)) if block]
    return "\n\n".join("\n".join(block) for block in blocks)
