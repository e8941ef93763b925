"""Write a layer's tensors for `csakit audit --tensors`, from JAX: `python examples/dump_jax.py layer.safetensors`. No PyTorch needed."""

from __future__ import annotations

import sys

import jax.numpy as jnp
from dump_numpy import RATIO, WINDOW, layer
from safetensors.flax import save_file


def dump(path: str, x: dict) -> None:
    """The ten lines: every array by its name, fetched from the device by safetensors, and how to read them. bfloat16 stays bfloat16."""
    metadata = {
        "ratio": str(RATIO),
        "window": str(WINDOW),  # counts the query itself
        "layout": "thd",  # [T, H, D]; or bshd, sbhd
        "name": "my layer, JAX",
    }
    save_file(x, path, metadata)


if __name__ == "__main__":
    dump(sys.argv[1], {name: jnp.asarray(value) for name, value in layer("--compressed-only" in sys.argv).items()})
