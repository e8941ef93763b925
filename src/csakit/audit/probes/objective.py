"""Probes of the objective: losses against the float64 oracle, top-k, ties, divisors, weights, coefficients."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from .. import oracle
from ..case import DIVISORS, INDEX_INPUTS, Case, Denominator, Form, NotSupported, Objective, Size, random_case
from ..subject import Subject, distance, gap
from .documents import padded
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
    return at_least(
        gap(subject.answer(random_case(topk=2, form=subject.form)).loss, subject.answer(random_case(topk=8, form=subject.form)).loss), MOVED
    )


@probe(
    "dense-is-all-selected",
    "the dense loss, whatever top-k, is the sparse loss with every visible entry selected",
    "the dense teacher depends on top-k (a denominator over the selected prefix), or the objectives differ in more than their candidates",
)
def dense_is_all_selected(subject: Subject) -> Measure:
    case = random_case(topk=2, size=subject.size, form=subject.form)
    dense, everything = replace(case, objective="dense"), replace(case, topk=case.entries.shape[1])
    return at_most(distance(subject.answer(dense), subject.answer(everything)), subject.tolerance)


@probe(
    "selection",
    "the selected sets are the visible entries of greatest score, also when every score is negative",
    "rows select other entries",
)
def selection(subject: Subject) -> Measure:
    case, right = _negative(subject.form)
    count = case.entries.shape[1]
    found = _sets(subject.indices(case), count)
    return at_most(float((found != _sets(right.indices, count)).any(-1).sum()), 0.0)


@probe(
    "tie-rule",
    "of equal scores the lowest entries are selected: the others get no gradient",
    "ties are broken otherwise, or by chance",
)
def tie_rule(subject: Subject) -> Measure:
    case = random_case(topk=2, form=subject.form)
    tied = replace(case, k_index=case.k_index[:, :1].expand_as(case.k_index))
    return at_most(float(subject.answer(tied).gradients["k_index"][:, 2:].abs().nan_to_num(math.inf).max()), 0.0)


@probe(
    "loss-scale",
    "with one divisor, micro-batches add up to the whole batch, and twice the divisor halves the loss",
    "the loss does not follow the divisor it is given: its scale changes with micro-batches or ranks",
)
def loss_scale(subject: Subject) -> Measure:
    case = replace(random_case(2, size=subject.size, form=subject.form), divisor=20.0)
    tokens = case.kv.shape[1]
    whole, halves = subject.answer(case), [subject.answer(case.alone(row, 0, tokens, 0)) for row in range(2)]
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
    case = padded(random_case(2, 14, size=subject.size, form=subject.form))
    documents = case.documents
    together = subject.answer(case).loss
    alone = [subject.answer(case.alone(row, 0, length, 0)).loss for row, _, length in documents]
    tokens = sum(length for _, _, length in documents)
    factor = float(together * tokens / sum(length * loss for (_, _, length), loss in zip(documents, alone)))
    measure = Measure(factor, f"= 1 +- {subject.tolerance:.3g}", abs(factor - 1) <= subject.tolerance)
    return measure if measure.passed else measure._replace(detail=_other_divisor(subject, case, together))


@probe(
    "row-weights",
    "a row of weight 0 has no part in loss, gradient or divisor",
    "row weights are not used, or not in the divisor",
)
def row_weights(subject: Subject) -> Measure:
    case = random_case(2, size=subject.size, form=subject.form)
    tokens = case.kv.shape[1]
    weight = torch.tensor([2.0, 0.0])[:, None].expand(2, tokens)
    alone = subject.answer(case.alone(0, 0, tokens, 0))
    gradients = {name: torch.cat([grad, torch.zeros_like(grad)]) for name, grad in alone.gradients.items() if name in INDEX_INPUTS}
    return at_most(distance(subject.answer(replace(case, weight=weight)), replace(alone, gradients=gradients)), subject.tolerance)


@probe(
    "loss-off",
    "a coefficient of None, 0 or 0.0 turns the loss off: no loss, no gradient, no crash",
    "the coefficients that turn the loss off are not alike, or one does not scale the loss",
)
def loss_off(subject: Subject) -> Measure:
    case, found = random_case(form=subject.form), []
    for coefficient in (0, 0.0, None):
        try:
            answer = subject.answer_with_coefficient(case, coefficient)
        except NotSupported:
            raise
        except Exception as error:
            raise RuntimeError(f"coefficient {coefficient}: {type(error).__name__}: {error}") from error
        found += [answer.loss, *(answer.gradients[name] for name in INDEX_INPUTS)]
    off = max(float(x.abs().nan_to_num(math.inf).max()) for x in found)
    half, whole = subject.answer_with_coefficient(case, 0.5), subject.answer(case)
    return at_most(max(off, gap(2 * half.loss, whole.loss)), subject.tolerance)


# The oracle is slow and its answers do not depend on the candidate.


@cache
def _ordinary(objective: Objective, denominator: Denominator, size: Size, form: Form) -> tuple[Case, oracle.Solution]:
    case = replace(random_case(2, 18, topk=3, size=size, form=form), objective=objective, denominator=denominator)
    return case, oracle.solve(case)


@cache
def _negative(form: Form) -> tuple[Case, oracle.Solution]:
    case = random_case(2, 18, topk=3, form=form)
    case = replace(case, weights=torch.stack([case.weights[0], -case.weights[1].abs()]))
    return case, oracle.solve(case)


def _whole(subject: Subject, objective: Objective) -> Measure:
    """The gap of loss and gradients, and of whatever else the candidate reports."""
    case, right = _ordinary(objective, subject.denominator, subject.size, subject.form)
    answer, count = subject.answer(case), case.entries.shape[1]
    gaps = [distance(answer, right)]
    if answer.kl is not None:
        gaps.append(gap(answer.kl, right.kl))
    if answer.teacher is not None:
        gaps.append(gap(answer.teacher, right.teacher))
    if answer.indices is not None:
        gaps.append(gap(_sets(answer.indices.long(), count), _sets(right.indices, count)))
    return at_most(max(gaps), subject.tolerance)


def _other_divisor(subject: Subject, case: Case, loss: Tensor) -> str:
    """Which other divisor the loss has, if that alone sets it apart from the right one; a candidate may declare it."""
    lengths = [length for _, _, length in case.documents]
    counts = {"candidates": sum(max(0, length - case.ratio + 1) for length in lengths), "positions": case.kv[..., 0].numel(), "one": 1}
    factor = float(loss / subject.truth(case).loss)
    fitting = [name for name, count in counts.items() if abs(factor * count / sum(lengths) - 1) <= subject.tolerance]
    return f'it divides by {DIVISORS[fitting[0]]}: if that is meant, declare divisor = "{fitting[0]}"' if fitting else ""


def _sets(indices: Tensor, count: int) -> Tensor:
    """How often each entry is selected [B, T, E + 1]; the last column counts numbers that are no entry."""
    outside = indices.masked_fill(indices > count, count).add(1).clamp_min(0)
    return torch.nn.functional.one_hot(outside, count + 2).sum(2)[..., 1:].double()
