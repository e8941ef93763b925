"""Layout: who sees whom.

A row of tokens may hold one document, a padded one, or several packed ones. All of that is reduced here to a few integers
per token: its position in its document, the first token of its window, and the range of compressed entries it sees. The
verbs know nothing else of documents, and no mask is ever built.

Everything follows from `positions` and `valid`. A token closes a block when (position + 1) is a multiple of the ratio; the
number of blocks closed in the row up to a token is one past the last entry it sees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import checks


@dataclass(frozen=True, eq=False)
class Layout:
    """Who sees whom in a batch of rows, as integer ranges; built once and shared by all layers and heads.

    B rows of T tokens, E compressed entries of room per row. All coordinates are row coordinates.

    Attributes:
        ratio: tokens per compressed entry, m.
        window: tokens in the sliding window, W, counting the query itself; 0 is no window.
        num_entries: E. Entries of successive documents are adjacent, spare capacity comes last.
        positions: [B, T] int32, position inside the document; 0 on padding.
        valid: [B, T] bool, True on real tokens.
        window_start: [B, T] int32, first row of kv in the window, which ends at the query; t + 1 on padding (an empty window).
        entry_start, entry_stop: [B, T] int32, the visible entries `start..stop-1`; 0 and 0 on padding.
        entry_token: [B, E] int32, first token of each entry; -1 on spare capacity.
        block: entries are blocks of tokens attended one by one.
        kv_offset: query t is row t + kv_offset of kv.
    """

    ratio: int
    window: int
    num_entries: int
    positions: Tensor
    valid: Tensor
    window_start: Tensor
    entry_start: Tensor
    entry_stop: Tensor
    entry_token: Tensor
    block: bool = False
    kv_offset: int = 0

    @classmethod
    def batch(cls, rows: int, tokens: int, *, ratio: int, window: int, device: torch.device | str | None = None) -> Layout:
        """The layout of `rows` rows, each one document of `tokens` tokens without padding.

        Raises:
            TypeError, ValueError: a size is not a whole number, or negative (ratio: below 1).
        """
        checks.whole("rows", rows, at_least=0)
        checks.whole("tokens", tokens, at_least=0)
        positions = torch.arange(tokens, dtype=torch.int32, device=device).expand(rows, tokens)
        return _from_positions(positions, torch.ones_like(positions, dtype=torch.bool), ratio, window)

    @classmethod
    def packed(
        cls,
        cu_seqlens: Tensor,
        *,
        ratio: int,
        window: int,
        tokens: int | None = None,
        cu_seqlens_padded: Tensor | None = None,
    ) -> Layout:
        """The layout of one row (B = 1) that holds several documents, of any length including 0, one behind the other.

        Args:
            cu_seqlens: [n + 1] int32 or int64, cumulative document lengths, starting with 0. Repeated offsets are empty documents.
            tokens: row length T. Given, no tensor is read back to the host and the call compiles whole; None: the last offset.
            cu_seqlens_padded: [n + 1], where each document's room begins and ends, when documents have padding behind them.

        Raises:
            TypeError, ValueError: not 1-D integers, or of different lengths.
            ValueError: offsets that do not start at 0, decrease, exceed `tokens`, or leave a document too little room. Values are
                checked on the CPU in eager mode and under `csakit.debug(True)`.
        """
        checks.tensor("cu_seqlens", cu_seqlens, "[documents + 1]", (None,), kind="index")
        room = cu_seqlens
        if cu_seqlens_padded is not None:
            checks.tensor("cu_seqlens_padded", cu_seqlens_padded, "[documents + 1]", (cu_seqlens.shape[0],), kind="index")
            room = cu_seqlens_padded
        if cu_seqlens.shape[0] < 1:
            raise ValueError("cu_seqlens must hold at least the offset 0; got an empty tensor")
        if tokens is None:
            tokens = int(room[-1])
        checks.whole("tokens", tokens, at_least=0)
        if checks.values_readable(cu_seqlens):
            _check_offsets(cu_seqlens, room, tokens)
        token = torch.arange(tokens, device=cu_seqlens.device, dtype=room.dtype)
        lengths = torch.cat([cu_seqlens.diff(), cu_seqlens.new_zeros(1)])  # behind the last document lies an empty one
        document = torch.searchsorted(room.contiguous(), token, right=True) - 1
        inside = document.clamp(min=0)
        positions = token - room[inside]
        valid = (document >= 0) & (positions < lengths[inside])
        return _from_positions(positions[None], valid[None], ratio, window)

    @classmethod
    def from_mask(cls, mask: Tensor, *, ratio: int, window: int) -> Layout:
        """The layout of padded rows: the real tokens of a row are one run; padding may lie left, right, or on both sides.

        Args:
            mask: [B, T] bool or 0/1 integers, 1 on real tokens.

        Raises:
            TypeError: a floating-point mask.
            ValueError: another shape, values other than 0 and 1, or a hole in a row (values are checked on the CPU in eager mode and
                under `csakit.debug(True)`).
        """
        if isinstance(mask, Tensor) and mask.dtype.is_floating_point:
            raise TypeError(
                f"mask must be bool or 0/1 integers, 1 on real tokens; got {checks.describe(mask)}. "
                "Convert an additive mask with `mask >= 0`, a 0.0/1.0 mask with `mask.bool()`"
            )
        checks.tensor("mask", mask, "[B, T]", (None, None), kind="real", fix="A [B, 1, T, T] mask cannot say where documents begin")
        valid = mask.bool()
        if checks.values_readable(mask):
            if mask.numel() and not ((mask == 0) | (mask == 1)).all():
                raise ValueError("mask must hold 0 and 1 only; use from_document_ids for several documents per row")
            if (_first_of_run(valid, valid).sum(1) > 1).any():
                raise ValueError("mask must have one run of real tokens per row; got a hole. Use from_document_ids for several documents")
        positions = valid.cumsum(1, dtype=torch.int32) - 1
        return _from_positions(positions, valid, ratio, window)

    @classmethod
    def from_document_ids(cls, ids: Tensor, *, ratio: int, window: int) -> Layout:
        """The layout of rows that say for each token which document it belongs to: each run of equal ids is a document.

        Args:
            ids: [B, T] int32 or int64, -1 on padding.

        Raises:
            TypeError, ValueError: another dtype or shape, or an id below -1 (checked on the CPU in eager mode and when debugging).
        """
        checks.tensor("ids", ids, "[B, T]", (None, None), kind="index")
        if checks.values_readable(ids) and (ids < -1).any():
            raise ValueError(f"ids must be -1 (padding) or at least 0; got {int(ids.min())}")
        valid = ids >= 0
        token = torch.arange(ids.shape[1], device=ids.device)
        begin = torch.where(_first_of_run(ids, valid), token, 0).cummax(1).values if ids.numel() else ids
        return _from_positions(token - begin, valid, ratio, window)

    def with_ratio(self, ratio: int) -> Layout:
        """The same documents for a layer with another compression ratio.

        Raises:
            TypeError, ValueError: ratio is not a whole number of at least 1.
            ValueError: this layout is a shard, which does not know the whole row.
        """
        checks.whole("ratio", ratio, at_least=1)
        if self.kv_offset or self.num_entries != self.positions.shape[1] // self.ratio:
            raise ValueError("with_ratio needs the whole row; this layout is a part of one. Call with_ratio before shard")
        return self if ratio == self.ratio else _from_positions(self.positions, self.valid, ratio, self.window)

    def to_entries(self, rows: Tensor) -> Tensor:
        """The row of each entry's first token: [B, T, ..] -> [B, E, ..]; 0 on spare capacity. At ratio 1: token rows as entries.

        Differentiable. Padding rows have no influence, whatever they hold.

        Raises:
            TypeError, ValueError: not a tensor, or not this layout's [B, T, ..].
        """
        batch, tokens = self.positions.shape
        if not isinstance(rows, Tensor):
            raise TypeError(f"rows must be a tensor [B, T, ..]; got {checks.describe(rows)}")
        if rows.shape[:2] != (batch, tokens) or self.num_entries > tokens // self.ratio:
            raise ValueError(
                f"rows must be the whole rows of this layout, [{batch}, {tokens}, ..]; got {list(rows.shape)}. Call to_entries before shard"
            )
        live = self.entry_token >= 0
        taken = take_rows(rows, self.entry_token.clamp(min=0))
        return torch.where(live.reshape(live.shape + (1,) * (rows.ndim - 2)), taken, 0)

    def shard(self, rank: int, world: int) -> Layout:
        """The part of a context-parallel rank: `T / world` queries in a row, beginning at `rank * T / world`.

        Its kv rows are the rows of those queries and, before them, the up to `window - 1` rows their windows reach back to (the halo;
        `kv_offset` is its length). Entries stay those of the whole row, so every rank holds all of them.

        Raises:
            TypeError, ValueError: rank or world is not a whole number, rank is not below world, world does not divide T.
            ValueError: this layout is a part already.
        """
        checks.whole("world", world, at_least=1)
        checks.whole("rank", rank, at_least=0)
        tokens = self.positions.shape[1]
        if rank >= world:
            raise ValueError(f"rank must be below world = {world}; got {rank}")
        if tokens % world:
            raise ValueError(f"world must divide the row length {tokens}; got {world}. Pad the row")
        if self.kv_offset:
            raise ValueError("shard needs the whole row; this layout is a part of one already")
        count = tokens // world
        first = rank * count
        halo = min(max(self.window - 1, 0), first)
        part = slice(first, first + count)
        return replace(
            self,
            positions=self.positions[:, part],
            valid=self.valid[:, part],
            window_start=self.window_start[:, part] - (first - halo),
            entry_start=self.entry_start[:, part],
            entry_stop=self.entry_stop[:, part],
            kv_offset=halo,
        )


def token_shape(layout: Layout) -> tuple[int, int]:
    """(B, T) of a layout.

    Raises:
        TypeError: something else stands in the layout's place.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a csakit.Layout; got {checks.describe(layout)}. Build one with Layout.batch, packed or from_mask")
    rows, tokens = layout.positions.shape
    return rows, tokens


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows[b, index[b, ..]]: [B, N, ..] and [B, M] -> [B, M, ..]. One index_select, whose backward is one index_add."""
    batch, length = rows.shape[:2]
    if length == 0 or index.numel() == 0:
        return rows.new_zeros(*index.shape, *rows.shape[2:])
    first = torch.arange(batch, device=rows.device)[:, None] * length
    return rows.reshape(batch * length, -1).index_select(0, (index + first).reshape(-1)).reshape(*index.shape, *rows.shape[2:])


def _from_positions(positions: Tensor, valid: Tensor, ratio: int, window: int) -> Layout:
    """Everything else of a layout, from the position of each token in its document."""
    checks.whole("ratio", ratio, at_least=1)
    checks.whole("window", window, at_least=0)
    batch, tokens = positions.shape
    capacity = tokens // ratio
    positions = torch.where(valid, positions, 0).to(torch.int32)
    token = torch.arange(tokens, device=positions.device, dtype=torch.int32)
    window_start = torch.where(valid, torch.maximum(token - positions, token + (1 - window)), token + 1)
    closes = valid & ((positions + 1) % ratio == 0)
    closed = closes.cumsum(1, dtype=torch.int32)
    entry_start = closed - (positions + 1) // ratio
    # the entry closed by token t begins at t + 1 - ratio; all other tokens write into a column that is cut off
    entry_token = positions.new_full((batch, capacity + 1), -1)
    column = torch.where(closes, closed - 1, capacity).long()
    entry_token = entry_token.scatter(1, column, torch.where(closes, token + (1 - ratio), -1))[:, :capacity]
    return Layout(
        ratio=ratio,
        window=window,
        num_entries=capacity,
        positions=positions,
        valid=valid,
        window_start=window_start,
        entry_start=torch.where(valid, entry_start, 0),
        entry_stop=torch.where(valid, closed, 0),
        entry_token=entry_token,
    )


def _first_of_run(ids: Tensor, valid: Tensor) -> Tensor:
    """Where a run of equal ids begins, on real tokens."""
    changed = torch.ones_like(valid)
    changed[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return changed & valid


def _check_offsets(cu_seqlens: Tensor, room: Tensor, tokens: int) -> None:
    for name, offsets in (("cu_seqlens", cu_seqlens), ("cu_seqlens_padded", room)):
        if int(offsets[0]) != 0:
            raise ValueError(f"{name} must start with 0; got {int(offsets[0])}. Pass cumulative offsets, not lengths")
        if (offsets.diff() < 0).any():
            raise ValueError(f"{name} must not decrease; got {offsets.tolist()}. Pass cumulative offsets, not lengths")
    if int(room[-1]) > tokens:
        raise ValueError(f"tokens must be at least the last offset {int(room[-1])}; got {tokens}")
    if (cu_seqlens.diff() > room.diff()).any():
        raise ValueError(f"cu_seqlens_padded must give every document room for its length; got {room.tolist()} for {cu_seqlens.tolist()}")
