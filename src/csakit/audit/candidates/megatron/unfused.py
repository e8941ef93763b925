"""The unfused paths of Megatron-LM's CompressedSparseAttention: its real methods on a layer that holds the case's tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from csakit.integrations.megatron import import_megatron, install

from ...case import Case, NotSupported, Result
from .rows import Rooms, rooms


class Megatron:
    """The unfused paths, SBHD, packed THD and padded THD, as they stand in the checkout.

    Raises:
        ImportError: no Megatron-LM with compressed sparse attention can be imported.
    """

    name, dtype = "Megatron-LM, unfused", torch.float32

    def __init__(self) -> None:
        self._csa, _ = import_megatron()
        if not torch.cuda.is_available():
            # one path asks, in its backward too, whether a CUDA graph is being captured; PyTorch without CUDA cannot answer
            torch.cuda.is_current_stream_capturing = lambda: False

    def loss(self, case: Case) -> Result:
        """The layer's indexer loss, with coefficient 1."""
        return Result(self.with_coefficient(case, 1.0))

    def with_coefficient(self, case: Case, coefficient: float | None) -> Tensor:
        """The layer's indexer loss under this dsa_indexer_loss_coeff."""
        if case.divisor is not None or case.weight is not None:
            raise NotSupported("Megatron has no row weights and no divisor of the caller's")
        loss = self._forward(case, coefficient)[1]
        return case.q.new_zeros(()) if loss is None else loss  # a row too short for an entry has no loss

    def select(self, case: Case) -> Tensor:
        """What the layer attends of its entries [B, T, K]."""
        seen: list[Tensor] = []
        if case.cu_seqlens is not None or case.mask is not None:
            raise NotSupported("packed rows number entries in another way")

        def attend(query: Tensor, kv_full: Tensor, sink: Tensor, indices: Tensor, scale: float) -> Tensor:
            seen.append(indices[..., -min(case.topk, case.entries.shape[1]) :])
            return query.flatten(2)

        with mock.patch.object(self._csa, "unfused_compressed_sparse_attn", attend):
            self._forward(case, 1.0)
        if not seen:
            raise NotSupported("its selection does not come out")
        return torch.where(seen[0] >= 0, seen[0] - case.kv.shape[1], -1)

    def attend(self, case: Case) -> Tensor:
        """The layer's output [B, T, H, D]."""
        if case.objective == "dense":
            raise NotSupported("Megatron's layer attends its selection in the dense objective too")
        return self._forward(case, 1.0)[0].transpose(0, 1).reshape(case.q.shape)

    def _forward(self, case: Case, coefficient: float | None) -> tuple[Tensor, Tensor | None]:
        # the audit's losses do not belong into the training log
        with mock.patch.object(self._csa.DSAIndexerLossLoggingHelper, "save_loss_to_tracker", not_logged):
            plain = case.cu_seqlens is None and case.mask is None
            return self._sbhd(case, coefficient) if plain else self._thd(case, rooms(case), coefficient)

    def _sbhd(self, case: Case, coefficient: float | None) -> tuple[Tensor, Tensor | None]:
        kv, entries = case.kv.transpose(0, 1), case.entries.transpose(0, 1)
        (tokens, rows, _), count = kv.shape, entries.shape[0]
        layer = _layer(case, coefficient, tuple(x.transpose(0, 1) for x in (case.q_index, case.k_index, case.weights)))
        window = self._csa.get_window_topk_idxs(case.window, rows, tokens, kv.device)
        hidden = kv.new_zeros(tokens, rows, 1)
        return self._csa.CompressedSparseAttention._forward_unfused_csa(
            layer, case.q.transpose(0, 1), hidden, hidden, torch.cat([kv, entries]), entries, count, tokens, window, None
        )

    def _thd(self, case: Case, at: Rooms, coefficient: float | None) -> tuple[Tensor, Tensor | None]:
        csa, (tokens, heads) = self._csa, at.q.shape[:2]
        layer = _layer(case, coefficient, (at.q_index[:, None], at.k_index[:, None], at.weights[:, None], at.cu_entries))
        cu_full = csa.build_cu_seqlens_kv_full(at.cu_rooms, at.cu_entries)
        kv_full = csa.cat_per_segment(at.kv, at.entries, at.cu_rooms, at.cu_entries, cu_full)
        window = csa.get_window_topk_idxs_thd(case.window, at.cu_rooms, total_q=tokens)
        hidden = case.kv.new_zeros(tokens, 1, 1)
        return csa.CompressedSparseAttention._forward_unfused_csa_thd(
            layer, at.q, hidden, hidden, kv_full, at.entries, at.entries.shape[0], heads, tokens, at.cu_rooms, at.cu_rooms, cu_full,
            at.cu_entries, window, at.longest, at.longest // case.ratio, at.packed(),
        )  # fmt: skip


class WithCsakit(Megatron):
    """The same code with csakit installed in it."""

    name = "Megatron-LM, unfused, with csakit"

    def _forward(self, case: Case, coefficient: float | None) -> tuple[Tensor, Tensor | None]:
        with install():
            return super()._forward(case, coefficient)


def not_logged(loss: Tensor, layer_number: int, num_layers: int, reduce_group: Any = None) -> None:
    """In place of Megatron's loss tracker."""


def settings(case: Case, coefficient: float | None) -> SimpleNamespace:
    """The part of Megatron's configuration that these paths read."""
    return SimpleNamespace(
        dsa_indexer_loss_coeff=coefficient, dsa_indexer_use_sparse_loss=case.objective == "sparse", calculate_per_token_loss=False,
        num_layers=1, mtp_num_layers=None, apply_rope_fusion=False,
    )  # fmt: skip


def _layer(case: Case, coefficient: float | None, index: tuple[Tensor, ...]) -> Any:
    """What the methods read from a layer; its indexer gives the case's tensors."""
    group = SimpleNamespace(size=lambda: 1)
    return SimpleNamespace(
        config=settings(case, coefficient),
        indexer=SimpleNamespace(
            forward_before_topk=lambda x, qr, packed: index, index_topk=case.topk, softmax_scale=case.index_scale,
            pg_collection=SimpleNamespace(tp=group, cp=group),
        ),
        training=True, compress_ratio=case.ratio, window_size=case.window, attn_sink=case.sink, softmax_scale=case.scale, layer_number=1,
    )  # fmt: skip
