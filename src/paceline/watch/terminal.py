"""The picture of a run as lines for a terminal. Pure: the width is an argument."""

from __future__ import annotations

from paceline.units import format_bytes, format_count, format_duration
from paceline.watch.fold import RunView


def rule(text: str, width: int) -> str:
    """`─ paceline ─ text ────`, as wide as the terminal but at most 100 columns."""
    head = f"─ paceline ─ {text} "
    return head + "─" * max(0, min(width, 100) - len(head))


def checkpoint_path(view: RunView) -> str:
    """Where the newest checkpoint is, with the host of rank 0, which writes it, unless it is plainly this one."""
    assert view.checkpoint is not None
    host = view.hosts[0]
    return view.checkpoint.path if host == "localhost" else f"{host}:{view.checkpoint.path}"


def render_summary(view: RunView, *, duration_s: float, log_folder: str, width: int) -> list[str]:
    """The closing lines of a run that went well."""
    ranks = f"{view.num_ranks} rank{'s' if view.num_ranks != 1 else ''}"
    lines = [rule(f"{ranks} on {', '.join(view.hosts)} · {format_duration(duration_s)}", width)]
    facts: list[str] = []
    if view.samples_per_s is not None:
        facts.append(f"{format_count(view.samples_per_s)} samples/s")
    if view.sync_share is not None:
        facts.append(f"{view.sync_share:.0%} of the time in synchronisation")
    if view.progress and len(view.hosts) > 1:
        facts.append(f"{format_bytes(view.sent_bytes)} sent to other hosts")
    if facts:
        lines.append("  " + " · ".join(facts))
    if view.num_ranks > 1 and view.num_alone == view.num_ranks:
        lines.append("  note        no rank made a process group: each trained by itself, on its own")
    if view.checkpoint is not None:
        lines.append(f"  checkpoint  {checkpoint_path(view)} ({format_bytes(view.checkpoint.num_bytes)})")
    lines.append(f"  logs        {log_folder}")
    return lines
