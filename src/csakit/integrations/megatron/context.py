"""Context parallelism: Megatron's path runs as it is, and csakit answers three of its calls.

The ranks hold successive stretches of one packed row. Megatron exchanges boundaries, compresses, projects and gathers; then every rank
has its queries, the kv before and of its stretch, and all entries, in the order in which the ranks made them. In csakit's terms that is
`Layout.shard`: the boundary ends in the halo, and the entries are those of the whole row, once they are put in its order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import csakit

from ...layout import Layout
from ...selection import Selection
from ..flash_mla import packed_entries
from .layer import Inputs, forward, no_loss, take

Function = Callable[..., Any]
_FUSED = ("use_fused_kernels", "apply_dsa_kernel_fusion")  # the attribute's name in newer and older checkouts


@dataclass
class Call:
    """One run of one layer through the path."""

    layer: Any
    row: Layout  # of the whole row
    part: Layout  # of this rank's queries
    room: Tensor  # [n + 1], where each document's room begins in the row
    boundary: int  # rows of kv before this rank's own
    in_order: Tensor | None = None  # [E'], the row in the gathered buffer of each compressed row, document by document
    numbers: Tensor | None = None  # [1, E], which of those compressed rows each entry of the layout is; -1 on spare capacity
    first: Tensor | None = None  # [1, E], the first compressed row of its document
    index: tuple[Tensor, Tensor, Tensor] | None = None  # the indexer's queries, keys and weights, as select takes them
    picked: Selection | None = None
    asked: bool = False  # for a selection
    taught: bool = False


_call: ContextVar[Call | None] = ContextVar("csakit_megatron_call", default=None)


def begin(layer: Any, rows: int, boundary_hidden: Tensor, packed_seq_params: Any) -> Call:
    """The Call of a layer whose rank has so many rows."""
    group, real, padded = layer.pg_collection.cp, packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded
    tokens = rows * group.size()
    row = Layout.packed(real, cu_seqlens_padded=padded, tokens=tokens, ratio=layer.compress_ratio, window=layer.window_size)
    part = row.shard(group.rank(), group.size())
    return Call(layer, row, part, real if padded is None else padded, boundary_hidden.shape[0])


def method(attention: str) -> Callable[[Function], Function]:
    """What makes the successor of CompressedSparseAttention._forward_thd_cp."""

    def make(stock: Function) -> Function:
        @functools.wraps(stock)
        def forward_thd_cp(self, query, key, x, qr, boundary_hidden, boundary_kv, packed_seq_params):
            arguments = (query, key, x, qr, boundary_hidden, boundary_kv, packed_seq_params)
            training = self.training and torch.is_grad_enabled()
            switch = next(name for name in _FUSED if hasattr(self, name))
            fused = getattr(self, switch)
            if self.indexer is None or boundary_hidden is None or (fused and not training):
                return stock(self, *arguments)
            if fused and attention == "megatron":
                raise RuntimeError(
                    'attention="megatron" has no fused output in the context-parallel path: its kernel makes output and loss in one. '
                    'Install with attention="csakit", or train with attention_backend "unfused"'
                )
            call = begin(self, query.shape[0], boundary_hidden, packed_seq_params)
            token = _call.set(call)
            setattr(self, switch, False)  # the unfused branch asks csakit; csakit's attention stands in for the fused kernel's
            try:
                out = stock(self, *arguments)
            finally:
                _call.reset(token)
                setattr(self, switch, fused)
            return finish(call, out) if training else out

        return forward_thd_cp

    return make


def finish(call: Call, out: Tensor) -> Tensor:
    """The output of a training pass; where Megatron took no loss because its coefficient is 0, with zero gradients for the indexer.

    Raises:
        RuntimeError: Megatron's path went round csakit.
    """
    off = not (call.layer.config.dsa_indexer_loss_coeff or 0.0)
    if not call.asked or not (call.taught or call.picked is None or off):
        what = "selection" if not call.asked else "loss"
        raise RuntimeError(f"Megatron's context-parallel path did not ask for the {what}: it is not the one csakit knows; handle.remove()")
    if call.taught or call.picked is None:
        return out
    return csakit.attach_loss(out, no_loss(call.picked))


def prepared(stock: Function) -> Function:
    """cp_utils.prepare_cp_compressor_input, which says where the gathered buffer holds each compressed row."""

    @functools.wraps(stock)
    def prepare_cp_compressor_input(hidden_local, boundary_hidden, cu_seqlens, cu_seqlens_compressed, global_start, cp_size, ratio):
        made = stock(hidden_local, boundary_hidden, cu_seqlens, cu_seqlens_compressed, global_start, cp_size, ratio)
        call = _call.get()
        if call is not None:
            call.in_order = made[2].long()
            call.numbers, document = packed_entries(call.row, call.room, cu_entries=cu_seqlens_compressed)
            call.first = cu_seqlens_compressed.long()[document]
        return made

    return prepare_cp_compressor_input


def selected(attention: str) -> Callable[[Function], Function]:
    """What makes the successor of cp_utils.compute_cp_indexer_topk."""

    def make(stock: Function) -> Function:
        @functools.wraps(stock)
        def compute_cp_indexer_topk(
            q_indexer_local, weights_indexer_local, k_indexer_seq_major, cu_seqlens_q, cu_seqlens_compressed, global_start, ratio,
            topk_width, indexer_softmax_scale, max_seqlen_q, use_fused,
        ):  # fmt: skip
            call = _call.get()
            if call is not None:
                call.asked = True
            if call is not None and topk_width and call.row.num_entries and max_seqlen_q >= ratio:
                assert call.numbers is not None and call.first is not None
                call.index = (q_indexer_local[None], take(k_indexer_seq_major, call.numbers), weights_indexer_local[None])
                call.picked = csakit.select(*call.index, topk_width, call.part, scale=indexer_softmax_scale)
                if attention == "csakit":
                    chosen, number = call.picked.indices[0].long(), (call.numbers - call.first)[0]
                    by_document = torch.where(chosen >= 0, number[chosen.clamp(min=0)], -1)
                    return by_document.to(torch.int32), None  # the second is for Megatron's loss only
            return stock(
                q_indexer_local, weights_indexer_local, k_indexer_seq_major, cu_seqlens_q, cu_seqlens_compressed, global_start, ratio,
                topk_width, indexer_softmax_scale, max_seqlen_q=max_seqlen_q, use_fused=use_fused,
            )  # fmt: skip

        return compute_cp_indexer_topk

    return make


def attended(attention: str, denominator: str, csa: Any) -> Callable[[Function], Function]:
    """What makes the successor of csa._unfused_indexer_sparse_attn_from_topk."""

    def make(stock: Function) -> Function:
        @functools.wraps(stock)
        def indexer_sparse_attn_from_topk(
            query, kv_full, attn_sink, topk_indices, q_indexer, k_indexer, weights, indexer_topk_indices, compressed_kv, softmax_scale,
            indexer_softmax_scale, loss_coeff, loss_divisor, sparse_loss, ratio, _max_seqlen_q, indexer_layout, q_padding_mask,
            tp_group=None,
        ):  # fmt: skip
            call = _call.get()
            if call is None:
                arguments = (
                    query, kv_full, attn_sink, topk_indices, q_indexer, k_indexer, weights, indexer_topk_indices, compressed_kv,
                    softmax_scale, indexer_softmax_scale, loss_coeff, loss_divisor, sparse_loss, ratio, _max_seqlen_q, indexer_layout,
                    q_padding_mask,
                )  # fmt: skip
                return stock(*arguments) if tp_group is None else stock(*arguments, tp_group=tp_group)
            out = None
            if attention == "megatron":
                out = csa.unfused_compressed_sparse_attn(query, kv_full, attn_sink, topk_indices, softmax_scale)[:, None]
            out, loss = forward(call.layer, part_inputs(call, query, kv_full), denominator, out, call.picked)
            call.taught = True
            return out.squeeze(1), loss

        return indexer_sparse_attn_from_topk

    return make


def part_inputs(call: Call, query: Tensor, kv_full: Tensor) -> Inputs:
    """A rank's tensors: query [T, H, D]; kv_full holds the boundary's rows, its own, and the gathered buffer of compressed rows."""
    assert call.index is not None and call.in_order is not None and call.numbers is not None
    stop = call.boundary + query.shape[0]
    begin = call.boundary - call.part.kv_offset
    where = torch.where(call.numbers >= 0, call.in_order[call.numbers.clamp(min=0)], -1)
    return Inputs(call.part, query[None], kv_full[None, begin:stop], take(kv_full[stop:], where), *call.index, call.row.valid.sum())
