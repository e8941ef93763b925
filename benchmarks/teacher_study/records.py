"""Measurements as tidy rows: one number per row, with the standard error over held-out rows where it has one."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Record:
    """One measured number.

    Attributes:
        language_seed, index_seed: of the language model and of the indexers; -1 where there is none.
        stage: what was done before measuring. layer: number of the layer in the model, -1 for the whole model.
        arm: teacher, reference selection, head or whatever was measured. against: the value is arm minus this, paired by row.
        topk: K, 0 where there is none.
        queries: "late" for positions in the second half of the row, else "all".
        error: standard error over rows; of differences, of the paired difference. nan where there is none.
    """

    preset: str
    language_seed: int
    index_seed: int
    stage: str
    layer: int
    arm: str
    against: str
    topk: int
    queries: str
    metric: str
    value: float
    error: float
    rows: int


def write(path: Path, records: Iterable[Record]) -> None:
    """The records as CSV; a file that stands is whole."""
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Record)], lineterminator="\n")
        writer.writeheader()
        for record in records:
            writer.writerow({**asdict(record), "value": f"{record.value:.7g}", "error": f"{record.error:.3g}"})
    os.replace(part, path)


def read(path: Path) -> list[Record]:
    """The records of a CSV."""
    kinds = {field.name: {"int": int, "float": float, "str": str}[str(field.type)] for field in fields(Record)}
    with path.open(newline="") as file:
        return [Record(**{name: kinds[name](text) for name, text in row.items()}) for row in csv.DictReader(file)]


class Tally:
    """Sums per held-out row of what is measured, from which means, paired differences and their errors follow.

    A quantity is a ratio of two sums over the queries of a row: captured mass over mass, bits over bytes, or a sum over a count.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[int, str, int, str, str], list[tuple[Tensor, Tensor]]] = {}

    def add(self, value: Tensor, weight: Tensor, *, layer: int = -1, arm: str, topk: int = 0, queries: str = "late", metric: str) -> None:
        """value and weight [B, N] of queries: the mean of value weighted by weight."""
        sums = (value * weight).double().sum(1), weight.expand_as(value).double().sum(1)
        self._parts.setdefault((layer, arm, topk, queries, metric), []).append(sums)

    def records(self, *, preset: str, language_seed: int, index_seed: int = -1, stage: str, against: str = "") -> list[Record]:
        """Every quantity, and with `against` also the differences of the other arms to that one."""
        found = []
        sums = {key: tuple(torch.cat(side) for side in zip(*parts)) for key, parts in self._parts.items()}
        for (layer, arm, topk, queries, metric), (total, weight) in sums.items():

            def record(other: str, numerator: Tensor, weight: Tensor = weight, key: tuple = (layer, arm, topk, queries, metric)) -> Record:
                value, error = ratio(numerator, weight)
                own_layer, own_arm, own_topk, own_queries, own_metric = key
                return Record(
                    preset, language_seed, index_seed, stage, own_layer, own_arm, other, own_topk, own_queries, own_metric,
                    value, error, len(weight),
                )  # fmt: skip

            found.append(record("", total))
            base = sums.get((layer, against, topk, queries, metric))
            if base is not None and arm != against:
                found.append(record(against, total - base[0]))
        return found


def ratio(numerator: Tensor, weight: Tensor) -> tuple[float, float]:
    """sum / sum, and its standard error over rows (linearised)."""
    value = float(numerator.sum() / weight.sum().clamp(min=1e-30))
    if len(weight) < 2:
        return value, float("nan")
    rest = (numerator - value * weight) / weight.mean().clamp(min=1e-30)
    return value, float(rest.std() / len(weight) ** 0.5)
