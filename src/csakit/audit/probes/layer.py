"""Probes of the layer around the loss: attention on whole, packed and padded rows, and compression."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from .. import oracle
from ..case import Case, Form, NotSupported, Objective, Size, random_case
from ..subject import Subject, gap
from .documents import LENGTHS, padded, poisoned
from .probe import Measure, at_most, probe


@probe(
    "attention",
    "attention output and gradients equal the float64 oracle, sparse and dense",
    "the attention itself differs: window, visibility, selection, or the gradient through the sink",
)
def attention(subject: Subject) -> Measure:
    return _attends(
        subject, [("sparse", ("whole", "sparse", subject.size, subject.form)), ("dense", ("whole", "dense", subject.size, subject.form))]
    )


@probe(
    "attention-packed",
    "attention over packed documents equals the float64 oracle",
    "packed documents leak into each other's attention: through the window, the selection, or entries that span a boundary",
)
def attention_packed(subject: Subject) -> Measure:
    return _attends(subject, [("packed", ("packed", "sparse", subject.size, subject.form))])


@probe(
    "attention-padding",
    "padding, on either side, leaves the attention of real tokens as it is",
    "padding changes the attention of real tokens: blocks or positions are counted from the start of the row, or padding is attended",
)
def attention_padding(subject: Subject) -> Measure:
    return _attends(subject, [(f"padding on the {side}", (side, "sparse", subject.size, subject.form)) for side in ("right", "left")])


@probe(
    "compression",
    "entries pool their own block's current half and the previous half of the block before it",
    "other entries: halves exchanged, or a block before that belongs to another document",
    forms=("csa",),
)
def compression(subject: Subject) -> Measure:
    plain, real = random_case(2, 16, ratio=4), torch.arange(16) < torch.tensor([16, 10])[:, None]
    named = {
        "whole rows": plain,
        "packed": random_case(lengths=(0, 9, 3, 4, 14), ratio=4),
        "padding on the right": poisoned(replace(plain, mask=real)),
        "padding on the left": replace(plain, mask=real.flip(1)),
    }
    gaps, reasons = {}, []
    for name, case in named.items():
        try:
            found = subject.entries(case)
        except NotSupported as reason:
            reasons.append(reason)
            continue
        right = oracle.compress(case)
        used = (right != 0).any(-1, keepdim=True)  # spare entries may hold anything
        gaps[name] = gap(torch.where(used, found, 0), right)
    return _worst(subject, gaps, reasons)


def _attends(subject: Subject, named: Iterable[tuple[str, tuple[str, Objective, Size, Form]]]) -> Measure:
    """The greatest gap of output and gradients over the cases that the candidate can express, and which cases are wrong."""
    gaps, reasons = {}, []
    for name, key in named:
        case, upstream, right, expected = _attention(*key)
        try:
            out, gradients = subject.attention(case, upstream)
        except NotSupported as reason:
            reasons.append(reason)
            continue
        real = (case.document_ids >= 0)[..., None, None]  # what a padding row gives is nobody's business
        gaps[name] = max(gap(torch.where(real, out, 0), right), *(gap(gradients[name], expected[name]) for name in expected))
    return _worst(subject, gaps, reasons)


def _worst(subject: Subject, gaps: dict[str, float], reasons: list[NotSupported]) -> Measure:
    """The greatest of some gaps, with the names of those that are too large."""
    if not gaps:
        raise reasons[0]
    wrong = [name for name, found in gaps.items() if not found <= subject.tolerance]
    return at_most(max(gaps.values()), subject.tolerance)._replace(detail=", ".join(wrong))


# The oracle is slow and its answers do not depend on the candidate.


@cache
def _attention(kind: str, objective: Objective, size: Size, form: Form) -> tuple[Case, Tensor, Tensor, dict[str, Tensor]]:
    if kind == "packed":
        case = random_case(lengths=LENGTHS, size=size, form=form)
    else:
        case = random_case(2, 18, size=size, form=form)
    if kind in ("left", "right"):
        case = padded(case)
        assert case.mask is not None
        case = case if kind == "right" else replace(case, mask=case.mask.flip(1))
    upstream = random_case(case.kv.shape[0], case.kv.shape[1], heads=case.q.shape[2], size=replace(size, times=1), seed=2).q
    upstream = torch.where((case.document_ids >= 0)[..., None, None], upstream, 0)
    case = replace(case, objective=objective)
    return case, upstream, *oracle.attend(case, upstream)
