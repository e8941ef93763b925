"""csakit beside a fused sparse kernel: the teacher from what the kernel was given and returned, as a candidate.

The kernel is plain PyTorch that keeps FlashMLA's documented contract: natural-log lse without the sink, +inf for a row without keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

import csakit
from csakit.integrations import flash_mla

from ..case import Case, NotSupported, Result
from .library import layout_of, sparse_result


class BesideKernel:
    """Selection and objective by csakit, attention by the kernel, the teacher's denominator from the kernel's lse."""

    name = "csakit beside a fused kernel"

    def loss(self, case: Case) -> Result:
        """The sparse loss over the kernel's own denominator; the dense one over that of a call with every visible entry."""
        layout = layout_of(case)
        chosen = self._select(case, layout).indices
        attended = chosen if case.objective == "sparse" and case.denominator == "attended" else None
        lse = self._kernel(case, layout, attended)[1]
        attention = (case.q, case.entries, lse)
        if case.objective == "sparse":
            log_mass = csakit.teacher_log_mass(*attention, layout, indices=chosen, scale=case.scale)
            return sparse_result(case, self._select(case, layout), log_mass)
        index = (case.q_index, case.k_index, case.weights)
        answer = csakit.distill_dense(
            *index, *attention, layout, index_scale=case.index_scale, scale=case.scale, weight=case.weight, divisor=case.divisor
        )
        return Result(answer.loss, answer.kl)

    def select(self, case: Case) -> Tensor:
        """Selected entries [B, T, K]."""
        return self._select(case, layout_of(case)).indices

    def attend(self, case: Case) -> Tensor:
        """The kernel's output [B, T, H, D]."""
        layout = layout_of(case)
        return self._kernel(case, layout, self._select(case, layout).indices if case.objective == "sparse" else None)[0]

    @staticmethod
    def _select(case: Case, layout: csakit.Layout) -> csakit.Selection:
        return csakit.select(case.q_index, case.k_index, case.weights, case.topk, layout, scale=case.index_scale)

    @staticmethod
    def _kernel(case: Case, layout: csakit.Layout, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out [B, T, H, D], csakit's lse [B, T, H]) of the kernel over some entries (None: all visible ones) and the window."""
        if not bool(case.kv.isfinite().all()):
            raise NotSupported("the kernel multiplies the rows of empty slots by 0: padding must hold numbers")
        packed = case.cu_seqlens is not None
        at = flash_mla.Addresses.thd(layout, case.cu_seqlens) if packed else flash_mla.Addresses.bshd(layout)  # type: ignore[arg-type]
        indices = at.indices(chosen)
        slots = indices.shape[1] - case.window
        out, lse = _sparse_attention(at.flatten(case.q), at.memory(case.kv, case.entries), indices, case.scale, case.sink)
        return at.unflatten(out), flash_mla.read(lse, indices, at, sink=case.sink, slots=slots).lse


def _sparse_attention(q: Tensor, kv: Tensor, indices: Tensor, scale: float, sink: Tensor) -> tuple[Tensor, Tensor]:
    """(out [N, H, D], lse [N, H]) of queries [N, H, D] over the rows of kv [M, D] that indices [N, K] name; numbers below 0 name none."""
    live = indices >= 0
    rows = kv[indices.clamp(min=0).long()]
    logits = (scale * torch.einsum("nhd,nkd->nhk", q, rows)).masked_fill(~live[:, None], -torch.inf)
    empty = ~live.any(-1)[:, None]
    lse = logits.masked_fill(empty[..., None], 0).logsumexp(-1)
    total = torch.logaddexp(lse, sink)
    shares = (logits - total[..., None]).exp()
    return torch.einsum("nhk,nkd->nhd", shares, rows), lse.masked_fill(empty, torch.inf)
