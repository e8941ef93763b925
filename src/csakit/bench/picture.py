"""The picture: bars of time per case, or curves over the length of the row, as one SVG file that looks right in light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from .figures import Figure, crossing
from .records import PEAK, Row
from .shapes import Case

WIDTH, LEFT, RIGHT, LINE, CHART = 860, 190, 120, 22, 420.0
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
STYLE = (
    "<style>text{font:13px system-ui,sans-serif;fill:#1f2937}.title{font-weight:600}.small{fill:#6b7280;font-size:12px}"
    ".mark{stroke:#1f2937}.axis{stroke:#d1d5db}.paper{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e5e7eb}.small{fill:#9ca3af}.mark{stroke:#e5e7eb}.axis{stroke:#4b5563}.paper{fill:#111827}}</style>"
)


def draw(rows: Sequence[Row]) -> str:
    """The SVG of timed rows: curves when an operation was measured at three or more lengths and otherwise alike, bars if not.

    Raises:
        ValueError: no row holds a time.
    """
    clock = "device" if any(row.figure == "device" for row in rows) else "cpu"
    times = [row for row in rows if row.figure == clock and row.value]
    if not times:
        raise ValueError("rows must hold at least one time; nothing was timed")
    providers = list(dict.fromkeys(row.provider for row in times))
    colour = {provider: COLOURS[number % len(COLOURS)] for number, provider in enumerate(providers)}
    lengths: dict[Case, set[int]] = {}
    for row in times:
        lengths.setdefault(replace(row.case, shape=replace(row.case.shape, tokens=0)), set()).add(row.tokens)
    if max(map(len, lengths.values())) >= 3:
        return _curves(rows, times, clock)
    return _bars(rows, times, clock, colour)


def _page(height: float, title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, STYLE, f'<rect class="paper" width="{WIDTH}" height="{height:.0f}"/>', *parts, "</svg>", ""])


def _bars(rows: Sequence[Row], times: Sequence[Row], clock: str, colour: dict[str, str]) -> str:
    """A group of bars per case, each group to its own scale; the line across a bar's end spans the 20 to 80 % quantiles."""
    parts, y = [], 12.0
    several = len({row.allocator for row in times}) > 1
    for case, allocator in dict.fromkeys((row.case, row.allocator) for row in times):
        group = [row for row in times if (row.case, row.allocator) == (case, allocator)]
        speedups: dict[str, Row] = {}
        for row in rows:
            if (row.case, row.allocator, row.figure) == (case, allocator, "speedup"):
                speedups.setdefault(row.provider, row)
        longest = max(_numbers(row).high for row in group)
        y += LINE
        parts.append(f'<text class="title" x="12" y="{y - 6:.0f}">{escape(f"{case}, {allocator}" if several else str(case))}</text>')
        for row in group:
            numbers, scale = _numbers(row), (WIDTH - LEFT - RIGHT) / longest
            middle, end = y + LINE / 2, LEFT + numbers.value * scale
            parts.append(f'<text x="{LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(row.provider)}</text>')
            bar = f'<rect x="{LEFT}" y="{y + 3:.1f}" width="{end - LEFT:.1f}" height="{LINE - 6}" rx="2" fill="{colour[row.provider]}"/>'
            parts.append(bar)
            low, high = (LEFT + x * scale for x in (numbers.low, numbers.high))
            parts.append(f'<line class="mark" x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>')
            speedup = speedups.get(row.provider)
            said = f"{numbers.value:.3g} ms" + (
                f", {speedup.value:.1f}x" if speedup and speedup.value and speedup.baseline != row.provider else ""
            )
            parts.append(f'<text class="small" x="{max(end, high) + 6:.1f}" y="{middle + 4:.1f}">{said}</text>')
            y += LINE
        y += 8
    baseline = next((row.baseline for row in rows if row.figure == "speedup"), "")
    y += LINE
    name = {"cpu": "CPU time", "device": "device time"}[clock]
    foot = f"{name}, median and 20 to 80 % quantiles" + (f"; speedups over {baseline}, pair by pair" if baseline else "")
    parts.append(f'<text class="small" x="12" y="{y - 6:.0f}">{escape(foot)}</text>')
    return _page(y + 4, foot, parts)


def _curves(rows: Sequence[Row], times: Sequence[Row], clock: str) -> str:
    """Time over tokens and, where it was measured, memory: both axes logarithmic, one curve per operation and provider."""
    name = {"cpu": "CPU time", "device": "device time"}[clock]
    memory = [row for row in rows if row.figure == "memory peak" and row.value]
    marks = _crossings(times)
    parts, foot = _chart(times, "ms", 20.0, marks), f"{name} over tokens, medians"
    if marks:
        foot += "; dotted: scoring overtakes attention"
    parts.append(f'<text class="small" x="12" y="{CHART - 4:.0f}">{foot}</text>')
    if not memory:
        return _page(CHART, foot, parts)
    parts += _chart(memory, "MiB", CHART + 20.0, ())
    parts.append(f'<text class="small" x="12" y="{2 * CHART - 4:.0f}">peak memory beyond the inputs over tokens, results included</text>')
    return _page(2 * CHART, foot, parts)


def _crossings(times: Sequence[Row]) -> list[float]:
    """The tokens at which scoring overtakes attention, for each provider."""
    found = []
    for provider in dict.fromkeys(row.provider for row in times):
        curves = [
            {row.tokens: _numbers(row).value for row in times if (row.provider, row.operation) == (provider, operation)}
            for operation in ("attend", "select")
        ]
        tokens = sorted(curves[0].keys() & curves[1].keys())
        at = crossing(tokens, *([curve[length] for length in tokens] for curve in curves)) if len(tokens) > 1 else None
        found += [] if at is None else [at]
    return found


def _chart(rows: Sequence[Row], unit: str, top: float, marks: Sequence[float]) -> list[str]:
    """Curves below `top`, with a vertical line at each mark."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        curves.setdefault(f"{row.operation}, {row.provider}", []).append((row.tokens, _numbers(row).value))
    xs = [x for curve in curves.values() for x, _ in curve]
    ys = [y for curve in curves.values() for _, y in curve]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)) + 1e-9)
    span, bottom = max(math.log2(max(xs) / min(xs)), 1e-9), top + CHART - 60

    def place(x: float, y: float) -> tuple[float, float]:
        across = 70 + math.log2(x / min(xs)) / span * (WIDTH - 70 - 230)
        return across, bottom - (math.log10(y) - low) / (high - low) * (bottom - top)

    parts = []
    for power in range(low, high + 1):
        _, y = place(min(xs), 10.0**power)
        parts.append(f'<line class="axis" x1="70" x2="{WIDTH - 230}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" x="62" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} {unit}</text>')
    for x in sorted(set(xs)):
        across, _ = place(x, min(ys))
        parts.append(f'<text class="small" x="{across:.1f}" y="{bottom + 20:.0f}" text-anchor="middle">{x // 1024}K</text>')
    for mark in marks:
        across, _ = place(mark, min(ys))
        parts.append(f'<line class="mark" stroke-dasharray="2 4" x1="{across:.1f}" x2="{across:.1f}" y1="{top:.0f}" y2="{bottom:.0f}"/>')
    for number, (name, curve) in enumerate(curves.items()):
        colour, points = COLOURS[number % len(COLOURS)], [place(x, y) for x, y in sorted(curve)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(f'<text x="{WIDTH - 215}" y="{top + 20 + LINE * number}" style="fill:{colour}">{escape(name)}</text>')
    return parts


def _numbers(row: Row) -> Figure:
    numbers = row.numbers
    assert numbers is not None and row.provider != PEAK
    return numbers
