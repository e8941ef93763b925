"""What a run learnt, in numbers: the evaluations before and after each stage, as a dictionary and as lines of text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csakit.train.log import mean_over_layers, read_metrics

MEASURES = ("kl", "uniform_kl", "captured", "recall", "top1")  # means over layers


class ReportError(Exception):
    """A folder does not hold a run. The message says what is missing."""


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it: settings, versions, steps and evaluations."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    def evaluation(self, stage: str, when: str) -> dict[str, Any] | None:
        """The last evaluation of that name, None when the run has not come so far."""
        found = [record for record in self.evaluations if (record["stage"], record["when"]) == (stage, when)]
        return found[-1] if found else None

    def stages(self) -> list[str]:
        """The stages that have begun, in order."""
        return list(dict.fromkeys(record["stage"] for record in self.evaluations))


def read_run(folder: Path) -> Run:
    """The run in a folder.

    Raises: ReportError when a file of it is missing or unreadable.
    """
    try:
        stored = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        records = read_metrics(folder / "metrics.jsonl")
        steps = [record for record in records if record["kind"] == "step"]
        evaluations = [record for record in records if record["kind"] == "evaluation"]
        return Run(folder, stored["config"], stored["environment"], steps, evaluations)
    except (OSError, ValueError, KeyError) as error:
        raise ReportError(f"{folder}: not the folder of a run, expected run.json and metrics.jsonl in it: {error}") from error


def summarise(run: Run) -> dict[str, Any]:
    """The means over layers before and after each stage, ready for JSON."""
    stages: dict[str, Any] = {}
    for stage in run.stages():
        stages[stage] = {}
        for when in ("before", "after"):
            record = run.evaluation(stage, when)
            if record:
                measures = {name: mean_over_layers(record, name) for name in MEASURES}
                whole = {name: record[name] for name in ("bits_per_byte", "bits_per_byte_sparse", "random") if name in record}
                stages[stage][when] = whole | measures
    rates = [record["tokens_per_second"] for record in run.steps]
    return {
        "run": str(run.folder),
        "steps": len(run.steps),
        "tokens": sum(record["tokens"] for record in run.steps),
        "tokens_per_second": sum(rates) / len(rates) if rates else None,
        "stages": stages,
    }


def table(summary: dict[str, Any]) -> list[list[str]]:
    """The numbers before and after each stage as rows of cells, the first row naming the columns."""
    rows = [["", "bits/byte", "KL", "uniform KL", "captured", "recall", "top-1"]]
    for stage, halves in summary["stages"].items():
        for when, values in halves.items():
            shares = [_share(values[name]) for name in ("captured", "recall", "top1")]
            rows.append(
                [f"{when} {stage}", _number(values["bits_per_byte"]), _number(values["kl"]), _number(values["uniform_kl"]), *shares]
            )
    return rows


def lines(summary: dict[str, Any]) -> list[str]:
    """The summary for people: the table, and what it says."""
    rows = table(summary)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]) for row in rows]
    return [*aligned, *sentences(summary)]


def sentences(summary: dict[str, Any]) -> list[str]:
    """What the numbers of a run say, one sentence for each stage that is through."""
    moments = {(stage, when): values for stage, halves in summary["stages"].items() for when, values in halves.items()}

    def told(stage: str, when: str, key: str) -> str:
        value = moments[stage, when].get(key)
        return _share(value) if key == "captured" else _number(value)

    found = []
    if {("dense", "before"), ("dense", "after")} <= moments.keys():
        before, after = (told("dense", when, "bits_per_byte") for when in ("before", "after"))
        found.append(f"dense: the model went from {before} to {after} bits per held-out byte.")
    if {("warmup", "before"), ("warmup", "after")} <= moments.keys():
        found.append(
            f"warm-up: the distance of the indexer from the attention (KL) went from {told('warmup', 'before', 'kl')} to "
            f"{told('warmup', 'after', 'kl')} nats; its selection holds {told('warmup', 'after', 'captured')} of the attention "
            f"to compressed entries, {told('warmup', 'before', 'captured')} before."
        )
    if {("sparse", "before"), ("sparse", "after")} <= moments.keys():
        before, after = (told("sparse", when, "bits_per_byte") for when in ("before", "after"))
        found.append(f"sparse: with everything training, {before} became {after} bits per held-out byte.")
    if {("warmup", "before"), ("sparse", "before")} <= moments.keys():
        found.append(
            f"the switch to sparse attention: {told('warmup', 'before', 'bits_per_byte')} bits per byte dense, "
            f"{told('warmup', 'before', 'bits_per_byte_sparse')} with the indexer untrained, "
            f"{told('sparse', 'before', 'bits_per_byte')} trained."
        )
    return found


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
