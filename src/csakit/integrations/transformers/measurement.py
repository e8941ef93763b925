"""How good an indexer's selection is, against the teacher over every visible entry: sums over forwards, read as averages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import csakit
from csakit.nn.functional import AttendInputs

if TYPE_CHECKING:
    from .forwards import Call


class Measurement:
    """What `handle.measure` collects. Sums stay on the device until `results`."""

    def __init__(self, queries: tuple[tuple[int, int], ...]) -> None:
        self._queries = queries
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._pictures: dict[str, list[dict[str, Any]]] = {}

    @torch.no_grad()
    def record(self, call: Call, inputs: AttendInputs) -> None:
        """Adds one layer of one forward.

        Raises:
            ValueError: a query outside the first forward.
        """
        q, kv, entries, sink, scale = inputs
        assert call.index is not None and entries is not None
        layout, name = call.layout, call.site.name
        lse = inputs.visible_lse(layout)
        log_mass = csakit.teacher_log_mass(q, entries, lse, layout, scale=scale)
        scores = csakit.index_scores(call.index.q, call.index.k, call.index.weights, layout, scale=call.index.scale)
        picked = call.selection or csakit.select(
            call.index.q, call.index.k, call.index.weights, call.site.topk, layout, scale=call.index.scale
        )
        indices = picked.indices
        shares = csakit.metrics.branch_shares(q, kv, entries, lse, layout, sink=sink, scale=scale)
        tokens = {
            "kl": csakit.distill(scores, log_mass, layout).kl,
            "captured": csakit.metrics.captured_mass(log_mass, indices),
            "recall": csakit.metrics.topk_recall(log_mass, indices),
            "top1": csakit.metrics.top1_hit(log_mass, indices),
            "entropy": csakit.metrics.teacher_entropy(log_mass),
            "uniform_kl": csakit.metrics.uniform_kl(log_mass),
            **{branch: share.mean(-1) for branch, share in zip(shares._fields, shares)},
            "heads_entries": shares.entries,
            "heads_cv": _variation(shares.entries),
            "tokens": torch.ones_like(lse[..., 0]),
        }
        visible = layout.entry_stop - layout.entry_start
        for suffix, counted in (("", visible > call.site.topk), ("_all", visible > 0)):
            self._add(name, suffix, tokens, counted & layout.valid)
        if self._queries and name not in self._pictures:
            self._pictures[name] = [_picture(row, token, log_mass, scores, indices, call) for row, token in self._queries]

    def results(self) -> dict[str, dict[str, Any]]:
        """Layer name -> averages as plain floats; None where no token was counted."""
        results = {name: _averages(sums) for name, sums in self._sums.items()}
        for name, pictures in self._pictures.items():
            results[name]["queries"] = pictures
        return results

    def _add(self, name: str, suffix: str, tokens: dict[str, Tensor], counted: Tensor) -> None:
        sums = self._sums.setdefault(name, {})
        for key, value in tokens.items():
            mask = counted if value.ndim == 2 else counted[..., None]
            total = torch.where(mask, value, 0).double().sum((0, 1))
            sums[key + suffix] = sums[key + suffix] + total if key + suffix in sums else total


def _variation(shares: Tensor) -> Tensor:
    """The coefficient of variation over heads: [B, T, H] -> [B, T], 0 where no head gives anything."""
    mean = shares.mean(-1)
    return torch.where(mean > 0, shares.std(-1, correction=0) / mean, 0)


def _averages(sums: dict[str, Tensor]) -> dict[str, Any]:
    averages: dict[str, Any] = {}
    for suffix in ("", "_all"):
        count = int(sums["tokens" + suffix])
        averages["tokens" + suffix] = count
        own = [key for key in sums if key.endswith("_all") == bool(suffix) and not key.startswith("tokens")]
        averages |= {key: (sums[key] / count).tolist() if count else None for key in own}
    return averages


def _picture(row: int, token: int, log_mass: Tensor, scores: Tensor, indices: Tensor, call: Call) -> dict[str, Any]:
    """Teacher and student of one query, over its visible entries, and what it picked."""
    rows, length, _ = log_mass.shape
    if not (0 <= row < rows and 0 <= token < length):
        raise ValueError(f"queries must lie inside [{rows}, {length}] of the first measured forward; got {(row, token)}")
    start, stop = int(call.layout.entry_start[row, token]), int(call.layout.entry_stop[row, token])

    def probabilities(x: Tensor) -> list[float]:
        inside = torch.zeros_like(x[row, token])
        inside[start:stop] = x[row, token, start:stop].softmax(-1)
        return inside.tolist()

    return {
        "row": row,
        "token": token,
        "position": int(call.layout.positions[row, token]),
        "visible": [start, stop],
        "teacher": probabilities(log_mass),
        "student": probabilities(scores),
        "picked": [entry for entry in indices[row, token].tolist() if entry >= 0],
    }
