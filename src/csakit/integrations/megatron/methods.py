"""The methods that take the place of Megatron's. Their parameters are Megatron's: `handle` compares them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import context
from .layer import Inputs, forward, sbhd_inputs, thd_inputs

AttentionMethod = Callable[..., Any]


def replacements(logger: Any, attention: str, denominator: str) -> dict[str, Callable[[AttentionMethod], AttentionMethod]]:
    """Name of a method of CompressedSparseAttention -> what makes its successor from it."""

    def run(layer: Any, inputs: Inputs, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        out, loss = forward(layer, inputs, denominator, out)
        if loss is not None and (layer.config.dsa_indexer_loss_coeff or 0.0) > 0:
            layers = layer.config.num_layers + (layer.config.mtp_num_layers or 0)
            logger.save_loss_to_tracker(loss=loss, layer_number=layer.layer_number, num_layers=layers)
        return out, loss

    def own_output(stock: AttentionMethod, layer: Any, *arguments: Any) -> Tensor | None:
        """Megatron's output, when it is to be kept: its own selection and attention, without its loss, which only training has."""
        if attention == "csakit":
            return None
        training, layer.training = layer.training, False
        try:
            return stock(layer, *arguments)[0]
        finally:
            layer.training = training

    def selects(layer: Any, entries: int) -> bool:
        return layer.indexer is not None and layer.compress_ratio > 1 and entries > 0

    def unfused(stock: AttentionMethod) -> AttentionMethod:
        @functools.wraps(stock)
        def method(self, query, x, qr, kv_full, compressed_kv, n_compressed, offset, window_idxs, packed_seq_params):
            arguments = (query, x, qr, kv_full, compressed_kv, n_compressed, offset, window_idxs, packed_seq_params)
            if not selects(self, n_compressed):
                return stock(self, *arguments)
            out = own_output(stock, self, *arguments)
            return run(self, sbhd_inputs(self, query, x, qr, kv_full, offset, packed_seq_params), out)

        return method

    def unfused_thd(stock: AttentionMethod) -> AttentionMethod:
        @functools.wraps(stock)
        def method(
            self, query, x, qr, kv_full_thd, compressed_kv, n_compressed_total, np_, total_q, cu_seqlens_q, cu_seqlens_kv,
            cu_seqlens_kv_full, cu_seqlens_compressed, window_idxs, max_seqlen_q, max_seqlen_compressed_idx, packed_seq_params,
        ):  # fmt: skip
            arguments = (
                query, x, qr, kv_full_thd, compressed_kv, n_compressed_total, np_, total_q, cu_seqlens_q, cu_seqlens_kv,
                cu_seqlens_kv_full, cu_seqlens_compressed, window_idxs, max_seqlen_q, max_seqlen_compressed_idx, packed_seq_params,
            )  # fmt: skip
            if not selects(self, n_compressed_total):
                return stock(self, *arguments)
            out = own_output(stock, self, *arguments)
            return run(self, thd_inputs(self, query, x, qr, kv_full_thd, cu_seqlens_q, cu_seqlens_kv_full, packed_seq_params), out)

        return method

    def fused_training(stock: AttentionMethod) -> AttentionMethod:
        @functools.wraps(stock)
        def method(self, query, x, qr, kv_full, n_compressed, offset, window_idxs, packed_seq_params):
            out = None
            if attention == "megatron":
                out = self._forward_fused_indexer_inference(
                    query, x, qr, kv_full, n_compressed, offset, window_idxs, packed_seq_params
                )  # fmt: skip
            return run(self, sbhd_inputs(self, query, x, qr, kv_full, offset, packed_seq_params), out)

        return method

    def fused_training_thd(stock: AttentionMethod) -> AttentionMethod:
        @functools.wraps(stock)
        def method(
            self, query, x, qr, packed_seq_params, total_q, np_, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_kv_full, max_seqlen_q,
            max_seqlen_compressed_idx, compressed_kv, kv_full_thd, window_idxs,
        ):  # fmt: skip
            out = None
            if attention == "megatron":
                out = self._forward_fused_indexer_inference_thd(
                    query, x, qr, kv_full_thd, packed_seq_params, total_q, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_kv_full, window_idxs,
                    max_seqlen_q, max_seqlen_compressed_idx, int(packed_seq_params.max_seqlen_kv),
                )  # fmt: skip
            return run(self, thd_inputs(self, query, x, qr, kv_full_thd, cu_seqlens_q, cu_seqlens_kv_full, packed_seq_params), out)

        return method

    return {
        "_forward_unfused_csa": unfused,
        "_forward_unfused_csa_thd": unfused_thd,
        "_forward_fused_indexer_training": fused_training,
        "_forward_fused_indexer_training_thd": fused_training_thd,
        "_forward_thd_cp": context.method(attention),
    }
