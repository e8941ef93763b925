"""Training indexers: the same start, data and budget for every arm; only the teacher differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

import csakit
from csakit.nn import LightningIndexer
from csakit.nn.functional import IndexInputs

from .model import LanguageModel, LayerView, Policy
from .presets import Preset
from .teachers import denominators, log_mass
from .text import training_rows

PEAK, FLOOR = 2e-3, 2e-4
Loss = Callable[[IndexInputs, LayerView, dict[str, Tensor]], Tensor]


def new_indexers(preset: Preset, seed: int) -> nn.ModuleList:
    """One indexer per compressed layer; the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(10_000 + seed)
        return nn.ModuleList(LightningIndexer(preset.attention()) for _ in range(preset.layers.count("csa")))


def index(indexers: nn.ModuleList, view: LayerView) -> IndexInputs:
    """The inputs of the index scores of a layer."""
    return indexers[view.number](view.hidden, view.latent, view.layout)


def select(indexers: nn.ModuleList, view: LayerView, topk: int) -> csakit.Selection:
    """The entries a layer's indexer selects, and their scores."""
    q, k, weights, scale = index(indexers, view)
    return csakit.select(q, k, weights, topk, view.layout, scale=scale)


def part(view: LayerView, inputs: IndexInputs, which: int, parts: int) -> tuple[LayerView, IndexInputs]:
    """The same layer for one of several equal parts of the queries, which see what they saw."""
    rows = inputs.q.shape[1] // parts
    queries = slice(which * rows, (which + 1) * rows)
    own = view.inputs._replace(q=view.inputs.q[:, queries])
    return (
        view._replace(inputs=own, layout=view.layout.shard(which, parts)),
        inputs._replace(q=inputs.q[:, queries], weights=inputs.weights[:, queries]),
    )


def dense_loss(teacher: str, which: int = 0, parts: int = 1) -> Loss:
    """KL to a teacher over every visible entry, for a part of the queries."""

    def loss(inputs: IndexInputs, view: LayerView, lse: dict[str, Tensor]) -> Tensor:
        rows = inputs.q.shape[1] // parts
        view, inputs = part(view, inputs, which, parts)
        scores = csakit.index_scores(inputs.q, inputs.k, inputs.weights, view.layout, scale=inputs.scale)
        mass = log_mass(view, lse[teacher][:, which * rows : (which + 1) * rows])
        return csakit.distill(scores, mass, view.layout).loss

    return loss


def sparse_loss(teacher: str, denominator: str, topk: int) -> Loss:
    """KL to a teacher over the selected entries; the denominator holds those ("attended") or every visible entry ("visible")."""

    def loss(inputs: IndexInputs, view: LayerView, lse: dict[str, Tensor]) -> Tensor:
        q, k, weights, scale = inputs
        selection = csakit.select(q, k, weights, topk, view.layout, scale=scale)
        own = lse if denominator == "visible" else denominators(view, selection.indices, arms=(teacher,))
        mass = log_mass(view, own[teacher], selection.indices)
        return csakit.distill(selection.scores, mass, view.layout).loss

    return loss


def train(
    model: LanguageModel,
    students: dict[str, nn.ModuleList],
    losses: Callable[[int], dict[str, Loss]],
    *,
    teachers: Iterable[str],
    steps: int,
    seed: int,
    peak: float = PEAK,
    log: Callable[[int, dict[str, float]], None] = lambda step, losses: None,
) -> None:
    """Trains every student on the frozen model, all on the same rows and queries.

    Args:
        students: the indexers of each arm.
        losses: from the step, what each arm minimises.
        teachers: those whose denominators over every visible entry the losses use.
        seed: of the rows.
    """
    preset = model.preset
    optimizers = {arm: torch.optim.Adam(own.parameters(), lr=peak, betas=(0.9, 0.98)) for arm, own in students.items()}
    for step in range(steps):
        found = dict.fromkeys(students, 0.0)
        learn = _learning(students, losses(step), tuple(teachers), found)
        with torch.no_grad():
            model(training_rows(20_000 + seed, step, preset.index_rows, preset.late_tokens)[:, :-1], learn)
        rate = FLOOR + 0.5 * (peak - FLOOR) * (1 + math.cos(math.pi * step / steps)) if peak > FLOOR else peak
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        log(step, found)


def _learning(students: dict[str, nn.ModuleList], losses: dict[str, Loss], teachers: tuple[str, ...], found: dict[str, float]) -> Policy:
    """Dense attention, on whose way every student gets the gradient of its loss; the values are added to `found`."""

    def learn(view: LayerView) -> Tensor:
        lse = denominators(view, arms=teachers)
        for arm, own in students.items():
            with torch.enable_grad():
                loss = losses[arm](index(own, view), view, lse)
                loss.backward()
            found[arm] += float(loss)
        return view.attend().out

    return learn


def random_parts(preset: Preset, arms: Sequence[str], seed: int) -> Callable[[int], dict[str, Loss]]:
    """The dense losses of a step: every arm is its own teacher, on the same part of the queries."""

    def losses(step: int) -> dict[str, Loss]:
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        which = int(torch.randint(preset.query_parts, (), generator=draw))
        return {arm: dense_loss(arm, which, preset.query_parts) for arm in arms}

    return losses
