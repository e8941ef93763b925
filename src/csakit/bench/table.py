"""The table for people: one block per case, one line per provider."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .figures import Figure, crossing
from .records import PEAK, Move, Row
from .shapes import Case

HEADER = ("provider", "cpu ms", "wall ms", "GF/s", "of peak", "speedup", "+ memory MiB", "beyond results", "error", "")
DEVICE_HEADER = ("provider", "device ms", *HEADER[2:])


@dataclass(frozen=True)
class Block:
    """What is shown of one case."""

    title: str
    header: tuple[str, ...]
    lines: list[tuple[str, ...]]


def blocks(rows: Sequence[Row]) -> list[Block]:
    """The rows, case by case."""
    return [_block(case, [row for row in rows if row.case == case]) for case in _cases(rows)]


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
    threads = "1 thread" if row.threads == 1 else f"{row.threads} threads"
    machine = row.processor if row.device == "cpu" else row.device
    versions = f"torch {row.torch}, csakit {row.csakit}, allocator {row.allocator}"
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


def growth(rows: Sequence[Row]) -> list[str]:
    """Per provider, where scoring takes longer than attention, when the rows hold both at several lengths."""
    lines = []
    for provider in dict.fromkeys(row.provider for row in rows):
        curves = {
            operation: {
                row.tokens: row.value
                for row in rows
                if (row.provider, row.operation, row.figure) == (provider, operation, "cpu") and row.value
            }
            for operation in ("attend", "select")
        }
        tokens = sorted(curves["attend"].keys() & curves["select"].keys())
        if len(tokens) < 2:
            continue
        at = crossing(tokens, *([curve[length] for length in tokens] for curve in curves.values()))
        said = f"not between {tokens[0]} and {tokens[-1]} tokens" if at is None else f"at about {at:.0f} tokens"
        lines.append(f"{provider}: scoring overtakes attention {said}")
    return lines


def _cases(rows: Iterable[Row]) -> list[Case]:
    return list(dict.fromkeys(row.case for row in rows))


def _block(case: Case, rows: Sequence[Row]) -> Block:
    peak = next((row.numbers for row in rows if row.provider == PEAK), None)
    title = str(case) + ("" if peak is None else f"; matrix product {peak.value:.0f} GF/s")
    by_provider: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.provider != PEAK:
            by_provider.setdefault(row.provider, {})[row.figure] = row
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
