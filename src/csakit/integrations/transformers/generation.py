"""Forwards with a cache: prefill, prefill in chunks and decode are one thing, a row that goes on.

A row's layout is made anew from its mask, from the first token on, and cut to the new tokens; so left padding shifts nothing and
every chunk sees what one long forward would have shown it. What has to be kept between forwards is little: per layer the last
rows of kv, the entries so far, and the projected tokens of blocks that are still open (or that the next entry overlaps).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from csakit import Layout, checks

from .documents import OFFSET_NAMES, of_shape, queries_of
from .forwards import Plan

Pool = Callable[[Tensor, Tensor, Tensor, Layout], Tensor]  # values, gates, positions, layout -> entries


class LayerMemory(DynamicSlidingWindowLayer):
    """What one attention layer keeps: its window's kv, as the library's layer does, and tensors [B, ..] under names of their own.

    Rows are reordered, repeated and chosen together, so beam search works. While selections are recorded, `picks` holds those of each
    forward, [B, T, K], and `name` the layer's name.
    """

    is_croppable = False

    def __init__(self, window: int, selects: bool) -> None:
        super().__init__(sliding_window=window)
        self.selects = selects
        self.rows: dict[str, Tensor] = {}
        self.name: str | None = None
        self.picks: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The kv rows [B, 1, halo + T, D] the new queries may see, twice: keys are values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states[:, :, :0]
        assert self.keys is not None
        full = torch.cat([self.keys, key_states], -2)
        self.cumulative_length += key_states.shape[-2]
        self.keys = self.values = _last(full.transpose(1, 2), self.sliding_window - 1).transpose(1, 2)
        return full, full

    def record(self, name: str, picks: Tensor) -> None:
        """Keeps the picks [B, T, K] of one forward."""
        self.name = name
        self.picks.append(picks)

    def reset(self) -> None:
        super().reset()
        self.rows.clear()
        self.picks.clear()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("this cache cannot be cropped: the tokens of a closed block are gone. Start again with a fresh cache")

    def reorder_cache(self, beam_idx: Any) -> None:
        if self.picks:
            raise ValueError("a beam search mixes rows as it goes, so its selections cannot be recorded; sample, or decode greedily")
        super().reorder_cache(beam_idx)
        self._change_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change_rows(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._change_rows(lambda x: x[indices])

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self.rows = {name: change(x) for name, x in self.rows.items()}
        self.picks = [change(x) for x in self.picks]


class Past:
    """The cached part of a row, for one forward that goes on from it.

    Attributes:
        cache: the library's cache, whose layers are LayerMemory.
        start: tokens in it, padding included.
        layout: of the row with the new tokens, from its first token on.
        positions: [B, start + T], what the host's rotations use.
    """

    def __init__(self, cache: Any, layout: Layout, positions: Tensor) -> None:
        self.cache = cache
        self.start = cache.get_seq_length()
        self.layout = layout
        self.positions = positions

    def queries(self, layout: Layout) -> Layout:
        """A layout of the whole row, for the new tokens alone."""
        return queries_of(layout, self.start, layout.positions.shape[1])

    def entries(self, layer: int, name: str, values: Tensor, gates: Tensor, pool: Pool, *, ratio: int, overlap: bool) -> Tensor:
        """The row's entries [B, E, D] with those that the new tokens close.

        Args:
            layer: its number. name: whose entries, when a layer keeps two kinds.
            values, gates: [B, T, D or 2 * D] of the new tokens.
            pool: makes entries of tokens.
        """
        rows, whole = self.cache.layers[layer].rows, self.layout.with_ratio(ratio)
        open_values, open_gates, known = (rows.get(f"{name}.{part}") for part in ("values", "gates", "entries"))
        if open_values is not None:
            values, gates = torch.cat([open_values, values], 1), torch.cat([open_gates, gates], 1)
        first = whole.positions.shape[1] - values.shape[1]
        closing, number = _closing(whole, self.start, first)
        fresh = pool(values, gates, self.positions[:, first:], closing)
        known = fresh[:, :0] if known is None else known
        room = fresh.new_zeros(fresh.shape[0], whole.num_entries + 1 - known.shape[1], fresh.shape[2])  # one more, for spare capacity
        entries = torch.cat([known, room], 1).scatter(1, number[..., None].expand_as(fresh), fresh)[:, :-1]
        keep = (2 if overlap else 1) * ratio - 1
        rows.update({f"{name}.values": _last(values, keep), f"{name}.gates": _last(gates, keep), f"{name}.entries": entries})
        return entries


def go_on(inputs: dict[str, Any], plan: Plan, config: Any, rows: int, tokens: int, ratio: int) -> Past:
    """The past of a cached forward, from its keyword arguments; a fresh one where they ask for a cache and bring none.

    Args:
        inputs: read are the cache, `attention_mask` [B, start + T] and `position_ids` [B, T] or [1, T]. Both may be missing: all tokens
            are then real and positions continue.

    Raises:
        TypeError: a cache of another kind, or a floating-point mask.
        ValueError: documents in other words, a mask that contradicts the cache or has padding inside a row, positions that do not
            continue, a cache that another model or the stock layers have filled, or one of a stage with another attention.
    """
    if any(inputs.get(name) is not None for name in (*OFFSET_NAMES, "seq_idx")):
        raise ValueError("a cache holds one document per row; pass use_cache=False for packed documents")
    given = inputs.get("cache") if inputs.get("cache") is not None else inputs.get("past_key_values")
    cache = _own(DynamicCache() if given is None else given, plan, config)
    start, kept = cache.get_seq_length(), cache.layers[0].rows
    valid = _valid(of_shape("attention_mask", inputs.get("attention_mask"), rows, start + tokens), kept.get("valid"), inputs, rows, tokens)
    layout = Layout.from_mask(valid, ratio=ratio, window=config.sliding_window)
    offset = _offset(of_shape("position_ids", inputs.get("position_ids"), rows, tokens), layout, start, kept.get("offset"))
    kept.update(valid=valid, offset=offset)
    return Past(cache, layout, layout.positions.long() + offset)


def _own(cache: Any, plan: Plan, config: Any) -> Any:
    """The cache, its layers made LayerMemory while it is empty."""
    if not isinstance(cache, DynamicCache):
        raise TypeError(f"csakit fills a DynamicCache, which generation makes by default; got {type(cache).__name__}")
    layers: list[Any] = cache.layers
    if cache.get_seq_length() == 0:
        layers[:] = [LayerMemory(config.sliding_window, plan.selects) for _ in range(config.num_hidden_layers)]
    elif not all(isinstance(layer, LayerMemory) for layer in layers):
        raise ValueError("this cache was filled by the stock layers, which keep other things in it; start with a fresh one")
    elif len(layers) != config.num_hidden_layers:
        raise ValueError(f"this cache was filled by a model of {len(layers)} layers, this one has {config.num_hidden_layers}")
    elif layers[0].selects != plan.selects:
        raise ValueError("this cache was filled in a stage with another attention; start with a fresh one")
    return cache


def _valid(mask: Tensor | None, known: Tensor | None, inputs: dict[str, Any], rows: int, tokens: int) -> Tensor:
    """[B, start + T] bool: the real tokens of the row so far and of the new part."""
    given = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    known = torch.ones(rows, 0, dtype=torch.bool, device=given.device) if known is None else known
    if known.shape[0] != rows:
        raise ValueError(f"the cache holds {known.shape[0]} rows, the model was given {rows}")
    start = known.shape[1]
    if mask is None:
        return torch.cat([known, known.new_ones(rows, tokens)], 1)
    if mask.dtype.is_floating_point:
        raise TypeError("attention_mask must be bool or 0/1 integers, 1 on real tokens; got a floating-point tensor. Use mask.bool()")
    if checks.values_readable(mask):
        if not torch.equal(mask[:, :start].bool(), known):
            raise ValueError(f"attention_mask must repeat the mask of the {start} cached tokens before that of the new ones")
        if ((mask[:, 1:] != 0) & (mask[:, :-1] == 0) & (mask.bool().cumsum(1)[:, :-1] > 0)).any():
            raise ValueError("attention_mask has padding inside a row; with a cache pad on the left, so that rows can go on")
    return torch.cat([known, mask[:, start:].bool()], 1)


def _offset(given: Tensor | None, layout: Layout, start: int, known: Tensor | None) -> Tensor:
    """[B, 1]: what the host's positions are ahead of the document's, from the row's first real token on."""
    known = layout.positions.new_zeros(layout.positions.shape[0], 1).long() if known is None else known
    if given is None:
        return known
    ahead, valid = given.long() - layout.positions[:, start:], layout.valid[:, start:]
    first = ahead.gather(1, valid.long().argmax(1, keepdim=True))
    begun = layout.valid[:, :start].any(1, keepdim=True) | ~valid.any(1, keepdim=True)
    offset = torch.where(begun, known, first)
    if checks.values_readable(given) and ((ahead != offset) & valid).any():
        raise ValueError(f"with a cache of {start} tokens position_ids must continue the row by ones; a cache holds one document per row")
    return offset


def _closing(whole: Layout, start: int, first: int) -> tuple[Layout, Tensor]:
    """The entries that tokens from `start` on close: a layout of the rows from `first` on with these alone, and their numbers [B, J].

    The number of spare capacity is E.
    """
    tokens = whole.positions.shape[1]
    there = whole.entry_token >= 0
    before = (there & (whole.entry_token + whole.ratio <= start)).sum(1, keepdim=True)
    count = (tokens - start + min(start, whole.ratio - 1)) // whole.ratio  # the most that can close, wherever a row's blocks begin
    number = before + torch.arange(count, device=before.device)
    number = torch.where(number < there.sum(1, keepdim=True), number, whole.num_entries)
    token = torch.nn.functional.pad(whole.entry_token - first, (0, 1), value=-1).gather(1, number)
    closing = replace(
        whole,
        num_entries=count,
        positions=whole.positions[:, first:],
        valid=whole.valid[:, first:],
        entry_token=token,
    )
    return closing, number


def _last(rows: Tensor, count: int) -> Tensor:
    """The last `count` rows along dimension 1, copied: a view would keep a whole prefill alive."""
    return rows[:, max(0, rows.shape[1] - count) :].clone()
