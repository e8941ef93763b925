"""One forward of the model, and one attention call inside it: what csakit does between projections and output.

A `Forward` is made when the backbone is called and travels down with the keyword arguments of its layers. Each attention
module turns it into a `Call`, which the module's compressor, indexer and attention function share. Nothing is kept on the
model, so a recomputation under gradient checkpointing sees the forward it belongs to, whatever ran since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import csakit
from csakit import Layout
from csakit.nn.functional import AttendInputs, IndexInputs, Objective, attend_and_distill

from .measurement import Measurement
from .protocol import IndexerAdapter, LayerSite
from .selections import scores_of

if TYPE_CHECKING:
    from .generation import Past


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
        past: Past | None = None,
        replayed: Mapping[str, Tensor] | None = None,
        recording: bool = False,
    ) -> None:
        self.plan = plan
        self.adapter = adapter
        self.position_ids = position_ids  # [B, T], what the host's rotations use
        self.weight = weight
        self.divisor = divisor
        self.measurement = measurement
        self.past = past
        self.replayed = {} if replayed is None else replayed  # layer name -> picks [B, T, K] that stand instead of the indexer's own
        self.losses: dict[str, Tensor] = {}
        self.picks: dict[str, tuple[Tensor, Layout]] | None = {} if recording else None
        self.documents = layout
        self._layouts: dict[int, Layout] = {}

    def layout(self, ratio: int) -> Layout:
        """The documents of this forward's tokens for layers of one compression ratio; made once."""
        if ratio not in self._layouts:
            layout = self.documents.with_ratio(ratio)
            self._layouts[ratio] = layout if self.past is None else self.past.queries(layout)
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
            picks = self.forward.replayed.get(self.site.name)
            if picks is None:
                q, k, weights, scale = self.index
                self.selection = csakit.select(q, k, weights, self.site.topk, self.layout, scale=scale)
            else:
                self.selection = csakit.Selection(picks, scores_of(self.index, picks, self.layout))
        if self.forward.picks is not None:
            self._record(self.forward.picks, self.selection.indices)
        return self.selection.indices

    def _record(self, picks: dict[str, tuple[Tensor, Layout]], indices: Tensor) -> None:
        """Keeps the picks with the forward, or with the cache, whose rows may still be reordered."""
        past = self.forward.past
        if past is None:
            picks[self.site.name] = indices, self.layout
        else:
            past.cache.layers[self.site.attention.layer_idx].record(self.site.name, indices)

    def attend(self, inputs: AttendInputs) -> Tensor:
        """The attention output [B, T, H, D], with the indexer's loss attached and measurements taken where asked for."""
        plan, trains = self.forward.plan, self.trains_indexer
        objective = Objective(plan.objective, plan.denominator, divisor=self.forward.divisor) if trains else Objective("off")
        attention, loss = attend_and_distill(inputs, self.layout, index=self.index, selection=self.selection, objective=objective)
        if self.forward.measurement is not None and self.index is not None:
            self.forward.measurement.record(self, inputs)
        if loss is None:
            return attention.out
        self.forward.losses[self.site.name] = loss.loss.detach()
        return csakit.attach_loss(attention.out, loss.loss, weight=self.forward.weight)
