"""index_scores and select: the Lightning Indexer chooses entries for each query."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import backends, checks, ops
from .layout import Layout, token_shape


class Selection(NamedTuple):
    """What `select` returns; [B, T, K], with several sets [B, T, S, K].

    Attributes:
        indices: int32, ascending entry numbers; -1 are empty slots, which come last.
        scores: fp32 (fp64 for fp64 inputs), differentiable; -inf on empty slots.
    """

    indices: Tensor
    scores: Tensor


def index_scores(
    q: Tensor, k: Tensor, weights: Tensor | None, layout: Layout, *, scale: float | None = None, relu: bool = True, sets: int = 1
) -> Tensor:
    """The score of every entry for every token: [B, T, E], with several sets [B, T, S, E]; fp32, -inf where not visible. Differentiable.

    For small inputs and metrics: `select` gives the greatest without holding all.

        score[p, e] = scale * sum_i weights[p, i] * relu(q[p, i] . k[e])                                            (V4 eq. 16)

    Args: as in `select`.
    """
    scale = _check(q, k, weights, layout, scale, relu, sets)
    name, tile = backends.choose(q.device)
    scores = ops.index_scores(q, k, weights, *layout_ranges(layout), scale, relu, sets, name, tile)
    return scores if sets > 1 else scores[:, :, 0]


def select(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    topk: int,
    layout: Layout,
    *,
    scale: float | None = None,
    relu: bool = True,
    sets: int = 1,
) -> Selection:
    """The `topk` visible entries of greatest score for each token, as a set in ascending order, and their scores.

    Ties go to the lowest entry number. With fewer than topk visible entries slots stay empty. The result is the same with and
    without gradient, compiled and eager, and does not depend on later tokens. Nothing of size T x I x E or T x E is held.

    Args:
        q: [B, T, I, C], index queries; any float dtype, scored in fp32 (fp64 for fp64).
        k: [B, E, C], index keys, one per entry.
        weights: [B, T, I], one per head and token, may be negative; None: ones.
        topk: K, slots per query.
        layout: who sees whom.
        scale: factor of the scores, the temperature of the student. None: C**-0.5 * (I / sets)**-0.5, without weights C**-0.5.
        relu: False takes plain products instead of their positive part.
        sets: S; the I heads fall into S runs of I / S heads, each with a selection of its own.

    Raises:
        TypeError, ValueError: an argument of another kind or shape, topk below 1, sets that do not divide the heads.
    """
    scale = _check(q, k, weights, layout, scale, relu, sets)
    checks.whole("topk", topk, at_least=1)
    name, tile = backends.choose(q.device)
    indices, scores = ops.select(q, k, weights, *layout_ranges(layout), topk, scale, relu, sets, name, tile)
    return Selection(indices, scores) if sets > 1 else Selection(indices[:, :, 0], scores[:, :, 0])


def validate_indices(indices: Tensor, layout: Layout) -> None:
    """Raises unless each row of indices names visible entries, none twice; -1 is an empty slot and may stand anywhere.

    Reads values back to the host: for tests and debugging. `attend` runs it under `csakit.debug(True)`.

    Args:
        indices: [B, T, K] or [B, T, S, K], int32 or int64.

    Raises:
        TypeError, ValueError: another dtype or shape.
        ValueError: an index that is repeated, below -1, out of range, or not visible; names the first.
    """
    slots = check_indices(indices, layout)
    rows = layout.num_entries
    start, stop = layout.entry_start[..., None, None], layout.entry_stop[..., None, None]
    ordered = slots.sort(-1).values
    repeated = torch.zeros_like(slots, dtype=torch.bool)
    repeated[..., 1:] = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    for wrong, values, what in (
        (slots < -1, slots, "is below -1, the empty slot"),
        (slots >= rows, slots, f"is out of range: the layout has {rows} entries"),
        ((slots >= 0) & ((slots < start) | (slots >= stop)), slots, "is not visible to its token"),
        (repeated, ordered, "stands more than once in its row"),
    ):
        if wrong.any():
            b, t, s, j = wrong.nonzero()[0].tolist()
            first, last = int(layout.entry_start[b, t]), int(layout.entry_stop[b, t]) - 1
            seen = f"it sees {first}..{last}" if last >= first else "it sees none"
            raise ValueError(f"indices: entry {int(values[b, t, s, j])} of row {b}, token {t} {what}; {seen}")


def check_indices(indices: Tensor, layout: Layout) -> Tensor:
    """indices as [B, T, S, K], after checks of dtype and shape."""
    rows, tokens = token_shape(layout)
    with_sets = isinstance(indices, Tensor) and indices.ndim == 4
    letters, sizes = ("[B, T, S, K]", (rows, tokens, None, None)) if with_sets else ("[B, T, K]", (rows, tokens, None))
    checks.tensor("indices", indices, letters, sizes, kind="index")
    return indices if with_sets else indices.unsqueeze(2)


def layout_ranges(layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """The fields of a layout that the ops take."""
    return layout.valid, layout.window_start, layout.entry_start, layout.entry_stop, layout.kv_offset


def check_index_inputs(q: Tensor, k: Tensor, weights: Tensor | None, layout: Layout, names: tuple[str, str] = ("q", "k")) -> None:
    """Raises unless the index branch fits the layout."""
    rows, tokens = token_shape(layout)
    checks.tensor(names[0], q, "[B, T, I, C]", (rows, tokens, None, None))
    checks.tensor(names[1], k, "[B, E, C]", (rows, layout.num_entries, q.shape[3]), fix="Index keys are one per entry of the layout")
    if weights is not None:
        checks.tensor("weights", weights, "[B, T, I]", (rows, tokens, q.shape[2]))


def index_scale(q: Tensor, weights: Tensor | None, scale: float | None, sets: int, name: str = "scale") -> float:
    """The scale asked for, or the default: C**-0.5 * (I / S)**-0.5, without weights C**-0.5."""
    if scale is not None:
        checks.number(name, scale)
        return float(scale)
    heads, width = q.shape[2:]
    return float(width) ** -0.5 * (1.0 if weights is None else float(heads // sets) ** -0.5)


def _check(q: Tensor, k: Tensor, weights: Tensor | None, layout: Layout, scale: float | None, relu: bool, sets: int) -> float:
    check_index_inputs(q, k, weights, layout)
    check_sets(sets, q.shape[2])
    checks.flag("relu", relu)
    return index_scale(q, weights, scale, sets)


def check_sets(sets: int, heads: int) -> None:
    checks.whole("sets", sets, at_least=1)
    checks.divides("sets", sets, "index heads", heads)
