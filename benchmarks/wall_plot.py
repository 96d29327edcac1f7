"""The figures of `wall.py` as a picture: how busy each way of synchronising keeps the machines.

benchmarks/wall_plot.py FILE docs/wall.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT, TOP, ROW = 760, 190, 240, 78, 26
BAR = 16
TEXT, FAINT, OTHERS, OURS, SURFACE, GRID = "#1f2328", "#59636e", "#8c959f", "#0969da", "#ffffff", "#d1d9e0"
BOLD = "font-weight='600'"
FONT = "font-family='system-ui, sans-serif' font-size='13'"


def main() -> None:
    """Draw the picture."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.write_text("\n".join(draw(json.loads(source.read_text()))) + "\n")


def draw(result: dict[str, Any]) -> Iterator[str]:
    """The lines of an SVG file."""
    rows = [row for row in result["rows"] if "busy" in row and row["strategy"] != "compute"]
    bottom = TOP + ROW * len(rows)
    settings = result["settings"]
    title = f"Share of a training step that is compute, {settings['hosts']} hosts on {settings['rate']} links"
    model = f"{settings['model_bytes'] / 1e6:g} MB of float32 weights, {settings['emulated_compute_s']:g} s of emulated"
    yield f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {bottom + 40}' width='{WIDTH}' {FONT}>"
    yield f"<title>{escape(title)}</title>"
    yield f"<rect width='100%' height='100%' rx='8' fill='{SURFACE}'/>"
    yield text(16, 28, title, font=f"font-size='16' {BOLD}")
    yield text(16, 48, f"{model} compute a step; all hosts on one machine with {settings['cores']} cores", FAINT)
    yield text(WIDTH - 16 - 90, TOP - 8, "step", FAINT, anchor="end")
    yield text(WIDTH - 16, TOP - 8, "MB a step", FAINT, anchor="end")
    for percent in (0, 25, 50, 75, 100):
        x = place(percent / 100)
        yield f"<line x1='{x:.1f}' y1='{TOP}' x2='{x:.1f}' y2='{bottom}' stroke='{GRID}'/>"
        yield text(x, bottom + 20, f"{percent} %", FAINT, anchor="middle")
    for number, row in enumerate(rows):
        yield from draw_row(row, TOP + ROW * number + ROW / 2)
    yield "</svg>"


def draw_row(row: dict[str, Any], middle: float) -> Iterator[str]:
    """A name, a bar with its share, and two figures."""
    is_ours = row["counted_by"] == "the sender"
    end = place(min(row["busy"], 1.0))
    baseline = middle + 5
    yield text(LEFT - 10, baseline, row["strategy"], anchor="end")
    shape = f"x='{LEFT}' y='{middle - BAR / 2:.1f}' width='{end - LEFT:.1f}' height='{BAR}' rx='2'"
    yield f"<rect {shape} fill='{OURS if is_ours else OTHERS}'/>"
    yield text(end + 6, baseline, f"{100 * row['busy']:.0f} %", font=BOLD)
    yield text(WIDTH - 16 - 90, baseline, f"{row['step_s']:.2f} s", FAINT, anchor="end")
    yield text(WIDTH - 16, baseline, f"{row['bytes_per_step'] / 1e6:.1f}", FAINT, anchor="end")


def place(share: float) -> float:
    """Where a share of 0 to 1 ends."""
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def text(x: float, y: float, words: str, fill: str = TEXT, *, anchor: str = "start", font: str = "") -> str:
    """One line of text."""
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{fill}' {font}>{escape(words)}</text>"


if __name__ == "__main__":
    main()
