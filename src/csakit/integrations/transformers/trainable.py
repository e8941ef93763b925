"""Who trains: the part of a model's parameters that gets gradients in a stage, and everyone's state when csakit came in."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .protocol import LayerSite


class Trainable:
    """requires_grad of a model's parameters. "Everything" is what trained when this first saw it."""

    def __init__(self, model: nn.Module, sites: Sequence[LayerSite]) -> None:
        self._model = model
        self._sites = sites
        self._seen: dict[int, tuple[nn.Parameter, bool]] = {}  # by id, with whether it trained

    def restrict(self, trains: str) -> None:
        """Lets "everything", "indexer" or "backbone" train; if no indexer trained before, all of their parameters do where asked for."""
        owned, parameters = self.indexers(), self._parameters()
        any_indexer = any(trainable for parameter, trainable in parameters if id(parameter) in owned)
        for parameter, trainable in parameters:
            is_indexer = id(parameter) in owned
            candidate = trainable or (is_indexer and not any_indexer and parameter.is_floating_point())
            parameter.requires_grad_(candidate and trains in ("everything", "indexer" if is_indexer else "backbone"))
            if not parameter.requires_grad:
                parameter.grad = None  # an optimizer would still step on it

    def restore(self) -> None:
        """Everyone as they were."""
        for parameter, trainable in self._parameters():
            parameter.requires_grad_(trainable)

    def indexers(self) -> set[int]:
        """The ids of everything under an indexer."""
        return {id(parameter) for site in self._sites if site.indexer is not None for parameter in site.indexer.parameters()}

    def _parameters(self) -> list[tuple[nn.Parameter, bool]]:
        """The parameters now, each with whether it trained when it was first seen (a resized embedding is a new one)."""
        return [self._seen.setdefault(id(parameter), (parameter, parameter.requires_grad)) for parameter in self._model.parameters()]
