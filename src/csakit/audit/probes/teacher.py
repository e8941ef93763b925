"""Probes of the teacher: what it must depend on, what it must not, and what it is in examples worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from ..case import ATTENTION_INPUTS, INDEX_INPUTS, Case, random_case
from ..subject import Subject, distance, gap
from .probe import MOVED, Measure, at_least, at_most, probe

exact = partial(torch.tensor, dtype=torch.float64)


@probe(
    "window",
    "the loss moves when only window keys move",
    "window keys do not reach the teacher: they are missing from the denominator",
)
def window(subject: Subject) -> Measure:
    case = random_case()
    return _moves(subject, case, replace(case, kv=random_case(seed=4).kv))


@probe(
    "sink",
    "the loss moves when only one head's sink moves",
    "the sink does not reach the teacher: it is missing from the denominator",
)
def sink(subject: Subject) -> Measure:
    case = random_case()
    return _moves(subject, case, replace(case, sink=case.sink + exact([3, 0, 0])))


@probe(
    "single-head-control",
    "with one head the denominator cancels: window and sink change nothing",
    "one head's teacher depends on its denominator: it is not normalised after the head sum",
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
    case = random_case()
    case = replace(case, kv=_constant_channel(case.kv), entries=_constant_channel(case.entries))
    q, sinks, constant = case.q.clone(), case.sink.clone(), 8.0
    q[:, :, 0, -1] += constant / case.scale
    sinks[0] += constant
    return at_most(distance(subject.answer(replace(case, q=q, sink=sinks)), subject.answer(case)), subject.tolerance)


@probe(
    "worked-teacher",
    "two heads, two entries, everything else worth 1 and 4: the teacher is [23/52, 29/52]",
    "another teacher (compressed-only heads give [1/2, 1/2])",
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
    case = _two_entries([[400.0], [0.0]], [0.0], heads=[[1.0]], sinks=[0.0])
    index = {"q_index": torch.eye(2).expand(1, 4, 2, 2), "k_index": exact([[[201, 1], [1, 1]]]), "weights": exact([-1, 1]).expand(1, 4, 2)}
    answer = subject.answer(case.with_tensors(index))
    found = 4 * torch.cat([answer.loss.reshape(1), answer.gradients["k_index"][0, :, 1]])
    error = (found - exact([200, -1, 1])).abs() / exact([200, 1, 1])
    return at_most(float(error.nan_to_num(math.inf).max()), subject.tolerance)


@probe(
    "underflow",
    "heads that put e^-800 on the entries still have a teacher that sums to 1",
    "the teacher underflows, or its digits are gone: it belongs in log space, with fp32 statistics",
)
def underflow(subject: Subject) -> Measure:
    case = random_case()
    agreeing = replace(case, q=case.q[:, :, :1].expand(-1, -1, 3, -1), sink=case.sink + 800)  # the denominator cancels
    return at_most(distance(subject.answer(agreeing), subject.truth(agreeing)), subject.tolerance)


@probe(
    "head-split",
    "heads spread over two ranks give the loss of all heads on one",
    "ranks do not combine their head sums before the one normalisation",
)
def head_split(subject: Subject) -> Measure:
    case = random_case(heads=4)
    return at_most(distance(subject.answer_over_ranks(case, 2), subject.answer(case)), subject.tolerance)


@probe(
    "gradient-isolation",
    "no gradient of the indexer loss reaches queries, keys, entries or sink",
    "the indexer loss trains the attention: the teacher is not a constant",
)
def gradient_isolation(subject: Subject) -> Measure:
    gradients = subject.answer(random_case()).gradients
    return at_most(max(float(gradients[name].abs().nan_to_num(math.inf).max()) for name in ATTENTION_INPUTS), 0.0)


@probe(
    "indexer-trains",
    "every input of the indexer gets a gradient",
    "the indexer stays untrained: its scores are cut off from the loss",
)
def indexer_trains(subject: Subject) -> Measure:
    gradients = subject.answer(random_case()).gradients
    return at_least(float(torch.stack([gradients[name].abs().max() for name in INDEX_INPUTS]).min()), 1e-4)


def _moves(subject: Subject, case: Case, moved: Case) -> Measure:
    """The relative change of the loss."""
    return at_least(gap(subject.answer(moved).loss, subject.answer(case).loss), MOVED)


def _constant_channel(keys: torch.Tensor) -> torch.Tensor:
    return torch.cat([keys[..., :-1], torch.ones_like(keys[..., -1:])], -1)


def _two_entries(entries: list[list[float]], key: list[float], *, heads: list[list[float]], sinks: list[float]) -> Case:
    """Four tokens of which only the last sees two entries, so that it alone has a KL; scale 1, and a window of itself."""
    case, width = random_case(tokens=4, window=1), len(key)
    kv = exact([[0.0] * width] * 3 + [key])[None]
    keys = {"q": exact(heads).expand(1, 4, -1, -1), "kv": kv, "entries": exact([entries]), "sink": exact(sinks)}
    return replace(case.with_tensors(keys), scale=1.0, index_scale=1.0)
