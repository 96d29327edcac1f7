"""Reads a training script, without running it, for what goes wrong on many machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
from paceline.checks.results import catch_crash
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


def examine_script(path: Path, project: Path) -> tuple[list[Finding], tuple[str, ...]]:
    """What `check_script` finds, and the modules that the script can't start without."""
    imports: list[str] = []

    def look() -> list[Finding]:
        reader = Reader(path, project)
        reader.read()
        imports.extend(find_required(reader.sources))
        return check_script(path, project)

    return catch_crash("unreadable-script", look), tuple(imports)


def check_script(path: Path, project: Path) -> list[Finding]:
    """What is found in a script and in the modules of its project that it imports, by file and line.

    `project`: the folder that is copied to the other hosts; imports are followed inside it only. Nothing is raised:
    what can't be read is a finding, too, and so is a rule that fails.
    """
    reader = Reader(path, project)
    reader.read()
    if not reader.sources:
        return reader.findings
    program = Program(reader.sources)
    rules = [one for one in CHECKS.values() if one.function.__module__ in {module.__name__ for module in _RULES}]
    found = [finding for source in program.sources for rule in rules for finding in _apply(rule, source)]
    return reader.findings + list(dict.fromkeys(found))


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
