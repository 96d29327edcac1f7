"""The whole examination: opens the hosts that can be opened, runs every check, and lets none of them end the others."""

from __future__ import annotations

import dataclasses
import queue
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.checks.differences import Row
from paceline.checks.ends import join_names
from paceline.checks.findings import Finding, check, worst_first
from paceline.checks.host_states import DetailsQuery, HostState, read_details
from paceline.checks.identities import are_apart
from paceline.checks.matrix import Matrix
from paceline.checks.pairs import Depth, check_pairs, check_unwired, list_all_candidates
from paceline.checks.quick import check_details, check_states, make_state
from paceline.checks.results import Result, catch_crash, failure, ok, run_check
from paceline.checks.together import check_together
from paceline.cluster.spec import Host, resolve_slots
from paceline.errors import HostError
from paceline.launch.facts import Facts
from paceline.launch.gpus import count_gpus
from paceline.launch.hosts import Hosts, HostsError, open_hosts
from paceline.launch.signals import signals_into
from paceline.launch.wiring import find_wires
from paceline.network.candidates import Nic
from paceline.network.wires import Wire

_GRACE_S = 0.5
"""What errands that still run get when the examination ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """One `paceline check`."""

    hosts: tuple[Host, ...]
    python: str | None = None
    """The interpreter on all hosts that don't name their own; None: the one that runs paceline."""
    nic: Nic | None = None
    depth: Depth = "full"
    script: Path | None = None
    """Absolute; None: nothing is known of what is to run."""
    project: Path | None = None
    """The folder whose modules are read with the script; None: the script's own."""
    data: str | None = None
    """A folder that must hold the same on all hosts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examined:
    """All that was found."""

    states: tuple[HostState, ...]
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    """The worst first."""
    matrix: Matrix | None = None
    """Speeds and round trips, where there are links."""


@check("reachable")
def check_reachable(host: Host, error: HostError | None) -> Iterator[Result]:
    """Each host lets paceline in.

    What it looks at
        Whether ssh logs in without a question, whether the interpreter is there, and whether the agent answers.

    Why it matters
        Nothing can be started on a host that asks for a password, or whose key is not known here.

    How to mend it
        What the line says: a key (`ssh-copy-id`), a host key, the interpreter's path.
    """
    if error is None:
        yield ok("ssh, the interpreter and the agent work")
        return
    yield failure(error.message.partition(": ")[2] or error.message, error.hint or f"ssh {host.ssh_destination} true")


@check("wires")
def check_wires(names: Sequence[str], wires: Sequence[Wire]) -> Iterator[Result]:
    """Every host reaches every other one.

    What it looks at
        A connection from each address of each host to each address of the others, on ports that nobody chose, with a
        secret that proves who answered.

    Why it matters
        PyTorch's ranks all talk to each other, on random ports. A single pair that can't makes the start hang.

    How to mend it
        Let the hosts of the cluster through each other's firewall; name the right network with `--nic`.
    """
    chosen = ", ".join(f"{wire.interface} on {name}" for name, wire in zip(names, wires, strict=True))
    yield ok(f"every pair of hosts can talk: {chosen}")


@check("slots")
def check_slots(reason: str, problem: str) -> Iterator[Result]:
    """As many ranks as were asked for find their GPUs.

    What it looks at
        `HOST:SLOTS`, `slots=` and `gpus=` against the GPUs that the host has.

    Why it matters
        A GPU that isn't there can't be used, and the run does not start.

    How to mend it
        Correct the number in -H or in the hostfile.
    """
    if problem:
        yield failure(problem, "correct gpus= or slots= in the hostfile")
    else:
        yield ok(reason)


@check("backend")
def check_backend(without_gpu: Sequence[str], nccl_at: str) -> Iterator[Result]:
    """The script's backend works on every host.

    What it looks at
        Whether the script asks for NCCL under no condition, and whether each host has a GPU that its ranks will see.

    Why it matters
        NCCL works on NVIDIA's GPUs alone. On a host without one the process group isn't made, and no rank starts.

    How to mend it
        Leave the backend out: PyTorch then takes NCCL for GPUs and Gloo for the rest.
    """
    if without_gpu:
        text = f"{nccl_at} asks for NCCL, and no rank on {join_names(without_gpu)} sees a GPU"
        yield failure(text, "torch.distributed.init_process_group()   (takes NCCL where there is a GPU, else Gloo)")
    else:
        yield ok("NCCL, which the script asks for, has a GPU on every host")


def examine(options: CheckOptions) -> Examined:
    """Runs it all. Raises InterruptedEarlyError for a signal; whatever else happens is a finding."""
    hosts = list(options.hosts)
    earlier, imports, nccl_at = _read_script(options)
    while hosts:
        try:
            found = _examine_all(hosts, options, imports, nccl_at)
        except HostsError as error:  # those that could be opened are opened anew, without the others
            for index, failed in error.failures.items():
                earlier += run_check(check_reachable, hosts[index].name, hosts[index], failed)
            hosts = [host for index, host in enumerate(hosts) if index not in error.failures]
        else:
            return dataclasses.replace(found, findings=tuple(worst_first([*earlier, *found.findings])))
    return Examined(states=(), rows=(), findings=tuple(worst_first(earlier)))


def _read_script(options: CheckOptions) -> tuple[list[Finding], tuple[str, ...], str]:
    """What is to say of the script, the modules that it can't start without, and where it asks for NCCL."""
    if options.script is None:
        return [], (), ""
    from paceline.checks.script import examine_script

    return examine_script(options.script, options.project or options.script.parent)


def _examine_all(hosts: Sequence[Host], options: CheckOptions, imports: tuple[str, ...], nccl_at: str) -> Examined:
    """Raises HostsError where some can't be opened."""
    is_quick = options.depth == "quick"
    pythons = [host.python or options.python or sys.executable for host in hosts]
    with signals_into(queue.SimpleQueue()) as inbox, open_hosts(hosts, inbox) as opened:
        facts = opened.open(f"check-{secrets.token_hex(4)}", pythons, grace_s=_GRACE_S)
        findings: list[Finding] = []
        for host in hosts:
            findings += run_check(check_reachable, host.name, host, None)
        query = DetailsQuery(imports=imports, data=options.data, is_quick=is_quick)
        states = _meet(opened, facts, query, findings)
        if nccl_at:
            findings += run_check(check_backend, "", [s.name for s in states if not s.num_gpus], nccl_at)
        judged, rows = check_states(states)
        findings += judged
        matrix = None
        if len(hosts) > 1:
            found, matrix = _examine_network(opened, facts, options, are_apart=are_apart(states))
            findings += found
        elif options.nic is not None:
            findings += list_all_candidates(opened, facts, options.nic)[1]
    return Examined(states=tuple(states), rows=rows, findings=tuple(findings), matrix=matrix)


def _meet(hosts: Hosts, facts: Sequence[Facts], query: DetailsQuery, findings: list[Finding]) -> list[HostState]:
    """Reads the details of every open host; what is found on the way is added to `findings`."""
    states: list[HostState] = []
    for index, reading in enumerate(read_details(hosts, query)):
        host = hosts.hosts[index]
        slots, num_gpus, reason, problem = _choose_slots(host, facts[index])
        findings += run_check(check_details, host.name, host.name, facts[index].python_path, reading.problem)
        findings += run_check(check_slots, host.name, reason, problem)
        if reading.details is not None:
            states.append(make_state(host, facts[index], reading, (slots, num_gpus)))
    return states


def _choose_slots(host: Host, facts: Facts) -> tuple[int, int, str, str]:
    """(ranks, GPUs that they see, why, what can't be)."""
    env = dict(host.env)
    num_gpus, why = count_gpus(facts.gpus, asked=env, there=facts.visible_gpus, gpus=host.gpus)
    try:
        slots, reason = resolve_slots(host, len(facts.gpus) if host.gpus is not None else num_gpus)
    except HostError as error:
        return 1, num_gpus, "", error.message
    return slots, num_gpus, f"{slots} slots: {reason} ({why})" if facts.gpus else f"{slots} slots: {reason}", ""


def _examine_network(
    hosts: Hosts, facts: Sequence[Facts], options: CheckOptions, *, are_apart: bool
) -> tuple[list[Finding], Matrix | None]:
    """Every pair of hosts; in full depth, when each of them is in order, all together."""
    try:
        wires = find_wires(hosts, facts, options.nic)
    except HostError as error:
        return catch_crash("wires", check_unwired, hosts, facts, options.nic, error), None
    names = [host.name for host in hosts.hosts]
    findings = run_check(check_wires, "", names, wires)
    matrices: list[Matrix] = []

    def check_all_pairs() -> list[Finding]:
        found, matrix = check_pairs(hosts, facts, wires, depth=options.depth)
        matrices.append(matrix)
        return found

    if are_apart:
        findings += catch_crash("ports", check_all_pairs)
    else:
        text = "pairs of hosts are not measured, as some are one machine"
        findings.append(Finding(check="speed", status="skipped", where="", text=text))
    if options.depth == "full":
        if any(finding.status == "failure" for finding in findings):
            text = "no group is formed by hosts of which a pair is not in order"
            findings.append(Finding(check="gloo", status="skipped", where="", text=text))
        else:
            findings += check_together(hosts, facts, wires)
    return findings, matrices[0] if matrices else None
