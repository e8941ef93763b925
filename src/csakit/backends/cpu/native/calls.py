"""The structs that the kernels take, made from tensors (arrays.h, attention.h, scoring.h and objective.h are their other side)."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ...rows import Ranges

TYPES = (torch.float32, torch.bfloat16)


class Array(Structure):
    _fields_ = (
        ("data", c_void_p), ("batch", c_int64), ("row", c_int64), ("group", c_int64), ("width", c_int64), ("bfloat", c_int64),
    )  # fmt: skip


class RangesStruct(Structure):
    _fields_ = (
        ("valid", c_void_p), ("window_start", c_void_p), ("entry_start", c_void_p), ("entry_stop", c_void_p), ("kv_offset", c_int64),
    )  # fmt: skip


class Indices(Structure):
    _fields_ = (("data", c_void_p), ("slots", c_int64), ("wide", c_int64))


class Attention(Structure):
    _fields_ = (
        *((name, Array) for name in ("q", "kv", "entries", "values", "entry_values", "out", "d_out", "d_q")),
        *((name, Array) for name in ("d_kv", "d_entries", "d_values", "d_entry_values")),
        ("sink", c_void_p), ("indices", Indices), ("ranges", RangesStruct), ("lse", c_void_p), ("mass", c_void_p), ("d_sink", c_void_p),
        *((name, c_int64) for name in ("rows", "tokens", "heads", "groups", "sets", "num_entries", "value_width", "threads")),
        ("scale", c_double),
    )  # fmt: skip


class Scoring(Structure):
    _fields_ = (
        *((name, Array) for name in ("q", "k", "d_q", "d_k")),
        ("weights", c_void_p), ("d_weights", c_void_p), ("d_scores", c_void_p), ("indices", Indices), ("ranges", RangesStruct),
        ("chosen", c_void_p), ("scores", c_void_p),
        *((name, c_int64) for name in ("rows", "tokens", "heads", "entries", "sets", "topk", "relu", "threads")),
        ("scale", c_double),
    )  # fmt: skip


class Objective(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("scores", "mass", "valid", "factor", "kl", "gradient")),
        *((name, c_int64) for name in ("rows", "sets", "slots", "threads")),
    )  # fmt: skip


class Call:
    """One call of a kernel: holds the tensors its struct points to."""

    def __init__(self, struct: Any) -> None:
        self.struct = struct
        self._alive: list[Tensor] = []

    def array(self, name: str, x: Tensor | None) -> None:
        """A tensor [B, N, G, D], or [B, N, D]."""
        if x is None:
            return
        if x.stride(-1) != 1:
            x = x.contiguous()
        batch, row, *group = x.stride()[:-1]
        setattr(self.struct, name, Array(self.pointer(x), batch, row, group[0] if group else 0, x.shape[-1], x.dtype == torch.bfloat16))

    def indices(self, x: Tensor | None) -> None:
        if x is not None:
            x = x.contiguous()
            address = self.pointer(x if x.numel() else x.new_empty(1))  # no slots are not "no indices", which null means
            self.struct.indices = Indices(address, x.shape[3], x.dtype == torch.int64)

    def ranges(self, ranges: Ranges) -> None:
        starts = [self.pointer(x.contiguous() if x.dtype == torch.int32 else x.to(torch.int32).contiguous()) for x in ranges[1:4]]
        self.struct.ranges = RangesStruct(self.pointer(ranges.valid.contiguous()), *starts, ranges.kv_offset)

    def pointer(self, x: Tensor | None) -> int | None:
        if x is None:
            return None
        self._alive.append(x)
        return x.data_ptr()

    def __call__(self, function: Any) -> None:
        function(ctypes.byref(self.struct))
