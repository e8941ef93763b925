"""The context-parallel path of Megatron-LM's CompressedSparseAttention on one rank, its real method on the CPU.

Two helpers of that path are CUDA kernels without a fallback (they lay out rows; no number of the loss is made there): plain PyTorch
stands in for them, written from their documented contracts. Projections, norms and rotations give the case's tensors.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ...case import Case, NotSupported
from .rows import Rooms, rooms
from .unfused import Megatron, not_logged, settings

_FUSED = ("FusedCSAIndexerSparseAttnFromTopkFunc", "FusedIndexerSparseAttnFromTopkFunc")


class ContextParallel(Megatron):
    """`_forward_thd_cp` without fused kernels."""

    name, fused = "Megatron-LM, context parallel", False
    select = None  # type: ignore[assignment]

    def with_coefficient(self, case: Case, coefficient: float | None) -> Tensor:
        """The layer's indexer loss under this dsa_indexer_loss_coeff; the path has none where it has no entry."""
        return super().with_coefficient(case, coefficient) if case.entries.shape[1] else case.q.new_zeros(())

    def _forward(self, case: Case, coefficient: float | None) -> tuple[Tensor, Tensor | None]:
        csa, at, losses = self._csa, rooms(case), []

        def attach(out: Tensor, loss: Tensor) -> Tensor:
            losses.append(loss)
            return out

        boundary = case.kv.new_zeros(case.window, 1, 1)
        keys = at.kv[:, None, None]
        with ExitStack() as stack, torch.compiler.set_stance("force_eager"):
            for owner, name, stand_in in self._stand_ins(attach):
                stack.enter_context(mock.patch.object(owner, name, stand_in))
            hidden = at.kv.new_zeros(at.kv.shape[0], 1, 1)
            try:
                out = csa.CompressedSparseAttention._forward_thd_cp(
                    _layer(case, at, coefficient, self.fused), at.q, keys, hidden, hidden, boundary,
                    keys.new_zeros(case.window, 1, 1, keys.shape[-1]), at.packed(),
                )  # fmt: skip
            except ImportError as error:
                raise NotSupported(f"this needs the fused kernel itself ({str(error).split('.')[0]})") from error
        return out, losses[0] if losses else None

    def _stand_ins(self, attach: Any) -> list[tuple[Any, str, Any]]:
        csa, layouts = self._csa, self._csa.csa_cp_layout_kernels
        found = [
            (csa, "DSAIndexerLossAutoScaler", SimpleNamespace(apply=attach)),
            (csa.DSAIndexerLossLoggingHelper, "save_loss_to_tracker", not_logged),
            (csa, "rotate_activation", lambda x: x),
            (csa.cp_utils, "apply_thd_cp_local_rope_unfused", lambda x, *_: x),
            (csa, "gather_from_sequence_parallel_region", lambda x, group: x),
            (layouts, "CompressorInputCompact", SimpleNamespace(apply=_compact)),
            (layouts, "build_attention_indices", _attention_indices),
        ]
        if hasattr(csa, "defer_reduce_scatter_wait"):
            found += [
                (csa, "async_gather_from_sequence_parallel_region", lambda x, group: SimpleNamespace(wait=lambda: x)),
                (csa, "defer_reduce_scatter_wait", lambda x, name: (x, None)),
            ]
        return found


class FusedContextParallel(ContextParallel):
    """`_forward_thd_cp` as it calls its fused kernel: the module's own unfused function of the same contract stands in for that."""

    name, fused = "Megatron-LM, context parallel, as it calls the fused kernel", True

    def _stand_ins(self, attach: Any) -> list[tuple[Any, str, Any]]:
        csa = self._csa
        kernel = next((name for name in _FUSED if hasattr(csa, name)), None)
        if kernel is None:
            raise NotSupported("this Megatron calls another fused kernel in its context-parallel path")
        select = csa.cp_utils.compute_cp_indexer_topk

        def selected(*arguments: Any, use_fused: bool, **options: Any) -> Any:
            return select(*arguments, use_fused=False, **options)

        def unfused(*arguments: Any) -> tuple[Tensor, Tensor]:
            return csa._unfused_indexer_sparse_attn_from_topk(*_with_graph(*arguments))

        return [
            *super()._stand_ins(attach),
            (csa.cp_utils, "compute_cp_indexer_topk", selected),
            (csa, kernel, SimpleNamespace(apply=unfused)),
        ]


def _with_graph(*arguments: Any) -> tuple[Any, ...]:
    """The first 18 arguments, those of the unfused function. A kernel that returns gradients itself gets its entries without their graph
    and that graph besides; the function needs both in one."""
    shared, rest = list(arguments[:18]), arguments[18:]
    if rest:
        index_rows, entry_rows, _, base, order = rest[:5]
        shared[1] = torch.cat([shared[1][:base], entry_rows])
        shared[5] = index_rows if order is None else index_rows[order.clamp_min(0).long()]
    return tuple(shared)


def _compact(hidden: Tensor, boundary: Tensor, cu_seqlens: Tensor, start: int, ratio: int, overlap: int, rows: int) -> tuple:
    """Room for the compressor's input and the group numbers: the compressor here has its entries already."""
    return hidden.new_zeros(rows * ratio, *hidden.shape[1:]), torch.zeros(rows, dtype=torch.int32)


def _attention_indices(
    cu_seqlens: Tensor, global_start: int, l_local: int, d_window: int, window_size: int, ratio: int, compressed_width: int,
    compressed_topk: Tensor | None = None, cu_seqlens_compressed: Tensor | None = None, seq_to_rank_row: Tensor | None = None,
    for_indexer_loss: bool = False,
) -> tuple[Tensor, None, Tensor]:  # fmt: skip
    """(rows of the keys: selected entries, then the window; None; rows of the entries), each [T, ..], -1 where empty; of one rank."""
    assert global_start == 0 and compressed_topk is not None and cu_seqlens_compressed is not None and seq_to_rank_row is not None
    token = torch.arange(l_local)
    segment = torch.bucketize(token, cu_seqlens[1:].long(), right=True).clamp_max(cu_seqlens.shape[0] - 2)
    logical = (compressed_topk.long() + cu_seqlens_compressed.long()[segment][:, None]).clamp(0, seq_to_rank_row.shape[0] - 1)
    entries = torch.where(compressed_topk >= 0, seq_to_rank_row.long()[logical], -1)
    near = token[:, None] - torch.arange(window_size - 1, -1, -1)
    window = torch.where(near >= cu_seqlens.long()[segment][:, None], near + d_window, -1)
    keys = torch.where(entries >= 0, entries + d_window + l_local, -1)
    return torch.cat([keys, window] if for_indexer_loss else [window, keys], 1).int(), None, entries.int()


def _layer(case: Case, at: Rooms, coefficient: float | None, fused: bool) -> Any:
    """What the method reads from a layer, on a context-parallel group of one rank."""
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    index_heads, index_width = at.q_index.shape[1:]

    def compressor(rows: Tensor) -> SimpleNamespace:
        def forward(hidden: Tensor, *_: Any, compressed_group_ids: Tensor, **__: Any) -> tuple[Tensor, None]:
            room = compressed_group_ids.shape[0] - rows.shape[0]
            return torch.nn.functional.pad(rows, (0, 0, 0, room))[:, None], None

        return SimpleNamespace(_forward_thd=forward)

    indexer = SimpleNamespace(
        compressor=compressor(at.k_index), linear_wq_b=lambda x: (at.q_index.flatten(1)[:, None], None),
        linear_weights_proj=lambda x: (at.weights[:, None] * index_heads**0.5, None), rotary_pos_emb=lambda *_, **__: None,
        index_n_heads=index_heads, index_head_dim=index_width, qk_pos_emb_head_dim=0, index_topk=case.topk,
        softmax_scale=case.index_scale, pg_collection=SimpleNamespace(tp=group, cp=group),
    )  # fmt: skip
    return SimpleNamespace(
        config=settings(case, coefficient), indexer=indexer, compressor=compressor(at.entries), training=True,
        pg_collection=SimpleNamespace(tp=group, cp=group), compress_ratio=case.ratio, window_size=case.window, attn_sink=case.sink,
        softmax_scale=case.scale, layer_number=1, use_fused_kernels=fused, apply_dsa_kernel_fusion=fused,
    )  # fmt: skip
