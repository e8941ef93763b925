"""The structs that the kernels take, as bytes: every field is a word of 8 bytes, in the order in which the headers have them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...rows import Ranges

TYPES = (torch.float32, torch.bfloat16)
ATTENTION, SCORING, OBJECTIVE = struct.Struct("92qd"), struct.Struct("45qd"), struct.Struct("10q")
_NOT_GIVEN = (0,) * 6
_NO_INDICES = (0,) * 3


class Call:
    """One call of a kernel. It holds the tensors that the words point to."""

    def __init__(self) -> None:
        self._alive: list[Tensor] = []

    def arrays(self, *tensors: Tensor | None) -> list[int]:
        """Arrays of tensors [B, N, G, D] or [B, N, D]."""
        words: list[int] = []
        for x in tensors:
            if x is None:
                words += _NOT_GIVEN
                continue
            if x.stride(-1) != 1:
                x = x.contiguous()
            self._alive.append(x)
            batch, row, *group, _ = x.stride()
            words += x.data_ptr(), batch, row, group[0] if group else 0, x.shape[-1], x.dtype is torch.bfloat16
        return words

    def indices(self, x: Tensor | None) -> tuple[int, ...]:
        """Indices of a tensor [B, T, S, K]; null: every visible entry."""
        if x is None:
            return _NO_INDICES
        address = self.pointer(x if x.numel() else x.new_empty(1))  # no slots are not "no indices", which null means
        return address, x.shape[3], x.dtype is torch.int64

    def ranges(self, ranges: Ranges) -> tuple[int, ...]:
        """Ranges."""
        valid, *bounds, offset = ranges
        return self.pointer(valid), *(self.pointer(x if x.dtype is torch.int32 else x.to(torch.int32)) for x in bounds), offset

    def pointer(self, x: Tensor | None) -> int:
        """Where the numbers of x begin, one after another."""
        if x is None:
            return 0
        x = x.contiguous()
        self._alive.append(x)
        return x.data_ptr()

    def floats(self, x: Tensor | None) -> int:
        """The same, as float32."""
        return 0 if x is None else self.pointer(x.float())

    def __call__(self, function: Callable[[bytes], Any], form: struct.Struct, *words: float) -> None:
        function(form.pack(*words))
