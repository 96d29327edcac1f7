"""Reads a training script, without running it, for what goes wrong on many machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.checks import (
    rules_collectives,
    rules_data,
    rules_devices,
    rules_gradients,
    rules_launching,
    rules_output,
    rules_paths,
    rules_saving,
)
from paceline.checks.findings import CHECKS, Check, Finding
from paceline.checks.imports import find_required
from paceline.checks.program import Program
from paceline.checks.reading import Reader
from paceline.checks.results import crashed
from paceline.checks.rules_launching import find_nccl
from paceline.checks.source import Source

_RULES = (
    rules_launching,
    rules_devices,
    rules_data,
    rules_gradients,
    rules_collectives,
    rules_saving,
    rules_output,
    rules_paths,
)


class ScriptReport(NamedTuple):
    """What reading a script has brought."""

    findings: list[Finding]
    imports: tuple[str, ...]
    """Modules that it can't start without."""
    nccl_at: str
    """Where it asks for NCCL in any case, as `train.py:12`; empty where it doesn't."""


def examine_script(path: Path, project: Path) -> ScriptReport:
    """Reads a script and the modules of its project that it imports. Raises nothing.

    `project`: the folder that is copied to the other hosts; imports are followed inside it only.
    """
    try:
        reader = Reader(path, project)
        reader.read()
        if not reader.sources:
            return ScriptReport(reader.findings, (), "")
        program = Program(reader.sources)
        findings = [*reader.findings, *_check(program)]
        return ScriptReport(findings, find_required(reader.sources, reader.holds), find_nccl(program))
    except Exception as error:  # noqa: BLE001  # whatever a file of somebody's holds
        result = crashed(error)
        finding = Finding(check="unreadable-script", status=result.status, where=path.name, text=result.text)
        return ScriptReport([finding], (), "")


def check_script(path: Path, project: Path) -> list[Finding]:
    """What `examine_script` finds, by file and line: what can't be read, and a rule that fails, too."""
    return examine_script(path, project).findings


def _check(program: Program) -> list[Finding]:
    rules = [one for one in CHECKS.values() if one.function.__module__ in {module.__name__ for module in _RULES}]
    found = [finding for source in program.sources for rule in rules for finding in _apply(rule, source)]
    return list(dict.fromkeys(found))


def _apply(rule: Check, source: Source) -> Iterator[Finding]:
    """A rule's findings in one file, without those that a comment turns off."""
    try:
        for finding in rule.function(source):
            home, line = _place(source, finding)
            if not home.ignores(line, finding.check):
                yield finding
    except Exception as error:  # noqa: BLE001 - one rule that fails must not hide what the others find
        yield Finding(
            check=rule.name,
            status="crashed",
            where=source.name,
            text=f"this rule failed on the file: {type(error).__name__}: {error}",
        )


def _place(source: Source, finding: Finding) -> tuple[Source, int]:
    """The file and the line of a finding, which may be in another file than the one that was looked at."""
    name, _, line = finding.where.rpartition(":")
    home = next((one for one in source.program.sources if one.name == name), source)
    return home, int(line)
