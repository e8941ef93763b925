"""Held-out evaluation: bits per byte, and how well each indexer knows what its layer attends to."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from csakit.train.batches import Batch, Rows
from csakit.train.config import RunConfig
from csakit.train.model import Model

QUERIES = 3
# The rows of an evaluation are the same in every run over the same text, whatever its seed.
ROWS_SEED = 0


def language_loss(model: nn.Module, batch: Batch, precision: str) -> Tensor:
    """Sum of the cross entropies of all predicted tokens, in nats."""
    with torch.autocast(batch.input_ids.device.type, torch.bfloat16, enabled=precision == "bf16"):
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=batch.real, use_cache=False).logits
    return cross_entropy(logits[batch.predicted].float(), batch.targets[batch.predicted], reduction="sum")


class Evaluator:
    """The held-out rows of a run and what to measure on them."""

    def __init__(self, built: Model, rows: Rows, config: RunConfig) -> None:
        self.built, self.precision = built, config.precision
        numbers = rows.numbers(ROWS_SEED, 0, min(config.data.heldout_rows, len(rows.rows)))
        # The same micro-batches in every stage: the numbers must not depend on where a run was resumed.
        size = max(config.stage(name).rows for name in config.stages)
        self.batches = [rows.batch(numbers[start : start + size]).to(config.device) for start in range(0, len(numbers), size)]

    @torch.no_grad()
    def bits_per_byte(self) -> float:
        """Bits per held-out byte of text, with the attention the model has now."""
        self.built.model.eval()
        nats = sum(float(language_loss(self.built.model, batch, self.precision)) for batch in self.batches)
        return nats / sum(int(batch.sizes.sum()) for batch in self.batches) / math.log(2)

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        """Bits per byte, the health of every indexer, and a few queries in full: what the report draws."""
        first = self.batches[0]
        queries = _queries(first)
        with self.built.handle.measure(queries=queries):
            bits = self.bits_per_byte()
        # "loss" is that of the last training step, which an evaluation has nothing to say about.
        layers = {name: {k: v for k, v in values.items() if k != "loss"} for name, values in self.built.handle.metrics()["layers"].items()}
        pictures = {name: values.pop("queries") for name, values in layers.items()}
        return {
            "bits_per_byte": bits,
            "random": self._random(),
            "layers": layers,
            "queries": [
                _shown(self.built, first, row, token, {name: found[number] for name, found in pictures.items()})
                for number, (row, token) in enumerate(queries)
            ],
        }

    def _random(self) -> float | None:
        """What a random selection would capture: the mean of topk / visible over the queries that have to choose."""
        ratio, topk = self.built.ratio, self.built.topk
        visible = torch.cat([(batch.position_ids[batch.real] + 1) // ratio for batch in self.batches])
        choosing = visible[visible > topk]
        return float((topk / choosing).mean()) if len(choosing) else None


def _queries(batch: Batch) -> list[tuple[int, int]]:
    """The last predicted token of the longest piece in each of the first rows."""
    found = []
    for row in range(min(QUERIES, len(batch.input_ids))):
        place = torch.where(batch.predicted[row], batch.position_ids[row], -1).argmax()
        found.append((row, int(place)))
    return found


def _shown(built: Model, batch: Batch, row: int, token: int, pictures: dict[str, Any]) -> dict[str, Any]:
    """What the report needs of a query: its text, and teacher, student and picks of each layer, by the entries of its document."""
    start = token - int(batch.position_ids[row, token])
    tokens = batch.input_ids[row, start : token + 1].tolist()
    ratio, decode = built.ratio, built.tokenizer.decode
    entries = len(tokens) // ratio
    layers = {}
    for name, picture in pictures.items():
        first, stop = picture["visible"]
        shares = {side: [round(share, 6) for share in picture[side][first:stop]] for side in ("teacher", "student")}
        layers[name] = {**shares, "picked": [entry - first for entry in picture["picked"]]}
    return {
        "position": len(tokens) - 1,
        "entries": [decode(tokens[entry * ratio : (entry + 1) * ratio]) for entry in range(entries)],
        "tail": decode(tokens[entries * ratio :]),
        "target": decode([int(batch.targets[row, token])]),
        "layers": layers,
    }
