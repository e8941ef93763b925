"""The fast backend for CPU tensors: bounded memory, hand-derived backward that recomputes.

native/       C++ kernels, one query after another: taken for float32 and bfloat16 where they can be built
chunked.py    the same in torch, chunks of queries: everything else
  parts.py      the keys a chunk of queries reaches: a block of consecutive rows, or gathered rows
  attention.py  attend, its backward, log_mass
  scoring.py    index_scores, select, their backward, the dense objective

A tile is a size of chunks: whoever sets one gets the chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import chunked, native
from .chunked import dense_kl, dense_kl_backward, log_mass

__all__ = ["attend", "attend_backward", "dense_kl", "dense_kl_backward", "index_scores", "log_mass", "scores_backward", "select"]


def _native_or_chunked(name: str) -> Callable[..., Any]:
    in_chunks, in_kernels = getattr(chunked, name), getattr(native, name)

    def run(*inputs: Any, tile: int = 0, **options: Any) -> Any:
        if tile or native.refuses(*(x for x in inputs if isinstance(x, Tensor))):
            return in_chunks(*inputs, tile=tile, **options)
        return in_kernels(*inputs, **options)

    run.__name__, run.__doc__ = name, in_chunks.__doc__
    return run


attend = _native_or_chunked("attend")
attend_backward = _native_or_chunked("attend_backward")
index_scores = _native_or_chunked("index_scores")
scores_backward = _native_or_chunked("scores_backward")
select = _native_or_chunked("select")
