"""Probes of the teacher: what it must depend on, what it must not, and what it is in examples worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial

import torch

from .. import oracle
from ..case import ATTENTION_INPUTS, INDEX_INPUTS, Case, Denominator, Form, NoLoss, Size, random_case
from ..subject import Subject, distance, gap
from .probe import MOVED, Measure, at_least, at_most, probe

exact = partial(torch.tensor, dtype=torch.float64)


@probe(
    "window",
    "the loss moves when only window keys move",
    "window keys do not reach the teacher: they are missing from the denominator",
    forms=("csa",),
)
def window(subject: Subject) -> Measure:
    case = random_case()
    return _moves(subject, case, replace(case, kv=random_case(seed=4).kv))


@probe(
    "sink",
    "the loss moves when only one head's sink moves",
    "the sink does not reach the teacher: it is missing from the denominator",
    forms=("csa",),
)
def sink(subject: Subject) -> Measure:
    case = random_case()
    return _moves(subject, case, replace(case, sink=case.sink + exact([3, 0, 0])))


@probe(
    "single-head-control",
    "with one head the denominator cancels: window and sink change nothing",
    "one head's teacher depends on its denominator: it is not normalised after the head sum",
    forms=("csa",),
)
def single_head_control(subject: Subject) -> Measure:
    case = random_case(heads=1)
    moved = replace(case, kv=random_case(seed=1).kv, sink=case.sink + 3)
    return at_most(distance(subject.answer(moved), subject.answer(case)), subject.tolerance)


@probe(
    "shift-invariance",
    "one constant added to sink, window and entry logits of a head changes nothing",
    "the parts of the denominator do not share one scale: logit scale, base of the lse, or a sink that is scaled too",
)
def shift_invariance(subject: Subject) -> Measure:
    case = random_case(form=subject.form)
    case = replace(case, kv=_constant_channel(case.kv), entries=_constant_channel(case.entries))
    q, sinks, constant = case.q.clone(), case.sink.clone(), 8.0
    q[:, :, 0, -1] += constant / case.scale
    sinks[0] += constant
    return at_most(distance(subject.answer(replace(case, q=q, sink=sinks)), subject.answer(case)), subject.tolerance)


@probe(
    "worked-teacher",
    "two heads, two entries, everything else worth 1 and 4: the teacher is [23/52, 29/52]",
    "another teacher (compressed-only heads give [1/2, 1/2])",
    forms=("csa",),
)
def worked_teacher(subject: Subject) -> Measure:
    half, two, three = math.log(1 / 2), math.log(2), math.log(3)
    case = _two_entries([[0, three], [three, 0]], [half, two], heads=[[1, 0], [0, 1]], sinks=[half, two])
    case = replace(case, q_index=torch.ones(1, 4, 1, 1), k_index=torch.ones(1, 2, 1), weights=torch.ones(1, 4, 1))
    teacher = 1 / 2 - 4 * subject.answer(case).gradients["k_index"].flatten()  # student - teacher, of one row in four
    return at_most(float((teacher - exact([23 / 52, 29 / 52])).abs().nan_to_num(math.inf).max()), subject.tolerance)


@probe(
    "extreme-scores",
    "teacher [1, 0] against scores [-200, 0]: the KL is 200, its gradient [-1, +1]",
    "the student's logarithm is cut off: an epsilon or a clamp, and the gradient with it",
)
def extreme_scores(subject: Subject) -> Measure:
    answer = subject.answer(extreme_case(subject.form))
    found = (4 if subject.form == "csa" else 2) * torch.cat([answer.loss.reshape(1), answer.gradients["k_index"][0, :, 1]])
    error = (found - exact([200, -1, 1])).abs() / exact([200, 1, 1])
    return at_most(float(error.nan_to_num(math.inf).max()), subject.tolerance)


@probe(
    "underflow",
    "heads that put e^-800 on the entries still have a teacher that sums to 1",
    "the teacher underflows, or its digits are gone: it belongs in log space, with fp32 statistics",
)
def underflow(subject: Subject) -> Measure:
    measure = at_most(_lost(subject, 800), subject.tolerance)
    if measure.passed:
        return measure
    kept, lost = 0, 800  # heads that put e^-kept on the entries have their teacher yet
    while lost - kept > 1:
        middle = (kept + lost) // 2
        kept, lost = (middle, lost) if _lost(subject, middle) <= subject.tolerance else (kept, middle)
    return measure._replace(detail=f"lost where every head puts less than e^-{lost} on them")


@probe(
    "head-split",
    "heads spread over two ranks give the loss of all heads on one",
    "ranks do not combine their head sums before the one normalisation",
)
def head_split(subject: Subject) -> Measure:
    case = random_case(heads=4, size=replace(subject.size, heads=subject.size.heads // 2 * 2), form=subject.form)
    return at_most(distance(subject.answer_over_ranks(case, 2), subject.answer(case)), subject.tolerance)


@probe(
    "gradient-isolation",
    "no gradient of the indexer loss reaches queries, keys, entries or sink",
    "the indexer loss trains the attention: the teacher is not a constant",
)
def gradient_isolation(subject: Subject) -> Measure:
    gradients = subject.answer(random_case(size=subject.size, form=subject.form)).gradients
    return at_most(max(float(gradients[name].abs().nan_to_num(math.inf).max()) for name in ATTENTION_INPUTS), 0.0)


@probe(
    "indexer-trains",
    "every input of the indexer gets a gradient",
    "the indexer stays untrained: its scores are cut off from the loss",
)
def indexer_trains(subject: Subject) -> Measure:
    try:
        gradients = subject.answer(random_case(form=subject.form)).gradients
    except NoLoss as reason:
        return at_least(0.0, 1e-4)._replace(detail=str(reason))
    return at_least(float(torch.stack([gradients[name].abs().max() for name in INDEX_INPUTS]).min()), 1e-4)


def _moves(subject: Subject, case: Case, moved: Case) -> Measure:
    """The relative change of the loss."""
    change = gap(subject.answer(moved).loss, subject.answer(case).loss)
    return at_least(change, MOVED)._replace(detail="the loss is exactly unchanged" if change == 0 else "")


def extreme_case(form: Form = "csa") -> Case:
    """One row whose teacher is [1, 0] and whose scores are [-200, 0]."""
    case = _two_entries([[400.0], [0.0]], [0.0], heads=[[1.0]], sinks=[0.0], form=form)
    tokens = case.kv.shape[1]
    queries = {"q_index": torch.eye(2).expand(1, tokens, 2, 2), "weights": exact([-1, 1]).expand(1, tokens, 2)}
    index = {**queries, "k_index": exact([[[201, 1], [1, 1]]])}
    return case.with_tensors(index).to(torch.float64, "cpu")


def quiet_case(shift: int, size: Size | None = None, form: Form = "csa") -> Case:
    """Like heads that put about e^-shift on the entries, each the same: the denominator cancels."""
    case = random_case(size=size, form=form)
    one_head = case.q[:, :, :1].expand_as(case.q)
    return replace(case, q=one_head, kv=torch.zeros_like(case.kv), sink=torch.full_like(case.sink, shift))


def _lost(subject: Subject, shift: int) -> float:
    """How far loss and gradients are off when the heads put e^-shift on the entries."""
    case, right = _quiet(shift, subject.size, subject.denominator, subject.form)
    return distance(subject.answer(case), right)


@cache
def _quiet(shift: int, size: Size, denominator: Denominator, form: Form) -> tuple[Case, oracle.Solution]:
    case = replace(quiet_case(shift, size, form), denominator=denominator)
    return case, oracle.solve(case)


def _constant_channel(keys: torch.Tensor) -> torch.Tensor:
    return torch.cat([keys[..., :-1], torch.ones_like(keys[..., -1:])], -1)


def _two_entries(entries: list[list[float]], key: list[float], *, heads: list[list[float]], sinks: list[float], form: Form = "csa") -> Case:
    """Four tokens (dsa: two) of which only the last sees two entries, so that it alone has a KL; scale 1, and a window of itself."""
    tokens = 4 if form == "csa" else 2
    case, width = random_case(tokens=tokens, window=1, form=form), len(key)
    kv = exact([[0.0] * width] * (tokens - 1) + [key])[None]
    sink = exact(sinks) if form == "csa" else torch.full((len(sinks),), -math.inf)
    keys = {"q": exact(heads).expand(1, tokens, -1, -1), "kv": kv, "entries": exact([entries]), "sink": sink}
    return replace(case.with_tensors(keys), scale=1.0, index_scale=1.0)
