"""The scale of the indexer's loss: that of the main loss, whatever this Megatron sets."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_loss_scale(
    stock: Callable[..., Any], scaler: Any, context_parallel: Callable[[], int], on_first: Callable[[bool], None]
) -> Callable[..., Any]:
    """Megatron's forward_step_calc_loss, after which the indexer's loss has the scale that is due.

    Megatron multiplies the main loss by grad_scale_func and, without per-token loss, divides it by the micro-batches; gradients are then
    averaged over data and context parallel ranks. An indexer's loss is a sum over the tokens of a rank by the tokens of all context
    parallel ranks, so one average too many is undone:

        due = grad_scale_func(1) * (1 with per-token loss, else context-parallel size / micro-batches)

    context_parallel is asked for the group's size where the caller leaves it to Megatron. The first call tells on_first whether
    Megatron's own value was missing or another. A scale function in the configuration is the user's word: what it sets is kept.
    """
    signature = inspect.signature(stock)
    users: bool | None = None  # whether the user's function sets this scale; known after the first call

    @functools.wraps(stock)
    def forward_step_calc_loss(*args: Any, **kwargs: Any) -> Any:
        nonlocal users
        first = users is None
        if first:
            scaler.main_loss_backward_scale = None
        result = stock(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        config, theirs = call.arguments["config"], scaler.main_loss_backward_scale
        if first:
            users = theirs is not None and getattr(config, "experimental_attention_variant_loss_scale_func", None) is not None
        wrong = False
        if not users:
            group = call.arguments["cp_group_size"]
            if group is None and call.arguments.get("is_last_stage") is None:
                group = context_parallel()
            due = _due(config, group or 1, call.arguments["num_microbatches"], _device(result[0]))
            wrong = first and (theirs is None or not torch.allclose(theirs.to(due), due))
            scaler.set_loss_scale(due)  # writes into the tensor that is there: a CUDA graph may have captured it
        if first:
            on_first(wrong)
        return result

    return forward_step_calc_loss


def _due(config: Any, context_parallel: int, micro_batches: int, device: torch.device) -> Tensor:
    one = torch.ones(1, device=device)
    scale = one if config.grad_scale_func is None else torch.as_tensor(config.grad_scale_func(one), device=device).reshape(1)
    return scale if config.calculate_per_token_loss else scale * context_parallel / micro_batches


def _device(output: Any) -> torch.device:
    """Of a stage's output: a tensor, or a list or dictionary of them."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output.device
