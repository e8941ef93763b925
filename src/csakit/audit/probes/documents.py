"""Probes of who sees whom: visibility, window, later tokens, packed documents, padding, rows without a candidate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ..case import ENTRY_INPUTS, INDEX_INPUTS, TOKEN_INPUTS, Case, random_case
from ..subject import FLOOR, Answer, Subject, distance, gap
from .probe import MOVED, Measure, at_most, probe


@probe(
    "visibility",
    "an entry is seen from the last token of its block on, and by no earlier one",
    "rows see an entry too early or too late: visible entries are floor((p + 1) / ratio)",
    forms=("csa",),
)
def visibility(subject: Subject) -> Measure:
    case, other = random_case(tokens=20, ratio=4, topk=5), random_case(tokens=20, ratio=4, seed=1)
    changes = []
    for entry in range(1, 5):  # the query that sees entry 0 alone has nothing to choose from
        entries = case.entries.clone()
        entries[:, entry] = other.entries[:, entry]
        changes.append((replace(case, entries=entries), range(4 * entry + 3, 20)))
    return _rows_that_move(subject, case, changes)


@probe(
    "window-width",
    "a key is in the window of its own query and the window - 1 after it",
    "another window: it counts the query itself, and nothing but the window's rows depend on a key",
    forms=("csa",),
)
def window_width(subject: Subject) -> Measure:
    case, other = random_case(topk=8), random_case(seed=1)
    changes = []
    for token in (5, 8, 12):
        kv = case.kv.clone()
        kv[:, token] = other.kv[:, token]
        changes.append((replace(case, kv=kv), range(token, token + case.window)))
    return _rows_that_move(subject, case, changes)


@probe(
    "causality",
    "what comes later changes nothing: not the loss of earlier rows, not their selection",
    "earlier rows depend on later tokens or entries",
    forms=("csa",),
)
def causality(subject: Subject) -> Measure:
    case, other = random_case(tokens=20, ratio=4), random_case(tokens=20, ratio=4, seed=1)
    kept = {**dict.fromkeys(TOKEN_INPUTS, 11), **dict.fromkeys(ENTRY_INPUTS, 2)}  # entry 2 is complete with token 11
    later = {name: torch.cat([getattr(case, name)[:, :n], getattr(other, name)[:, n:]], 1) for name, n in kept.items()}
    before, after = subject.answer(case), subject.answer(case.with_tensors(later))
    rows = [answer.gradients["q_index"][:, :11] for answer in (after, before)]
    return at_most(gap(*rows), subject.tolerance)


@probe(
    "packed-leak",
    "documents packed in one row give what they give alone, whatever their lengths",
    "documents of a packed row see each other: window, blocks, visibility or top-k cross a boundary",
)
def packed_leak(subject: Subject) -> Measure:
    case = random_case(lengths=LENGTHS, size=subject.size, form=subject.form)
    tokens, used = case.kv.shape[1], 0
    expected = Answer(torch.zeros((), dtype=torch.float64), {name: torch.zeros_like(getattr(case, name)) for name in INDEX_INPUTS})
    for row, first, length in case.documents:
        alone, share = subject.answer(case.alone(row, first, length, used)), length / tokens
        expected.loss.add_(share * alone.loss)
        for name in INDEX_INPUTS:
            start = used if name in ENTRY_INPUTS else first
            expected.gradients[name][:, start : start + alone.gradients[name].shape[1]] = share * alone.gradients[name]
        used += length // case.ratio
    return at_most(distance(subject.answer(case), expected), subject.tolerance)


@probe(
    "padding-poison",
    "NaN in padding and spare entries changes nothing",
    "memory that nobody may read is read: masked in the scores, but multiplied (0 * NaN)",
)
def padding_poison(subject: Subject) -> Measure:
    case = padded(random_case(3, 12, size=subject.size, form=subject.form))
    return at_most(distance(subject.answer(poisoned(case)), subject.answer(case)), subject.tolerance)


@probe(
    "padding-side",
    "padding on the left gives what padding on the right gives",
    "positions, windows or blocks are counted from the row's start, not from the document's",
)
def padding_side(subject: Subject) -> Measure:
    case, spare = random_case(2, 12, size=subject.size, form=subject.form), 3 * subject.size.times
    tokens = case.kv.shape[1]
    mask = (torch.arange(tokens) < tokens - spare).expand(2, tokens)
    right = subject.answer(replace(case, mask=mask))
    rolled = {name: getattr(case, name).roll(spare, 1) for name in TOKEN_INPUTS}
    left = subject.answer(case.with_tensors({**rolled, "mask": mask.roll(spare, 1)}))
    aligned = {name: x.roll(-spare, 1) if name in TOKEN_INPUTS else x for name, x in left.gradients.items()}
    return at_most(distance(replace(left, gradients=aligned), right), subject.tolerance)


@probe(
    "empty-rows",
    "rows with no candidate, or one, have KL 0 and gradient 0",
    "a row without a choice contributes, or is not a number",
    forms=("csa",),
)
def empty_rows(subject: Subject) -> Measure:
    answers = [subject.answer(random_case(tokens=tokens, ratio=4)) for tokens in (7, 3)]
    found = [x.abs().nan_to_num(math.inf) for answer in answers for x in (answer.loss, *answer.gradients.values())]
    return at_most(max(float(x.max()) for x in found if x.numel()), subject.tolerance * FLOOR)


LENGTHS = (0, 5, 1, 7, 2, 0, 9)
"""Of documents in a packed row: empty ones, shorter than a block, ending inside a block."""


def padded(case: Case) -> Case:
    """The case with padding on the right: its first row is whole, the second has 7 tokens in 12, further ones none."""
    rows, tokens = case.kv.shape[:2]
    lengths = torch.tensor([tokens, 7 * tokens // 12, *[0] * rows])[:rows]
    return replace(case, mask=torch.arange(tokens) < lengths[:, None])


def poisoned(case: Case) -> Case:
    """A case with right padding, the same but for NaN in everything that no real token may read."""
    assert case.mask is not None
    lengths, tensors = case.mask.sum(1), {name: getattr(case, name).clone() for name in (*TOKEN_INPUTS, *ENTRY_INPUTS)}
    for row, length in enumerate(lengths.tolist()):
        for name, x in tensors.items():
            x[row, length if name in TOKEN_INPUTS else length // case.ratio :] = math.nan
    return case.with_tensors(tensors)


def _rows_that_move(subject: Subject, case: Case, changes: Iterable[tuple[Case, range]]) -> Measure:
    """How many rows move that should not, or stay although they should move; the gradient of an index query shows its row alone."""
    before, wrong = _row_gradients(subject, case), 0
    for changed, rows in changes:
        moved = (_row_gradients(subject, changed) - before).abs().amax((0, 2, 3)) > MOVED * before.abs().max()
        expected = torch.zeros_like(moved)
        expected[rows.start : rows.stop] = True
        wrong += int((moved != expected).sum())
    return at_most(float(wrong), 0.0)


def _row_gradients(subject: Subject, case: Case) -> Tensor:
    return subject.answer(case).gradients["q_index"]
