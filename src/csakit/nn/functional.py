"""What a hybrid attention layer does between its projections and its output, whoever owns the projections.

The modules of csakit.nn and the integrations, which work on a host's own modules, run the same three steps: entries from
pooled tokens, inputs of the indexer from detached ones, attention together with the objective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import csakit
from csakit import Layout

Projection = Callable[[Tensor], Tensor]
Rotation = Callable[[Tensor, Tensor], Tensor]  # rows and their positions -> rotated rows


class IndexInputs(NamedTuple):
    """What `csakit.select` needs of an indexer."""

    q: Tensor  # [B, T, I, C]
    k: Tensor  # [B, E, C]
    weights: Tensor  # [B, T, I]
    scale: float


class AttendInputs(NamedTuple):
    """What `csakit.attend` needs of a layer."""

    q: Tensor  # [B, T, H, D]
    kv: Tensor  # [B, T, D]
    entries: Tensor | None  # [B, E, D]; None: sliding window only
    sink: Tensor  # [H]
    scale: float

    def visible_lse(self, layout: Layout) -> Tensor:
        """The lse [B, T, H] of attention over every visible entry; a constant."""
        with torch.no_grad():
            return csakit.attend(self.q, self.kv, self.entries, layout, sink=self.sink, scale=self.scale).lse


class Objective(NamedTuple):
    """How the indexer's loss is taken."""

    kind: str  # "off", "dense" or "sparse"
    denominator: str = "attended"  # or "visible"
    weight: Tensor | None = None  # [B, T], of `csakit.distill`
    divisor: float | Tensor | None = None  # of `csakit.distill`
    group: Any = None  # of `csakit.distill`: over which the heads are sharded


def compressed_entries(
    values: Tensor, gates: Tensor, bias: Tensor, positions: Tensor, layout: Layout, *, norm: Projection, rotate: Rotation, overlap: bool
) -> Tensor:
    """The entries [B, E, D] of a compressor: pooled inside documents, then normed, then rotated at their first own token.

    Args:
        values, gates, bias, overlap: of `csakit.compress`.
        positions: [B, T], the position the host gives each token.
    """
    return rotate(norm(csakit.compress(values, gates, bias, layout, overlap=overlap)), layout.to_entries(positions))


def index_inputs(
    hidden: Tensor,
    latent: Tensor,
    positions: Tensor,
    *,
    queries: Projection,
    keys: Projection,
    gate: Projection,
    rotate: Rotation,
    width: int,
    scale: float,
) -> IndexInputs:
    """The inputs of the index scores. Detached here: the indexer's loss reaches nothing but the indexer, and no other loss reaches it.

    Args:
        hidden: [B, T, d]. latent: [B, T, r], the normed query latent. positions: [B, T].
        queries: latent -> [B, T, I * C]. keys: hidden -> [B, E, C], rotated. gate: hidden -> [B, T, I].
        width: C.
        scale: of the scores, C**-0.5 * I**-0.5.
    """
    hidden, latent = hidden.detach(), latent.detach()
    q = rotate(queries(latent).unflatten(-1, (-1, width)), positions)
    return IndexInputs(q, keys(hidden), gate(hidden), scale)


def attend_and_distill(
    inputs: AttendInputs, layout: Layout, *, index: IndexInputs | None, selection: csakit.Selection | None, objective: Objective
) -> tuple[csakit.Attention, csakit.IndexerLoss | None]:
    """The attention over the selection (None: every visible entry), and the indexer's loss, None when the objective is "off".

    The dense objective is that of an attention over every visible entry, whose denominator is then both the attended and the visible one.
    The sparse one distills over the selection; its teacher comes out of the attention pass itself ("attended"), or of a dense pass's lse.
    """
    q, kv, entries, sink, scale = inputs
    indices = None if selection is None else selection.indices
    own_mass = objective.kind == "sparse" and objective.denominator == "attended"
    attention = csakit.attend(q, kv, entries, layout, indices=indices, sink=sink, scale=scale, teacher=own_mass)
    if objective.kind == "off":
        return attention, None
    assert entries is not None and index is not None
    weight, divisor, group = objective.weight, objective.divisor, objective.group
    if objective.kind == "dense":
        index_q, index_k, weights, index_scale = index
        lse = attention.lse
        loss = csakit.distill_dense(
            index_q, index_k, weights, q, entries, lse, layout,
            index_scale=index_scale, scale=scale, weight=weight, divisor=divisor, group=group,
        )  # fmt: skip
        return attention, loss
    assert selection is not None
    log_mass = attention.log_mass
    if log_mass is None:
        lse = inputs.visible_lse(layout)
        log_mass = csakit.teacher_log_mass(q, entries, lse, layout, indices=indices, scale=scale)
        attention = attention._replace(log_mass=log_mass)
    return attention, csakit.distill(selection.scores, log_mass, layout, weight=weight, divisor=divisor, group=group)
