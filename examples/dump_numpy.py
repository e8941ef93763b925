"""Write a layer's tensors for `csakit audit --tensors`, from NumPy: `python examples/dump_numpy.py layer.safetensors`.

Needs numpy and safetensors. `layer` stands for your own code; `--compressed-only` makes the mistake of leaving window and sink out.
"""

from __future__ import annotations

import sys

import numpy as np
from safetensors.numpy import save_file

RATIO, WINDOW, SLOTS = 4, 5, 3


def layer(compressed_only: bool = False, tokens: int = 32, heads: int = 4, width: int = 8) -> dict[str, np.ndarray]:
    """What a layer has at hand: its inputs, the index scores, the selection and the teacher that its loss was made from."""
    random = np.random.default_rng(0)
    q, kv, entries = (random.standard_normal(shape) for shape in ((tokens, heads, width), (tokens, width), (tokens // RATIO, width)))
    sink, scores = random.standard_normal(heads), random.standard_normal((tokens, tokens // RATIO))
    token, entry = np.arange(tokens)[:, None], np.arange(tokens // RATIO)
    visible = entry < (token + 1) // RATIO
    scores = np.where(visible, scores, -np.inf)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :SLOTS]
    indices = np.where(np.take_along_axis(visible, best, 1), best, -1)
    chosen = (indices[:, :, None] == entry).any(1)
    near = np.where((np.arange(tokens) <= token) & (np.arange(tokens) > token - WINDOW), 1.0, 0.0)[:, None]
    mass = np.exp(np.einsum("thd,ed->the", q, entries) * width**-0.5) * chosen[:, None]
    rest = 0 if compressed_only else (near * np.exp(np.einsum("thd,sd->ths", q, kv) * width**-0.5)).sum(-1) + np.exp(sink)
    share = (mass / np.maximum(mass.sum(-1) + rest, 1e-300)[..., None]).sum(1)
    teacher = share / np.maximum(share.sum(-1, keepdims=True), 1e-300)
    return {"q": q, "kv": kv, "entries": entries, "sink": sink, "scores": scores, "indices": indices, "teacher": teacher}


def dump(path: str, x: dict[str, np.ndarray]) -> None:
    """The ten lines: every tensor by its name in float32 (indices int32), and how to read them."""
    tensors = {name: np.ascontiguousarray(value, np.float32) for name, value in x.items()}
    tensors["indices"] = np.ascontiguousarray(x["indices"], np.int32)
    metadata = {
        "ratio": str(RATIO),
        "window": str(WINDOW),  # counts the query itself
        "layout": "thd",  # [T, H, D]; or bshd, sbhd
        "name": "my layer, NumPy",
    }
    save_file(tensors, path, metadata)


if __name__ == "__main__":
    dump(sys.argv[1], layer("--compressed-only" in sys.argv))
