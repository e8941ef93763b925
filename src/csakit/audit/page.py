"""The report of an audit as one HTML file that needs nothing else: verdict, the two teachers, the shares of heads, the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from csakit.report import svg
from csakit.report.style import STYLE

from .picture import Picture
from .report import HEADER, Report


def write(target: Path, reports: Sequence[Report]) -> None:
    """Write the page of some reports.

    Raises:
        OSError: the file cannot be written.
    """
    target.write_text(render(reports), encoding="utf-8")


def render(reports: Sequence[Report]) -> str:
    """The page."""
    body = "".join(_section(report) for report in reports)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>csakit audit</title><style>{STYLE}</style></head><body><h1>csakit audit</h1>{body}</body></html>\n"
    )


def _section(report: Report) -> str:
    lines = [line for line in report.conclusion.splitlines() if line.startswith(("verdict", "convention"))]
    told = "".join(f"<p>{escape(line)}</p>" for line in lines)
    fits = "" if report.fits is None else f"<p>closest known mistake: {escape(report.fits)}</p>"
    places = "".join(f"<li><code>{escape(str(place))}</code></li>" for place in report.places)
    where = f"<h3>Where to look</h3><ul>{places}</ul>" if places else ""
    picture = "" if report.picture is None else _picture(report.picture)
    return f"<h2>{escape(report.candidate)}</h2>{told}{fits}{picture}<h3>The numbers</h3>{_table([HEADER, *report.rows()])}{where}"


def _picture(picture: Picture) -> str:
    entries = ", ".join(map(str, picture.entries))
    heads: list[tuple[str, ...]] = [("head", "window", "candidates", "sink")]
    heads += [(str(number), *(f"{share:.4f}" for share in shares)) for number, shares in enumerate(picture.shares)]
    numbers: list[tuple[str, ...]] = [("entry", "under audit", "right", "student")]
    columns = zip(picture.entries, picture.found, picture.right, picture.student)
    numbers += [(str(entry), *(f"{value:.4f}" for value in values)) for entry, *values in columns]
    legend = '<span class="legend"><span><i class="a"></i>under audit, up</span><span><i class="b"></i>right, down</span></span>'
    return (
        f"<h3>The two teachers in the worst row</h3><p>Row {picture.row}, token {picture.token}, entries {entries}: "
        f"total variation {picture.difference:.3g}.{legend}</p>{svg.bars(picture.found, picture.right, [])}{_table(numbers)}"
        f"<h3>Where its heads look</h3>{_table(heads)}"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head, *body = rows
    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in body)}</table>"
