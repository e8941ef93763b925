"""Megatron-LM's own CSA code as a candidate, with the checkout on the Python path:

    PYTHONPATH=PATH csakit audit csakit.audit.candidates.megatron:Megatron
    PYTHONPATH=PATH csakit audit csakit.audit.candidates.megatron:WithCsakit

The real methods of CompressedSparseAttention run, unfused, on a layer that holds the case's tensors in place of projections.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from csakit.integrations.megatron import import_megatron, install

from ..case import Case, NotSupported, Result


class Megatron:
    """The unfused paths, SBHD and packed THD, as they stand in the checkout.

    Raises:
        ImportError: no Megatron-LM with compressed sparse attention can be imported.
    """

    name, dtype = "Megatron-LM", torch.float32

    def __init__(self) -> None:
        self._csa, _ = import_megatron()
        if not torch.cuda.is_available():
            # one path asks, in its backward too, whether a CUDA graph is being captured; PyTorch without CUDA cannot answer
            torch.cuda.is_current_stream_capturing = lambda: False

    def loss(self, case: Case) -> Result:
        """The layer's indexer loss, with coefficient 1."""
        if case.divisor is not None or case.weight is not None:
            raise NotSupported("Megatron has no row weights and no divisor of the caller's")
        loss = self._forward(case)[1]
        return Result(case.q.new_zeros(()) if loss is None else loss)  # a row too short for an entry has no loss

    def attend(self, case: Case) -> Tensor:
        """The layer's output [B, T, H, D]."""
        if case.objective == "dense":
            raise NotSupported("Megatron's layer attends its selection in the dense objective too")
        rows, tokens, heads, width = case.q.shape
        return self._forward(case)[0].transpose(0, 1).reshape(rows, tokens, heads, width)

    def _forward(self, case: Case) -> tuple[Tensor, Tensor | None]:
        if case.mask is not None:
            raise NotSupported("Megatron has no padding mask; packed rows are its way")
        # the audit's losses do not belong into the training log
        with mock.patch.object(self._csa.DSAIndexerLossLoggingHelper, "save_loss_to_tracker", _not_logged):
            return self._sbhd(case) if case.cu_seqlens is None else self._thd(case, case.cu_seqlens)

    def _sbhd(self, case: Case) -> tuple[Tensor, Tensor | None]:
        kv, entries = case.kv.transpose(0, 1), case.entries.transpose(0, 1)
        (tokens, rows, _), count = kv.shape, entries.shape[0]
        layer = _layer(case, tuple(x.transpose(0, 1) for x in (case.q_index, case.k_index, case.weights)))
        window = self._csa.get_window_topk_idxs(case.window, rows, tokens, kv.device)
        hidden = kv.new_zeros(tokens, rows, 1)
        return self._csa.CompressedSparseAttention._forward_unfused_csa(
            layer, case.q.transpose(0, 1), hidden, hidden, torch.cat([kv, entries]), entries, count, tokens, window, None
        )

    def _thd(self, case: Case, cu_seqlens: Tensor) -> tuple[Tensor, Tensor | None]:
        from megatron.core.packed_seq_params import PackedSeqParams

        csa, tokens, heads = self._csa, case.q.shape[1], case.q.shape[2]
        cu_entries = torch.cat([cu_seqlens[:1], (cu_seqlens.diff() // case.ratio).cumsum(0).to(cu_seqlens.dtype)])
        count, longest = int(cu_entries[-1]), int(cu_seqlens.diff().max())
        entries, keys = case.entries[0, :count], case.k_index[:, :count]
        layer = _layer(case, (case.q_index.transpose(0, 1), keys.transpose(0, 1), case.weights.transpose(0, 1), cu_entries))
        cu_full = csa.build_cu_seqlens_kv_full(cu_seqlens, cu_entries)
        kv_full = csa.cat_per_segment(case.kv[0], entries, cu_seqlens, cu_entries, cu_full)
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        window = csa.get_window_topk_idxs_thd(case.window, cu_seqlens, total_q=tokens)
        hidden = case.kv.new_zeros(tokens, 1, 1)
        return csa.CompressedSparseAttention._forward_unfused_csa_thd(
            layer, case.q[0], hidden, hidden, kv_full, entries, count, heads, tokens, cu_seqlens, cu_seqlens, cu_full, cu_entries,
            window, longest, longest // case.ratio, packed,
        )  # fmt: skip


class WithCsakit(Megatron):
    """The same code with csakit installed in it."""

    name = "Megatron-LM with csakit"

    def _forward(self, case: Case) -> tuple[Tensor, Tensor | None]:
        with install():
            return super()._forward(case)


def _not_logged(loss: Tensor, layer_number: int, num_layers: int) -> None:
    pass


def _layer(case: Case, index: tuple[Tensor, ...]) -> Any:
    """What the methods read from a layer; its indexer gives the case's tensors."""
    group = SimpleNamespace(size=lambda: 1)
    return SimpleNamespace(
        config=SimpleNamespace(
            dsa_indexer_loss_coeff=1.0, dsa_indexer_use_sparse_loss=case.objective == "sparse", calculate_per_token_loss=False,
            num_layers=1, mtp_num_layers=None,
        ),
        indexer=SimpleNamespace(
            forward_before_topk=lambda x, qr, packed: index, index_topk=case.topk, softmax_scale=case.index_scale,
            pg_collection=SimpleNamespace(tp=group, cp=group),
        ),
        training=True, compress_ratio=case.ratio, window_size=case.window, attn_sink=case.sink, softmax_scale=case.scale, layer_number=1,
    )  # fmt: skip
