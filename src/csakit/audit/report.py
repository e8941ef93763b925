"""Verdicts of an audit, and the same table as text, rich, Markdown and JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Verdict:
    """What one probe found. `measured` and `limit` are None and "" where nothing could be measured."""

    probe: str
    status: Literal["pass", "fail", "not tested"]
    measured: float | None
    limit: str
    explanation: str


@dataclass(frozen=True)
class Report:
    """The verdicts on one candidate, and the known mistakes that give its losses, where a probe failed."""

    candidate: str
    verdicts: tuple[Verdict, ...]
    fits: str | None = None

    @property
    def passed(self) -> bool:
        """True when something was tested and no probe failed."""
        return not self.failed and any(verdict.status == "pass" for verdict in self.verdicts)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the probes that failed."""
        return tuple(verdict.probe for verdict in self.verdicts if verdict.status == "fail")

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values for JSON; a measured number that is not finite becomes None."""
        verdicts = [asdict(verdict) for verdict in self.verdicts]
        for verdict in verdicts:
            if verdict["measured"] is not None and not math.isfinite(verdict["measured"]):
                verdict["measured"] = None
        return {"candidate": self.candidate, "passed": self.passed, "fits": self.fits, "verdicts": verdicts}

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """The table: probe, verdict, measured, limit, explanation."""
        return [(v.probe, v.status, "" if v.measured is None else f"{v.measured:.3g}", v.limit, v.explanation) for v in self.verdicts]

    @property
    def summary(self) -> str:
        """One line: how many probes passed, failed and were not tested, and the mistake that fits."""
        counts = {status: sum(verdict.status == status for verdict in self.verdicts) for status in ("pass", "fail", "not tested")}
        line = f"{self.candidate}: {counts['pass']} passed, {counts['fail']} failed, {counts['not tested']} not tested"
        return line if self.fits is None else f"{line}; {self.fits}"

    def __str__(self) -> str:
        rows = [HEADER, *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]).rstrip() for row in rows]
        return "\n".join([*lines, self.summary])


HEADER = ("probe", "verdict", "measured", "limit", "what it says")


@dataclass(frozen=True)
class Matrix:
    """What catches what: one report per candidate, the right ones first."""

    right: tuple[Report, ...]
    wrong: tuple[Report, ...]

    @property
    def passed(self) -> bool:
        """True when every right candidate passes and every wrong one is caught by at least one probe."""
        return all(report.passed for report in self.right) and all(report.failed for report in self.wrong)

    @property
    def probes(self) -> list[str]:
        """Names of the columns."""
        return [verdict.probe for verdict in self.right[0].verdicts]

    def cells(self) -> list[tuple[str, list[str]]]:
        """Rows of the table: a candidate and its marks, "x" where a probe fails, "-" where it is not tested."""
        marks = {"pass": "", "fail": "x", "not tested": "-"}
        return [(report.candidate, [marks[v.status] for v in report.verdicts]) for report in (*self.right, *self.wrong)]

    def as_dict(self) -> dict[str, Any]:
        """The matrix as plain values for JSON."""
        return {"passed": self.passed, "right": [r.as_dict() for r in self.right], "wrong": [r.as_dict() for r in self.wrong]}

    def markdown(self, probes: dict[str, str], mistakes: dict[str, str]) -> str:
        """The matrix with numbered columns, then what the numbers and the rows stand for."""
        numbers = range(1, len(self.probes) + 1)
        lines = [_row("", *map(str, numbers)), _row("---", *[":-:"] * len(numbers))]
        lines += [_row(f"`{name}`", *marks) for name, marks in self.cells()]
        lines += ["", _row("", "probe", "true of a right candidate"), _row("---", "---", "---")]
        lines += [_row(str(number), f"`{name}`", probes[name]) for number, name in zip(numbers, self.probes)]
        lines += ["", _row("mistake", "what it does"), _row("---", "---")]
        lines += [_row(f"`{name}`", mistakes[name]) for name, _ in self.cells() if name in mistakes]
        return "\n".join(lines)

    def __str__(self) -> str:
        rows, names = self.cells(), self.probes
        width = max(len(name) for name, _ in rows)
        numbers = [str(number) for number in range(1, len(names) + 1)]
        lines = [" " * width + "".join(number.rjust(3) for number in numbers)]
        lines += [name.ljust(width) + "".join(mark.rjust(3) for mark in marks) for name, marks in rows]
        legend = [f"{number.rjust(2)} {name}" for number, name in zip(numbers, names)]
        return "\n".join([*(line.rstrip() for line in lines), "", *legend])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
