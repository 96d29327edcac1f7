"""`paceline lab`: several real hosts on this machine."""

from __future__ import annotations

import os
import signal
import sys
import time

import click

from paceline.errors import InputError
from paceline.lab import Lab, format_rate, names, parse_rate, take_down
from paceline.units import format_duration

_name = click.option("--name", default="lab", metavar="NAME", help="Which lab, if there are several.  [lab]")

# What a person or a program may send to `lab exec`, meant for the command that it runs.
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_SENT_BY_THE_TERMINAL = 0x80  # SI_KERNEL


@click.group(name="lab", no_args_is_help=True)
def app() -> None:
    """Several real hosts on this one Linux machine (needs root)."""


@app.command()
@click.option("--hosts", type=int, default=4, metavar="N", help="How many; they are called h1, h2, ...  [4]")
@click.option("--rate", metavar="RATE", help="Of each link, both ways: 1gbit, 100mbit.  [unshaped]")
@_name
@click.option("--keep", multiple=True, metavar="FOLDER", help="Below ~ or /tmp: for all hosts to share.")
def up(hosts: int, rate: str | None, name: str, keep: tuple[str, ...]) -> None:
    """Start the hosts; they stay until `paceline lab down`."""
    began = time.monotonic()
    rate_bits_per_s = None if rate is None else parse_rate(rate)
    lab = Lab.up(name, num_hosts=hosts, rate_bits_per_s=rate_bits_per_s, keep=keep)
    took = format_duration(time.monotonic() - began)
    click.echo(f"{_describe(lab)}, up in {took}")
    for path in lab.spec.keep:
        click.echo(f"  shared by all hosts, because it is needed there: {path}")
    option = "" if name == "lab" else f"--name {name} "
    click.echo(f"  try:  paceline lab exec {option}{lab.hosts[0]} -- ssh {lab.hosts[-1]} hostname")


@app.command(name="exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_name
@click.argument("host")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def execute(name: str, host: str, command: tuple[str, ...]) -> None:
    """Run a command on a host: with this terminal, folder and environment, but HOME and its like."""
    argv = list(command[1:] if command[:1] == ("--",) else command)
    if not argv:
        raise InputError("no command to run was given", hint=f"paceline lab exec {host} -- hostname")
    sys.exit(_run_in_foreground(Lab.find(name), host, argv))


@app.command()
@_name
def down(name: str) -> None:
    """End every process of the lab and remove all of it."""
    click.echo(f"lab {name} is gone" if take_down(name) else f"there was no lab {name}")


@app.command(name="list")
def list_labs() -> None:
    """The labs that are up."""
    for name in names():
        click.echo(_describe(Lab.find(name)))


def _describe(lab: Lab) -> str:
    hosts = f"{len(lab.hosts)} hosts, {lab.hosts[0]} to {lab.hosts[-1]}"
    return f"lab {lab.name}: {hosts}, links {format_rate(lab.spec.rate_bits_per_s)}"


def _run_in_foreground(lab: Lab, host: str, argv: list[str]) -> int:
    """The command's exit code, 128 + N for a signal. Signals to this process reach it; its death ends it."""
    # At a terminal, Ctrl-C reaches the whole group by itself. Elsewhere the command gets a group of its own,
    # so that a signal to ours does not reach it twice: once directly and once through us.
    process = lab.popen(host, ["setpriv", "--pdeathsig", "KILL", "--", *argv], start_new_session=not _has_terminal())
    signals = {*_PASSED_ON, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # not before: the command would inherit it
    while process.poll() is None:
        received = signal.sigwaitinfo(signals)
        if received.si_signo != signal.SIGCHLD and received.si_code != _SENT_BY_THE_TERMINAL:
            process.send_signal(received.si_signo)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
