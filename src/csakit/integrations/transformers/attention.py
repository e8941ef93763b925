"""The functions csakit registers with Transformers under the name "csakit".

The attention function serves every layer of a model that csakit is installed in. A layer that is called by itself, without its
model, carries no call: it gets the library's own eager attention and the mask it was given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .forwards import Call

NAME = "csakit"
CARRIER = "csakit"  # the keyword that takes a Forward to the attention modules, and a Call to the attention function


def register() -> None:
    """Makes the name "csakit" known to the library. Registering again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, eager_mask)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    s_aux: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The output [B, T, H, D] of one layer, and None: csakit holds no attention weights. The signature is the library's.

    Raises:
        RuntimeError: a layer ran with gradients outside its model's forward, so csakit does not know its documents.
        ValueError: dropout on attention probabilities.
    """
    call = kwargs.pop(CARRIER, None)
    if not isinstance(call, Call):
        if module.training and torch.is_grad_enabled():
            raise RuntimeError(
                "an attention layer ran outside its model's forward, where csakit cannot know its documents and would train no indexer; "
                "call the model, or handle.remove() first"
            )
        return _stock(module)(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, s_aux=s_aux, **kwargs)
    if dropout:
        raise ValueError(f"attention_dropout must be 0, csakit's attention has none; got {dropout}")
    return call.attend(call.forward.adapter.views(call, query, key, s_aux, scaling)), None


def _stock(module: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The eager attention of the file that defines this module's class."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise RuntimeError(f"no eager attention is defined beside {type(module).__name__}; call handle.remove() first")
