"""csakit inside torchtitan, through torchtitan's own overrides: DeepSeek-V4's attention with a loss for its indexers.

    --override.imports 'csakit.integrations.torchtitan.deepseek_v4.csa={"tokens_per_step": 131072}'

* `deepseek_v4`: overrides `csa`, `hca` and `sliding` for the attentions of torchtitan's DeepSeek-V4 model.
* `deepseek_v3`: override `hybrid_attention`, V4's attention in the layers of its DeepSeek-V3 model, for releases without the other.

Both modules import torchtitan; this one does not.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def indexer_losses(models: nn.Module | Iterable[nn.Module]) -> dict[str, Tensor]:
    """The indexer's loss of each layer in its last training forward: nats per token, 0-dim, a constant; by the layer's name.

    Args:
        models: a model, or a trainer's model_parts.
    """
    parts = [models] if isinstance(models, nn.Module) else list(models)
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, module in part.named_modules():
            loss = module.__dict__.get("indexer_loss")
            if isinstance(loss, Tensor):
                found[name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")] = loss
    return found
