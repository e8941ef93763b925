"""The report of a run as one HTML file that needs nothing else: curves, tables, selections, settings."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from csakit.report import svg
from csakit.report.style import STYLE
from csakit.report.summary import MEASURES, Run, read_run, sentences, summarise, table
from csakit.train.log import mean_over_layers

PARTS = ("backbone", "indexer")


def write(folder: Path) -> Path:
    """Write `report.html` into the folder of a run and return its path.

    Raises: ReportError when the folder holds no run.
    """
    target = folder / "report.html"
    target.write_text(render(read_run(folder)), encoding="utf-8")
    return target


def render(run: Run) -> str:
    """The page."""
    summary = summarise(run)
    learnt = "".join(f"<li>{escape(text)}</li>" for text in sentences(summary))
    environment = ", ".join(f"{key} {value}" for key, value in run.environment.items())
    body = [
        f"<h1>csakit train: {escape(run.folder.resolve().name)}</h1>",
        f'<p class="faint">{escape(environment)}</p>',
        f"<h2>What was learnt</h2><ul>{learnt}</ul>{_evaluations(run)}",
        f"<h2>Curves</h2>{_curves(run)}",
        f"<h2>What a query selects</h2>{_selections(run)}",
        f"<h2>Layer by layer</h2>{_layers(run)}",
        f"<h2>Settings</h2>{_settings(run.config)}",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.folder.resolve().name)}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _table(rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head, *body = rows
    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in body)}</table>"


def _evaluations(run: Run) -> str:
    explained = (
        "Held-out documents, means over the layers that have an indexer. KL: distance of the indexer from the attention it should "
        "predict, in nats, beside that of a uniform guess. Captured: share of the attention to compressed entries that falls on "
        "the selection. Recall: share of the teacher's own top entries that is selected. Top-1: how often the entry with most attention is."
    )
    return _table(table(summarise(run))) + f'<p class="faint">{explained}</p>'


def _curves(run: Run) -> str:
    bands = []
    for stage in run.stages():
        steps = [record["total_steps"] for record in run.steps if record["stage"] == stage]
        if steps:
            bands.append(svg.Band(stage, min(steps) - 1, max(steps)))
    starts = {band.name: band.start for band in bands}
    held = [(starts[record["stage"]] + record["step"], record) for record in run.evaluations if record["stage"] in starts]

    def training(name: str, key: str, style: str, group: str = "") -> svg.Curve:
        values = [(record["total_steps"], (record[group] if group else record).get(key)) for record in run.steps]
        return svg.Curve(name, [(step, value) for step, value in values if value is not None], style)

    def heldout(name: str, key: str, style: str) -> svg.Curve:
        values = [(step, record.get(key, mean_over_layers(record, key))) for step, record in held]
        return svg.Curve(name, [(step, value) for step, value in values if value is not None], style, dots=True)

    bits = [training("training", "bits_per_byte", "a"), heldout("held-out", "bits_per_byte", "b")]
    divergence = [training("training", "kl", "a"), heldout("held-out", "kl", "b"), heldout("uniform guess", "uniform_kl", "c")]
    shares = [heldout("captured", "captured", "a"), heldout("recall", "recall", "b"), heldout("captured at random", "random", "c")]
    norms = [training(part, part, style, "gradient_norms") for part, style in zip(PARTS, "ab")]
    return (
        svg.chart(bits, bands, unit="bits per byte")
        + svg.chart(divergence, bands, unit="KL of the indexer from its teacher, nats", logarithmic=True)
        + svg.chart(shares, bands, unit="share found by the selection")
        + svg.chart(norms, bands, unit="gradient norm before clipping", logarithmic=True)
    )


def _selections(run: Run) -> str:
    names = {"teacher": "attention", "student": "indexer", "picked": "picked"}
    legend = "".join(f'<span><i class="{style}"></i>{name}</span>' for style, name in names.items())
    shown = [
        "<p>One bar is one compressed entry, oldest first. Up: the attention it gets; down: what the indexer gives it; "
        f'the marks below: what was picked.<span class="legend">{legend}</span></p>'
    ]
    moments = [run.evaluation("warmup", "before"), run.evaluation("warmup", "after"), run.evaluation("sparse", "after")]
    records = [record for record in moments if record and record["queries"]]
    if not records:
        return "<p>No evaluation with an indexer yet.</p>"
    for number, query in enumerate(records[-1]["queries"]):
        shown.append(f"<h3>Query {number + 1}, token {query['position']} of its document</h3>")
        for layer in query["layers"]:
            for record in records:
                values = record["queries"][number]["layers"][layer]
                shown.append(f'<p class="faint">{escape(layer)}, {record["when"]} {record["stage"]}</p>')
                shown.append(svg.bars(values["teacher"], values["student"], values["picked"]))
            shown.append(_text(query, query["layers"][layer]))
    return "".join(shown)


def _text(query: dict[str, Any], values: dict[str, Any]) -> str:
    """The text a query sees: entries shaded by the teacher's share, those picked outlined, the byte to predict at the end."""
    top = max([*values["teacher"], 1e-9])
    picked = set(values["picked"])
    spans = []
    for entry, text in enumerate(query["entries"]):
        share = values["teacher"][entry] / top if entry < len(values["teacher"]) else 0.0
        kind = ' class="pick"' if entry in picked else ""
        spans.append(f'<span{kind} style="background: color-mix(in srgb, var(--a) {55 * share:.0f}%, transparent)">{escape(text)}</span>')
    return f'<pre>{"".join(spans)}{escape(query["tail"])}<span class="next">{escape(query["target"])}</span></pre>'


def _layers(run: Run) -> str:
    rows = [["", "KL", "uniform KL", "captured", "recall", "top-1", "entries", "by head", "heads differ"]]
    for record in run.evaluations:
        for name, values in record["layers"].items():
            if record["when"] != "during":
                cells = ["-" if values.get(key) is None else f"{values[key]:.4f}" for key in (*MEASURES, "entries", "heads_cv")]
                heads = values.get("heads_entries") or []
                cells.insert(-1, f"{min(heads):.2f} to {max(heads):.2f}" if heads else "-")
                rows.append([f"{record['when']} {record['stage']}: {name}", *cells])
    explained = (
        "Entries: the share of the attention that goes to compressed entries; by head: the least and the greatest of its heads. Heads "
        "differ: its coefficient of variation over the heads of a query; where it is small, the teacher's denominator hardly matters."
    )
    return _table(rows) + f'<p class="faint">{explained}</p>'


def _settings(config: dict[str, Any]) -> str:
    return _table([["setting", "value"], *_pairs(config)])


def _pairs(values: dict[str, Any], prefix: str = "") -> list[list[str]]:
    pairs = []
    for key, value in values.items():
        if isinstance(value, dict):
            pairs += _pairs(value, f"{prefix}{key}.")
        else:
            pairs.append([prefix + key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)])
    return pairs
