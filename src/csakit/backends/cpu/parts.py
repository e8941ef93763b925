"""The keys that a chunk of queries reaches, in one of two forms with the same few products.

Block     consecutive rows, seen through a mask: the window, and entries where nearly all that is visible is attended.
          One matrix product for all queries and heads of the chunk; nothing is copied.
Gathered  the rows of a list of indices per query, copied into a reused buffer.

Within a Block a query's weight for a row it does not see is exactly 0, which hides the row only while it is finite. When memory
holds NaN or Inf the callers therefore use Gathered everywhere: there each query touches its own rows alone.

C queries of a chunk, H heads in S sets, G KV heads, n rows, D width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..rows import INF, Ranges

DENSE_UP_TO = 1.3  # visible / selected: up to here a masked block product is cheaper than a gather
TILE_BYTES = 4 << 20  # temporaries of a chunk should stay in cache ...
MOST_BYTES = 24 << 20  # ... and must stay bounded


class Scratch:
    """Buffers that are used again by each chunk: a fresh large allocation costs more than the gather that fills it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self.dtype)
        return buffer[:size].view(shape)


class Memory(NamedTuple):
    """The rows of one batch row that can be attended, and where their gradients go."""

    keys: Tensor  # [N, G, D]
    values: Tensor | None  # [N, G, Dv]; None: the first `width` channels of the keys
    width: int
    d_keys: Tensor | None = None
    d_values: Tensor | None = None


class Part(ABC):
    """Keys and values of a chunk, with the products attention needs. Weights have shape [C, H, n], rows and results [C, H, D]."""

    live: Tensor  # [C, 1 or S, n]: what may be attended
    _memory: Memory
    _keys: Tensor
    _values: Tensor

    def dots(self, q: Tensor) -> Tensor:
        """[C, H, n]: q . key"""
        return self._dots(q, self._keys)

    def value_dots(self, d_out: Tensor) -> Tensor:
        """[C, H, n]: d_out . value"""
        return self._dots(d_out, self._values)

    def keys_by(self, weights: Tensor) -> Tensor:
        """[C, H, D]: sum of weight * key"""
        return self._by(weights, self._keys)

    def values_by(self, weights: Tensor) -> Tensor:
        """[C, H, Dv]: sum of weight * value"""
        return self._by(weights, self._values)

    def add_key_gradient(self, weights: Tensor, rows: Tensor) -> None:
        """d_key += sum over queries and heads of weight * row"""
        assert self._memory.d_keys is not None
        self._add(self._memory.d_keys, weights, rows)

    def add_value_gradient(self, weights: Tensor, rows: Tensor) -> None:
        """d_value += sum over queries and heads of weight * row"""
        shared = self._memory.values is None
        target = self._memory.d_keys if shared else self._memory.d_values
        assert target is not None
        self._add(target[..., : self._memory.width] if shared else target, weights, rows)

    @abstractmethod
    def _dots(self, x: Tensor, rows: Tensor) -> Tensor: ...

    @abstractmethod
    def _by(self, weights: Tensor, rows: Tensor) -> Tensor: ...

    @abstractmethod
    def _add(self, d_memory: Tensor, weights: Tensor, rows: Tensor) -> None: ...


class Block(Part):
    """Consecutive rows."""

    def __init__(self, memory: Memory, rows: slice, live: Tensor, dtype: torch.dtype) -> None:
        self._rows, self._memory, self.live = rows, memory, live
        self._keys = memory.keys[rows].to(dtype)
        self._values = self._keys[..., : memory.width] if memory.values is None else memory.values[rows].to(dtype)

    def _dots(self, x: Tensor, rows: Tensor) -> Tensor:
        return _ungroup(_group(x, rows.shape[1]) @ rows.permute(1, 2, 0), x.shape[0])

    def _by(self, weights: Tensor, rows: Tensor) -> Tensor:
        return _ungroup(_group(weights, rows.shape[1]) @ rows.transpose(0, 1), weights.shape[0])

    def _add(self, d_memory: Tensor, weights: Tensor, rows: Tensor) -> None:
        d_rows = d_memory[self._rows]
        groups = d_rows.shape[1]
        for g, (w, x) in enumerate(zip(_group(weights, groups), _group(rows, groups))):
            d_rows[:, g].addmm_(w.T, x)


class Gathered(Part):
    """The rows of a list of indices per query and set."""

    def __init__(self, memory: Memory, indices: Tensor, live: Tensor, scratch: Scratch, name: str, *, finite: bool) -> None:
        # pieces: the coarsest cut of the heads in which each piece has one set and one KV head
        count, sets, slots = indices.shape
        groups = memory.keys.shape[1]
        pieces = math.lcm(sets, groups)
        piece = torch.arange(pieces)
        safe = torch.where(live, indices, 0)
        self._index = (safe[:, piece * sets // pieces] * groups + (piece * groups // pieces)[:, None]).flatten()
        self._shape = (count, pieces, slots)
        self._memory, self._scratch, self._name, self.live = memory, scratch, name, live
        # a dead slot holds some other row; its weight is 0, which is enough unless that row is NaN
        self._dead = None if finite else ~live[:, piece * sets // pieces].flatten()
        self._keys = self._gather(memory.keys, "keys")
        self._values = self._keys[..., : memory.width] if memory.values is None else self._gather(memory.values, "values")

    def _gather(self, rows: Tensor, kind: str) -> Tensor:
        count, pieces, slots = self._shape
        flat = rows.flatten(0, 1)
        buffer = self._scratch(f"{self._name} {kind}", self._index.numel(), flat.shape[1])
        if flat.dtype == buffer.dtype:
            torch.index_select(flat, 0, self._index, out=buffer)
        else:
            buffer.copy_(flat.index_select(0, self._index))
        if self._dead is not None:
            buffer.masked_fill_(self._dead[:, None], 0)
        return buffer.view(count * pieces, slots, flat.shape[1])

    def _cut(self, x: Tensor) -> Tensor:
        """[C, H, n] -> [C * pieces, H / pieces, n]"""
        count, pieces, _ = self._shape
        return x.reshape(count * pieces, x.shape[1] // pieces, x.shape[2])

    def _dots(self, x: Tensor, rows: Tensor) -> Tensor:
        return (self._cut(x) @ rows.transpose(1, 2)).view(x.shape[0], x.shape[1], rows.shape[1])

    def _by(self, weights: Tensor, rows: Tensor) -> Tensor:
        return (self._cut(weights) @ rows).view(weights.shape[0], weights.shape[1], rows.shape[2])

    def _add(self, d_memory: Tensor, weights: Tensor, rows: Tensor) -> None:
        count, pieces, slots = self._shape
        share = self._scratch("gradient", count * pieces, slots, rows.shape[2])
        torch.bmm(self._cut(weights).transpose(1, 2), self._cut(rows), out=share)
        share = share.view(count * pieces * slots, rows.shape[2])
        if self._dead is not None:
            share.masked_fill_(self._dead[:, None], 0)
        d_memory.flatten(0, 1).index_add_(0, self._index, share)


def _group(x: Tensor, groups: int) -> Tensor:
    """[C, H, n] -> [G, C * H/G, n]"""
    count, heads, width = x.shape
    if groups == 1:
        return x.reshape(1, count * heads, width)
    return x.view(count, groups, heads // groups, width).transpose(0, 1).reshape(groups, count * heads // groups, width)


def _ungroup(x: Tensor, count: int) -> Tensor:
    """[G, C * H/G, n] -> [C, H, n]"""
    groups, rows, width = x.shape
    if groups == 1:
        return x.view(count, rows // count, width)
    return x.view(groups, count, rows // count, width).transpose(0, 1).reshape(count, groups * rows // count, width).contiguous()


# ---- chunks ----------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Queries begin..end-1 of a batch row, and the rows of kv and entries that any of them sees."""

    row: int
    queries: slice
    window: slice
    entries: slice
    padded: bool


def tile_size(bytes_per_query: int, tile: int) -> int:
    """Queries per chunk: as asked, else so many that the temporaries stay in cache."""
    if tile:
        return tile
    bytes_per_query = max(bytes_per_query, 1)
    return max(1, min(64, max(8, TILE_BYTES // bytes_per_query), MOST_BYTES // bytes_per_query))


def chunks(ranges: Ranges, tile: int) -> list[Chunk]:
    """All chunks of a batch. Reads the bounds of the ranges once."""
    rows, tokens = ranges.valid.shape
    if not rows or not tokens:
        return []
    tile = min(tile, tokens)
    count = -(-tokens // tile)
    far = torch.iinfo(torch.int32).max

    def cut(x: Tensor, empty: int) -> Tensor:
        return pad(x, (0, count * tile - tokens), value=empty).unflatten(-1, (count, tile))

    starts = torch.stack([ranges.window_start, ranges.entry_start])
    own = (torch.arange(tokens, dtype=starts.dtype) + (ranges.kv_offset + 1)).expand_as(ranges.entry_stop)
    stops = torch.stack([own, ranges.entry_stop])
    live = ranges.valid & (starts < stops)
    high = cut(torch.where(live, stops, 0), 0).amax(-1)
    low = cut(torch.where(live, starts, far), far).amin(-1).minimum(high)
    bounds = torch.stack([low, high], -1).tolist()  # of windows, of entries
    padded = cut(~ranges.valid, 0).any(-1).tolist()
    return [
        Chunk(b, slice(c * tile, min((c + 1) * tile, tokens)), slice(*bounds[0][b][c]), slice(*bounds[1][b][c]), padded[b][c])
        for b in range(rows)
        for c in range(count)
    ]


def all_finite(*tensors: Tensor | None) -> bool:
    """Whether no tensor holds NaN or Inf (a sum that overflows counts as Inf, which only costs time)."""
    return all(
        x is None or math.isfinite(float(x.sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32))) for x in tensors
    )


def window_part(memory: Memory, chunk: Chunk, ranges: Ranges, scratch: Scratch, *, finite: bool) -> Part:
    """The window of each query: rows window_start .. its own."""
    start = ranges.window_start[chunk.row, chunk.queries, None]
    own = torch.arange(chunk.queries.start, chunk.queries.stop)[:, None] + ranges.kv_offset
    if finite:
        row = torch.arange(chunk.window.start, chunk.window.stop)
        return Block(memory, chunk.window, ((row >= start) & (row <= own))[:, None], scratch.dtype)
    width = int((own + 1 - start).amax()) if own.numel() else 0
    index = start + torch.arange(max(width, 0))
    return Gathered(memory, index[:, None], (index <= own)[:, None], scratch, "window", finite=False)


def entries_part(
    memory: Memory, chunk: Chunk, ranges: Ranges, indices: Tensor | None, scratch: Scratch, *, finite: bool
) -> tuple[Part, Tensor | None]:
    """The attended entries, and for a Block of selected ones the column [C, S, K] of each slot (the last column is for empty slots)."""
    start = ranges.entry_start[chunk.row, chunk.queries, None, None]
    stop = ranges.entry_stop[chunk.row, chunk.queries, None, None]
    first, span = chunk.entries.start, chunk.entries.stop - chunk.entries.start
    if indices is None:
        if finite:
            entry = torch.arange(first, chunk.entries.stop)
            return Block(memory, chunk.entries, (entry >= start) & (entry < stop), scratch.dtype), None
        index = start + torch.arange(span)
        return Gathered(memory, index, index < stop, scratch, "entries", finite=False), None
    chosen = indices[chunk.row, chunk.queries]
    live = (chosen >= start) & (chosen < stop)
    if not finite or span > DENSE_UP_TO * chosen.shape[2]:
        return Gathered(memory, chosen, live, scratch, "entries", finite=finite), None
    column = torch.where(live, chosen - first, span).long()
    mask = torch.zeros(*chosen.shape[:2], span + 1, dtype=torch.bool).scatter_(2, column, True)[..., :span]
    return Block(memory, chunk.entries, mask, scratch.dtype), column


def masked_(x: Tensor, live: Tensor, value: float = -INF) -> Tensor:
    """x [C, H, n] with the value, in place, where live [C, S, n] is false for a head's set."""
    count, heads, slots = x.shape
    x.view(count, live.shape[1], heads // live.shape[1], slots).masked_fill_(~live[:, :, None], value)
    return x
