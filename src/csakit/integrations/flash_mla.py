"""The teacher from a fused sparse kernel: FlashMLA, cuDNN, TileLang.

These kernels take one flat list of key rows and, for each query, the numbers of the rows it attends: its compressed entries first,
its window after. They return `lse`, the denominator without the sink. Here the two index spaces meet: `Addresses` says which row of
the kernel's kv holds which token and entry, `read` turns what the kernel was given and returned into csakit's indices and lse.

    addresses = flash_mla.Addresses.sbhd(layout)
    out, max_logits, lse = flash_mla_sparse_fwd(q_flat, kv_flat, indices[:, None], scale, attn_sink=sink)
    lse, chosen = flash_mla.read(lse, indices, addresses, sink=sink, slots=topk, max_logits=max_logits)
    log_mass = csakit.teacher_log_mass(q, entries, lse, layout, indices=chosen, scale=scale)
    loss = csakit.distill(scores, log_mass, layout).loss

`attend` does all of it but the loss, for callers without tensors of the kernel's form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..attention import Attention, logit_scale, lse_with_sink, teacher_log_mass
from ..backends.rows import INF
from ..layout import Layout
from ..selection import check_indices, validate_indices


class Read(NamedTuple):
    """What `read` returns.

    Attributes:
        lse: [B, T, H], natural logarithm of the whole denominator, the sink included; -inf where nothing is attended, and on padding.
        indices: [B, T, K] int32, entries of the layout, in the kernel's slot order; -1 where a slot holds no entry.
    """

    lse: Tensor
    indices: Tensor


@dataclass(frozen=True, eq=False)
class Addresses:
    """Where a kernel's flat arrays hold the tokens and entries of a layout.

    Attributes:
        layout: who sees whom.
        tokens: [B, T_kv] int64, the kernel's kv row of each token of kv; -1: none.
        entries: [B, E] int64, the kernel's kv row of each entry; -1 on spare capacity.
        size: M, at least the number of kv rows.
        batch_inner: query t of row b is kernel row t * B + b (SBHD); otherwise b * T + t. The same when B = 1.
    """

    layout: Layout
    tokens: Tensor
    entries: Tensor
    size: int
    batch_inner: bool

    @classmethod
    def sbhd(cls, layout: Layout) -> Addresses:
        """[S, B, ..] tensors, flattened; kv is the tokens, then the entries: `cat([kv, entries]).flatten(0, 1)`, Megatron's order.

        With B = 1 also one packed or context-parallel row whose entries follow behind all its tokens.
        """
        rows, length, row = _sizes(layout)
        tokens = torch.arange(length, device=row.device) * rows + row
        entries = (torch.arange(layout.num_entries, device=row.device) + length) * rows + row
        return cls(layout, tokens, _live(entries, layout), rows * (length + layout.num_entries), True)

    @classmethod
    def bshd(cls, layout: Layout) -> Addresses:
        """[B, S, ..] tensors, flattened; kv is the tokens, then the entries of each row: `cat([kv, entries], 1).flatten(0, 1)`."""
        rows, length, row = _sizes(layout)
        stride = length + layout.num_entries
        tokens = torch.arange(length, device=row.device) + row * stride
        entries = torch.arange(layout.num_entries, device=row.device) + length + row * stride
        return cls(layout, tokens, _live(entries, layout), rows * stride, False)

    @classmethod
    def thd(cls, layout: Layout, cu_seqlens: Tensor, *, cu_entries: Tensor | None = None) -> Addresses:
        """One packed row; kv holds, document by document, its tokens and then its entries.

        Args:
            layout: of one row, B = 1.
            cu_seqlens: [n + 1] int32 or int64, where each document's room begins and ends (the padded offsets, if there are any).
            cu_entries: [n + 1], where the host's entries of each document begin. None: every document has the layout's entries. Hosts that
                also compress a document's padding have more; those entries are seen by nobody.

        Raises:
            TypeError, ValueError: offsets that are not 1-D integers or differ in length, a layout with several rows or a halo.
        """
        length = layout.positions.shape[1]
        row, document = packed_entries(layout, cu_seqlens, cu_entries=cu_entries)
        room, live = cu_seqlens.long(), layout.entry_token >= 0
        before = packed_entry_offsets(layout, cu_seqlens) if cu_entries is None else cu_entries.long()
        token = torch.arange(length, device=room.device)
        owner = _document_of(token, room)
        tokens = torch.where(token < room[-1], token + before[owner], -1)
        entries = torch.where(live, room[document + 1] + row, -1)
        return cls(layout, tokens[None], entries, length + length // layout.ratio, True)

    def flatten(self, x: Tensor) -> Tensor:
        """Per-token rows in the kernel's order: [B, T, ..] -> [N, ..]."""
        return (x.transpose(0, 1) if self.batch_inner else x).flatten(0, 1)

    def unflatten(self, x: Tensor) -> Tensor:
        """The inverse of `flatten`: [N, ..] -> [B, T, ..].

        Raises:
            ValueError: x has another number of rows.
        """
        rows, tokens = self.layout.positions.shape
        if x.shape[0] != rows * tokens:
            raise ValueError(f"the kernel's rows must be the {rows * tokens} queries of the layout; got {list(x.shape)}")
        return x.unflatten(0, (tokens, rows)).transpose(0, 1) if self.batch_inner else x.unflatten(0, (rows, tokens))

    def memory(self, kv: Tensor, entries: Tensor) -> Tensor:
        """The kernel's kv [M, D] from kv [B, T_kv, D] and entries [B, E, D]; differentiable. Rows that hold nothing are 0.

        Raises:
            TypeError, ValueError: tensors that do not fit the layout.
        """
        rows, length, _ = _sizes(self.layout)
        checks.tensor("kv", kv, "[B, T_kv, D]", (rows, length, None))
        checks.tensor("entries", entries, "[B, E, D]", (rows, self.layout.num_entries, kv.shape[2]))
        flat = torch.cat([kv.flatten(0, 1), entries.flatten(0, 1)])
        where = torch.cat([self.tokens.flatten(), self.entries.flatten()])
        where = torch.where(where < 0, self.size, where)  # what has no row goes to one that is cut off
        return flat.new_zeros(self.size + 1, flat.shape[1]).index_put((where,), flat)[:-1]

    def indices(self, chosen: Tensor | None = None, *, multiple: int = 1) -> Tensor:
        """What each query attends, for the kernel: [N, K + W] int32, its entries, then its window; -1 are empty slots.

        Args:
            chosen: [B, T, K] entries of the layout, from `csakit.select`. None: every visible entry (K = E); the lse of such a call is the
                denominator of the dense objective.
            multiple: pad the slots with -1 to a multiple of this (FlashMLA: 128 on Hopper, 64 on Blackwell).

        Raises:
            TypeError, ValueError: chosen is not [B, T, K], multiple is not a whole number.
        """
        checks.whole("multiple", multiple, at_least=1)
        layout = self.layout
        start, stop = layout.entry_start[..., None], layout.entry_stop[..., None]
        if chosen is None:
            chosen = torch.arange(layout.num_entries, device=start.device).expand(*start.shape[:2], -1)
        chosen = _one_set(chosen, layout)
        seen = (chosen >= start) & (chosen < stop)
        entries = torch.where(seen, _look_up(self.entries, torch.where(seen, chosen, 0)), -1)
        query = torch.arange(start.shape[1], device=start.device)[:, None] + layout.kv_offset
        token = query - torch.arange(layout.window - 1, -1, -1, device=start.device)
        seen = (token >= layout.window_start[..., None]) & (token >= 0)
        window = torch.where(seen, _look_up(self.tokens, torch.where(seen, token, 0)), -1)
        flat = self.flatten(torch.cat([entries, window], -1)).to(torch.int32)
        return torch.nn.functional.pad(flat, (0, -flat.shape[1] % multiple), value=-1)


def packed_entry_offsets(layout: Layout, cu_seqlens: Tensor) -> Tensor:
    """[n + 1] int64: where each document's entries begin in a packed row of the layout; B = 1.

    Args: as in `Addresses.thd`.
    """
    _check_offsets(layout, cu_seqlens)
    token = layout.entry_token[0].long()
    first = torch.where(token >= 0, token, layout.positions.shape[1])  # ascending: spare capacity comes last
    return torch.searchsorted(first, cu_seqlens.long())


def packed_entries(layout: Layout, cu_seqlens: Tensor, *, cu_entries: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(row [1, E], document [1, E]) int64: where a host that packs its entries by document keeps each entry of the layout.

    Rows of spare capacity are -1. Args and Raises: as in `Addresses.thd`.
    """
    own = packed_entry_offsets(layout, cu_seqlens)
    if cu_entries is None:
        cu_entries = own
    checks.tensor("cu_entries", cu_entries, "of the shape of cu_seqlens", tuple(cu_seqlens.shape), kind="index")
    document = _document_of(layout.entry_token.long().clamp(min=0), cu_seqlens.long())
    number = torch.arange(layout.num_entries, device=own.device) - own[document]
    return torch.where(layout.entry_token >= 0, cu_entries.long()[document] + number, -1), document


def compact(indices: Tensor) -> tuple[Tensor, Tensor]:
    """(indices [N, K], lengths [N] int32): each row's live slots moved to its front, in their order, and how many there are.

    The form FlashMLA takes with `topk_length`. Entries still precede the window.

    Raises:
        TypeError, ValueError: not an integer tensor [N, K].
    """
    checks.tensor("indices", indices, "[N, K]", (None, None), kind="index")
    live = indices >= 0
    order = live.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    return indices.gather(-1, order), live.sum(-1, dtype=torch.int32)


def read(
    lse: Tensor,
    indices: Tensor,
    addresses: Addresses,
    *,
    sink: Tensor | None,
    slots: int,
    lengths: Tensor | None = None,
    base: Literal["e", "2"] = "e",
    max_logits: Tensor | None = None,
) -> Read:
    """csakit's lse and indices from what a fused kernel was given and returned.

    The kernel's lse is over all its indices, entries and window; the sink is added here. A query without any index is empty whatever
    the kernel wrote for it (+inf, -inf, 0).

    Args:
        lse: [N, H] or [B, T, H], as the kernel returned it. Not `lse_indexer`, which is over the leading entries only.
        indices: [N, K + W] or [N, 1, K + W] int32 or int64, as the kernel got them. Numbers below 0 or beyond kv are empty slots.
        addresses: where kv holds tokens and entries.
        sink: [H], the kernel's attn_sink; None: no sink.
        slots: K, the leading slots that may hold entries. The window stands behind them, or directly behind a compacted row's entries.
        lengths: [N], only so many leading slots of a row count (FlashMLA's topk_length).
        base: of the kernel's logarithm; "2" for kernels that work in powers of two.
        max_logits: [N, H] or [B, T, H], the kernel's greatest logit of each query, in the same logarithm. When given, and values can be
            read, an lse that lies below it is refused.

    Raises:
        TypeError, ValueError: an argument of another kind or shape, another base.
        ValueError: an entry stands behind the first `slots` slots, or belongs to another row; an lse that leaves out part of what its
            query attends, as lse_indexer does. Values are checked on the CPU in eager mode and under `csakit.debug(True)`.
    """
    layout, flat = addresses.layout, _flat_indices(indices, addresses, lengths)
    checks.whole("slots", slots, at_least=0)
    if slots > flat.shape[1]:
        raise ValueError(f"slots must be at most the {flat.shape[1]} slots of indices; got {slots}")
    by_token = addresses.unflatten(flat)
    number = _entry_numbers(addresses)[by_token]  # row * E + entry, or -1
    row = torch.arange(layout.positions.shape[0], device=flat.device)[:, None, None]
    own = (number >= 0) & (number // max(layout.num_entries, 1) == row)
    chosen = torch.where(own, number - row * layout.num_entries, -1)[..., :slots].to(torch.int32)

    attends = (by_token < addresses.size).any(-1)
    kernel_lse = _by_token("lse", lse, addresses)
    greatest = None if max_logits is None else _by_token("max_logits", max_logits, addresses)
    if checks.values_readable(flat):
        _check_slots(number, own, slots)
        _check_whole(kernel_lse, greatest, attends & layout.valid)
    if checks.debugging():
        validate_indices(chosen, layout)
    full = lse_with_sink(torch.where(attends[..., None], kernel_lse, -INF), sink, base=base)
    return Read(full.masked_fill(~layout.valid[..., None], -INF), chosen)


@torch.no_grad()
def attend(
    q: Tensor,
    kv: Tensor,
    entries: Tensor,
    addresses: Addresses,
    *,
    indices: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    value_width: int | None = None,
    teacher: bool = False,
    multiple: int = 128,
    base: Literal["e", "2"] = "e",
    kernel: Callable[..., Any] | None = None,
) -> Attention:
    """What `csakit.attend` returns, by a fused forward kernel. Constants: the kernel has no backward.

    Args:
        q, kv, entries, indices, sink, scale, value_width, teacher: of `csakit.attend`. FlashMLA's kernels take bfloat16, D = 512 or 576 and
            values of 512 channels.
        addresses: of the layout.
        multiple, base: of `Addresses.indices` and `read`.
        kernel: called as `flash_mla_sparse_fwd(q, kv, indices, scale, value_width, sink)`, with the tensors of that function, and
            returns (out, max_logits, lse). None: FlashMLA's.

    Raises:
        ImportError: no kernel was given and flash_mla is not installed.
        TypeError, ValueError: tensors that do not fit the layout; an lse that `read` refuses.
    """
    if kernel is None:
        kernel = _flash_mla_kernel()
    layout, flat = addresses.layout, addresses.flatten(q.detach())  # a view made without grad mode still requires a gradient
    scale = logit_scale(scale, q.shape[-1])
    picked = addresses.indices(indices, multiple=multiple)
    strength = None if sink is None else sink.float()
    keys = addresses.memory(kv, entries)[:, None]
    out, greatest, lse = kernel(flat, keys, picked[:, None], scale, value_width or q.shape[-1], strength)
    slots = layout.num_entries if indices is None else indices.shape[-1]
    whole = read(lse, picked, addresses, sink=sink, slots=slots, base=base, max_logits=greatest).lse
    out = addresses.unflatten(out).masked_fill(~layout.valid[..., None, None], 0)
    mass = teacher_log_mass(q, entries, whole, layout, indices=indices, scale=scale) if teacher and indices is not None else None
    return Attention(out, whole, mass)


def _flash_mla_kernel() -> Callable[..., Any]:
    try:
        from flash_mla import flash_mla_sparse_fwd
    except ImportError as error:
        raise ImportError(
            "flash_mla is not installed. Build it from https://github.com/deepseek-ai/FlashMLA (a Hopper or Blackwell GPU), "
            "give another kernel with kernel=, or call csakit.attend"
        ) from error
    return flash_mla_sparse_fwd


def _sizes(layout: Layout) -> tuple[int, int, Tensor]:
    """Rows, kv rows of each, and the row numbers [B, 1]."""
    rows, tokens = layout.positions.shape
    return rows, tokens + layout.kv_offset, torch.arange(rows, device=layout.positions.device)[:, None]


def _check_offsets(layout: Layout, cu_seqlens: Tensor) -> None:
    rows = layout.positions.shape[0]
    if rows != 1 or layout.kv_offset:
        raise ValueError(f"thd is for one packed row without a halo; got {rows} rows, kv_offset {layout.kv_offset}. Use sbhd")
    checks.tensor("cu_seqlens", cu_seqlens, "[documents + 1]", (None,), kind="index")
    if cu_seqlens.shape[0] < 2:
        raise ValueError("cu_seqlens must hold at least one document: two offsets")


def _document_of(token: Tensor, room: Tensor) -> Tensor:
    """The document in whose room a token lies; tokens behind all rooms count to the last."""
    return (torch.searchsorted(room, token, right=True) - 1).clamp(0, room.shape[0] - 2)


def _live(entries: Tensor, layout: Layout) -> Tensor:
    return torch.where(layout.entry_token >= 0, entries, -1)


def _one_set(chosen: Tensor, layout: Layout) -> Tensor:
    checked = check_indices(chosen, layout)
    if checked.shape[2] != 1:
        raise ValueError(f"these kernels attend one set per query; got {checked.shape[2]} sets")
    return checked[:, :, 0]


def _look_up(table: Tensor, number: Tensor) -> Tensor:
    """table[b, number[b, t, j]]: [B, N] and [B, T, J] -> [B, T, J]."""
    if not table.shape[1]:
        return torch.full_like(number, -1, dtype=table.dtype)
    return table.gather(1, number.long().flatten(1)).view(number.shape)


def _flat_indices(indices: Tensor, addresses: Addresses, lengths: Tensor | None) -> Tensor:
    """indices as [N, slots] int64, with `size` for empty slots."""
    queries = addresses.layout.positions.numel()
    if isinstance(indices, Tensor) and indices.ndim == 3 and indices.shape[1] == 1:
        indices = indices[:, 0]
    checks.tensor("indices", indices, "[N, slots] or [N, 1, slots]", (queries, None), kind="index")
    live = (indices >= 0) & (indices < addresses.size)
    if lengths is not None:
        checks.tensor("lengths", lengths, "[N]", (queries,), kind="index")
        live = live & (torch.arange(indices.shape[1], device=indices.device) < lengths[:, None])
    return torch.where(live, indices.long(), addresses.size)


def _entry_numbers(addresses: Addresses) -> Tensor:
    """[M + 1]: for each kv row, row * E + entry of the entry it holds; -1 for tokens and for the row of empty slots."""
    flat = addresses.entries.flatten()
    table = flat.new_full((addresses.size + 1,), -1)
    table[torch.where(flat < 0, addresses.size, flat)] = torch.arange(flat.shape[0], device=flat.device)
    table[-1] = -1
    return table


def _by_token(name: str, x: Tensor, addresses: Addresses) -> Tensor:
    """[N, H] or [B, T, H] -> [B, T, H]."""
    rows, tokens = addresses.layout.positions.shape
    if isinstance(x, Tensor) and x.ndim == 2:
        checks.tensor(name, x, "[N, H]", (rows * tokens, None))
        return addresses.unflatten(x)
    checks.tensor(name, x, "[N, H] or [B, T, H]", (rows, tokens, None), fix="Kernels that return [B, H, T] need a transpose")
    return x


def _check_slots(number: Tensor, own: Tensor, slots: int) -> None:
    foreign = (number >= 0) & ~own
    if foreign.any():
        b, t, j = foreign.nonzero()[0].tolist()
        raise ValueError(f"indices: slot {j} of row {b}, token {t} holds an entry of another row; is the batch order of addresses right?")
    late = own[..., slots:]
    if late.any():
        b, t, j = late.nonzero()[0].tolist()
        raise ValueError(
            f"indices: slot {slots + j} of row {b}, token {t} holds an entry, but slots says that only the first {slots} do. "
            "Entries come first, the window after"
        )


def _check_whole(lse: Tensor, greatest: Tensor | None, attends: Tensor) -> None:
    """Raises unless lse can be the logarithm of everything its query attends."""
    reason = (
        "A denominator over the leading entries only (lse_indexer) leaves out the window: every head then counts the same in the teacher, "
        "however little of its attention goes to entries. Pass lse"
    )
    part = attends & lse.isinf().any(-1)
    if part.any():
        b, t = part.nonzero()[0].tolist()
        raise ValueError(f"lse is {lse[b, t].tolist()} at row {b}, token {t}, which attends something. {reason}")
    if greatest is None:
        return
    slack = 1e-3 * (1 + greatest.abs())
    low = attends[..., None] & (lse < greatest - slack)
    if low.any():
        b, t, h = low.nonzero()[0].tolist()
        raise ValueError(
            f"lse is {float(lse[b, t, h])} at row {b}, token {t}, head {h}, below its greatest logit {float(greatest[b, t, h])}. {reason}"
        )
