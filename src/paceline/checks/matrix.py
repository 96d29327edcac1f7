"""Speed and round trip of every pair of hosts, as a table that a person can read. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_COLUMNS = 8
"""With more hosts than this there is one line per host instead of a line per pair."""
_LINE_WIDTH = 80
_NAME_WIDTH = 16

Pair = tuple[int, int]
"""(index of the host that sends, index of the host that receives)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
    """What was measured between hosts; a pair that is missing was not measured."""

    names: Sequence[str]
    rates_mbps: Mapping[Pair, float]
    """Megabits per second. Empty where speed was not asked for."""
    round_trips_ms: Mapping[Pair, float]
    broken: frozenset[Pair] = frozenset()
    """Pairs that could not be connected, or whose transfer stalled."""

    def as_list(self) -> list[dict[str, Any]]:
        """For programs: {`from`, `to`, `mbps`, `round_trip_ms`, `is_broken`} of each pair of which something is known;
        what was not measured is None."""
        pairs = sorted({*self.rates_mbps, *self.round_trips_ms, *self.broken})
        return [
            {
                "from": self.names[pair[0]],
                "to": self.names[pair[1]],
                "mbps": self.rates_mbps.get(pair),
                "round_trip_ms": self.round_trips_ms.get(pair),
                "is_broken": pair in self.broken,
            }
            for pair in pairs
        ]


def render_matrix(matrix: Matrix) -> list[str]:
    """Rows from, columns to; at most 80 columns wide for eight hosts. Empty where nothing was measured."""
    blocks = [("Mb/s", matrix.rates_mbps, _write_rate), ("ms", matrix.round_trips_ms, _write_ms)]
    measured = [block for block in blocks if block[1]]
    if len(matrix.names) > MAX_COLUMNS:
        return _render_hosts(matrix) if measured else []
    lines: list[str] = []
    for unit, values, write in measured:
        lines.append(_line(f"{unit}  from ↓ →", matrix.names))
        for row, name in enumerate(matrix.names):
            cells = [_cell((row, column), values, write, matrix.broken) for column in range(len(matrix.names))]
            lines.append(_line(name, cells))
    return lines


def _cell(pair: Pair, values: Mapping[Pair, float], write: Callable[[float], str], broken: frozenset[Pair]) -> str:
    if pair[0] == pair[1]:
        return "·"
    if pair in broken:
        return "✗"
    if pair not in values:
        return "?"
    return write(values[pair])


def _render_hosts(matrix: Matrix) -> list[str]:
    lines = [_line("median", ["sends", "receives", "round", "broken"]), _line("", ["Mb/s", "Mb/s", "trip ms", "pairs"])]
    for host, name in enumerate(matrix.names):
        sent = [value for (source, _), value in matrix.rates_mbps.items() if source == host]
        received = [value for (_, target), value in matrix.rates_mbps.items() if target == host]
        trips = [value for pair, value in matrix.round_trips_ms.items() if host in pair]
        num_broken = sum(host in pair for pair in matrix.broken)
        cells = [
            _write_rate(statistics.median(sent)) if sent else "?",
            _write_rate(statistics.median(received)) if received else "?",
            _write_ms(statistics.median(trips)) if trips else "?",
            str(num_broken) if num_broken else "·",
        ]
        lines.append(_line(name, cells))
    return lines


def _line(head: str, cells: Sequence[str]) -> str:
    width = min(_NAME_WIDTH, (_LINE_WIDTH - _NAME_WIDTH) // len(cells))
    return f"{_cut(head, _NAME_WIDTH - 1):<{_NAME_WIDTH}}" + "".join(
        f"{_cut(cell, width - 1):>{width}}" for cell in cells
    )


def _cut(text: str, width: int) -> str:
    """Hosts differ at the end of their names."""
    return text if len(text) <= width else "…" + text[1 - width :]


def _write_rate(rate_mbps: float) -> str:
    return f"{rate_mbps:.0f}" if rate_mbps >= 10 else f"{rate_mbps:.1f}"


def _write_ms(elapsed_ms: float) -> str:
    return f"{elapsed_ms:.0f}" if elapsed_ms >= 9.95 else f"{elapsed_ms:.1f}"
