"""Small pictures as inline SVG: curves over the steps of a run, and the bars of one query's selection.

Colours are CSS classes, so that the page decides them and light and dark both work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 34


@dataclass(frozen=True)
class Curve:
    """A line or a set of dots: its name, its points (x, y) and its CSS class."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str
    dots: bool = False


@dataclass(frozen=True)
class Band:
    """A named stretch of the x axis."""

    name: str
    start: float
    stop: float


def chart(curves: Sequence[Curve], bands: Sequence[Band], *, unit: str, x_name: str = "steps", logarithmic: bool = False) -> str:
    """A chart of the curves over the bands; with `logarithmic` the y axis counts factors. Empty when no curve has a point."""
    curves = [
        Curve(c.name, [p for p in c.points if math.isfinite(p[1]) and (p[1] > 0 or not logarithmic)], c.style, c.dots) for c in curves
    ]
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    place = _Axes.around(curves, bands, logarithmic)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(unit)} over {escape(x_name)}">']
    for number, band in enumerate(bands):
        left, right = place.x(band.start), place.x(band.stop)
        parts.append(
            f'<rect class="band{number % 2}" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
        )
        parts.append(f'<text x="{(left + right) / 2:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(band.name)}</text>')
    for value in place.ticks():
        height = place.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for curve in curves:
        points = [(place.x(x), place.y(y)) for x, y in curve.points]
        if curve.dots or len(points) == 1:
            parts += [f'<circle class="dot {curve.style}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in points]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="curve {curve.style}" points="{path}"/>')
    parts.append("</svg>")
    legend = "".join(f'<span><i class="{curve.style}"></i>{escape(curve.name)}</span>' for curve in curves)
    return f'<figure><figcaption>{escape(unit)}<span class="legend">{legend}</span></figcaption>{"".join(parts)}</figure>'


def bars(teacher: Sequence[float], student: Sequence[float], picked: Sequence[int]) -> str:
    """One query: the teacher's share of each entry upwards, the student's downwards, a mark under each entry picked."""
    count = max(1, len(teacher))
    step = WIDTH / count
    half = 70
    top = max([*teacher, *student, 1e-9])
    parts = [f'<svg viewBox="0 0 {WIDTH} {2 * half + 16}" role="img" aria-label="teacher and student of one query">']
    for entry, (want, have) in enumerate(zip(teacher, student)):
        left, width = entry * step, max(step - 1, 0.5)
        for share, style, name in ((want, "teacher", "teacher"), (have, "student", "student")):
            height = half * share / top
            y = half - height if style == "teacher" else half
            parts.append(
                f'<rect class="{style}" x="{left:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}">'
                f"<title>entry {entry}: {name} {share:.4f}</title></rect>"
            )
    parts.append(f'<line class="axis" x1="0" x2="{WIDTH}" y1="{half}" y2="{half}"/>')
    for entry in picked:
        title = f"<title>entry {entry} picked</title>"
        size = f'width="{max(step - 1, 2):.2f}" height="8"'
        parts.append(f'<rect class="picked" x="{entry * step:.2f}" y="{2 * half + 4}" {size}>{title}</rect>')
    parts.append("</svg>")
    return "".join(parts)


@dataclass(frozen=True)
class _Axes:
    left: float
    right: float
    low: float
    high: float
    logarithmic: bool

    @classmethod
    def around(cls, curves: Sequence[Curve], bands: Sequence[Band], logarithmic: bool) -> _Axes:
        xs = [x for curve in curves for x, _ in curve.points] + [edge for band in bands for edge in (band.start, band.stop)]
        ys = [math.log10(y) if logarithmic else y for curve in curves for _, y in curve.points]
        low, high = min(ys), max(ys)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
        return cls(min(xs), max(max(xs), min(xs) + 1), low - margin, high + margin, logarithmic)

    def x(self, value: float) -> float:
        return LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        value = math.log10(value) if self.logarithmic else value
        return TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> list[float]:
        """About four round numbers of the y axis."""
        if self.logarithmic and self.high - self.low > 1:
            return [10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1)]
        low, high = (10**self.low, 10**self.high) if self.logarithmic else (self.low, self.high)
        rough = (high - low) / 4
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
        return [round(step * number, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
