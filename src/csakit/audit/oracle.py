"""The right answers in float64: one Python loop over the queries, each line an equation.

Written apart from the library's verbs and from the candidates, so that an error in one is not repeated in the other. It reads
only what a query may see, so whatever lies in padding or spare entries cannot reach its results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .case import ATTENTION_INPUTS, INDEX_INPUTS, LOSS_INPUTS, Case


class Query(NamedTuple):
    """Where a real token is, and what it sees (row coordinates)."""

    row: int
    token: int
    window: list[int]
    visible: list[int]


@dataclass(frozen=True)
class Solution:
    """The right answer to a case, in float64: loss and what leads to it, and gradients for every name in `LOSS_INPUTS`."""

    loss: Tensor  # []
    gradients: dict[str, Tensor]
    kl: Tensor  # [B, T]
    teacher: Tensor  # [B, T, E], 0 where an entry is no candidate
    indices: Tensor  # [B, T, K] int64, ascending, -1 in empty slots


def queries(case: Case) -> Iterator[Query]:
    """Every real token with its window and its visible entries."""
    used = [0] * case.kv.shape[0]
    for row, first, length in case.documents:
        for p in range(length):
            window = range(first + max(0, p - case.window + 1), first + p + 1)
            visible = range(used[row], used[row] + (p + 1) // case.ratio)
            yield Query(row, first + p, list(window), list(visible))
        used[row] += length // case.ratio


def scores_of(case: Case, query: Query) -> Tensor:
    """Index scores of the visible entries: index_scale * sum_i weights_i * relu(q_i . k_e)."""
    products = case.q_index[query.row, query.token] @ case.k_index[query.row, query.visible].T
    return case.index_scale * (case.weights[query.row, query.token] @ products.relu())


def chosen_of(case: Case, query: Query, scores: Tensor) -> list[int]:
    """Places, among the visible entries, of the topk greatest scores in ascending order; ties go to the lowest entry.

    A selection that the case brings along counts as it is.
    """
    if case.chosen is not None:
        given = set(case.chosen[query.row, query.token].tolist())
        return [place for place, entry in enumerate(query.visible) if entry in given]
    best = sorted(range(len(query.visible)), key=lambda place: (-scores[place].item(), place))
    return sorted(best[: case.topk])


def logits_of(case: Case, query: Query, places: list[int]) -> tuple[Tensor, Tensor]:
    """Logits [H, ..] of the window, and of the entries at some places among the visible ones."""
    heads = case.scale * case.q[query.row, query.token]
    entries = case.entries[query.row, [query.visible[place] for place in places]]
    return heads @ case.kv[query.row, query.window].T, heads @ entries.T


def teacher_of(case: Case, query: Query, places: list[int]) -> Tensor:
    """log_mass [n] of the candidates: logsumexp over the heads of (logit - lse), the denominator of the real attention."""
    window, logits = logits_of(case, query, places)
    everything = list(range(len(query.visible)))
    attended = logits if case.denominator == "attended" else logits_of(case, query, everything)[1]
    lse = torch.cat([case.sink[:, None], window, attended], 1).logsumexp(1)
    return (logits - lse[:, None]).logsumexp(0)


def solve(case: Case) -> Solution:
    """The loss of a case with its gradients, teacher, KL and selection."""
    leaves = {name: getattr(case, name).double().clone().requires_grad_() for name in INDEX_INPUTS}
    weight = torch.ones(case.kv.shape[:2]) if case.weight is None else case.weight
    kl = torch.zeros(case.kv.shape[:2], dtype=torch.float64)
    teacher = torch.zeros(*case.kv.shape[:2], case.entries.shape[1], dtype=torch.float64)
    indices = torch.full((*case.kv.shape[:2], case.topk), -1)
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    learner = case.with_tensors(leaves)
    for query in queries(case):
        place = query.row, query.token
        weights += float(weight[place])
        scores = scores_of(learner, query)
        chosen = chosen_of(case, query, scores.detach())
        indices[place][: len(chosen)] = torch.tensor([query.visible[n] for n in chosen], dtype=torch.int64)
        candidates = chosen if case.objective == "sparse" else list(range(len(query.visible)))
        if candidates:
            mass = teacher_of(case, query, candidates)
            target = mass.log_softmax(0)
            student = scores[candidates].log_softmax(0)
            row = torch.where(target.exp() > 0, target.exp() * (target - student), 0.0).sum()
            total = total + float(weight[place]) * row
            kl[place] = row.detach()
            teacher[place][[query.visible[n] for n in candidates]] = target.exp()
    divisor = weights if case.divisor is None else case.divisor
    loss = total / divisor if divisor else total * 0
    return Solution(loss.detach(), _gradients(case, leaves, loss), kl, teacher, indices)


def attend(case: Case, upstream: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Attention output [B, T, H, D] over window, selected (or, dense, all visible) entries and sink; gradients of sum(upstream * out)."""
    leaves = {name: getattr(case, name).double().clone().requires_grad_() for name in ATTENTION_INPUTS}
    layer = case.with_tensors(leaves)
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for query in queries(case):
        everything = list(range(len(query.visible)))
        places = chosen_of(case, query, scores_of(case, query)) if case.objective == "sparse" else everything
        logits = torch.cat([*logits_of(layer, query, places), layer.sink[:, None]], 1)
        keys = torch.cat([layer.kv[query.row, query.window], layer.entries[query.row, [query.visible[n] for n in places]]])
        row = logits.softmax(1)[:, :-1] @ keys
        out[query.row, query.token] = row.detach()
        total = total + (upstream[query.row, query.token] * row).sum()
    return out, _gradients(case, leaves, total, ATTENTION_INPUTS)


def compress(case: Case) -> Tensor:
    """Entries [B, E, D], 0 where spare: per channel one softmax over the block's current half and the previous half of the block before."""
    width = case.values.shape[2] // 2
    entries = torch.zeros_like(case.entries)
    used = [0] * case.kv.shape[0]
    for row, first, length in case.documents:
        for block in range(length // case.ratio):
            values, gates = [], []
            for i in range(case.ratio):
                token = first + block * case.ratio + i
                values.append(case.values[row, token, width:])
                gates.append(case.gates[row, token, width:] + case.bias[i, width:])
                if block > 0:
                    values.append(case.values[row, token - case.ratio, :width])
                    gates.append(case.gates[row, token - case.ratio, :width] + case.bias[i, :width])
            entries[row, used[row] + block] = (torch.stack(gates).softmax(0) * torch.stack(values)).sum(0)
        used[row] += length // case.ratio
    return entries


def _gradients(case: Case, leaves: dict[str, Tensor], total: Tensor, names: tuple[str, ...] = LOSS_INPUTS) -> dict[str, Tensor]:
    """Gradients of a total for the named inputs of a case; zeros for those it does not depend on."""
    found: dict[str, Tensor | None] = dict.fromkeys(names)
    if total.requires_grad:
        found.update(zip(leaves, torch.autograd.grad(total, list(leaves.values()), allow_unused=True)))
    return {name: torch.zeros_like(getattr(case, name)) if grad is None else grad for name, grad in found.items()}
