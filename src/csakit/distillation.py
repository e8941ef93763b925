"""distill and distill_dense: the loss that trains the indexer; attach_loss: how it reaches backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, checks, ops
from .attention import check_entries, check_lse, logit_scale
from .layout import Layout, token_shape
from .selection import check_index_inputs, check_sets, layout_ranges
from .selection import index_scale as default_index_scale


class IndexerLoss(NamedTuple):
    """What `distill` and `distill_dense` return.

    Attributes:
        loss: scalar, fp32 (fp64 for fp64 inputs), nats: sum of weight * KL over tokens, divided by the divisor.
        kl: [B, T], the KL of each token in nats, 0 on padding; a constant. With S sets, their mean.
        divisor: scalar, what the sum was divided by.
    """

    loss: Tensor
    kl: Tensor
    divisor: Tensor


def distill(
    scores: Tensor,
    log_mass: Tensor,
    layout: Layout,
    *,
    weight: Tensor | None = None,
    divisor: float | Tensor | None = None,
    group: Any = None,
) -> IndexerLoss:
    """The loss that moves the indexer's distribution over the selected entries to the attention's: KL(teacher || student).

        teacher = softmax(log_mass), student = softmax(scores), both over the slots of a row
        loss = sum_p weight[p] * KL[p] / divisor,  d loss / d score = weight / divisor * (student - teacher)       (V3.2 eq. 4)

    The teacher is a constant; only `scores` get a gradient. In log space throughout: no epsilon, and a row whose heads put e^-100 on its
    entries still has a teacher that sums to 1. A row without candidates, or whose candidates have no mass, has KL 0.

    Args:
        scores: [B, T, K] or [B, T, S, K] from `select`; -inf marks an empty slot.
        log_mass: shaped like scores, from `attend(teacher=True)` or `teacher_log_mass`.
        layout: who is a real token.
        weight: [B, T] float, int or bool, weight of each token; default 1. On padding it counts as 0, whatever it holds.
        divisor: what to divide by; default: the sum of the weights, so tokens without candidates count. Give one global count when the
            data of a step is split (gradient accumulation, data or context parallel). 0 gives loss 0.
        group: process group over which the heads of a set are sharded: log_mass is combined over it (row maximum, then one sum) before the
            one normalisation. Every rank gets the same loss.

    Raises:
        TypeError, ValueError: an argument of another kind or shape; a negative or non-finite divisor.
    """
    rows, tokens = token_shape(layout)
    with_sets = isinstance(scores, Tensor) and scores.ndim == 4
    letters, sizes = ("[B, T, S, K]", (rows, tokens, None, None)) if with_sets else ("[B, T, K]", (rows, tokens, None))
    checks.tensor("scores", scores, letters, sizes)
    checks.tensor("log_mass", log_mass, "of the shape of scores", tuple(scores.shape))
    dtype = torch.promote_types(torch.promote_types(scores.dtype, log_mass.dtype), torch.float32)
    factor, divisor = _factor(weight, divisor, layout, dtype)
    if not with_sets:
        scores, log_mass = scores[:, :, None], log_mass[:, :, None]
    loss, kl = ops.distill(scores, log_mass.detach(), factor, layout.valid, _group_name(group), *backends.choose(scores.device))
    return IndexerLoss(loss, kl, divisor)


def distill_dense(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor | None,
    q: Tensor,
    entries: Tensor,
    lse: Tensor,
    layout: Layout,
    *,
    index_scale: float | None = None,
    scale: float | None = None,
    relu: bool = True,
    sets: int = 1,
    weight: Tensor | None = None,
    divisor: float | Tensor | None = None,
    group: Any = None,
) -> IndexerLoss:
    """The loss of `distill` over every visible entry, for the dense warm-up (V3.2 eq. 3). Streams: no T x E array is ever held.

    Only q_index, k_index and weights get a gradient.

    Args:
        q_index, k_index, weights, relu, sets: q, k, weights, relu, sets of `select`. index_scale: its scale.
        q, entries, scale: of `attend`.
        lse: [B, T, H], of a dense pass of `attend`, the sink included.
        layout, weight, divisor, group: as in `distill`. A group makes every rank walk its chunks together.

    Raises:
        TypeError, ValueError: an argument of another kind or shape.
    """
    check_index_inputs(q_index, k_index, weights, layout, ("q_index", "k_index"))
    check_sets(sets, q_index.shape[2])
    checks.flag("relu", relu)
    rows, tokens = token_shape(layout)
    checks.tensor("q", q, "[B, T, H, D]", (rows, tokens, None, None))
    heads, width = q.shape[2:]
    checks.divides("sets", sets, "heads", heads)
    entries = check_entries(entries, layout, width, heads)
    check_lse(lse, layout, heads)
    index_scale = default_index_scale(q_index, weights, index_scale, sets, "index_scale")
    dtype = torch.float32
    for x in (q_index, k_index, q, entries, lse):
        dtype = torch.promote_types(dtype, x.dtype)
    factor, divisor = _factor(weight, divisor, layout, dtype)
    name, tile = backends.choose(q.device)
    loss, kl = ops.distill_dense(
        q_index, k_index, weights, factor, q.detach(), entries.detach(), lse.detach(), *layout_ranges(layout),
        index_scale, logit_scale(scale, width), relu, sets, _group_name(group), name, tile,
    )  # fmt: skip
    return IndexerLoss(loss, kl, divisor)


def attach_loss(out: Tensor, loss: Tensor, *, weight: float | Tensor | Callable[[], float | Tensor] = 1.0) -> Tensor:
    """out, unchanged; its backward also gives `loss` the gradient `weight`, whatever gradient comes from above.

    So a loss made inside a layer needs no list to be collected in: the layer's output carries it, also through gradient checkpointing
    and when out itself needs no gradient. Whoever scales the main loss (a gradient scaler, 1 / micro-batches) scales this one with weight.

    Args:
        out: any tensor that the rest of the model depends on.
        loss: scalar.
        weight: number, scalar tensor, or a function without arguments that is read in each backward.

    Raises:
        TypeError: out or loss is not a floating-point tensor, or weight is none of the three.
        ValueError: loss is not a scalar; a weight that is NaN or infinite.
    """
    if not isinstance(out, Tensor) or not out.dtype.is_floating_point:
        raise TypeError(f"out must be a floating-point tensor; got {checks.describe(out)}")
    checks.tensor("loss", loss, "scalar", ())
    if isinstance(weight, Tensor):
        checks.tensor("weight", weight, "scalar", (), kind="real")
    elif not callable(weight):
        checks.number("weight", weight)
    return ops.AttachLoss.apply(out, loss, weight) if loss.requires_grad else out


def _factor(weight: Tensor | None, divisor: float | Tensor | None, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight / divisor of each token [B, T], and the divisor."""
    valid = layout.valid
    if weight is None:
        weights = valid.to(dtype)
    else:
        checks.tensor("weight", weight, "[B, T]", tuple(valid.shape), kind="real")
        weights = torch.where(valid, weight.detach().to(dtype), 0)
    if divisor is None:
        total = weights.sum()
    elif isinstance(divisor, Tensor):
        checks.tensor("divisor", divisor, "scalar", (), kind="real")
        total = divisor.detach().to(device=valid.device, dtype=dtype)
    else:
        checks.number("divisor", divisor)
        if divisor < 0 or math.isnan(divisor):
            raise ValueError(f"divisor must be at least 0; got {divisor}")
        total = torch.full((), float(divisor), dtype=dtype, device=valid.device)
    return torch.where(total == 0, 0, weights / total), total


def _group_name(group: Any) -> str:
    if group is None:
        return ""
    name = getattr(group, "group_name", None)
    if not isinstance(name, str):
        raise TypeError(f"group must be a torch.distributed process group; got {checks.describe(group)}")
    return name
