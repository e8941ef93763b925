"""install() and the Handle: csakit's attention and the indexer's objective inside a stock Transformers model, reversibly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from csakit import Layout

from .attention import CARRIER, NAME, register
from .deepseek_v4 import DeepseekV4Adapter
from .documents import layout_of, of_shape
from .forwards import Call, Forward, Plan
from .generation import check_cached
from .measurement import Measurement
from .protocol import IndexerAdapter, LayerSite, changed_sources
from .settings import DENOMINATORS, FREEZES, OBJECTIVES, STAGES, check_share, coefficient, finite_number, one_of

ADAPTERS: tuple[IndexerAdapter, ...] = (DeepseekV4Adapter(),)
_MARK = "_csakit_handle"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


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
    handle = backbone.__dict__.get(_MARK)
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
    handle._configure(objective=objective, denominator=denominator, freeze=freeze, coef=coef)
    handle._attach()
    return handle


class Handle:
    """csakit inside one model. A context manager: leaving it removes csakit.

    Attributes:
        divisor: what the sum of the indexer's losses is divided by: None (the real tokens of the forward), a number or a tensor
            (one global count, with gradient accumulation).
        layout: the documents of the next forwards, or None: derived from their arguments.
    """

    divisor: float | Tensor | None
    layout: Layout | None

    def __init__(self, model: nn.Module, adapter: IndexerAdapter, backbone: Any) -> None:
        self.model = model
        self._step_weight: float | Tensor | Callable[[], float | Tensor] = 1.0
        self.divisor = None
        self.layout = None
        self._adapter = adapter
        self._backbone = backbone
        self._sites = adapter.layers(backbone)
        self._arguments = list(signature(type(backbone).forward).parameters)[1:]
        self._requires_grad: dict[int, tuple[nn.Parameter, bool]] = {}  # by id: who trained when csakit first saw it
        self._plan = Plan(selects=True, objective="off", coef=0.0, denominator="attended")
        self._last: Forward | None = None
        self._measurement: Measurement | None = None
        self._measuring = False
        self._undo: list[Callable[[], Any]] = []  # functions of this model, not closures: a deep copy of the model has its own handle

    # who trains, and for what

    def stage(self, name: str) -> Handle:
        """This handle, with attention, objective and trainable parameters of a stage: "dense", "warmup" or "sparse".

        dense: attention over every visible entry, no objective, everything trains but the indexers. warmup: the same attention,
        dense objective, only the indexers train. sparse: selection, sparse objective, everything trains. "Everything" is what
        trained at install; if no indexer did, all of their parameters.

        Raises:
            ValueError: another name, or warmup and sparse for a model without indexers.
            RuntimeError: the handle was removed.
        """
        self._check_installed()
        selects, objective, trains = STAGES[one_of("stage", name, tuple(STAGES))]
        self._set_plan(selects=selects, objective=objective)
        self._set_trainable(trains)
        return self

    def indexer_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of everything under an indexer, trainable or not."""
        owned = self._indexer_ids()
        return ((name, parameter) for name, parameter in self.model.named_parameters() if id(parameter) in owned)

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of everything that trains now."""
        return ((name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad)

    @property
    def coef(self) -> float:
        """The weight of the loss; 0.0 is no loss work. Settable."""
        return self._plan.coef

    @coef.setter
    def coef(self, value: float | None) -> None:
        self._plan = replace(self._plan, coef=coefficient(value))

    @property
    def step_weight(self) -> float | Tensor | Callable[[], float | Tensor]:
        """Number, scalar tensor, or a callable that returns one: read in backward and multiplied with coef. Settable.

        The scale of a gradient scaler, or 1 / micro-batches.
        """
        return self._step_weight

    @step_weight.setter
    def step_weight(self, value: float | Tensor | Callable[[], float | Tensor]) -> None:
        self._step_weight = value if callable(value) or isinstance(value, Tensor) else finite_number("step_weight", value)

    # what came of it

    @property
    def losses(self) -> dict[str, Tensor]:
        """Layer name -> detached loss, scalar, nats, without coef, of the last forward that ran with gradients.

        Under reentrant checkpointing the first pass runs without gradients: losses appear with the recomputation, in backward.
        """
        return {} if self._last is None else dict(self._last.losses)

    def metrics(self) -> dict[str, Any]:
        """{"loss": mean over the layers that own an indexer, "layers": {name: {"loss": .., and what `measure` recorded}}}; plain floats.

        "loss" is None where no loss was computed. What `measure` records is described there.
        """
        losses = {name: float(loss) for name, loss in self.losses.items()}
        layers: dict[str, dict[str, Any]] = {site.name: {"loss": losses.get(site.name)} for site in self._sites if site.indexer is not None}
        if self._measurement is not None:
            for name, values in self._measurement.results().items():
                layers[name].update(values)
        return {"loss": sum(losses.values()) / len(losses) if losses else None, "layers": layers}

    @contextmanager
    def measure(self, queries: Iterable[tuple[int, int]] = ()) -> Iterator[None]:
        """A context whose forwards compare each indexer with the full-visible teacher; `metrics` then reports the averages.

        Per CSA layer, with the mean over real tokens that see more entries than topk under the plain name, and over all real
        tokens that see an entry under `<name>_all`: kl (dense, nats), captured (teacher mass at the student's own picks), recall
        (of the teacher's own topk), top1, entropy, uniform_kl, and window, entries, sink (mass shares, mean over heads);
        heads_entries (the entries share of each head), heads_cv (its coefficient of variation over the heads of a query: where it is
        small, heads agree and the teacher's denominator hardly matters), tokens (how many were averaged). None where there are none.

        It costs a second, dense pass and holds [B, T, E] for one layer at a time. Attention and losses stay those of the stage.

        Args:
            queries: (row, token) pairs of the first forward for which "queries" holds teacher and student probabilities [E] and picks.

        Raises:
            ValueError: a query outside the first forward's [B, T] (raised there).
        """
        self._check_installed()
        self._measurement = Measurement(tuple(queries))
        self._measuring = True
        try:
            yield
        finally:
            self._measuring = False

    # coming and going

    def remove(self) -> None:
        """Gives the stock model back: forwards, hooks, configuration and requires_grad as they were. Removing twice is fine."""
        if self._undo:
            self._restore_requires_grad()
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _check_installed(self) -> None:
        if not self._undo:
            raise RuntimeError("this handle was removed; call install(model) again")

    def _attach(self) -> None:
        if self._undo:
            return
        register()
        try:
            self._swap_config()
            for site in self._sites:
                for module, forward in self._adapter.taps(site):
                    self._replace_forward(module, forward)
                self._hook(site.attention.register_forward_pre_hook(partial(self._enter, site), with_kwargs=True))
            self._hook(self._backbone.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._set(self._backbone, _MARK, self)
        except BaseException:
            self.remove()
            raise

    def _hook(self, hook: torch.utils.hooks.RemovableHandle) -> None:
        self._undo.append(hook.remove)

    def _set(self, module: Any, name: str, value: Any) -> None:
        module.__dict__[name] = value
        self._undo.append(partial(_drop, module, name))

    def _replace_forward(self, module: Any, forward: Callable[..., Any]) -> None:
        if "forward" in module.__dict__:
            raise RuntimeError(
                f"the forward of a {type(module).__name__} is already replaced on the instance (a dispatch hook?); remove that first"
            )
        self._set(module, "forward", forward)

    def _swap_config(self) -> None:
        """Gives the model a configuration of its own, named "csakit": the given one may be shared with other models."""
        original = self._backbone.config
        own = copy.copy(original)
        holders = [module for module in self.model.modules() if module.__dict__.get("config") is original]
        for module in holders:
            module.__dict__["config"] = own
        self._undo.append(partial(_restore_config, holders, own, original))
        self._backbone.set_attn_implementation(NAME)

    # one forward

    def _begin(self, backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The backbone's arguments with this forward's documents among them; unchanged where csakit steps aside for a cache."""
        inputs = {**dict(zip(self._arguments, args)), **kwargs}
        self._check_options(inputs)
        if any(inputs.get(name) is not None for name in ("cache", "past_key_values")) or inputs.get("use_cache"):
            check_cached(inputs, self._plan, self.layout, training=backbone.training and torch.is_grad_enabled())
            return None
        tokens = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
        if tokens is None:
            return None  # the model says what is missing
        rows, length = tokens.shape[:2]
        given = of_shape("position_ids", inputs.get("position_ids"), rows, length)
        ratio, window = self._sites[0].ratio, backbone.config.sliding_window
        layout = layout_of(inputs, rows, length, ratio=ratio, window=window, explicit=self.layout)
        forward = Forward(
            self._plan,
            self._adapter,
            layout,
            layout.positions.long() if given is None else given,
            weight=partial(self._loss_weight, self._plan.coef),
            divisor=self.divisor,
            measurement=self._measurement if self._measuring else None,
        )
        if torch.is_grad_enabled():
            self._last = forward
        embeds = inputs.get("inputs_embeds")
        if embeds is not None and self._input_must_require_grad() and not embeds.requires_grad:
            inputs["inputs_embeds"] = embeds.detach().requires_grad_()
        # the library takes a mask that is already built as a dict; None in it: no mask is built, visibility is in the layout
        return (), {**inputs, "attention_mask": {NAME: None}, "position_ids": forward.position_ids, "use_cache": False, CARRIER: forward}

    def _enter(self, site: LayerSite, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        forward = kwargs.get(CARRIER)
        if forward is None:
            return None
        if module.config._attn_implementation != NAME:
            name = module.config._attn_implementation
            raise RuntimeError(f"the attention implementation was changed to {name!r} after install; call handle.remove() first")
        call = Call(forward, site)
        return args, {**kwargs, self._adapter.carrier: call, CARRIER: call}

    def _check_options(self, inputs: dict[str, Any]) -> None:
        config = self._backbone.config
        if inputs.get("output_attentions", getattr(config, "output_attentions", False)):
            raise ValueError(
                "output_attentions is not available: csakit holds no attention weights. handle.measure() reports shares and picks"
            )
        if inputs.get("is_causal", getattr(config, "is_causal", None)) is False:
            raise ValueError("is_causal=False is not available: entries and windows are causal")

    def _input_must_require_grad(self) -> bool:
        """Reentrant checkpointing cuts the graph where no input requires a gradient; with a frozen backbone none would.

        The library sees to it for token ids, not for inputs_embeds.
        """
        checkpoints = getattr(self._backbone, "gradient_checkpointing", False) and self._backbone.training and torch.is_grad_enabled()
        return checkpoints and self._plan.objective != "off" and self._plan.coef > 0.0

    def _loss_weight(self, coef: float) -> float | Tensor:
        step = self._step_weight() if callable(self._step_weight) else self._step_weight
        return coef * step

    # settings

    def _configure(self, *, objective: str, denominator: str, freeze: str, coef: float) -> None:
        self._plan = replace(self._plan, coef=coef, denominator=denominator)
        self._set_plan(selects=objective != "dense", objective=objective)
        if freeze == "backbone":
            self._set_trainable("indexer")
        else:
            self._restore_requires_grad()

    def _set_plan(self, *, selects: bool, objective: str) -> None:
        if objective != "off" and all(site.indexer is None for site in self._sites):
            raise ValueError(f"objective {objective!r} needs a layer with an indexer; this model has none. Use objective='off'")
        self._plan = replace(self._plan, selects=selects, objective=objective)

    def _set_trainable(self, trains: str) -> None:
        owned = self._indexer_ids()
        parameters = self._parameters()
        any_indexer = any(trainable for parameter, trainable in parameters if id(parameter) in owned)
        for parameter, trainable in parameters:
            is_indexer = id(parameter) in owned
            candidate = trainable or (is_indexer and not any_indexer and parameter.is_floating_point())
            parameter.requires_grad_(candidate and trains in ("everything", "indexer" if is_indexer else "backbone"))
            if not parameter.requires_grad:
                parameter.grad = None  # an optimizer would still step on it

    def _restore_requires_grad(self) -> None:
        for parameter, trainable in self._parameters():
            parameter.requires_grad_(trainable)

    def _parameters(self) -> list[tuple[nn.Parameter, bool]]:
        """The model's parameters now, each with whether it trained when it was first seen (a resized embedding is a new one)."""
        return [
            self._requires_grad.setdefault(id(parameter), (parameter, parameter.requires_grad)) for parameter in self.model.parameters()
        ]

    def _indexer_ids(self) -> set[int]:
        return {id(parameter) for site in self._sites if site.indexer is not None for parameter in site.indexer.parameters()}


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


def _drop(module: Any, name: str) -> None:
    module.__dict__.pop(name, None)


def _restore_config(holders: list[nn.Module], own: Any, original: Any) -> None:
    """The original object, or, if the model's own copy was changed since (a resized vocabulary), that copy under the old name."""
    own._attn_implementation_internal = original._attn_implementation
    unchanged = own.__dict__ == original.__dict__
    for module in holders:
        module.__dict__["config"] = original if unchanged else own
