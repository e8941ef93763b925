"""Verdicts of an audit: the whole in a word, the table as text, Markdown and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .closest import Fit
from .picture import Picture
from .places import Place


@dataclass(frozen=True)
class Verdict:
    """What one probe found. `measured` and `limit` are None and "" where nothing could be measured."""

    probe: str
    status: Literal["pass", "fail", "not tested"]
    measured: float | None
    limit: str
    explanation: str


# A loss that keeps these on ordinary rows is the right one, whatever it does in the corners.
ORDINARY = frozenset(
    {"window", "sink", "single-head-control", "worked-teacher", "sparse-loss", "dense-loss", "gradient-isolation", "indexer-trains"}
)


@dataclass(frozen=True)
class Report:
    """The verdicts on one candidate, its conventions, and, where a probe failed, which known mistake fits and where to look."""

    candidate: str
    verdicts: tuple[Verdict, ...]
    fit: Fit | None = None
    conventions: Mapping[str, str] = field(default_factory=dict)
    places: tuple[Place, ...] = ()
    picture: Picture | None = None

    @property
    def passed(self) -> bool:
        """True when something was tested and no probe failed."""
        return not self.failed and any(verdict.status == "pass" for verdict in self.verdicts)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the probes that failed."""
        return tuple(verdict.probe for verdict in self.verdicts if verdict.status == "fail")

    @property
    def fits(self) -> str | None:
        """Which known mistake fits best, in words; None where no probe failed."""
        return None if self.fit is None else self.fit.text

    @property
    def verdict(self) -> Literal["correct", "defects", "wrong", "not tested"]:
        """The whole in a word: "defects" is a loss that is right on ordinary rows and fails in a corner."""
        if self.passed:
            return "correct"
        if not self.failed:
            return "not tested"
        passed = {verdict.probe for verdict in self.verdicts if verdict.status == "pass"}
        return "defects" if not ORDINARY & set(self.failed) and {"sparse-loss", "dense-loss"} & passed else "wrong"

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values for JSON; a measured number that is not finite becomes None."""
        return {
            "candidate": self.candidate,
            "passed": self.passed,
            "verdict": self.verdict,
            "fits": self.fits,
            "fit": None if self.fit is None else {**_finite(asdict(self.fit)), "mistakes": list(self.fit.mistakes)},
            "conventions": dict(self.conventions),
            "picture": None if self.picture is None else _finite(asdict(self.picture)),
            "places": [asdict(place) for place in self.places],
            "verdicts": [_finite(asdict(verdict)) for verdict in self.verdicts],
        }

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """The table: probe, verdict, measured, limit, explanation."""
        return [(v.probe, v.status, "" if v.measured is None else f"{v.measured:.3g}", v.limit, v.explanation) for v in self.verdicts]

    @property
    def summary(self) -> str:
        """One line: how many probes passed, failed and were not tested, and the mistake that fits."""
        counts = {status: sum(verdict.status == status for verdict in self.verdicts) for status in ("pass", "fail", "not tested")}
        line = f"{self.candidate}: {counts['pass']} passed, {counts['fail']} failed, {counts['not tested']} not tested"
        return line if self.fits is None else f"{line}; {self.fits}"

    @property
    def conclusion(self) -> str:
        """The verdict in a sentence, the conventions, and where to look."""
        told = {
            "correct": "correct" + (" in all that could be tested" if any(v.status == "not tested" for v in self.verdicts) else ""),
            "defects": f"correct on ordinary rows, with defects: {', '.join(self.failed)}",
            "wrong": f"wrong: {', '.join(self.failed)}",
            "not tested": "not tested: nothing could be asked",
        }
        lines = [f"verdict: {told[self.verdict]}"]
        lines += [f"convention, {name}: {text}" for name, text in self.conventions.items()]
        lines += [f"{'look at:' if number == 0 else '        '} {place}" for number, place in enumerate(self.places)]
        return "\n".join(lines)

    def __str__(self) -> str:
        rows = [HEADER, *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]).rstrip() for row in rows]
        return "\n".join([*lines, self.summary, self.conclusion])


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()}


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
