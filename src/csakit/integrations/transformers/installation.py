"""install(): the way into a model."""

from __future__ import annotations

from torch import nn

from .deepseek_v4 import DeepseekV4Adapter
from .handle import MARK, Handle
from .protocol import IndexerAdapter, changed_sources
from .settings import DENOMINATORS, FREEZES, OBJECTIVES, check_share, coefficient, one_of

ADAPTERS: tuple[IndexerAdapter, ...] = (DeepseekV4Adapter(),)


def install(
    model: nn.Module,
    *,
    objective: str = "sparse",
    coef: float | None = 1.0,
    share: str = "own",
    denominator: str = "attended",
    freeze: str = "none",
    strict: bool = True,
) -> Handle:
    """The handle of csakit inside this model: its layers run csakit's attention, and backward trains its indexers.

    The loss is attached to the output of each layer that owns an indexer, so a plain `loss.backward()` trains it. Weights
    stay the model's own and nothing is patched on classes. Installing again returns the same handle with the new settings.
    Apply PEFT before: who trains in a stage is decided among the parameters that train when csakit comes in.

    Args:
        model: a stock model, or a wrapper around one.
        objective: "sparse" (selection and the objective over it), "dense" (attention and objective over every visible entry) or
            "off" (selection, no objective).
        coef: weight of the loss; None and 0 do no loss work and leave the indexers without gradient.
        share: "own". Other models will let one indexer serve several layers.
        denominator: of the sparse objective's teacher, "attended" (the layer's own softmax) or "visible" (a dense pass).
        freeze: "none", or "backbone": only the indexers train.
        strict: refuse a library whose functions are not those this was proven on.

    Raises:
        TypeError: a model of an unknown type, or coef is not a number.
        ValueError: an unknown setting, or a configuration csakit cannot run faithfully.
        RuntimeError: with `strict`, a changed function of the library; a layer that something else has patched; csakit already in a part
            of this model.
    """
    one_of("objective", objective, OBJECTIVES)
    one_of("denominator", denominator, DENOMINATORS)
    one_of("freeze", freeze, FREEZES)
    coef = coefficient(coef)
    check_share(share)
    adapter = _adapter(model)
    backbone = adapter.backbone(model)
    handle = backbone.__dict__.get(MARK)
    if handle is None:
        adapter.check(backbone)
        changed = changed_sources(adapter, backbone)
        if strict and changed:
            raise RuntimeError(
                f"this version of transformers changed {', '.join(changed)}, which csakit replaces or "
                "relies on. Install csakit[hf], or pass strict=False and compare logits with the stock model yourself"
            )
        handle = Handle(model, adapter, backbone)
    elif all(module is not model for module in handle.model.modules()):
        raise RuntimeError(f"csakit is already installed in a part of this {type(model).__name__}; remove that handle first")
    handle.configure(objective=objective, denominator=denominator, freeze=freeze, coef=coef)
    handle.attach()
    return handle


def _adapter(model: nn.Module) -> IndexerAdapter:
    kinds = (
        [getattr(getattr(module, "config", None), "model_type", None) for module in model.modules()] if isinstance(model, nn.Module) else []
    )
    kind = next((kind for kind in kinds if kind is not None), None)
    for adapter in ADAPTERS:
        if kind in adapter.model_types:
            return adapter
    known = ", ".join(name for adapter in ADAPTERS for name in adapter.model_types)
    raise TypeError(f"install knows the model types {known}; got {type(model).__name__} of model type {kind!r}")
