"""A training step of the tiny preset of `csakit train`: the stock model, or the same with csakit in it.

Rows hold one document each: on packed rows the stock model computes something else. Stock trains no indexer; csakit's step does, and is
timed with that work.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from csakit.train import model as models
from csakit.train import stages
from csakit.train.presets import PRESETS

from .problem import Problem

PRESET = "tiny"


class Step:
    """The model in the sparse stage, its optimizer, and the rows of a problem.

    Args:
        own: with csakit installed.
    """

    def __init__(self, problem: Problem, *, own: bool) -> None:
        config = PRESETS[PRESET]
        self.input_ids = problem.inputs["input_ids"]
        built = models.build(config)
        self._stage = config.sparse
        models.set_stage(built, self._stage)
        if not own:
            built.handle.remove()
        self.model = built.model.to(self.input_ids.device)
        self.optimizer: Any = stages.make_optimizer(self.model, self._stage)
        stages.set_learning_rates(self.optimizer, self._stage, 0)

    def loss(self) -> Tensor:
        """Nats per predicted token."""
        logits = self.model(input_ids=self.input_ids, use_cache=False).logits[:, :-1]
        return cross_entropy(logits.flatten(0, 1).float(), self.input_ids[:, 1:].flatten())

    def __call__(self) -> dict[str, Tensor]:
        """One step, and its loss."""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        stages.clip_gradients(self.optimizer, self._stage.clip)
        self.optimizer.step()
        return {"loss": loss.detach()}
