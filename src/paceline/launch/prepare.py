"""From what the user asked for to a run that is ready to start: facts, comparison, wires, the project on every host.

Each step returns what was decided and why; nothing is started here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from paceline.cluster.spec import Host, resolve_slots
from paceline.errors import HostError
from paceline.launch import protocol, ship
from paceline.launch.compare import Difference, compare_facts
from paceline.launch.deliver import IN_USE_LIMIT_S, deliver
from paceline.launch.environment import HostPlan, RunPlan
from paceline.launch.facts import Facts
from paceline.launch.gpus import count_gpus
from paceline.launch.hosts import Hosts
from paceline.launch.options import RunOptions
from paceline.launch.reasons import Place, Reason, explain_choices, summarise_choices
from paceline.launch.transport import is_this_machine
from paceline.launch.wiring import find_wires
from paceline.network.wires import Wire
from paceline.units import format_bytes

_WORKER = "from paceline.train.worker import main; main()"
_OFTEN_MEANT = ("NCCL_", "TORCH", "PYTORCH_", "OMP_", "GLOO_", "CUDA_", "HF_", "PYTHONPATH", "LD_LIB")  # fmt: skip


Look = Callable[[Hosts, Sequence[Facts], Sequence[tuple[int, int]]], None]
"""Looks at the hosts before anything is started there: with their facts, and for each its ranks and the GPUs that they
will see. Raises HostError for what will break the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that can start."""

    plan: RunPlan
    facts: tuple[Facts, ...]
    wires: tuple[Wire, ...]
    reasons: tuple[Reason, ...]
    """Every automatic choice, for --dry-run."""
    summary: tuple[Reason, ...]
    """What is worth a line at every start."""
    commands: tuple[list[str], ...]
    """The command of every rank, per host."""


def choose_pythons(options: RunOptions) -> list[str]:
    """The interpreter of each host: its own `python=`, `--python`, or the path of the one that runs this."""
    return [host.python or options.python or sys.executable for host in options.hosts]


def prepare(hosts: Hosts, options: RunOptions, run_id: str, look: Look, *, dry_run: bool) -> Prepared:
    """Open the channels and make everything ready. Raises HostError and InputError."""
    project = _project(options)
    facts = hosts.open(run_id, choose_pythons(options), grace_s=options.grace_s)
    names = [host.name for host in options.hosts]
    num_gpus, choices = _choose_slots(options, facts)
    slots = [count for count, _ in choices]
    differences = compare_facts(names, facts, slots, num_gpus=num_gpus, needs_torch=options.kind != "command")
    if differences and not options.allow_mismatch:
        raise _mismatch(names, differences)
    look(hosts, facts, list(zip(slots, num_gpus, strict=True)))
    wires = find_wires(hosts, facts, options.nic)
    extra_folders = {} if dry_run else _send_packages(hosts, facts, options)
    places = _place_project(hosts, options, project, facts, dry_run=dry_run)
    plans = tuple(
        HostPlan(
            name=host.name,
            slots=slots[index],
            num_cores=facts[index].num_cores,
            interface=wires[index].interface,
            gpus=host.gpus,
            python=facts[index].python_path,
            cwd=places[index].cwd,
            python_path=(f"{facts[index].state_folder}/runtime/{hosts.runtime_digest}", *extra_folders.get(index, ())),
            env=_asked_env(options, host),
        )
        for index, host in enumerate(options.hosts)
    )
    plan = RunPlan(
        run_id=run_id,
        hosts=plans,
        master_addr=wires[0].address,
        max_restarts=options.restarts,
        sync=options.sync,
        stall_warning_s=options.stall_warning_s,
    )
    return Prepared(
        plan=plan,
        facts=tuple(facts),
        wires=wires,
        reasons=tuple(
            explain_choices(plan, wires, places, hosts_why=options.hosts_reason, slots_why=[why for _, why in choices])
        ),
        summary=tuple(summarise_choices(plan, wires, places, _unsent_names(options))),
        commands=tuple(_command(options, host, places[index]) for index, host in enumerate(plans)),
    )


def _asked_env(options: RunOptions, host: Host) -> dict[str, str]:
    """What the user gives the ranks of a host: its line in the hostfile goes before --env."""
    return {**dict(options.env), **dict(host.env)}


def _choose_slots(options: RunOptions, facts: Sequence[Facts]) -> tuple[list[int], list[tuple[int, str]]]:
    """Per host the GPUs that its ranks will see; and the number of ranks, with the reason."""
    num_gpus: list[int] = []
    choices: list[tuple[int, str]] = []
    for host, fact in zip(options.hosts, facts, strict=True):
        asked = _asked_env(options, host)
        count, why_gpus = count_gpus(fact.gpus, asked=asked, there=fact.visible_gpus, gpus=host.gpus)
        slots, why = resolve_slots(host, len(fact.gpus) if host.gpus is not None else count)
        num_gpus.append(count)
        choices.append((slots, f"{why} ({why_gpus})" if fact.gpus else why))
    return num_gpus, choices


def _project(options: RunOptions) -> ship.Project | None:
    if not options.ship or all(is_this_machine(host) for host in options.hosts):
        return None
    return ship.find_project(options.cwd, options.script)


def _command(options: RunOptions, host: HostPlan, place: Place) -> list[str]:
    if options.kind == "command":
        return [options.target, *options.arguments]
    target = place.script if place.script is not None else options.target
    return [host.python, "-c", _WORKER, options.kind, target, *options.arguments]


def _place_project(
    hosts: Hosts, options: RunOptions, project: ship.Project | None, facts: Sequence[Facts], *, dry_run: bool
) -> list[Place]:
    """Where each host works: in place where it shares the file system, else in its own copy."""
    script = options.target if options.kind == "script" else None
    here = Place(cwd=str(options.cwd), script=script, num_sent=None, num_files=0)
    places = [here] * len(hosts.hosts)
    if project is None:
        return places
    sharing = _find_sharing(hosts, project.root)
    away = set(range(len(places))) - sharing
    relative = os.path.relpath(options.script, project.cwd) if options.script is not None else None
    if not options.cwd.is_relative_to(project.root):
        # Hosts that share the script's folder need not share the one where the command was typed.
        beside = Place(cwd=str(project.cwd), script=relative, num_sent=None, num_files=0)
        at_home = _find_sharing(hosts, options.cwd)
        places = [here if index in at_home else beside for index in range(len(places))]
    if not away:
        return places
    cargo = ship.load_project(project)
    if dry_run:
        return [
            Place(
                cwd="(a folder of paceline's there)",
                script=relative,
                num_sent=0,
                num_files=len(cargo.entries),
                copy_of=project.reason,
            )
            if index in away
            else places[index]
            for index in range(len(places))
        ]
    _check_room(hosts, facts, cargo, away)
    for index, delivery in deliver(hosts, cargo, sorted(away), in_use_limit_s=IN_USE_LIMIT_S).items():
        places[index] = Place(
            cwd=os.path.normpath(os.path.join(delivery.folder, project.cwd_below_root)),
            script=relative,
            num_sent=delivery.num_sent,
            num_files=len(cargo.entries),
            copy_of=project.reason,
            is_spare=delivery.is_spare,
            left_behind=cargo.left_behind,
        )
    return places


def _find_sharing(hosts: Hosts, folder: Path) -> set[int]:
    """The hosts that see this folder of the driver's at the same path."""
    written = ship.write_token(folder)
    if written is None:
        return {index for index, host in enumerate(hosts.hosts) if is_this_machine(host)}
    path, token = written
    try:
        question = protocol.FindToken(path=str(path), token=token)
        answers = hosts.ask(
            dict.fromkeys(range(len(hosts.hosts)), question),
            protocol.TokenFound,
            timeout_s=20,
            doing="look for the project's folder",
        )
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return {index for index, answer in answers.items() if answer.found}


def _check_room(hosts: Hosts, facts: Sequence[Facts], cargo: ship.Cargo, away: Collection[int]) -> None:
    for index in sorted(away):
        if facts[index].free_bytes < cargo.num_bytes:
            raise HostError(
                f"{hosts.hosts[index].name}: {format_bytes(facts[index].free_bytes)} free in "
                f"{facts[index].state_folder}, but the project has {format_bytes(cargo.num_bytes)}",
                hint="make room there, or set XDG_STATE_HOME there to a folder on another disk",
            )


def _send_packages(hosts: Hosts, facts: Sequence[Facts], options: RunOptions) -> dict[int, tuple[str, ...]]:
    """Checkpoints need safetensors: a host that lacks it gets this machine's, where the processor is the same."""
    here = os.uname().machine
    lacking = [index for index, fact in enumerate(facts) if not fact.has_safetensors and fact.machine == here]
    cargo = ship.load_package("safetensors") if lacking and options.kind != "command" else None
    if cargo is None:
        return {}
    # Nothing is written beside a package: any copy will do, and none is waited for.
    return {index: (delivery.folder,) for index, delivery in deliver(hosts, cargo, lacking, in_use_limit_s=0).items()}


def _mismatch(names: Sequence[str], differences: Sequence[Difference]) -> HostError:
    rows = [("", *names), *((difference.what, *difference.values) for difference in differences)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    hints = "\n  ".join(difference.hint for difference in differences)
    heading = "the hosts can't run this together" if len(names) > 1 else "this host can't run it"
    return HostError(f"{heading}\n{table}", hint=f"{hints}\n  or, at your own risk: --allow-mismatch")


def _unsent_names(options: RunOptions) -> list[str]:
    """Variables of this process that mean something to training, and that the other hosts don't get."""
    if all(is_this_machine(host) for host in options.hosts):
        return []
    return sorted(name for name in os.environ if name.startswith(_OFTEN_MEANT) and name not in dict(options.env))


def new_run_id(now: str) -> str:
    """Sortable by time, and never twice the same."""
    return f"{now}-{secrets.token_hex(2)}"
