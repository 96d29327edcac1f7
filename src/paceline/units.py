"""Numbers as people read them."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """1234567 -> '1.2 MB' (decimal units, as on network and disk labels)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_duration(duration_s: float) -> str:
    """75.2 -> '1m15s'; below ten seconds with one decimal."""
    if duration_s < 9.95:  # from there on it would round to 10.0
        return f"{duration_s:.1f}s"
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m{seconds:02d}s"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def format_count(count: float) -> str:
    """41234 -> '41.2k'."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}" if count >= 100 else f"{count:.3g}"
