"""The plain candidate: dense torch as a careful author would write it, and the same flow with one known mistake in it.

`PlainTorch()` is right. `PlainTorch("compressed-only")` is the same code but for the one line that makes the mistake of that
name, so that a probe which fails it has found that line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..case import Case, Result

INF = float("inf")

MISTAKES = {
    "compressed-only": "each head's denominator holds the candidate entries alone: no window, no sink",
    "selected-prefix-lse": "each head's denominator is the lse of the selected entries, also where all visible ones are candidates",
    "sink-without-window": "the denominator holds the sink and the entries, not the window",
    "window-without-sink": "the denominator holds the window and the entries, not the sink",
    "per-rank-normalisation": "each rank normalises the teacher of its own heads, then the ranks are averaged",
    "teacher-without-scale": "the teacher's logits leave the attention's scale out",
    "epsilon-in-logarithm": "both logarithms of the KL take probability + 1e-10",
    "clamped-student": "the student's probability is raised to 1.2e-38, the least fp32 number, before its logarithm",
    "reverse-kl": "the KL is taken of the student from the teacher, not of the teacher from the student",
    "probability-space": "head probabilities are summed as they are and divided by max(sum, 1e-10): no log space",
    "unnormalised-teacher": "the head sum is divided by the number of heads, not by its own total",
    "base-2-lse": "a base-2 lse is used as if it were a natural logarithm",
    "teacher-with-gradient": "the teacher is not detached: the loss trains the attention too",
    "late-visibility": "the query that closes a block does not see its entry: floor(p / ratio)",
    "early-visibility": "an entry is visible one token before its block is complete: floor((p + 2) / ratio)",
    "window-plus-one": "the window holds one token too many: the query and `window` tokens before it",
    "swapped-halves": "compression takes the previous half of values and gates for the current one",
    "highest-tie-first": "equal scores go to the highest entry number",
    "sparse-is-dense": "the sparse objective runs over every visible entry",
    "student-without-scale": "the student's softmax leaves the index scale out",
    "detached-scores": "the loss sees the scores without their graph: the indexer is never trained",
    "packed-as-one": "document boundaries of a packed row are ignored",
    "left-padding-as-text": "positions and blocks are counted from the start of the row, left padding included",
    "masked-by-score-only": "padding is masked in the scores, its memory is still multiplied",
    "softmax-of-nothing": "a row without a candidate is sent through the softmax",
    "padding-in-divisor": "the mean runs over all positions, padding included",
    "candidates-in-divisor": "the mean runs over the rows that have a candidate",
    "divisor-ignored": "an explicit divisor is not used",
    "weights-ignored": "row weights are not used",
    "coefficient-none": "a coefficient of None, which turns the loss off, is multiplied",
}


@dataclass(frozen=True)
class PlainTorch:
    """A candidate with every member, right unless a mistake is named.

    Raises:
        ValueError: the mistake is not one of `MISTAKES`.
    """

    mistake: str | None = None

    def __post_init__(self) -> None:
        if self.mistake is not None and self.mistake not in MISTAKES:
            raise ValueError(f"mistake must be None or one of {', '.join(MISTAKES)}; got {self.mistake!r}")

    @property
    def name(self) -> str:
        return self.mistake or "torch"

    def loss(self, case: Case) -> Result:
        """The indexer loss with its KL, teacher and selection."""
        case, (window, visible) = self._clean(case), self._masks(case)
        log_mass, scores, chosen, candidates = self._student_and_teacher(case, window, visible)
        return self._objective(case, scores, self._normalise(log_mass, candidates), chosen, candidates)

    def loss_over_ranks(self, cases: Sequence[Case]) -> Result:
        """The loss of all heads, each case holding those of one rank: one logsumexp over the ranks, then one normalisation."""
        window, visible = self._masks(cases[0])
        parts = [self._student_and_teacher(self._clean(case), window, visible) for case in cases]
        _, scores, chosen, candidates = parts[0]
        if self.mistake == "per-rank-normalisation":
            teacher = torch.stack([self._normalise(part[0], candidates).exp() for part in parts]).mean(0).log()
        else:
            teacher = self._normalise(torch.stack([part[0] for part in parts]).logsumexp(0), candidates)
        return self._objective(cases[0], scores, teacher, chosen, candidates)

    def with_coefficient(self, case: Case, coefficient: float | None) -> Tensor:
        """The loss times a coefficient; None and 0 turn it off."""
        loss = self.loss(case).loss
        return coefficient * loss if self.mistake == "coefficient-none" else (coefficient or 0.0) * loss  # type: ignore[operator]

    def select(self, case: Case) -> Tensor:
        """Selected entries [B, T, K], -1 in empty slots."""
        return _slots(self._choose(case, self._scores(self._clean(case), self._masks(case)[1])), case.topk)

    def attend(self, case: Case) -> Tensor:
        """Attention output [B, T, H, D] over window, selected (dense objective: all visible) entries and sink."""
        case, (window, visible) = self._clean(case), self._masks(case)
        attended = self._choose(case, self._scores(case, visible)) if case.objective == "sparse" else visible
        logits = self._logits(case, window, attended)
        real = (case.document_ids >= 0)[..., None, None]
        sink = torch.where(real, case.sink[:, None], 0)  # padding has nothing to attend, and a softmax of nothing is NaN
        probabilities = torch.cat([*logits, sink], -1).softmax(-1)[..., :-1]
        return real * torch.einsum("bths,bsd->bthd", probabilities, torch.cat([case.kv, case.entries], 1))

    def compress(self, case: Case) -> Tensor:
        """Entries [B, E, D]: one softmax per channel over the current half of a block and the previous half of the one before."""
        halves = slice(None, case.values.shape[2] // 2), slice(case.values.shape[2] // 2, None)
        previous, current = reversed(halves) if self.mistake == "swapped-halves" else halves
        entries, used = torch.zeros_like(case.entries), [0] * len(case.kv)
        for row, first, length in self._documents(case):
            blocks = length // case.ratio
            inside = slice(first, first + blocks * case.ratio)
            values = case.values[row, inside].unflatten(0, (blocks, case.ratio))
            gates = case.gates[row, inside].unflatten(0, (blocks, case.ratio)) + case.bias
            before = torch.full_like(gates[:, :, previous], -INF)
            before[1:] = gates[:-1, :, previous]
            shares = torch.cat([gates[:, :, current], before], 1).softmax(1)
            pooled = torch.cat([values[:, :, current], values[:, :, previous].roll(1, 0)], 1)
            entries[row, used[row] : used[row] + blocks] = (shares * pooled).sum(1)
            used[row] += blocks
        return entries

    def _documents(self, case: Case) -> list[tuple[int, int, int]]:
        if self.mistake == "packed-as-one" and case.cu_seqlens is not None:
            return [(0, 0, case.kv.shape[1])]
        if self.mistake == "left-padding-as-text":
            return [(row, 0, first + length) if case.mask is not None else (row, first, length) for row, first, length in case.documents]
        return case.documents

    def _masks(self, case: Case) -> tuple[Tensor, Tensor]:
        """Who sees whom: window [B, T, T] and visible entries [B, T, E]."""
        (rows, tokens), count, device = case.kv.shape[:2], case.entries.shape[1], case.kv.device
        window = torch.zeros(rows, tokens, tokens, dtype=torch.bool, device=device)
        visible = torch.zeros(rows, tokens, count, dtype=torch.bool, device=device)
        width = case.window + (self.mistake == "window-plus-one")
        closing = {"late-visibility": 0, "early-visibility": 2}.get(self.mistake or "", 1)
        used = [0] * rows
        for row, first, length in self._documents(case):
            p, blocks = torch.arange(length, device=device), length // case.ratio
            inside, entries = slice(first, first + length), slice(used[row], used[row] + blocks)
            window[row, inside, inside] = (p <= p[:, None]) & (p > p[:, None] - width)
            visible[row, inside, entries] = p[:blocks] < ((p + closing) // case.ratio)[:, None]
            used[row] += blocks
        return window, visible

    def _clean(self, case: Case) -> Case:
        """The case with zeros in padding and spare entries: 0 * NaN is NaN, so masking scores alone would not do."""
        if self.mistake == "masked-by-score-only":
            return case
        real, used = case.document_ids >= 0, torch.zeros(case.entries.shape[:2], dtype=torch.bool, device=case.kv.device)
        for row, _, length in self._documents(case):
            used[row, used[row].sum() :][: length // case.ratio] = True
        masks = {"q": real, "kv": real, "q_index": real, "weights": real, "entries": used, "k_index": used}
        tensors = {name: (getattr(case, name), mask) for name, mask in masks.items()}
        return case.with_tensors(
            {name: torch.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, 0) for name, (x, mask) in tensors.items()}
        )

    def _scores(self, case: Case, visible: Tensor) -> Tensor:
        """Index scores [B, T, E], -inf where an entry is not visible."""
        products = torch.einsum("btic,bec->btie", case.q_index, case.k_index).relu()
        scores = torch.einsum("bti,btie->bte", case.weights, products)
        scale = 1.0 if self.mistake == "student-without-scale" else case.index_scale
        return (scale * scores).masked_fill(~visible, -INF)

    def _choose(self, case: Case, scores: Tensor) -> Tensor:
        """The topk greatest scores of every query as a mask [B, T, E], equal ones lowest entry first; or the case's own selection."""
        if case.chosen is not None:
            return _members(case.chosen, scores.shape[-1]) & (scores > -INF)
        flipped = self.mistake == "highest-tie-first"
        order = (scores.flip(-1) if flipped else scores).argsort(dim=-1, descending=True, stable=True)[..., : case.topk]
        best = scores.shape[-1] - 1 - order if flipped else order
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & (scores > -INF)

    def _logits(self, case: Case, window: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Attention logits of the window [B, T, H, T] and of the entries [B, T, H, E], -inf where not attended."""
        logits = [case.scale * torch.einsum("bthd,bsd->bths", case.q, keys) for keys in (case.kv, case.entries)]
        return logits[0].masked_fill(~window[:, :, None], -INF), logits[1].masked_fill(~attended[:, :, None], -INF)

    def _student_and_teacher(self, case: Case, window: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log_mass [B, T, E] of the case's heads, index scores, the selection and the candidates."""
        scores = self._scores(case, visible)
        chosen = self._choose(case, scores.detach())
        sparse = case.objective == "sparse" and self.mistake != "sparse-is-dense"
        candidates = chosen if sparse else visible
        if self.mistake == "teacher-without-scale":
            case = replace(case, scale=1.0)
        near, far = self._logits(case, window, visible if case.denominator == "visible" else candidates)
        sink = case.sink.expand(*near.shape[:3])[..., None]
        pieces = {
            "compressed-only": [far],
            "selected-prefix-lse": [far.masked_fill(~chosen[:, :, None], -INF)],
            "sink-without-window": [far, sink],
            "window-without-sink": [far, near],
        }.get(self.mistake or "", [far, near, sink])
        lse = torch.cat(pieces, -1).logsumexp(-1, keepdim=True)
        if self.mistake == "base-2-lse":
            lse = lse / math.log(2)
        mass = far.masked_fill(~candidates[:, :, None], -INF) - lse.masked_fill(lse == -INF, 0)
        log_mass = mass.logsumexp(2) - (math.log(case.q.shape[2]) if self.mistake == "unnormalised-teacher" else 0)
        if self.mistake != "teacher-with-gradient":
            log_mass = log_mass.detach()
        return log_mass, scores.detach() if self.mistake == "detached-scores" else scores, chosen, candidates

    def _normalise(self, log_mass: Tensor, candidates: Tensor) -> Tensor:
        """Teacher log-probabilities [B, T, E], -inf outside the candidates."""
        if self.mistake == "unnormalised-teacher":
            return log_mass
        if self.mistake == "probability-space":
            mass = log_mass.exp()
            return (mass / mass.sum(-1, keepdim=True).clamp_min(1e-10)).log()
        return self._log_softmax(log_mass, candidates)

    def _log_softmax(self, logits: Tensor, candidates: Tensor) -> Tensor:
        """Log-probabilities over the candidates, -inf elsewhere; a row without candidates has no softmax."""
        logits = logits.masked_fill(~candidates, -INF)
        if self.mistake == "softmax-of-nothing":
            return logits.log_softmax(-1)
        nothing = ~candidates.any(-1, keepdim=True)
        return logits.masked_fill(nothing, 0).log_softmax(-1).masked_fill(nothing, -INF)

    def _objective(self, case: Case, scores: Tensor, teacher: Tensor, chosen: Tensor, candidates: Tensor) -> Result:
        """KL(teacher || student) of every query and its weighted mean."""
        student = self._log_softmax(scores, candidates)
        probability = teacher.exp()
        if self.mistake == "epsilon-in-logarithm":
            terms = probability * ((probability + 1e-10).log() - (student.exp() + 1e-10).log())
        elif self.mistake == "reverse-kl":
            terms = student.exp() * (student - teacher).masked_fill(student == -INF, 0)
        elif self.mistake == "clamped-student":
            cut = student.exp().clamp_min(torch.finfo(torch.float32).tiny).log()
            terms = probability * (teacher - cut).masked_fill(probability == 0, 0)
        else:
            terms = probability * (teacher - student).masked_fill(probability == 0, 0)
        kl, real = terms.sum(-1), case.document_ids >= 0
        weight = real.to(kl.dtype)
        if case.weight is not None and self.mistake != "weights-ignored":
            weight = torch.where(real, case.weight, 0)
        divisor = weight.sum() if case.divisor is None or self.mistake == "divisor-ignored" else kl.new_tensor(case.divisor)
        if self.mistake == "padding-in-divisor":
            divisor = kl.new_tensor(real.numel())
        if self.mistake == "candidates-in-divisor":
            divisor = candidates.any(-1).sum()
        loss = (weight * kl).sum() / divisor.to(kl.dtype).clamp_min(torch.finfo(kl.dtype).tiny)
        return Result(loss, kl.detach(), probability.detach(), _slots(chosen, case.topk))


def _members(indices: Tensor, count: int) -> Tensor:
    """Entry numbers [B, T, K], -1 in empty slots, as a mask [B, T, E]."""
    spare = torch.where(indices < 0, count, indices).long()
    return torch.zeros(*indices.shape[:2], count + 1, dtype=torch.bool, device=indices.device).scatter(-1, spare, True)[..., :count]


def _slots(chosen: Tensor, topk: int) -> Tensor:
    """A selection mask [B, T, E] as entry numbers [B, T, K], ascending, -1 in empty slots."""
    count = chosen.shape[-1]
    numbers = torch.arange(count, device=chosen.device).expand(chosen.shape)
    ordered = torch.where(chosen, numbers, count).sort(-1).values[..., :topk]
    ordered = torch.nn.functional.pad(ordered, (0, topk - ordered.shape[-1]), value=count)
    return torch.where(ordered == count, -1, ordered)
