"""One row per figure: what was measured, where, and the number with its quantiles; as CSV and JSON.

A file grows while a run goes on: the rows of a contest are written together, in one piece, as soon as they are measured.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .figures import Figure, beyond_noise
from .shapes import Case, Shape

# where the time of a call goes, see profile.py
PARTS = (
    "attention",
    "scoring",
    "objective",
    "compression",
    "projections",
    "rotation and norms",
    "experts",
    "streams",
    "optimizer",
    "other",
    "python",
)
FIGURES = {
    # name: (unit, whether less is better)
    "error": ("relative", True),
    "cpu": ("ms", True),
    "wall": ("ms", True),
    "device": ("ms", True),
    "throughput": ("GF/s", False),
    "of peak": ("%", False),
    "speedup": ("x", False),  # over the baseline, another provider at the same case
    "against": ("x", False),  # over itself at the baseline, another case of the contest
    "tokens": ("tokens/s", False),
    "memory peak": ("MiB", True),
    "memory extra": ("MiB", True),
    "import": ("ms", True),
    "first call": ("ms", True),
    **{f"part {name}": ("ms", True) for name in PARTS},
}
STATUSES = ("ok", "disagrees", "skipped", "failed")
PEAK = "matrix product"  # the provider whose throughput is the machine's peak


@dataclass(frozen=True)
class Row:
    """A figure of one provider at one case.

    Attributes:
        status: ok; disagrees: not timed, the results were wrong; skipped: not run, note says why; failed: it raised.
        figure: a key of FIGURES; rows of a provider that was not timed have the figure error alone.
        value, low, high: median, 20 and 80 % quantile; None where there is none.
        baseline: for speedup and against, who or what it is relative to.
        provider_version .. date: what it ran on.
    """

    suite: str
    operation: str
    tokens: int
    heads: int
    width: int
    topk: int
    window: int
    ratio: int
    index_heads: int
    index_width: int
    selection: str
    dtype: str
    provider: str
    status: str
    figure: str
    value: float | None
    low: float | None
    high: float | None
    unit: str
    repeats: int
    baseline: str
    note: str
    provider_version: str
    csakit: str
    torch: str
    python: str
    device: str
    processor: str
    threads: int
    allocator: str
    load: float
    date: str

    @property
    def case(self) -> Case:
        shape = Shape(**{field.name: getattr(self, field.name) for field in fields(Shape)})
        return Case(self.operation, shape, self.selection, self.dtype, self.threads)

    @property
    def numbers(self) -> Figure | None:
        if self.value is None:
            return None
        return Figure(self.value, self.value if self.low is None else self.low, self.value if self.high is None else self.high)

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two rows of two runs the same measurement."""
        return (self.case, self.provider, self.figure, self.baseline, self.device, self.allocator)


COLUMNS = tuple(field.name for field in fields(Row))
_WHOLE = {"tokens", "heads", "width", "topk", "window", "ratio", "index_heads", "index_width", "repeats", "threads"}
_REAL = {"value", "low", "high", "load"}


def append(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows behind those of a table, which may be new.

    The file is replaced as a whole: whoever is stopped leaves whole contests behind.

    Raises:
        OSError: it cannot be written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    before = path.read_text() if path.exists() else ""
    if not before:
        writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    unfinished = path.with_name(f"{path.name}.part")
    with unfinished.open("w") as file:
        file.write(before + text.getvalue())
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def read_csv(path: Path) -> list[Row]:
    """The rows of a table.

    Raises:
        ValueError: other columns, or a value that is no number where one belongs.
        OSError: the file cannot be read.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} is no table of csakit bench: it lacks the columns {', '.join(missing)}")
        return [_row(path, number, line) for number, line in enumerate(reader, 2)]


def _row(path: Path, number: int, line: dict[str, str]) -> Row:
    try:
        values: dict[str, Any] = {name: line[name] for name in COLUMNS}
        values |= {name: int(line[name]) for name in _WHOLE}
        values |= {name: float(line[name]) if line[name] else None for name in _REAL}
        return Row(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {number}: {error}") from error


@dataclass(frozen=True)
class Move:
    """A figure that moved beyond the noise."""

    old: Row
    new: Row
    factor: float  # new / old
    better: bool


def compare(old: Sequence[Row], new: Sequence[Row]) -> tuple[list[Move], int]:
    """What moved between two runs, most first, and how many figures both have.

    A figure moved when the ranges from 20 to 80 % do not touch; figures without a range (memory) when they differ by more than 5 % and
    1 MiB. Times depend on what else the machine does; speedups, measured in pairs within a run, do so less.
    """
    before = {row.key: row for row in old}
    moves, common = [], 0
    for row in new:
        past = before.get(row.key)
        if row.figure == "error" or past is None or past.numbers is None or row.numbers is None:
            continue
        common += 1
        was, now = past.numbers, row.numbers
        factor = now.value / was.value if was.value else float("inf") if now.value else 1.0
        ranges = past.low is not None and row.low is not None
        moved = beyond_noise(was, now) if ranges else abs(now.value - was.value) > max(0.05 * was.value, 1)
        if moved:
            moves.append(Move(past, row, factor, (now.value < was.value) == FIGURES[row.figure][1]))
    moves.sort(key=lambda move: max(move.factor, 1 / max(move.factor, 1e-9)), reverse=True)
    return moves, common
