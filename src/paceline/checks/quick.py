"""What the hosts' details alone say: the look that every run takes before it starts, and the first part of an
examination."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.checks.differences import Row, compare_hosts
from paceline.checks.findings import Finding, check, worst_first
from paceline.checks.gpu import GPU_CHECKS
from paceline.checks.host import HOST_CHECKS
from paceline.checks.patients import Examination, Patient, Reading, read_vitals
from paceline.checks.surroundings import SURROUNDINGS_CHECKS
from paceline.checks.verdicts import Verdict, failure, ok, run_check
from paceline.cluster.spec import Host
from paceline.launch.facts import Facts
from paceline.launch.hosts import Hosts


@check("vitals")
def check_vitals(name: str, python: str, problem: str) -> Iterator[Verdict]:
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


def make_patient(host: Host, facts: Facts, reading: Reading, layout: tuple[int, int]) -> Patient:
    assert reading.vitals is not None
    return Patient(
        name=host.name,
        facts=facts,
        vitals=reading.vitals,
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
    patients: list[Patient] = []
    readings = read_vitals(hosts, Examination(imports=tuple(imports), is_quick=True))
    for index, reading in enumerate(readings):
        if reading.vitals is not None:  # else it is busy: no reason to stop
            patients.append(make_patient(hosts.hosts[index], facts[index], reading, layout[index]))
    judged, _ = judge(patients, needs_torch=needs_torch)
    return worst_first(judged)


def judge(patients: Sequence[Patient], *, needs_torch: bool = True) -> tuple[list[Finding], tuple[Row, ...]]:
    """What the hosts' details say, without asking them anything more."""
    findings: list[Finding] = []
    for patient in patients:
        for function in (*HOST_CHECKS, *SURROUNDINGS_CHECKS, *GPU_CHECKS):
            findings += run_check(function, patient.name, patient)
    comparison = compare_hosts(patients, needs_torch=needs_torch)
    return [*findings, *comparison.findings], comparison.rows
