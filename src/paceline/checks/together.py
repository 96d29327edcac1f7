"""All hosts at once in one process group, as PyTorch makes it: the last question, when everything else is answered."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.checks.ends import join_names
from paceline.checks.findings import Finding, check
from paceline.checks.results import catch_crash
from paceline.errors import HostError
from paceline.launch import protocol
from paceline.launch.errands import Errand, Reply, run_errands
from paceline.launch.facts import Facts
from paceline.launch.hosts import Hosts
from paceline.network.wires import Wire
from paceline.units import format_bytes, format_duration

LARGE_BYTES = 64 * 10**6
PHASE_LIMIT_S = 10.0
START_LIMIT_S = 40.0
"""For PyTorch's import: from a network drive, on a busy host, it takes that long."""
_ERRAND = "paceline.checks.group_errand"
_PORT_LIMIT_S = 5.0
_NUM_PHASES_AFTER_START = 4

_DOING = {
    "start": "importing PyTorch and finding each other",
    "join": "making the group",
    "one": "adding up one number",
    "barrier": "waiting for each other",
    "large": f"adding up {format_bytes(LARGE_BYTES)}",
}


def check_together(hosts: Hosts, facts: Sequence[Facts], wires: Sequence[Wire]) -> list[Finding]:
    """A group over all hosts, with Gloo; and one with NCCL, where every host has a GPU. Takes seconds.

    Raises InterruptedEarlyError.
    """
    names = [host.name for host in hosts.hosts]
    findings = catch_crash("gloo", check_gloo, names, facts, lambda: _form_group(hosts, wires, "gloo"))
    if all(fact.gpus for fact in facts):
        findings += catch_crash("nccl", check_nccl, names, facts, lambda: _form_group(hosts, wires, "nccl"))
    return findings


@check("gloo")
def check_gloo(
    names: Sequence[str], facts: Sequence[Facts], form_group: Callable[[], Sequence[Reply]]
) -> Iterator[Finding]:
    """PyTorch's own processes form a group over all hosts.

    What it looks at
        One process on each host meets the others with Gloo, on the interfaces that were chosen: they find each other,
        add up one number, wait for each other, and add up 64 MB. Each step has ten seconds.

    Why it matters
        It is what a training run does first, with the same library, and without anything of the script's. If it works
        here and the script hangs, the script is the place to look.

    How to mend it
        The step that fails tells: finding each other is a matter of ports and firewalls, the first number of
        interfaces, the 64 MB of packet sizes. A host that is missing has a finding of its own above.
    """
    yield from _look("gloo", names, facts, form_group)


@check("nccl")
def check_nccl(
    names: Sequence[str], facts: Sequence[Facts], form_group: Callable[[], Sequence[Reply]]
) -> Iterator[Finding]:
    """The first GPU of each host forms a group with NCCL.

    What it looks at
        The same steps as with Gloo, on GPUs: finding each other, one number, a barrier, 64 MB.

    Why it matters
        NCCL chooses its own ways (InfiniBand, shared memory, sockets), and has limits of its own. It can fail where
        Gloo works.

    How to mend it
        `NCCL_DEBUG=INFO` names the way that it took. `NCCL_IB_DISABLE=1` takes InfiniBand out of the question.
    """
    yield from _look("nccl", names, facts, form_group)


def _look(
    name: str, names: Sequence[str], facts: Sequence[Facts], form_group: Callable[[], Sequence[Reply]]
) -> Iterator[Finding]:
    without = [names[index] for index, fact in enumerate(facts) if fact.torch_version is None]
    if without or len(names) < 2:
        why = f"no PyTorch on {join_names(without)}" if without else "it takes two hosts"
        yield Finding(check=name, status="skipped", where="", text=f"no group was formed: {why}")
        return
    try:
        replies = form_group()
    except HostError as error:
        yield Finding(check=name, status="failure", where="", text=error.message, remedy=error.hint or "")
        return
    yield from read_group(name, names, replies)


def _form_group(hosts: Hosts, wires: Sequence[Wire], backend: str) -> list[Reply]:
    """What each host's process said. Raises HostError where the first host has no port."""
    asked = {0: protocol.HoldPort(port=0)}
    held = hosts.ask(asked, protocol.PortHeld, timeout_s=_PORT_LIMIT_S, doing="find a free port")[0]
    if held.port == 0:
        raise HostError(f"{hosts.hosts[0].name}: no port is free: {held.holder}")
    errands = [
        Errand(
            host=rank,
            module=_ERRAND,
            argument={
                "rank": rank,
                "num_ranks": len(wires),
                "address": wires[0].address,
                "port": held.port,
                "backend": backend,
                "num_bytes": LARGE_BYTES,
                "start_limit_s": START_LIMIT_S,
                "limit_s": PHASE_LIMIT_S,
                "env": {
                    "GLOO_SOCKET_IFNAME": wire.interface,
                    "NCCL_SOCKET_IFNAME": f"={wire.interface}",
                    "TORCH_NCCL_BLOCKING_WAIT": "1",  # else a limit that is over ends the process without a word
                },
            },
        )
        for rank, wire in enumerate(wires)
    ]
    limit_s = 2 * START_LIMIT_S + _NUM_PHASES_AFTER_START * PHASE_LIMIT_S
    return run_errands(hosts, errands, timeout_s=limit_s)


def read_group(name: str, names: Sequence[str], replies: Sequence[Reply]) -> Iterator[Finding]:
    """What the processes' words mean. Who is missing is named by the others; who had trouble, by itself."""
    silent = {index: reply.problem for index, reply in enumerate(replies) if reply.problem}
    failed = {
        index: phase
        for index, reply in enumerate(replies)
        if reply.value
        for phase in reply.value["phases"]
        if "problem" in phase
    }
    for index, problem in silent.items():
        text = f"the process on {names[index]} ended, or hung: {problem}"
        remedy = f'On {names[index]}:  python -c "import torch.distributed"'
        yield Finding(check=name, status="failure", where=names[index], text=text, remedy=remedy)
    if failed:
        yield _tell_failure(name, names, failed, silent)
    elif not silent:
        took_s = max(float(reply.value["large_s"]) for reply in replies)
        share = 2 * (len(names) - 1) / len(names)  # of the bytes: what each host sends in a ring
        rate_mbps = LARGE_BYTES * 8 * share / max(took_s, 1e-6) / 1e6
        text = (
            f"{len(names)} hosts add up {format_bytes(LARGE_BYTES)} in {format_duration(took_s)}: "
            f"{rate_mbps:.0f} Mb/s on each link"
        )
        yield Finding(check=name, status="ok", where="", text=text)


def _tell_failure(
    name: str, names: Sequence[str], failed: Mapping[int, dict[str, Any]], silent: Mapping[int, str]
) -> Finding:
    """One finding for the group: the earliest step that failed, who was missing in it, and the first words."""
    phase_names = list(_DOING)
    earliest = min((phase["name"] for phase in failed.values()), key=phase_names.index)
    at_it = {index: phase for index, phase in failed.items() if phase["name"] == earliest}
    # Who fails at once has a reason of its own; the others wait for it until their time is over.
    first = min(at_it, key=lambda index: at_it[index]["took_s"])
    is_first_alone = all(at_it[first]["took_s"] < phase["took_s"] / 2 for i, phase in at_it.items() if i != first)
    votes: collections.Counter[int] = collections.Counter(rank for phase in at_it.values() for rank in phase["missing"])
    missing = [names[rank] for rank in sorted(votes)]
    if missing:
        where, who = join_names(missing), f"{join_names(missing)} never came"
    elif is_first_alone:
        where, who = names[first], f"first on {names[first]}"
    else:
        where, who = "", f"on {join_names([names[index] for index in at_it])}"
    remedy = f"paceline run --env {'NCCL_DEBUG=INFO' if name == 'nccl' else 'TORCH_CPP_LOG_LEVEL=INFO'} …"
    return Finding(
        check=name,
        status="warning" if set(votes) & silent.keys() else "failure",
        where=where,
        text=f"no group: {_DOING[earliest]} did not succeed; {who}: {at_it[first]['problem']}",
        remedy=remedy,
    )
