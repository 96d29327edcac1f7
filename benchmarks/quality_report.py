"""The tables and charts of `quality.py`: from figures to text, 80 columns wide, and to SVG."""

from __future__ import annotations

import dataclasses
import html
import math
import statistics
from collections.abc import Iterable, Sequence

WIDTH, LEFT, RIGHT, ROW = 760, 230, 20, 26
COLOURS = ("#4c6ef5", "#e8590c", "#2f9e44", "#ae3ec9", "#1098ad", "#e03131", "#868e96")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A way to synchronise at its best learning rate."""

    label: str
    num_hosts: int
    lr: float
    lr_is_at_edge: bool
    losses: Sequence[float]
    """On held-out text, by seed; infinite where training failed or diverged."""
    gaps: Sequence[float]
    """How much higher than the synchronous loss of the same seed, as a share of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """A training on the slow link."""

    label: str
    lr: float
    points: Sequence[tuple[float, float]]
    """Seconds of training so far, loss on held-out text; at least one."""
    step_s: float
    reached_s: float | None
    """When the loss first was what ddp ends with."""


def spread(losses: Sequence[float]) -> float:
    """How far the seeds lie from their mean at most, as a share of it."""
    mean = statistics.mean(losses)
    return max(abs(loss - mean) for loss in losses) / mean


def gap_table(title: str, rows: Sequence[Row], synchronous: Sequence[float]) -> str:
    """The held-out losses, and how much each is above the synchronous one of the same seed."""
    lines = [title, f"  {'strategy':<26} hosts     lr    loss     gap  by seed"]
    for row in rows:
        gaps = " ".join(f"{gap:+.2%}" for gap in row.gaps) if len(row.gaps) > 1 else "one seed"
        lr = f"{row.lr:g}" + "*" * row.lr_is_at_edge
        means = f"{statistics.mean(row.losses):7.4f} {statistics.mean(row.gaps):+7.2%}"
        lines.append(f"  {row.label:<26} {row.num_hosts:>5} {lr:>6} {means}  {gaps}")
    if len(synchronous) > 1:
        lines.append(f"  The synchronous loss itself lies within {spread(synchronous):.2%} of its mean.")
    if any(row.lr_is_at_edge for row in rows):
        lines.append("  * at the edge of the grid: a better one may lie outside")
    return "\n".join(lines)


def gap_chart(title: str, rows: Sequence[Row], synchronous: Sequence[float]) -> str:
    """A dot per seed, a bar at the mean; the grey band is what the seed alone does to the synchronous loss."""
    band = spread(synchronous)
    finite = [gap for row in rows for gap in row.gaps if math.isfinite(gap)]
    ticks = nice_ticks(min(-band, *finite), max(band, *finite))
    bottom = 50 + ROW * len(rows)

    def x(gap: float) -> float:
        return LEFT + (gap - ticks[0]) / (ticks[-1] - ticks[0]) * (WIDTH - LEFT - RIGHT)

    parts = [
        f'<rect x="{x(-band):.1f}" y="40" width="{x(band) - x(-band):.1f}" height="{bottom - 40}" fill="#dee2e6"/>'
    ]
    for tick in ticks:
        parts.append(line(x(tick), 40, x(tick), bottom, "#868e96" if abs(tick) < 1e-9 else "#e9ecef"))
        parts.append(text(x(tick), bottom + 16, f"{100 * tick:+.3g} %" if abs(tick) > 1e-9 else "0", "middle"))
    for number, row in enumerate(rows):
        y = 40 + ROW * (number + 0.5)
        parts.append(text(LEFT - 10, y + 4, f"{row.label}, {row.num_hosts} hosts", "end"))
        gaps = [gap for gap in row.gaps if math.isfinite(gap)]
        parts += [f'<circle cx="{x(gap):.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[0]}" opacity="0.7"/>' for gap in gaps]
        if gaps:
            mean = x(statistics.mean(gaps))
            parts.append(line(mean, y - 8, mean, y + 8, COLOURS[1], width=3))
    parts.append(text(LEFT, bottom + 34, "held-out loss above the synchronous one of the same seed", "start"))
    return svg(title, parts, height=bottom + 44)


def time_to_loss(points: Iterable[tuple[float, float]], target: float) -> float | None:
    """When a curve of (seconds, loss) first came down to `target`, between two of its points; None if never."""
    before_s, before = 0.0, math.inf
    for s, loss in points:
        if loss <= target:
            share = (before - target) / (before - loss) if math.isfinite(before) and before > loss else 1.0
            return before_s + share * (s - before_s)
        before_s, before = s, loss
    return None


def wall_table(title: str, curves: Sequence[Curve], target: float) -> str:
    """How long each takes to the loss that the first of them, ddp, ends with."""
    head = f"{'strategy':<24} {'lr':>6} {'s/step':>7} {'loss':>7} {'after s':>8} {'to ddp’s, s':>11} {'sooner':>8}"
    lines = [title, f"  {head}"]
    first_s = curves[0].reached_s
    for curve in curves:
        end_s, loss = curve.points[-1]
        words = f"  {curve.label:<24} {curve.lr:>6g} {curve.step_s:7.3f} {loss:7.4f} {end_s:8.0f}"
        if curve.reached_s is None or first_s is None:
            lines.append(f"{words}       never")
        else:
            lines.append(f"{words} {curve.reached_s:11.0f} {first_s / curve.reached_s:6.1f} ×")
    return "\n".join([*lines, f"  ddp's loss at its end is {target:.4f}."])


def wall_chart(title: str, curves: Sequence[Curve], target: float) -> str:
    """Held-out loss against seconds of training, on a logarithmic scale of time."""
    seconds = [s for curve in curves for s, _ in curve.points]
    losses = [loss for curve in curves for _, loss in curve.points if math.isfinite(loss)]
    left, top, bottom = 60, 40, 360
    decades = math.log10(min(seconds)), math.log10(max(seconds))
    ticks = nice_ticks(min(losses), max(losses))

    def at(s: float, loss: float) -> tuple[float, float]:
        share = (math.log10(s) - decades[0]) / (decades[1] - decades[0])
        height = (loss - ticks[0]) / (ticks[-1] - ticks[0])
        return left + share * (WIDTH - left - RIGHT), bottom - height * (bottom - top)

    parts = []
    for tick in ticks:
        y = at(seconds[0], tick)[1]
        parts += [line(left, y, WIDTH - RIGHT, y, "#e9ecef"), text(left - 6, y + 4, f"{tick:.2f}", "end")]
    for s in (number * 10**power for power in range(-1, 5) for number in (1, 2, 5)):
        if min(seconds) <= s <= max(seconds):
            x = at(s, ticks[0])[0]
            parts += [line(x, top, x, bottom, "#e9ecef"), text(x, bottom + 16, f"{s:g} s", "middle")]
    y = at(seconds[0], target)[1]
    parts.append(line(left, y, WIDTH - RIGHT, y, "#868e96"))
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(s, loss) for s, loss in curve.points if loss < math.inf))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(line(WIDTH - 220, top + 12 + 18 * number, WIDTH - 200, top + 12 + 18 * number, colour, width=3))
        parts.append(text(WIDTH - 194, top + 16 + 18 * number, curve.label, "start"))
    parts.append(text(left, bottom + 34, "held-out loss after so many seconds of training", "start"))
    return svg(title, parts, height=bottom + 44)


def nice_ticks(low: float, high: float) -> list[float]:
    """At most ten round numbers, evenly spaced, that reach from below `low` to above `high`."""
    raw = max(high - low, 1e-6) / 8
    power = 10 ** math.floor(math.log10(raw))
    step = next(number * power for number in (1, 2, 5, 10) if number * power >= raw)
    return [number * step for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: int = 1) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def svg(title: str, parts: Sequence[str], *, height: float) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}"'
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="#212529"'
    back = f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>'
    caption = text(20, 22, title, "start")
    return "\n".join([f"{head} {style}>", f"<title>{html.escape(title)}</title>", back, caption, *parts, "</svg>", ""])
