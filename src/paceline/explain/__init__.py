"""What a failed run's logs say: the first cause, what shows it, and what to do."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import PacelineError
from paceline.explain import report, signatures, sources
from paceline.explain.cause import Explanation
from paceline.explain.cause import explain as explain_logs

_RUN_WIDTH = 100
_RUN_TAIL_BYTES = 4 << 20
"""Of each rank's log at the end of a run: nobody should wait for the rest."""


def explain_name(name: str) -> str | None:
    """The entry of that name as text, or None if there is none."""
    signature = signatures.load().by_id.get(name)
    return None if signature is None else "\n".join(report.entry_text(signature, 80))


def explain_folder(folder: Path) -> Explanation:
    """The logs of a run's folder, or of any other. Raises InputError if there are none."""
    return explain_logs(sources.read_folder(folder, signatures.load()))


def explain_run(folder: Path) -> list[str]:
    """At most five lines for the end of a failed run.

    Empty where nothing is at least likely, and where it is a traceback of the user's own, which the run shows anyway.
    """
    try:
        explanation = explain_logs(sources.read_run(folder, signatures.load(), tail_bytes=_RUN_TAIL_BYTES))
    except (OSError, PacelineError):
        return []
    if explanation.confidence not in ("certain", "likely") or explanation.entry is None:
        return []
    return report.short(explanation, _RUN_WIDTH, f"paceline explain {folder}")
