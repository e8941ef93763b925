"""The backward pass of a stage in which only the indexers train: layer by layer, inside the forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def within_forward(layers: list[nn.Module]) -> Iterator[None]:
    """A context in which each attention layer's indexer loss goes backward as soon as the layer is through.

    The indexer's loss needs no gradient from above: `csakit.attach_loss` adds the same gradient whatever comes down. With everything else
    frozen, the graph of a layer can be used and dropped at its end. Nothing of it reaches the next layer, the frozen layers above need no
    backward pass, and the activations of one indexer are all that is ever kept.
    """
    hooks = [layer.register_forward_hook(_finish) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _finish(layer: nn.Module, inputs: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
    out, *rest = output
    if out.requires_grad:
        with torch.autocast(out.device.type, enabled=False):
            torch.autograd.backward(out, torch.zeros_like(out))
    return out.detach(), *rest
