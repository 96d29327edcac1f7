"""Is every host a machine of its own? Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from paceline.checks.findings import check
from paceline.checks.host_states import HostState
from paceline.checks.results import Result


@check("one-machine-each")
def check_one_machine_each(states: Sequence[HostState]) -> Iterator[Result]:
    """Every host is a machine of its own, with a name of its own.

    What it looks at
        Host names, the kernel's boot id, /etc/machine-id, and the namespaces that containers live in.

    Why it matters
        NCCL takes two ranks for neighbours when host name and boot id are equal; two containers of one machine with the
        same name then look for memory that they don't share. Copies of one disk get the same address by DHCP.

    How to mend it
        Name each machine once; `hostnamectl set-hostname NAME`; `systemd-machine-id-setup` after removing
        /etc/machine-id.
    """
    results: list[Result] = []
    for one, two in itertools.combinations(states, 2):
        result = _compare_identities(one, two)
        if result is not None:
            results.append(result)
    yield from results or [Result(status="ok", text="every host is a machine of its own")]


def are_apart(states: Sequence[HostState]) -> bool:
    """No machine is there under two names."""
    return not any(_are_one(one, two) for one, two in itertools.combinations(states, 2))


def _are_one(one: HostState, two: HostState) -> bool:
    a, b = one.details, two.details
    return a.boot_id == b.boot_id and a.namespaces == b.namespaces and a.hostname == b.hostname


def _compare_identities(one: HostState, two: HostState) -> Result | None:
    a, b = one.details, two.details
    both = f"{one.name} and {two.name}"
    rename = f"On {two.name}:  hostnamectl set-hostname NEW-NAME"
    if _are_one(one, two):
        text = f"{both} are one machine"
        return Result(status="warning", text=text, remedy=f"name it once, with all its ranks: -H {one.name}:2")
    named = {"NCCL_HOSTID"} & a.variables.keys() & b.variables.keys()
    if a.boot_id == b.boot_id and a.hostname == b.hostname and not named:
        text = f"{both} are containers of one machine, both called {a.hostname}: NCCL takes them for one host"
        remedy = f"docker run --hostname NEW-NAME ...   (or env.NCCL_HOSTID={two.name} in the hostfile)"
        return Result(status="failure" if one.num_gpus and two.num_gpus else "warning", text=text, remedy=remedy)
    if a.hostname == b.hostname:
        text = f"{both} both call themselves {a.hostname}, which is how libraries and logs tell hosts apart"
        return Result(status="warning", text=text, remedy=rename)
    if a.machine_id and a.machine_id == b.machine_id and a.boot_id != b.boot_id:
        remedy = f"On {two.name}:  rm /etc/machine-id; systemd-machine-id-setup   (as root; reboot)"
        text = f"{both} have one machine id, as copies of one disk do: DHCP may give both the same address"
        return Result(status="warning", text=text, remedy=remedy)
    return None
