"""The table for people: one block per case, one line per provider."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from . import goals
from .figures import Figure, crossing, slope
from .records import PARTS, PEAK, Move, Row
from .shapes import DTYPES, Case
from .suites import word

HEADER = ("provider", "cpu ms", "wall ms", "GF/s", "of peak", "speedup", "+ memory MiB", "beyond results", "error", "")
DEVICE_HEADER = ("provider", "device ms", *HEADER[2:])


@dataclass(frozen=True)
class Block:
    """What is shown of one case."""

    title: str
    header: tuple[str, ...]
    lines: list[tuple[str, ...]]


def blocks(rows: Sequence[Row]) -> list[Block]:
    """The rows, case by case, under each setting of the allocator."""
    keys = dict.fromkeys((row.case, row.allocator) for row in rows)
    several = len({allocator for _, allocator in keys}) > 1
    return [
        _block(
            f"{case}, allocator {allocator}" if several else str(case),
            [row for row in rows if (row.case, row.allocator) == (case, allocator)],
        )
        for case, allocator in keys
    ]


def text(rows: Sequence[Row]) -> str:
    """The blocks as plain text."""
    parts = []
    for block in blocks(rows):
        widths = [max(len(line[column]) for line in (block.header, *block.lines)) for column in range(len(block.header))]
        aligned = [
            "  ".join(
                cell.ljust(width) if number in (0, len(widths) - 1) else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(line, widths))
            )
            for line in (block.header, *block.lines)
        ]
        parts.append("\n".join([block.title, *(f"  {line.rstrip()}" for line in aligned)]))
    return "\n\n".join(parts)


def conditions(rows: Sequence[Row]) -> str:
    """One line on what the rows were measured with."""
    row = rows[0]
    counts = sorted({row.threads for row in rows})
    threads = "1 thread" if counts == [1] else f"{' and '.join(map(str, counts))} threads"
    machine = row.processor if row.device == "cpu" else row.device
    allocators = dict.fromkeys(row.allocator for row in rows)
    versions = f"torch {row.torch}, csakit {row.csakit}" + (f", allocator {row.allocator}" if len(allocators) == 1 else "")
    return f"{machine}, {threads}, {versions}, load {row.load:g}, {row.date}"


def moves(found: Sequence[Move], common: int) -> str:
    """What `records.compare` found, as text."""
    if not found:
        return f"nothing moved beyond the noise ({common} figures compared)"
    lines = [f"{len(found)} of {common} figures moved beyond the noise:"]
    for move in found:
        new, old = move.new, move.old
        word = "better" if move.better else "worse"
        lines.append(f"  {word:6} {new.provider:16} {new.figure:13} {_number(old.value)} -> {_number(new.value)} {new.unit}  ({new.case})")
    return "\n".join(lines)


def remarks(rows: Sequence[Row]) -> list[str]:
    """What the rows say taken together: variants, growth, where the time goes, starts, goals."""
    sections = (_variants(rows), growth(rows), _parts(rows), _starts(rows), goals.lines(rows))
    return [line for section in sections if section for line in (*section, "")]


def growth(rows: Sequence[Row]) -> list[str]:
    """Per provider, how attention, scoring and memory grow and where scoring takes longer than attention, from three lengths on."""
    lines = []
    for provider in dict.fromkeys(row.provider for row in rows):
        attention, scoring, memory = (
            _curve(rows, provider, *what) for what in (("attend", "cpu"), ("select", "cpu"), ("attend", "memory peak"))
        )
        tokens = sorted(attention.keys() & scoring.keys())
        if len(tokens) < 3:
            continue
        named = {"attention": attention, "scoring": scoring, "memory of attention": memory}
        powers = ", ".join(f"{name} as T^{slope(curve):.2f}" for name, curve in named.items() if len(curve) >= 3)
        lines.append(f"{provider}: {powers} over the longer half of the lengths")
        at = crossing(tokens, *([curve[length] for length in tokens] for curve in (attention, scoring)))
        said = f"not between {tokens[0]} and {tokens[-1]} tokens" if at is None else f"at about {at:.0f} tokens"
        lines.append(f"{provider}: scoring overtakes attention {said}")
    return lines


def _curve(rows: Sequence[Row], provider: str, operation: str, figure: str) -> dict[int, float]:
    """{tokens: value}."""
    return {
        row.tokens: row.value for row in rows if (row.provider, row.operation, row.figure) == (provider, operation, figure) and row.value
    }


def _variants(rows: Sequence[Row]) -> list[str]:
    """Every provider against itself."""
    lines = []
    for row in rows:
        if row.figure == "against" and row.numbers is not None:
            name = "threads" if row.baseline.endswith("thread") else "dtype" if row.baseline in DTYPES else "operation"
            lines.append(f"{row.provider}: {word(row.case, name)} over {row.baseline}: {_range(row.numbers)} x  ({row.case})")
    return lines


def _parts(rows: Sequence[Row]) -> list[str]:
    """Where the time of a call goes: milliseconds and share, a column for each provider."""
    lines = []
    for case in _cases(row for row in rows if row.figure.startswith("part ")):
        columns: dict[str, dict[str, float]] = {}
        for row in rows:
            if row.case == case and row.figure.startswith("part ") and row.value is not None:
                columns.setdefault(row.provider, {})[row.figure.removeprefix("part ")] = row.value
        lines.append(f"where the time goes, ms: {case}")
        lines.append(f"  {'':18}" + "".join(f"{provider:>24}" for provider in columns))
        for part in PARTS:
            values = [column.get(part, 0.0) for column in columns.values()]
            if any(values):
                shares = (f"{value:.1f} ({100 * value / sum(column.values()):.0f} %)" for value, column in zip(values, columns.values()))
                lines.append(f"  {part:18}" + "".join(f"{share:>24}" for share in shares))
        lines.append(f"  {'all':18}" + "".join(f"{sum(column.values()):>24.1f}" for column in columns.values()))
    return lines


def _starts(rows: Sequence[Row]) -> list[str]:
    """Tokens per second, and what a fresh process waits for."""
    said = {
        "tokens": "trains {} tokens per second",
        "import": "import takes {} ms",
        "first call": "the first call of a process takes {} ms",
    }
    return [
        f"{row.provider}: {said[row.figure].format(_range(row.numbers))}  ({row.case})"
        for row in rows
        if row.figure in said and row.numbers is not None
    ]


def _cases(rows: Iterable[Row]) -> list[Case]:
    return list(dict.fromkeys(row.case for row in rows))


def _block(about: str, rows: Sequence[Row]) -> Block:
    """The block of one case; about: what it is."""
    peak = next((row.numbers for row in rows if row.provider == PEAK), None)
    title = about + ("" if peak is None else f"; matrix product {peak.value:.0f} GF/s")
    by_provider: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.provider != PEAK:
            by_provider.setdefault(row.provider, {}).setdefault(row.figure, row)
    on_device = any("device" in figures for figures in by_provider.values())
    lines = [_line(provider, figures, "device" if on_device else "cpu") for provider, figures in by_provider.items()]
    return Block(title, DEVICE_HEADER if on_device else HEADER, lines)


def _line(provider: str, figures: dict[str, Row], clock: str) -> tuple[str, ...]:
    verdict = figures["error"]
    note = "" if verdict.status == "ok" else f"{verdict.status}: {verdict.note}"

    def cell(name: str, *, ranged: bool = False) -> str:
        numbers = figures[name].numbers if name in figures else None
        return "-" if numbers is None else _range(numbers) if ranged else _number(numbers.value)

    error = "-" if verdict.value is None else f"{verdict.value:.0e}"
    share = cell("of peak")
    return (
        provider,
        cell(clock, ranged=True),
        cell("wall"),
        cell("throughput"),
        share if share == "-" else f"{share} %",
        cell("speedup", ranged=True),
        cell("memory peak"),
        cell("memory extra"),
        error,
        note,
    )


def _range(numbers: Figure) -> str:
    return f"{_number(numbers.value)} [{_number(numbers.low)}..{_number(numbers.high)}]"


def _number(value: float | None) -> str:
    """Three digits, no exponent."""
    if value is None:
        return "-"
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
        if abs(value) >= 0.1 or not value
        else f"{value:.3f}"
    )
