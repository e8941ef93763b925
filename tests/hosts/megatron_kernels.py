"""The two CuTe kernels of Megatron's context-parallel path in plain torch, written from what their docstrings promise.

The kernels need CUDA tensors and CuTeDSL; everything around them runs on the CPU, with these in their place.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor


class CompressorInputCompact:
    """The tokens of each compressed group that a rank can see whole, group by group, and the groups' numbers in their documents."""

    @staticmethod
    def apply(
        hidden_local: Tensor, boundary_hidden: Tensor, cu_seqlens: Tensor, global_start: int, ratio: int, d_comp: int, c_cap: int
    ) -> tuple[Tensor, Tensor]:
        known = torch.cat([boundary_hidden, hidden_local])  # row i is token global_start - boundary + i
        stop, rows, groups = global_start + hidden_local.shape[0], [], []
        for begin, end in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist()):
            if end <= global_start or begin >= stop:
                continue
            first = -(-max(global_start - d_comp - begin, 0) // ratio)
            for group in range(first, (min(end, stop) - begin) // ratio):
                groups.append(group)
                rows += range(begin + group * ratio, begin + (group + 1) * ratio)
        index = torch.tensor(rows, dtype=torch.long) - global_start + boundary_hidden.shape[0]
        compact = known.new_zeros(c_cap * ratio, *known.shape[1:])
        compact = torch.cat([known[index], compact[len(rows) :]])
        return compact, torch.tensor(groups + [-1] * (c_cap - len(groups)), dtype=torch.int32)


def build_attention_indices(
    cu_seqlens: Tensor, global_start: int, l_local: int, d_window: int, window_size: int, ratio: int, compressed_width: int,
    compressed_topk: Tensor | None = None, cu_seqlens_compressed: Tensor | None = None, seq_to_rank_row: Tensor | None = None,
    for_indexer_loss: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Rows of (boundary, local, compressed) that each local query attends; window first, or with a loss compressed first; -1 is none."""
    windows, entries, ranked = [], [], []
    starts, ends = cu_seqlens.tolist(), cu_seqlens[1:].tolist()
    for row in range(l_local):
        token = global_start + row
        document = next((i for i, (a, b) in enumerate(zip(starts, ends)) if a <= token < b), None)
        begin = token if document is None else starts[document]
        reach = [t for t in range(token - window_size + 1, token + 1) if t >= begin and document is not None]
        windows.append([t - global_start + d_window for t in reach] + [-1] * (window_size - len(reach)))
        if compressed_topk is not None:
            chosen = compressed_topk[row].tolist()
        else:
            chosen = [e if e < (token + 1 - begin) // ratio else -1 for e in range(compressed_width)]
        if document is None or cu_seqlens_compressed is None or seq_to_rank_row is None:
            chosen = [-1] * len(chosen)
        else:
            first = int(cu_seqlens_compressed[document])
            chosen = [-1 if e < 0 else int(seq_to_rank_row[first + e]) for e in chosen]
        ranked.append(chosen)
        entries.append([-1 if e < 0 else d_window + l_local + e for e in chosen])
    both = (entries, windows) if for_indexer_loss else (windows, entries)
    indices = torch.tensor([[*a, *b] for a, b in zip(*both)], dtype=torch.int32)
    return indices, None, torch.tensor(ranked, dtype=torch.int32) if for_indexer_loss else None


def replace_kernels(csa: ModuleType, monkeypatch) -> None:
    """Puts the two in the kernels' place."""
    kernels = csa.csa_cp_layout_kernels
    monkeypatch.setattr(kernels, "CompressorInputCompact", CompressorInputCompact)
    monkeypatch.setattr(kernels, "build_attention_indices", build_attention_indices)
