"""One forward of the model, and one attention call inside it: what csakit does between projections and output.

A `Forward` is made when the backbone is called and travels down with the keyword arguments of its layers. Each attention
module turns it into a `Call`, which the module's compressor, indexer and attention function share. Nothing is kept on the
model, so a recomputation under gradient checkpointing sees the forward it belongs to, whatever ran since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import csakit
from csakit import Layout

from .measurement import Measurement
from .protocol import AttendInputs, IndexerAdapter, IndexInputs, LayerSite


@dataclass(frozen=True)
class Plan:
    """What the layers of one forward do."""

    selects: bool  # attention over the indexer's picks; else over every visible entry
    objective: str  # "off", "dense" or "sparse"
    coef: float  # 0.0: no loss work
    denominator: str  # "attended" or "visible"


class Forward:
    """The documents, the plan and the losses of one forward of the backbone."""

    def __init__(
        self,
        plan: Plan,
        adapter: IndexerAdapter,
        layout: Layout,
        position_ids: Tensor,
        *,
        weight: Callable[[], float | Tensor],
        divisor: float | Tensor | None,
        measurement: Measurement | None,
    ) -> None:
        self.plan = plan
        self.adapter = adapter
        self.position_ids = position_ids  # [B, T], what the host's rotations use
        self.weight = weight
        self.divisor = divisor
        self.measurement = measurement
        self.losses: dict[str, Tensor] = {}
        self._layouts = {layout.ratio: layout}

    def layout(self, ratio: int) -> Layout:
        """The documents of this forward for layers of one compression ratio; made once."""
        if ratio not in self._layouts:
            self._layouts[ratio] = next(iter(self._layouts.values())).with_ratio(ratio)
        return self._layouts[ratio]


class Call:
    """One attention layer at work. The compressor and the indexer fill it, the attention function finishes it."""

    def __init__(self, forward: Forward, site: LayerSite) -> None:
        self.forward = forward
        self.site = site
        self.layout = forward.layout(site.ratio)
        self.position_ids = forward.position_ids
        self.index: IndexInputs | None = None
        self.selection: csakit.Selection | None = None

    @property
    def trains_indexer(self) -> bool:
        """Whether this layer computes and attaches its indexer's loss now."""
        plan, indexer = self.forward.plan, self.site.indexer
        if indexer is None or plan.objective == "off" or plan.coef == 0.0 or not torch.is_grad_enabled():
            return False
        return any(parameter.requires_grad for parameter in indexer.parameters())

    @property
    def needs_indexer(self) -> bool:
        """Whether this layer runs its indexer at all."""
        if self.site.indexer is None:
            return False
        return self.forward.plan.selects or self.trains_indexer or self.forward.measurement is not None

    def run_indexer(self, project: Callable[[], IndexInputs]) -> Tensor | None:
        """The picks [B, T, K] int32 (-1 empty) of the indexer, None where attention is dense. No graph is kept without a loss."""
        with torch.set_grad_enabled(self.trains_indexer):
            self.index = project()
            if not self.forward.plan.selects:
                return None
            q, k, weights, scale = self.index
            self.selection = csakit.select(q, k, weights, self.site.topk, self.layout, scale=scale)
        return self.selection.indices

    def attend(self, inputs: AttendInputs) -> Tensor:
        """The attention output [B, T, H, D], with the indexer's loss attached and measurements taken where asked for."""
        q, kv, entries, sink, scale = inputs
        indices = None if self.selection is None else self.selection.indices
        trains = self.trains_indexer
        sparse = trains and self.forward.plan.objective == "sparse"
        own_mass = sparse and self.forward.plan.denominator == "attended"
        attention = csakit.attend(q, kv, entries, self.layout, indices=indices, sink=sink, scale=scale, teacher=own_mass)
        if self.forward.measurement is not None and self.index is not None:
            self.forward.measurement.record(self, inputs)
        if not trains:
            return attention.out
        loss = (self._sparse_loss if sparse else self._dense_loss)(inputs, attention)
        self.forward.losses[self.site.name] = loss.loss.detach()
        return csakit.attach_loss(attention.out, loss.loss, weight=self.forward.weight)

    def _sparse_loss(self, inputs: AttendInputs, attention: csakit.Attention) -> csakit.IndexerLoss:
        assert self.selection is not None and inputs.entries is not None
        log_mass = attention.log_mass
        if log_mass is None:
            lse, picks = inputs.visible_lse(self.layout), self.selection.indices
            log_mass = csakit.teacher_log_mass(inputs.q, inputs.entries, lse, self.layout, indices=picks, scale=inputs.scale)
        return csakit.distill(self.selection.scores, log_mass, self.layout, divisor=self.forward.divisor)

    def _dense_loss(self, inputs: AttendInputs, attention: csakit.Attention) -> csakit.IndexerLoss:
        assert self.index is not None and inputs.entries is not None
        index_q, index_k, weights, index_scale = self.index
        return csakit.distill_dense(
            index_q,
            index_k,
            weights,
            inputs.q,
            inputs.entries,
            attention.lse,
            self.layout,
            index_scale=index_scale,
            scale=inputs.scale,
            divisor=self.forward.divisor,
        )
