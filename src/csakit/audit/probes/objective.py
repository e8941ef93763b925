"""Probes of the whole: losses against the float64 oracle, top-k, ties, divisors, and the optional verbs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from .. import oracle
from ..case import INDEX_INPUTS, Case, Denominator, Objective, random_case
from ..subject import Subject, distance, gap
from .documents import poisoned
from .probe import MOVED, Measure, at_least, at_most, probe


@probe(
    "sparse-loss",
    "sparse loss and gradients equal the float64 oracle, top-k below visible",
    "the sparse objective has another value",
)
def sparse_loss(subject: Subject) -> Measure:
    return _whole(subject, "sparse")


@probe(
    "dense-loss",
    "dense loss and gradients equal the float64 oracle",
    "the dense objective has another value",
)
def dense_loss(subject: Subject) -> Measure:
    return _whole(subject, "dense")


@probe(
    "top-k-below-visible",
    "the sparse loss depends on top-k while it is below the visible count",
    "top-k does not act on the objective: sparse is dense under another name",
)
def top_k_below_visible(subject: Subject) -> Measure:
    return at_least(gap(subject.answer(random_case(topk=2)).loss, subject.answer(random_case(topk=8)).loss), MOVED)


@probe(
    "dense-is-all-selected",
    "the dense loss, whatever top-k, is the sparse loss with every visible entry selected",
    "the dense teacher depends on top-k (a denominator over the selected prefix), or the objectives differ in more than their candidates",
)
def dense_is_all_selected(subject: Subject) -> Measure:
    dense = subject.answer(replace(random_case(topk=2), objective="dense"))
    return at_most(distance(dense, subject.answer(random_case(topk=8))), subject.tolerance)


@probe(
    "selection",
    "the selected sets are the visible entries of greatest score, also when every score is negative",
    "rows select other entries",
)
def selection(subject: Subject) -> Measure:
    case, right = _negative()
    count = case.entries.shape[1]
    found = _sets(subject.indices(case), count)
    return at_most(float((found != _sets(right.indices, count)).any(-1).sum()), 0.0)


@probe(
    "tie-rule",
    "of equal scores the lowest entries are selected: the others get no gradient",
    "ties are broken otherwise, or by chance",
)
def tie_rule(subject: Subject) -> Measure:
    case = random_case(topk=2)
    tied = replace(case, k_index=case.k_index[:, :1].expand_as(case.k_index))
    return at_most(float(subject.answer(tied).gradients["k_index"][:, 2:].abs().nan_to_num(math.inf).max()), 0.0)


@probe(
    "loss-scale",
    "with one divisor, micro-batches add up to the whole batch, and twice the divisor halves the loss",
    "the loss does not follow the divisor it is given: its scale changes with micro-batches or ranks",
)
def loss_scale(subject: Subject) -> Measure:
    case = replace(random_case(2), divisor=20.0)
    whole, halves = subject.answer(case), [subject.answer(case.alone(row, 0, 16, 0)) for row in range(2)]
    gradients = {name: torch.cat([half.gradients[name] for half in halves]) for name in INDEX_INPUTS}
    summed = replace(whole, loss=halves[0].loss + halves[1].loss, gradients=gradients)
    halved = subject.answer(replace(case, divisor=40.0)).loss
    return at_most(max(distance(summed, whole), gap(2 * halved, whole.loss)), subject.tolerance)


@probe(
    "row-divisor",
    "the mean runs over real tokens: rows without a candidate count, padding does not",
    "the mean runs over other rows: measured is the factor to the mean over real tokens",
)
def row_divisor(subject: Subject) -> Measure:
    lengths, case = (14, 9), random_case(2, 14)
    together = subject.answer(replace(case, mask=torch.arange(14) < torch.tensor(lengths)[:, None])).loss
    alone = [subject.answer(case.alone(row, 0, length, 0)).loss for row, length in enumerate(lengths)]
    factor = float(together * sum(lengths) / sum(length * loss for length, loss in zip(lengths, alone)))
    return Measure(factor, f"= 1 +- {subject.tolerance:.3g}", abs(factor - 1) <= subject.tolerance)


@probe(
    "row-weights",
    "a row of weight 0 has no part in loss, gradient or divisor",
    "row weights are not used, or not in the divisor",
)
def row_weights(subject: Subject) -> Measure:
    case = random_case(2)
    weight = torch.tensor([2.0, 0.0])[:, None].expand(2, 16)
    alone = subject.answer(case.alone(0, 0, 16, 0))
    gradients = {name: torch.cat([grad, torch.zeros_like(grad)]) for name, grad in alone.gradients.items() if name in INDEX_INPUTS}
    return at_most(distance(subject.answer(replace(case, weight=weight)), replace(alone, gradients=gradients)), subject.tolerance)


@probe(
    "attention",
    "attention output and gradients equal the float64 oracle, sparse and dense",
    "the attention itself differs: window, visibility, selection, or the gradient through the sink",
)
def attention(subject: Subject) -> Measure:
    gaps = []
    objectives: tuple[Objective, ...] = ("sparse", "dense")
    for objective in objectives:
        case, upstream, right, expected = _attention(objective)
        out, gradients = subject.attention(case, upstream)
        gaps += [gap(out, right), *(gap(gradients[name], expected[name]) for name in expected)]
    return at_most(max(gaps), subject.tolerance)


@probe(
    "compression",
    "entries pool their own block's current half and the previous half of the block before it",
    "other entries: halves exchanged, or a block before that belongs to another document",
)
def compression(subject: Subject) -> Measure:
    padded = replace(random_case(2, 16, ratio=4), mask=torch.arange(16) < torch.tensor([16, 10])[:, None])
    gaps = []
    for case in (random_case(lengths=(0, 9, 3, 4, 14), ratio=4), poisoned(padded)):
        found, right = subject.entries(case), oracle.compress(case)
        used = (right != 0).any(-1, keepdim=True)  # spare entries may hold anything
        gaps.append(gap(torch.where(used, found, 0), right))
    return at_most(max(gaps), subject.tolerance)


# The oracle is slow and its answers do not depend on the candidate.


@cache
def _ordinary(objective: Objective, denominator: Denominator) -> tuple[Case, oracle.Solution]:
    case = replace(random_case(2, 18, topk=3), objective=objective, denominator=denominator)
    return case, oracle.solve(case)


@cache
def _negative() -> tuple[Case, oracle.Solution]:
    case = random_case(2, 18, topk=3)
    case = replace(case, weights=torch.stack([case.weights[0], -case.weights[1].abs()]))
    return case, oracle.solve(case)


@cache
def _attention(objective: Objective) -> tuple[Case, Tensor, Tensor, dict[str, Tensor]]:
    case, upstream = replace(random_case(2, 18), objective=objective), random_case(2, 18, seed=2).q
    return case, upstream, *oracle.attend(case, upstream)


def _whole(subject: Subject, objective: Objective) -> Measure:
    """The gap of loss and gradients, and of whatever else the candidate reports."""
    case, right = _ordinary(objective, subject.denominator)
    answer, count = subject.answer(case), case.entries.shape[1]
    gaps = [distance(answer, right)]
    if answer.kl is not None:
        gaps.append(gap(answer.kl, right.kl))
    if answer.teacher is not None:
        gaps.append(gap(answer.teacher, right.teacher))
    if answer.indices is not None:
        gaps.append(gap(_sets(answer.indices.long(), count), _sets(right.indices, count)))
    return at_most(max(gaps), subject.tolerance)


def _sets(indices: Tensor, count: int) -> Tensor:
    """How often each entry is selected [B, T, E + 1]; the last column counts numbers that are no entry."""
    outside = indices.masked_fill(indices > count, count).add(1).clamp_min(0)
    return torch.nn.functional.one_hot(outside, count + 2).sum(2)[..., 1:].double()
