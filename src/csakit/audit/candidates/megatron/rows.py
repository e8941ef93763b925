"""A case in Megatron's THD form: one flat row of tokens, offsets of the segments, and of the room each has."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...case import Case, NotSupported


@dataclass(frozen=True, eq=False)
class Rooms:
    """N segments, each with a room: its tokens, then padding. Flat tensors of T tokens and E entries."""

    q: Tensor  # [T, H, D]
    kv: Tensor  # [T, D]
    entries: Tensor  # [E, D]
    q_index: Tensor  # [T, I, C]
    k_index: Tensor  # [E, C]
    weights: Tensor  # [T, I]
    cu_seqlens: Tensor  # [N + 1] int32, of the real tokens
    cu_rooms: Tensor  # [N + 1] int32, of the rooms; the same tensor without padding
    cu_entries: Tensor  # [N + 1] int32: Megatron makes entries of a whole room

    @property
    def longest(self) -> int:
        """Tokens of the largest room."""
        return int(self.cu_rooms.diff().max())

    def packed(self) -> Any:
        """Megatron's PackedSeqParams."""
        from megatron.core.packed_seq_params import PackedSeqParams

        padded = {} if self.cu_rooms is self.cu_seqlens else {"cu_seqlens_q_padded": self.cu_rooms, "cu_seqlens_kv_padded": self.cu_rooms}
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=self.cu_seqlens, cu_seqlens_kv=self.cu_seqlens, max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest, **padded,
        )  # fmt: skip


def rooms(case: Case) -> Rooms:
    """The case as packed segments: its documents; or every row one segment, padding on its right the rest of the room.

    Raises:
        NotSupported: padding on the left.
    """
    rows, tokens = case.kv.shape[:2]
    if case.cu_seqlens is not None:
        cu_rooms = cu_seqlens = case.cu_seqlens
    else:
        cu_rooms = cu_seqlens = torch.arange(rows + 1, dtype=torch.int32) * tokens
        if case.mask is not None:
            if any(not left and right for row in case.mask.tolist() for left, right in itertools.pairwise(row)):
                raise NotSupported("Megatron has padding behind a segment only")
            cu_seqlens = torch.nn.functional.pad(case.mask.sum(1).cumsum(0), (1, 0)).int()
    cu_entries = torch.nn.functional.pad((cu_rooms.diff() // case.ratio).cumsum(0), (1, 0)).int()
    count = int(cu_entries[-1])
    per_token = (x.flatten(0, 1) for x in (case.q, case.kv, case.q_index, case.weights))
    q, kv, q_index, weights = per_token
    entries, k_index = (x.flatten(0, 1)[:count] for x in (case.entries, case.k_index))
    return Rooms(q, kv, entries, q_index, k_index, weights, cu_seqlens, cu_rooms, cu_entries)
