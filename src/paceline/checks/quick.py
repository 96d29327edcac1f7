"""What the hosts' details alone say: the look that every run takes before it starts, and the first part of an
examination."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.checks.differences import Row, compare_hosts
from paceline.checks.findings import Finding, check, worst_first
from paceline.checks.gpu import GPU_CHECKS
from paceline.checks.host import HOST_CHECKS
from paceline.checks.host_states import DetailsQuery, HostState, Reading, read_details
from paceline.checks.results import Result, failure, ok, run_check
from paceline.checks.surroundings import SURROUNDINGS_CHECKS
from paceline.cluster.spec import Host
from paceline.launch.facts import Facts
from paceline.launch.hosts import Hosts


@check("details")
def check_details(name: str, python: str, problem: str) -> Iterator[Result]:
    """Each host tells of itself.

    What it looks at
        Whether a small process of paceline's could read the host's details.

    Why it matters
        Nothing more can be said of a host whose details are not known; what stops this process may stop ranks, too.

    How to mend it
        What the line says. The agent there runs, with the same interpreter.
    """
    if problem:
        remedy = f"On {name}:  {python} -c 'import sysconfig'   (does it end by itself?)"
        yield failure(f"a process there could not read the host's details: {problem}", remedy)
    else:
        yield ok("its details could be read")


def make_state(host: Host, facts: Facts, reading: Reading, layout: tuple[int, int]) -> HostState:
    assert reading.details is not None
    return HostState(
        name=host.name,
        facts=facts,
        details=reading.details,
        clock_ahead_s=reading.clock_ahead_s,
        slots=layout[0],
        num_gpus=layout[1],
    )


def quick_findings(
    hosts: Hosts,
    facts: Sequence[Facts],
    layout: Sequence[tuple[int, int]],
    *,
    imports: Sequence[str] = (),
    needs_torch: bool = True,
) -> list[Finding]:
    """For the start of a run, whose hosts are open already: one short process on each host, and no waiting.

    `layout`: of each host the ranks, and the GPUs that they see. Raises InterruptedEarlyError for a signal.
    """
    states: list[HostState] = []
    readings = read_details(hosts, DetailsQuery(imports=tuple(imports), is_quick=True))
    for index, reading in enumerate(readings):
        if reading.details is not None:  # else it is busy: no reason to stop
            states.append(make_state(hosts.hosts[index], facts[index], reading, layout[index]))
    judged, _ = check_states(states, needs_torch=needs_torch)
    return worst_first(judged)


def check_states(states: Sequence[HostState], *, needs_torch: bool = True) -> tuple[list[Finding], tuple[Row, ...]]:
    """What the hosts' details say, without asking them anything more."""
    findings: list[Finding] = []
    for state in states:
        for function in (*HOST_CHECKS, *SURROUNDINGS_CHECKS, *GPU_CHECKS):
            findings += run_check(function, state.name, state)
    comparison = compare_hosts(states, needs_torch=needs_torch)
    return [*findings, *comparison.findings], comparison.rows
