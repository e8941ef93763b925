"""The Handle: csakit's attention and the indexer's objective inside a stock Transformers model, reversibly."""

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
from .documents import layout_of, of_shape
from .forwards import Call, Forward, Plan
from .measurement import Measurement
from .protocol import IndexerAdapter, LayerSite
from .selections import Selections
from .settings import STAGES, coefficient, finite_number, one_of
from .trainable import Trainable

MARK = "_csakit_handle"  # where a backbone keeps its handle
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Handle:
    """csakit inside one model. A context manager: leaving it removes csakit.

    Attributes:
        divisor: what the sum of the indexer's losses is divided by: a number or a tensor (one count for all that an optimizer step sees),
            or None: the forward's `num_items_in_batch` if it has one (the Trainer's such count), else the real tokens of the forward.
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
        self._trainable = Trainable(model, self._sites)
        self._plan = Plan(selects=True, objective="off", coef=0.0, denominator="attended")
        self._last: Forward | None = None
        self._measurement: Measurement | None = None
        self._measuring = False
        self._recorded: list[Any] | None = None  # while recording: the forwards, and caches in place of the forwards that used them
        self._replayed: Selections | None = None
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
        self._trainable.restrict(trains)
        return self

    def indexer_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of everything under an indexer, trainable or not."""
        owned = self._trainable.indexers()
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

    # selections as data

    @contextmanager
    def record(self) -> Iterator[Selections]:
        """A context that yields a record, filled when it ends with what the indexers picked in the forwards inside.

        Forwards with a cache count as one: prefill, chunks and decoded tokens of a `generate` are one batch of documents.

        Raises:
            ValueError: a stage whose attention selects nothing, or (at the end) a cache whose first tokens were not recorded.
            RuntimeError: a recording inside another, or a removed handle.
        """
        self._check_installed()
        if self._recorded is not None:
            raise RuntimeError("a recording is already open")
        if not self._plan.selects:
            raise ValueError("attention over every visible entry selects nothing to record; use handle.stage('sparse')")
        record, self._recorded = Selections(), []
        try:
            yield record
            record.fill(self._recorded)
        finally:
            self._recorded = None

    @contextmanager
    def replay(self, record: Selections) -> Iterator[None]:
        """A context whose forwards attend to the picks of a record, bit for bit, instead of selecting.

        The indexer scores those picks, and its objective is taken over them. Each forward must hold the documents of the record, padded
        or packed in any way: give each micro-batch its `record[i:j]`.

        Raises:
            TypeError: not a record.
            ValueError: a stage whose attention selects nothing; in a forward, a cache or a record that does not fit (`Selections.in_rows`).
            RuntimeError: the handle was removed.
        """
        self._check_installed()
        if not isinstance(record, Selections):
            raise TypeError(f"replay needs a csakit Selections, from handle.record() or Selections.load; got {type(record).__name__}")
        if not self._plan.selects:
            raise ValueError("attention over every visible entry replays no selection; use handle.stage('sparse')")
        before, self._replayed = self._replayed, record
        try:
            yield
        finally:
            self._replayed = before

    # coming and going

    def remove(self) -> None:
        """Gives the stock model back: forwards, hooks, configuration and requires_grad as they were. Removing twice is fine."""
        if self._undo:
            self._trainable.restore()
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _check_installed(self) -> None:
        if not self._undo:
            raise RuntimeError("this handle was removed; call install(model) again")

    def attach(self) -> None:
        """Puts csakit into the model; nothing where it is already."""
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
            self._set(self._backbone, MARK, self)
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
        """The backbone's arguments with this forward's documents, and its cache if it has one, among them."""
        inputs = {**dict(zip(self._arguments, args)), **kwargs}
        self._check_options(inputs)
        tokens = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
        if tokens is None:
            return None  # the model says what is missing
        rows, length = tokens.shape[:2]
        forward = self._forward(inputs, rows, length)
        if torch.is_grad_enabled() and forward.past is None:
            self._last = forward
        embeds = inputs.get("inputs_embeds")
        if embeds is not None and self._input_must_require_grad() and not embeds.requires_grad:
            inputs["inputs_embeds"] = embeds.detach().requires_grad_()
        inputs.pop("past_key_values", None)  # the library's old name of `cache`
        return (), {
            **inputs,
            # the library takes a mask that is already built as a dict; None in it: no mask is built, visibility is in the layout
            "attention_mask": {NAME: None},
            "position_ids": forward.position_ids,
            "cache": None if forward.past is None else forward.past.cache,
            "use_cache": False,  # one is here already
            CARRIER: forward,
        }

    def _forward(self, inputs: dict[str, Any], rows: int, length: int) -> Forward:
        """What the layers of this forward share."""
        config, ratio, past = self._backbone.config, self._sites[0].ratio, None
        plan = self._plan
        if inputs.get("use_cache") or any(inputs.get(name) is not None for name in ("cache", "past_key_values")):
            from .generation import go_on

            self._check_cached()
            past = go_on(inputs, plan, config, rows, length, ratio)
            layout, positions = past.layout, past.positions[:, past.start :]
            plan = replace(plan, objective="off")
        else:
            layout = layout_of(inputs, rows, length, ratio=ratio, window=config.sliding_window, explicit=self.layout)
            given = of_shape("position_ids", inputs.get("position_ids"), rows, length)
            positions = layout.positions.long() if given is None else given
        forward = Forward(
            plan,
            self._adapter,
            layout,
            positions,
            weight=partial(self._loss_weight, plan.coef),
            divisor=inputs.get("num_items_in_batch") if self.divisor is None else self.divisor,
            measurement=self._measurement if self._measuring else None,
            past=past,
            recording=self._recorded is not None,
        )
        if self._replayed is not None:
            forward.replayed = self._replayed.in_rows(self._sites, forward.layout)
        if self._recorded is not None:
            source = forward if past is None else past.cache
            if all(source is not other for other in self._recorded):
                self._recorded.append(source)
        return forward

    def _check_cached(self) -> None:
        """Raises ValueError where a forward cannot have a cache: it should train, is replayed, or has documents in words of the handle."""
        if self._backbone.training and torch.is_grad_enabled():
            raise ValueError("a forward with a cache trains no indexer; pass use_cache=False (csakit's default) while training")
        if self._replayed is not None:
            raise ValueError("a replay needs whole rows; pass use_cache=False")
        if self.layout is not None:
            raise ValueError("a cache holds one document per row; set handle.layout to None, or pass use_cache=False")

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

    def configure(self, *, objective: str, denominator: str, freeze: str, coef: float) -> None:
        """Takes over the settings of `install`, already checked."""
        self._plan = replace(self._plan, coef=coef, denominator=denominator)
        self._set_plan(selects=objective != "dense", objective=objective)
        if freeze == "backbone":
            self._trainable.restrict("indexer")
        else:
            self._trainable.restore()

    def _set_plan(self, *, selects: bool, objective: str) -> None:
        if objective != "off" and all(site.indexer is None for site in self._sites):
            raise ValueError(f"objective {objective!r} needs a layer with an indexer; this model has none. Use objective='off'")
        self._plan = replace(self._plan, selects=selects, objective=objective)


def handle_of(model: nn.Module) -> Handle:
    """The handle of the csakit inside this model or a part of it.

    Raises:
        RuntimeError: there is none.
    """
    handle = next((module.__dict__[MARK] for module in model.modules() if MARK in module.__dict__), None)
    if handle is None:
        raise RuntimeError(f"csakit is not installed in this {type(model).__name__}; call install(model) first")
    return handle


def _drop(module: Any, name: str) -> None:
    module.__dict__.pop(name, None)


def _restore_config(holders: list[nn.Module], own: Any, original: Any) -> None:
    """The original object, or, if the model's own copy was changed since (a resized vocabulary), that copy under the old name."""
    own._attn_implementation_internal = original._attn_implementation
    unchanged = own.__dict__ == original.__dict__
    for module in holders:
        module.__dict__["config"] = original if unchanged else own
