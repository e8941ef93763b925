"""Writes what the recorded tables say into the pages: `python benchmarks/render.py`.

benchmarks/README.md   between `<!-- tables: begin -->` and `<!-- tables: end -->`: a section for every table of record.py, its commands,
                       its output; and the output of every other `csakit bench --read benchmarks/NAME.csv` the page shows
benchmarks/*.svg       the picture of every table
README.md              between `<!-- figures: begin -->` and `<!-- figures: end -->`: what a visitor wants to know first
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from record import TABLES, command

from csakit.bench import goals, picture, records, table
from csakit.bench.records import Row
from csakit.cli import main

FOLDER = Path(__file__).parent
MARKS = {name: re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL) for name in ("tables", "figures")}
SHOWN = re.compile(r"(```text\n\$ csakit bench --read benchmarks/(\S+)\n).*?(```)", re.DOTALL)
LAYERS = {"sliding": "sliding window", "csa": "compressed sparse", "hca": "heavily compressed"}
PROVIDERS = ("csakit-nn", "csakit-installed", "transformers")


def sections(folder: Path) -> str:
    """A section for every table in the folder."""
    parts = []
    for recorded in TABLES:
        path = folder / f"{recorded.name}.csv"
        if not path.exists():
            continue
        commands = "\n".join(command(recorded, options) for options in recorded.commands)
        parts += [
            f"## {recorded.title}",
            recorded.about,
            f"```text\n{commands}\n```",
            f"![{recorded.title}]({recorded.name}.svg)",
            f"```text\n$ csakit bench --read benchmarks/{path.name}\n```",
        ]
    return "\n\n".join(parts) + "\n"


def shown(folder: Path, page: str) -> str:
    """The page with the output of each `--read` as it is now."""

    def output(block: re.Match[str]) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            main(["bench", "--read", str(folder / block[2])])
        return block[1] + said.getvalue().strip() + "\n" + block[3]

    return SHOWN.sub(output, page)


def figures(tables: dict[str, list[Row]]) -> str:
    """The README's figures: layers and steps against stock, the goals of the kernels, growth."""
    parts = [_layers(tables.get("layers", [])), _steps(tables.get("step", [])), _goals(tables), _growth(tables.get("growth", []))]
    return "\n".join(part for part in parts if part)


def _layers(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    cases = list(dict.fromkeys(row.case for row in rows))
    threads = "thread" if cases[0].threads == 1 else "threads"
    lines = [
        f"One V4-Flash-width layer, fp32, {cases[0].threads} {threads}, seconds and peak memory beyond weights and input:",
        "",
        "| layer | tokens | csakit.nn | csakit installed | stock Transformers | csakit.nn over stock |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case in sorted(cases, key=lambda case: (case.shape.tokens, list(LAYERS).index(case.kind), case.backward)):
        found = {provider: _of(rows, case, provider) for provider in PROVIDERS}
        status = {row.provider: row.status for row in rows if (row.case, row.figure) == (case, "error")}
        cells = [_cell(found[provider], status.get(provider, "")) for provider in PROVIDERS]
        own, stock = (found[provider].get("wall") for provider in ("csakit-nn", "transformers"))
        over = f"{stock / own:.1f} x" if own and stock else ""
        what = f"{LAYERS[case.kind]}, {'forward and backward' if case.backward else 'forward'}"
        lines.append(f"| {what} | {case.shape.tokens} | {' | '.join(cells)} | {over} |")
    worst = {
        who: max((row.value or 0.0 for row in rows if row.figure == "error" and row.provider == who), default=0.0) for who in PROVIDERS
    }
    said = f"Outputs and gradients differ from float64 by at most {worst['csakit-nn']:.0e} (csakit.nn), {worst['csakit-installed']:.0e}"
    return "\n".join([*lines, "", f"{said} (installed) and {worst['transformers']:.0e} (stock), relative to the greatest value.", ""])


def _of(rows: Sequence[Row], case: object, provider: str) -> dict[str, float]:
    """{figure: value} of a provider at a case."""
    return {row.figure: row.value for row in rows if (row.case, row.provider) == (case, provider) and row.value is not None}


def _cell(found: dict[str, float], status: str) -> str:
    if "wall" not in found:
        return {"skipped": "does not fit", "": "-"}.get(status, status)
    memory = found.get("memory peak")
    return f"{found['wall'] / 1e3:.2f} s" + ("" if memory is None else f", {memory / 1024:.1f} GiB")


def _steps(rows: Sequence[Row]) -> str:
    speed = {row.provider: row.numbers for row in rows if row.figure == "tokens" and row.numbers is not None}
    if len(speed) < 2:
        return ""
    own, stock = speed["csakit-installed"].value, speed["transformers"].value
    return (
        f"A training step of the tiny preset, 1 thread: {own:.0f} tokens per second with the indexers' training, "
        f"{stock:.0f} in stock Transformers without ({own / stock:.2f} x).\n"
    )


def _goals(tables: dict[str, list[Row]]) -> str:
    verdicts = goals.lines([row for name in ("targets", "variants", "small") for row in tables.get(name, [])])
    if not verdicts:
        return ""
    lines = [
        "What the native kernels are held to, and what was measured (one thread unless it says otherwise):",
        "",
        "| | |",
        "| --- | --- |",
    ]
    for verdict in verdicts:
        held, said = verdict.split(maxsplit=1)
        what, _, figure = said.rpartition(": ")
        lines.append(f"| {what} | {figure} ({held}) |")
    return "\n".join([*lines, ""])


def _growth(rows: Sequence[Row]) -> str:
    found = table.growth(rows)
    return "Growth from 1K to 64K tokens: " + "; ".join(line.split(": ", 1)[1] for line in found) + ".\n" if found else ""


def render(folder: Path = FOLDER) -> None:
    """Brings pages and pictures up to date."""
    tables = {path.stem: records.read_csv(path) for path in sorted(folder.glob("*.csv"))}
    for name, rows in tables.items():
        (folder / f"{name}.svg").write_text(picture.draw(rows))
    for page, name, text in (
        (folder / "README.md", "tables", sections(folder)),
        (folder.parent / "README.md", "figures", figures(tables)),
    ):
        before = page.read_text()
        page.write_text(shown(folder, MARKS[name].sub(lambda block, text=text: block[1] + text + block[2], before)))


if __name__ == "__main__":
    render()
