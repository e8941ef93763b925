"""The row in which a teacher is furthest from the right one: both over its candidates, and where each head looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from . import oracle
from .case import Case, Denominator, Form, random_case
from .subject import AnswerError, Subject


@dataclass(frozen=True)
class Picture:
    """One row: the teacher under audit, the right one and the student over its candidates, and the shares of its heads."""

    row: int
    token: int
    entries: tuple[int, ...]  # candidates
    found: tuple[float, ...]  # the teacher under audit
    right: tuple[float, ...]
    student: tuple[float, ...]
    shares: tuple[tuple[float, float, float], ...]  # of each head: window, candidates, sink
    difference: float  # total variation between the two teachers


def with_scores(case: Case, scores: Tensor) -> Case:
    """The case with an indexer that gives exactly these scores [B, T, E], up to a constant in each row; -inf becomes the least.

    One index head whose query is the scores, made positive so that ReLU lets them pass, and whose keys are unit vectors.
    """
    rows, _, count = scores.shape
    least = torch.where(scores.isfinite(), scores, torch.inf).amin(-1, keepdim=True)
    queries = torch.where(scores.isfinite(), scores - torch.where(least.isfinite(), least, 0) + 1, 0)
    keys = torch.eye(count, dtype=scores.dtype).expand(rows, -1, -1)
    index = {"q_index": queries[:, :, None], "k_index": keys, "weights": torch.ones_like(queries[..., :1])}
    return replace(case.with_tensors(index), index_scale=1.0)


def picture(subject: Subject) -> Picture | None:
    """The worst row of a candidate's own teacher, which the gradient of its scores gives away; None where it gives none."""
    case, right = _case(subject.denominator, subject.form)
    try:
        gradient = subject.answer(case).gradients["q_index"][:, :, 0]
    except AnswerError:
        raise
    except Exception:  # no loss, a crash, or an indexer of a shape that it does not take
        return None
    candidates = right.teacher > 0
    student = case.q_index[:, :, 0].masked_fill(~candidates, -torch.inf).softmax(-1).nan_to_num(0.0)
    tokens = case.kv[..., 0].numel()
    found = torch.where(candidates, student - tokens * gradient, 0)
    return worst_row(case, found, right.teacher, student)


def worst_row(case: Case, found: Tensor, right: Tensor, student: Tensor) -> Picture | None:
    """The row of the greatest total variation between two teachers [B, T, E]."""
    away = (found - right).abs().nan_to_num(torch.inf).sum(-1) / 2
    if not away.numel():
        return None
    place = int(away.argmax())
    row, token = divmod(place, away.shape[1])
    query = next((query for query in oracle.queries(case) if (query.row, query.token) == (row, token)), None)
    entries = [] if query is None else [entry for entry in query.visible if float(right[row, token, entry]) > 0]
    if query is None or not entries:
        return None

    def over(x: Tensor) -> tuple[float, ...]:
        return tuple(x[row, token, entries].tolist())

    places = [query.visible.index(entry) for entry in entries]
    window, logits = oracle.logits_of(case, query, places)
    shares = torch.cat([window, logits, case.sink[:, None].double()], 1).softmax(1)
    split: Sequence[Tensor] = shares.split([window.shape[1], logits.shape[1], 1], 1)
    heads = torch.stack([part.sum(1) for part in split], 1)
    return Picture(
        row, token, tuple(entries), over(found), over(right), over(student),
        tuple((a, b, c) for a, b, c in heads.tolist()), float(away[row, token]),
    )  # fmt: skip


@cache
def _case(denominator: Denominator, form: Form) -> tuple[Case, oracle.Solution]:
    """A case whose scores are known, and all entries selected, so that rows have many candidates."""
    case = random_case(tokens=16, topk=8, form=form)
    scores = torch.randint(-32, 33, (*case.kv.shape[:2], case.entries.shape[1]), generator=torch.Generator().manual_seed(3)) / 16
    case = replace(with_scores(case, scores.double()), denominator=denominator, topk=case.entries.shape[1])
    return case, oracle.solve(case)
