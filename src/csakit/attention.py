"""attend: one softmax over window, chosen entries and sink; and the adapters that make a teacher from another kernel's lse."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import backends, checks, ops
from .backends.rows import INF
from .layout import Layout, token_shape
from .selection import check_indices, layout_ranges, validate_indices


class Attention(NamedTuple):
    """What `attend` returns.

    Attributes:
        out: [B, T, H, Dv], q's dtype.
        lse: [B, T, H] fp32 (fp64 for fp64 inputs), natural logarithm of the softmax denominator, the sink included; -inf where there is
            nothing to attend, and on padding. A constant.
        log_mass: shaped like indices, fp32: logarithm of the probability of each slot's entry, summed over the heads of the slot's set;
            -inf on empty slots. A constant. None unless asked for with `teacher=True` and indices.
    """

    out: Tensor
    lse: Tensor
    log_mass: Tensor | None


def attend(
    q: Tensor,
    kv: Tensor | None,
    entries: Tensor | None,
    layout: Layout,
    *,
    indices: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    values: Tensor | None = None,
    entry_values: Tensor | None = None,
    value_width: int | None = None,
    teacher: bool = False,
) -> Attention:
    """Attention of every token over its window of tokens, its entries, and a sink, in one softmax; and the teacher of the indexer.

        Z = exp(sink) + sum_window exp(scale q.kv) + sum_entries exp(scale q.entry)
        out = (sum_window exp(scale q.kv) kv + sum_entries exp(scale q.entry) entry) / Z,  lse = ln Z                (V4 eq. 27)
        log_mass[j] = logsumexp over heads of (scale q.entry_j - lse)                                        (math.md section 6)

    Statistics are fp32 (fp64 for fp64 inputs). Padding rows give out 0 and lse -inf and get no gradient; what a token does not see has no
    influence on its result, not even as NaN. Memory beyond inputs, results and gradients is bounded by a chunk of queries.

    Args:
        q: [B, T, H, D]; strided views are fine here and below.
        kv: [B, T_kv, D] or, with G KV heads, [B, T_kv, G, D]; T_kv = T + layout.kv_offset. Key and value of the window. None: no window,
            layout.window must be 0.
        entries: [B, E, D] or [B, E, G, D], compressed entries. None: there is a window only.
        layout: who sees whom.
        indices: [B, T, K] int32 or int64, entries to attend, the same for all heads; or [B, T, S, K], head h uses set h // (H / S). -1 is
            an empty slot, anywhere. A row's entries must be distinct and visible (checked under `csakit.debug(True)`); what is not visible
            is never attended. None: every visible entry.
        sink: [H], a logit per head without scale or value; -inf is none, +inf takes all mass. None: no sink.
        scale: factor of the logits; None: D**-0.5.
        values, entry_values: shaped like kv and entries with a width of their own. None: the keys are the values.
        value_width: the values are the first so many channels of the keys (DeepSeek-V3.2's absorbed MLA: 512 of 576).
        teacher: with indices, also return log_mass, from the logits of this pass (over every visible entry: `teacher_log_mass`).

    Raises:
        TypeError, ValueError: an argument of another kind or shape, or a combination that has no meaning.
    """
    rows, tokens = token_shape(layout)
    checks.tensor("q", q, "[B, T, H, D]", (rows, tokens, None, None))
    heads, width = q.shape[2:]
    if kv is None and layout.window:
        raise ValueError(f"kv is None, but the layout has a window of {layout.window}. Pass kv, or build the layout with window=0")
    if kv is not None and not layout.window:
        kv = values = None  # nobody sees it
    if kv is None and entries is None:
        raise ValueError("attend needs kv or entries; got neither" + ("" if layout.window else " (the layout's window is 0)"))
    if entries is None and indices is not None:
        raise ValueError("indices name entries, but entries is None")
    kv = _keys("kv", kv, "T_kv", rows, tokens + layout.kv_offset, width, heads, "T_kv = T + layout.kv_offset")
    entries = _keys("entries", entries, "E", rows, layout.num_entries, width, heads, "E = layout.num_entries")
    values, entry_values, value_width = _values(kv, entries, values, entry_values, value_width, width)
    if kv is not None and entries is not None and kv.shape[2] != entries.shape[2]:
        raise ValueError(f"kv and entries must have the same number of KV heads; got {kv.shape[2]} and {entries.shape[2]}")
    if sink is not None:
        checks.tensor("sink", sink, "[H]", (heads,))
    checks.flag("teacher", teacher)
    slots = None
    if indices is not None:
        slots = check_indices(indices, layout)
        checks.divides("sets of indices", slots.shape[2], "heads", heads)
        if checks.debugging():
            validate_indices(indices, layout)
    name, tile = backends.choose(q.device)
    scale = logit_scale(scale, width)
    out, lse, mass = ops.attend(
        q, kv, entries, values, entry_values, sink, slots, *layout_ranges(layout), scale, value_width, teacher, name, tile
    )
    return Attention(out, lse, mass.view(indices.shape) if teacher and indices is not None else None)


def teacher_log_mass(
    q: Tensor, entries: Tensor, lse: Tensor, layout: Layout, *, indices: Tensor | None = None, scale: float | None = None, sets: int = 1
) -> Tensor:
    """The log-mass of every visible entry [B, T, E], or of the slots of indices (shaped like them), from a given lse; a constant.

        log_mass[p, e] = logsumexp over heads of (scale q[p, h] . entry[e] - lse[p, h])                      (math.md section 6)

    For attention that ran in another kernel, and for metrics. `attend(teacher=True)` returns the same without a second product.

    Args:
        q, entries, indices, scale: as in `attend`.
        lse: [B, T, H], natural logarithm of the full denominator, **the sink included** (see `lse_with_sink`). With the lse of a dense
            pass and indices this is the "visible" denominator.
        sets: S, without indices: [B, T, S, E], each set over its own heads.

    Raises:
        TypeError, ValueError: an argument of another kind or shape.
    """
    rows, tokens = token_shape(layout)
    checks.tensor("q", q, "[B, T, H, D]", (rows, tokens, None, None))
    heads, width = q.shape[2:]
    entries = check_entries(entries, layout, width, heads)
    check_lse(lse, layout, heads)
    slots = None if indices is None else check_indices(indices, layout)
    checks.whole("sets", sets, at_least=1)
    if slots is not None and sets not in (1, slots.shape[2]):
        raise ValueError(f"sets must be that of indices, {slots.shape[2]}; got {sets}. Leave it out when indices are given")
    sets = sets if slots is None else slots.shape[2]
    checks.divides("sets", sets, "heads", heads)
    name, tile = backends.choose(q.device)
    mass = ops.log_mass(
        q.detach(), entries.detach(), lse.detach(), slots, *layout_ranges(layout), logit_scale(scale, width), sets, name, tile
    )
    if indices is not None:
        return mass.view(indices.shape)
    return mass if sets > 1 else mass[:, :, 0]


def lse_with_sink(lse: Tensor, sink: Tensor | None, *, base: Literal["e", "2"] = "e") -> Tensor:
    """The natural-log lse with the sink in it, from that of a kernel that leaves the sink out.

        logaddexp(lse, sink);   an empty row, which kernels mark with -inf or +inf (FlashMLA), becomes the sink

    Args:
        lse: [.., H], of window and entries.
        sink: [H], or None: no sink.
        base: of the logarithm the kernel uses: "e", or "2" (lse is then multiplied by ln 2).

    Raises:
        TypeError, ValueError: tensors of another kind, a sink that is not [H], another base.
    """
    if base not in ("e", "2"):
        raise ValueError(f'base must be "e" or "2"; got {base!r}')
    if not isinstance(lse, Tensor) or not lse.dtype.is_floating_point or lse.ndim < 1:
        raise TypeError(f"lse must be a floating-point tensor [.., H]; got {checks.describe(lse)}")
    natural = lse * math.log(2) if base == "2" else lse
    natural = torch.where(natural == INF, -INF, natural)
    if sink is None:
        return natural
    checks.tensor("sink", sink, "[H]", (lse.shape[-1],))
    return torch.logaddexp(natural, sink.to(natural.dtype))


def check_entries(entries: Tensor, layout: Layout, width: int, heads: int) -> Tensor:
    """entries as [B, E, G, D]; raises unless they fit."""
    checked = _keys("entries", entries, "E", layout.positions.shape[0], layout.num_entries, width, heads, "E = layout.num_entries")
    if checked is None:
        raise TypeError("entries must be a floating-point tensor [B, E, D]; got None")
    return checked


def check_lse(lse: Tensor, layout: Layout, heads: int) -> None:
    rows, tokens = token_shape(layout)
    checks.tensor("lse", lse, "[B, T, H]", (rows, tokens, heads), fix="Kernels that return [B, H, T] need a transpose")


def _keys(name: str, x: Tensor | None, letter: str, rows: int, length: int, width: int, heads: int, fix: str) -> Tensor | None:
    if x is None:
        return None
    if isinstance(x, Tensor) and x.ndim == 4:
        checks.tensor(name, x, f"[B, {letter}, G, D]", (rows, length, None, width), fix=fix)
        checks.divides(f"KV heads of {name}", x.shape[2], "heads", heads)
        return x
    checks.tensor(name, x, f"[B, {letter}, D]", (rows, length, width), fix=fix)
    return x.unsqueeze(2)  # indexing costs twice as much


def _values(
    kv: Tensor | None, entries: Tensor | None, values: Tensor | None, entry_values: Tensor | None, value_width: int | None, width: int
) -> tuple[Tensor | None, Tensor | None, int]:
    """values and entry_values as [.., G, Dv], and Dv."""
    if values is None and entry_values is None:
        if value_width is None:
            return None, None, width
        checks.whole("value_width", value_width, at_least=1)
        if value_width > width:
            raise ValueError(f"value_width must be at most the key width {width}; got {value_width}")
        return None, None, value_width
    if value_width is not None:
        raise ValueError("value_width says that the values are channels of the keys; it does not go with values or entry_values")
    result = []
    for name, keys, x in (("values", kv, values), ("entry_values", entries, entry_values)):
        if (keys is None) != (x is None):
            there = "kv" if name == "values" else "entries"
            raise ValueError(f"{name} and {there} must be given together; got only {there if x is None else name}")
        if x is not None and keys is not None:
            x = x[:, :, None] if isinstance(x, Tensor) and x.ndim == 3 else x
            checks.tensor(name, x, "[.., G, Dv], shaped like its keys but for the width", (*keys.shape[:3], None))
        result.append(x)
    widths = {x.shape[3] for x in result if x is not None}
    if len(widths) > 1:
        raise ValueError(f"values and entry_values must have the same width; got {sorted(widths)}")
    return result[0], result[1], widths.pop()


def logit_scale(scale: float | None, width: int) -> float:
    if scale is None:
        return float(width) ** -0.5
    checks.number("scale", scale)
    return float(scale)
