"""Write a layer's tensors for `csakit audit --tensors`, from Paddle: `python examples/dump_paddle.py layer.safetensors`.

No PyTorch needed.
"""

from __future__ import annotations

import sys

import paddle
from dump_numpy import RATIO, WINDOW, layer
from safetensors.numpy import save_file


def dump(path: str, x: dict[str, paddle.Tensor]) -> None:
    """The ten lines: every tensor by its name as NumPy (which has no bfloat16: cast that), and how to read them."""
    tensors = {name: (value if "int" in str(value.dtype) else value.astype("float32")).numpy() for name, value in x.items()}
    metadata = {
        "ratio": str(RATIO),
        "window": str(WINDOW),  # counts the query itself
        "layout": "thd",  # [T, H, D]; or bshd, sbhd
        "name": "my layer, Paddle",
    }
    save_file(tensors, path, metadata)


if __name__ == "__main__":
    dump(sys.argv[1], {name: paddle.to_tensor(value) for name, value in layer("--compressed-only" in sys.argv).items()})
