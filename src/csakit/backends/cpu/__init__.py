"""The fast backend for CPU tensors: bounded memory, hand-derived backward that recomputes.

native/       C++ kernels, one query after another: taken for float32 and bfloat16 where they can be built
chunked.py    the same in torch, chunks of queries: everything else
  parts.py      the keys a chunk of queries reaches: a block of consecutive rows, or gathered rows
  attention.py  attend, its backward, log_mass
  scoring.py    index_scores, select, their backward
dense.py      the dense objective, made of the functions of either

A tile is a size of chunks: whoever sets one gets the chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import chunked, native
from .dense import Dense

__all__ = [
    "attend", "attend_backward", "dense_kl", "dense_kl_backward", "index_scores", "log_mass", "objective", "scores_backward", "select",
]  # fmt: skip


def _native_or_chunked(name: str) -> Callable[..., Any]:
    in_chunks, in_kernels = getattr(chunked, name), getattr(native, name)

    def run(*inputs: Any, tile: int = 0, **options: Any) -> Any:
        if tile or native.refuses(*inputs):
            return in_chunks(*inputs, **({"tile": tile} if tile else {}), **options)
        return in_kernels(*inputs, **options)

    run.__name__, run.__doc__ = name, in_chunks.__doc__
    return run


attend = _native_or_chunked("attend")
attend_backward = _native_or_chunked("attend_backward")
index_scores = _native_or_chunked("index_scores")
log_mass = _native_or_chunked("log_mass")
objective = _native_or_chunked("objective")
scores_backward = _native_or_chunked("scores_backward")
select = _native_or_chunked("select")

_dense = Dense(index_scores, log_mass, objective, scores_backward)
dense_kl, dense_kl_backward = _dense.kl, _dense.backward
