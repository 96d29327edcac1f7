"""`paceline env`: what is installed on each host, and the same on all of them."""

from __future__ import annotations

import json as json_text
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from paceline.checks.host_states import HostState
from paceline.cli.hosts import choose_hosts
from paceline.cluster.spec import Host, parse_hosts
from paceline.envs.opening import open_some
from paceline.envs.options import Outcome, SyncOptions
from paceline.envs.sync import Synced, sync
from paceline.envs.table import find_differences, meet, render_differences
from paceline.errors import InputError
from paceline.launch.hosts import HostsError, InterruptedEarlyError
from paceline.launch.transport import is_this_machine

_LEFT_OUT_LINES = 10
_PATH = click.Path(path_type=Path)
_HOSTS = click.option("--hosts", "-H", metavar="HOST,...", help="Machines.")
_HOSTFILE = click.option("--hostfile", type=_PATH, metavar="FILE", help="The same, one host a line: alice python=PATH.")
_PYTHON = click.option("--python", metavar="PATH", help="The interpreter on every host.  [this one's path]")
_JSON = click.option("--json", is_flag=True, help="For programs.")


@click.group("env")
def app() -> None:
    """Look at the environments of the hosts, and make them the same."""


@app.command()
@_HOSTS
@_HOSTFILE
@_PYTHON
@_JSON
def show(hosts: str | None, hostfile: Path | None, python: str | None, json: bool) -> None:
    """What each host's interpreter is, and what it has."""
    states = _meet(choose_hosts(hosts, hostfile)[0], python)
    if json:
        print(json_text.dumps([_record(state) for state in states], indent=2))
        return
    for state in states:
        print("\n".join(_describe(state)))


@app.command()
@_HOSTS
@_HOSTFILE
@_PYTHON
@_JSON
def diff(hosts: str | None, hostfile: Path | None, python: str | None, json: bool) -> None:
    """Packages whose versions differ between hosts.

    Exit codes: 0 the hosts are alike, 1 they are not.
    """
    chosen = choose_hosts(hosts, hostfile)[0]
    if len(chosen) < 2:
        raise InputError("one host has nothing to differ from", hint="paceline env diff -H HOST,HOST")
    states = _meet(chosen, python)
    rows = find_differences(states)
    names = [state.name for state in states]
    if json:
        found = [
            {"what": row.what, "values": dict(zip(names, row.values, strict=True)), "remedy": row.remedy}
            for row in rows
        ]
        print(json_text.dumps(found, indent=2))
    elif rows:
        print("\n".join(render_differences(names, rows, shutil.get_terminal_size().columns)))
    else:
        print(f"✓ the same packages on {', '.join(names)}")
    sys.exit(1 if rows else 0)


@app.command("sync")
@click.option("--hosts", "-H", metavar="HOST,...", help="Machines that are to get it.")
@_HOSTFILE
@click.option("--from", "source", metavar="HOST", help="Whose environment it is.  [this machine's]")
@click.option("--python", metavar="PATH", help="The interpreter that is copied.  [this one's path]")
@click.option("--offline", is_flag=True, help="Send the installed files; the hosts need no package index.")
@click.option("--to", metavar="PATH", help="The folder on the hosts.  [one of paceline's own]")
@click.option("--dry-run", is_flag=True, help="Say what would be done where; send nothing.")
def sync_command(
    hosts: str | None,
    hostfile: Path | None,
    source: str | None,
    python: str | None,
    offline: bool,
    to: str | None,
    dry_run: bool,
) -> None:
    """Make one host's environment on the others.

    Always a new folder; nothing that is there is touched. Exit codes: 0 all have it, 3 some could not get it.
    """
    chosen = choose_hosts(hosts, hostfile)[0]
    options = SyncOptions(
        hosts=chosen,
        source=_find_source(chosen, source),
        python=python,
        offline=offline,
        to=to,
        dry_run=dry_run,
    )
    teller = Teller()
    try:
        synced = sync(options, teller.tell)
    except InterruptedEarlyError as interrupted:
        print("paceline: stopped; what has arrived stays, and the same command goes on from there", file=sys.stderr)
        sys.exit(interrupted.exit_code)
    finally:
        teller.end()
    print("\n".join(render_synced(synced, options)))
    sys.exit(3 if any(outcome.status == "failed" for outcome in synced.outcomes) else 0)


class Teller:
    """Lines on stderr; on a terminal a state of progress is replaced by the next one, elsewhere it is left out."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._states: dict[str, str] = {}

    def tell(self, host: str, text: str, is_state: bool) -> None:
        """See paceline.envs.options.Tell."""
        if not is_state:
            self.end()
            print(f"{host}: {text}", file=sys.stderr, flush=True)
        elif self._is_terminal:
            self._states[host] = text
            line = "   ".join(f"{name}: {state}" for name, state in self._states.items())
            width = shutil.get_terminal_size().columns
            print(f"\r\x1b[K{line[: width - 1]}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the line of states."""
        if self._states:
            self._states.clear()
            print(file=sys.stderr)


def render_synced(synced: Synced, options: SyncOptions) -> list[str]:
    """What came of it, and the line to use it."""
    found, lock = synced.inventory, synced.lock
    packages = f"{len(lock.packages)} package{'' if len(lock.packages) == 1 else 's'}"
    lines = [f"environment {lock.name}: {packages} for Python {found.python} on {found.machine}"]
    lines += [f"! left out: {text}" for text in lock.left_out[:_LEFT_OUT_LINES]]
    if len(lock.left_out) > _LEFT_OUT_LINES:
        lines.append(f"! and {len(lock.left_out) - _LEFT_OUT_LINES} more were left out")
    for outcome in synced.outcomes:
        sign = "✗" if outcome.status == "failed" else "✓"
        lines.append(f"{sign} {outcome.host}: {outcome.text}")
        if outcome.remedy:
            lines.append(f"    {outcome.remedy}")
    lines += _how_to_use(
        [outcome for outcome in synced.outcomes if outcome.status in ("made", "there")], synced, options
    )
    return lines


def _how_to_use(outcomes: list[Outcome], synced: Synced, options: SyncOptions) -> list[str]:
    if not outcomes:
        return []
    pythons = {outcome.python for outcome in outcomes}
    if pythons == {synced.inventory.python_path}:
        return [f"To use it:  paceline run --python {synced.inventory.python_path} ..."]
    source = f"    {options.source.name} python={synced.inventory.python_path}"
    return [
        "To use it, in the hostfile:",
        source,
        *(f"    {outcome.host} python={outcome.python}" for outcome in outcomes),
    ]


def _find_source(chosen: tuple[Host, ...], source: str | None) -> Host:
    """As the user has written it among the hosts, with its `python=`, else by its name alone."""
    if source is None:
        return next((host for host in chosen if is_this_machine(host)), parse_hosts("localhost", origin="--from")[0])
    found = parse_hosts(source, origin="--from")
    if len(found) != 1:
        raise InputError(
            f"--from {source}: expected one host", hint=f"paceline env sync -H HOST,... --from {found[0].name}"
        )
    return next((host for host in chosen if (host.name, host.user) == (found[0].name, found[0].user)), found[0])


def _meet(chosen: tuple[Host, ...], python: str | None) -> list[HostState]:
    try:
        with open_some(chosen, [[host.python or python or sys.executable] for host in chosen]) as opened:
            if opened.failures:
                raise HostsError(opened.failures)
            return meet(opened)
    except InterruptedEarlyError as interrupted:
        print("paceline: stopped", file=sys.stderr)
        sys.exit(interrupted.exit_code)


def _describe(state: HostState) -> list[str]:
    facts, details = state.facts, state.details
    cuda = f"CUDA {facts.cuda_version}" if facts.cuda_version else "CPU only"
    torch = f"{facts.torch_version} ({cuda})" if facts.torch_version else "none"
    return [
        state.name,
        f"    interpreter  {facts.python_path}, Python {facts.python_version}",
        f"    environment  {details.environment} in {details.prefix}",
        f"    torch        {torch}",
        f"    packages     {len(details.packages)}",
    ]


def _record(state: HostState) -> dict[str, Any]:
    facts, details = state.facts, state.details
    return {
        "host": state.name,
        "python": facts.python_path,
        "python_version": facts.python_version,
        "environment": details.environment,
        "prefix": details.prefix,
        "machine": facts.machine,
        "torch": facts.torch_version,
        "cuda": facts.cuda_version,
        "packages": details.packages,
    }
