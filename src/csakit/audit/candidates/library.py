"""csakit's own verbs as a candidate: all that a framework has to write to put its loss under the audit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import csakit

from ..case import Case, NotSupported, Result


class Library:
    """A candidate with every member, each a call of the public verbs."""

    name = "csakit"

    def loss(self, case: Case) -> Result:
        """The loss of `distill` with the teacher that comes out of `attend`, or of `distill_dense`."""
        layout, selection = layout_of(case), _select(case)
        if case.objective == "sparse":
            return sparse_result(case, selection, _log_mass(case, selection.indices))
        lse = csakit.attend(case.q, case.kv, case.entries, layout, sink=case.sink, scale=case.scale).lse
        index, attention = (case.q_index, case.k_index, case.weights), (case.q, case.entries, lse)
        answer = csakit.distill_dense(
            *index, *attention, layout, index_scale=case.index_scale, scale=case.scale, weight=case.weight, divisor=case.divisor
        )
        log_mass = csakit.teacher_log_mass(*attention, layout, scale=case.scale)
        return Result(answer.loss, answer.kl, _probabilities(log_mass), selection.indices)

    def loss_over_ranks(self, cases: Sequence[Case]) -> Result:
        """The sparse loss when every rank returns the log mass of its heads: one logsumexp over the ranks, then `distill`."""
        if cases[0].objective == "dense":
            raise NotSupported("the dense objective reduces over a process group, which one process does not have")
        selection = _select(cases[0])
        log_mass = torch.stack([_log_mass(case, selection.indices) for case in cases]).logsumexp(0)
        return sparse_result(cases[0], selection, log_mass)

    def with_coefficient(self, case: Case, coefficient: float | None) -> Tensor:
        """The loss as a layer carries it: attached to an output whose own gradient is 0."""
        if not coefficient:
            return case.q_index.new_zeros(())
        loss = self.loss(case).loss
        return csakit.attach_loss(coefficient * loss.detach(), loss, weight=coefficient)

    def select(self, case: Case) -> Tensor:
        """Selected entries [B, T, K]."""
        return _select(case).indices

    def attend(self, case: Case) -> Tensor:
        """Attention output [B, T, H, D]."""
        indices = self.select(case) if case.objective == "sparse" else None
        return csakit.attend(case.q, case.kv, case.entries, layout_of(case), indices=indices, sink=case.sink, scale=case.scale).out

    def compress(self, case: Case) -> Tensor:
        """Entries [B, E, D]."""
        return csakit.compress(case.values, case.gates, case.bias, layout_of(case))


def layout_of(case: Case) -> csakit.Layout:
    """Who sees whom in a case."""
    if case.cu_seqlens is not None:
        return csakit.Layout.packed(case.cu_seqlens, ratio=case.ratio, window=case.window)
    if case.mask is not None:
        return csakit.Layout.from_mask(case.mask, ratio=case.ratio, window=case.window)
    rows, tokens = case.kv.shape[:2]
    return csakit.Layout.batch(rows, tokens, ratio=case.ratio, window=case.window, device=case.kv.device)


def _select(case: Case) -> csakit.Selection:
    return csakit.select(case.q_index, case.k_index, case.weights, case.topk, layout_of(case), scale=case.index_scale)


def _log_mass(case: Case, indices: Tensor) -> Tensor:
    """[B, T, K] of the case's heads; the denominator "visible" is the lse of a dense pass."""
    attention, layout = (case.q, case.kv, case.entries), layout_of(case)
    if case.denominator == "visible":
        lse = csakit.attend(*attention, layout, sink=case.sink, scale=case.scale).lse
        return csakit.teacher_log_mass(case.q, case.entries, lse, layout, indices=indices, scale=case.scale)
    log_mass = csakit.attend(*attention, layout, indices=indices, sink=case.sink, scale=case.scale, teacher=True).log_mass
    assert log_mass is not None
    return log_mass


def sparse_result(case: Case, selection: csakit.Selection, log_mass: Tensor) -> Result:
    """The sparse loss over a selection, and the teacher [B, T, E] behind it."""
    answer = csakit.distill(selection.scores, log_mass, layout_of(case), weight=case.weight, divisor=case.divisor)
    slots = _probabilities(log_mass)
    count = case.entries.shape[1]
    spare = torch.where(selection.indices < 0, count, selection.indices).long()  # empty slots fall into a column that is cut off
    teacher = slots.new_zeros(*slots.shape[:2], count + 1).scatter(-1, spare, slots)[..., :count]
    return Result(answer.loss, answer.kl, teacher, selection.indices)


def _probabilities(log_mass: Tensor) -> Tensor:
    """The teacher: softmax over the slots, 0 in a row without mass."""
    return log_mass.softmax(-1).nan_to_num(0.0)
