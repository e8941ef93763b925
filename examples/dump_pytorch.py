"""Write a layer's tensors for `csakit audit --tensors`, from PyTorch: `python examples/dump_pytorch.py layer.safetensors`."""

from __future__ import annotations

import sys

import torch
from dump_numpy import RATIO, WINDOW, layer
from safetensors.torch import save_file


def dump(path: str, x: dict[str, torch.Tensor]) -> None:
    """The ten lines: every tensor by its name, detached, on the CPU, contiguous, and how to read them. bfloat16 stays bfloat16."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in x.items()}
    metadata = {
        "ratio": str(RATIO),
        "window": str(WINDOW),  # counts the query itself
        "layout": "bshd",  # [B, T, H, D]; or sbhd, thd
        "name": "my layer, PyTorch",
    }
    save_file(tensors, path, metadata)


if __name__ == "__main__":
    given = {name: torch.from_numpy(value) for name, value in layer("--compressed-only" in sys.argv).items()}
    q, scores = given["q"], given["scores"].requires_grad_()
    chosen = given["indices"].clamp(min=0)
    empty = given["indices"] < 0
    target = given["teacher"].gather(1, chosen).masked_fill(empty, 0)
    student = scores.gather(1, chosen).masked_fill(empty, -torch.inf).masked_fill(empty.all(1, keepdim=True), 0).log_softmax(1)
    kl = (torch.xlogy(target, target) - target * student.masked_fill(empty, 0)).sum(1)
    loss = kl.mean()
    (d_scores,) = torch.autograd.grad(loss, scores)
    rows = {name: value[None] for name, value in {**given, "kl": kl, "d_scores": d_scores}.items() if name != "sink"}
    dump(
        sys.argv[1], {**{name: x.float() if x.is_floating_point() else x for name, x in rows.items()}, "sink": given["sink"], "loss": loss}
    )
