"""The training loop: dense, warm-up, sparse, with evaluation before and after each, checkpoints and resumption.

dense    attention over every visible entry; everything but the indexer learns language
warmup   the same attention; the indexer alone learns to match the teacher, over every visible entry
sparse   attention over what the indexer selects; everything learns, the indexer over its selection
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from csakit.train import checkpoint, model, stages
from csakit.train.batches import Batch, Rows
from csakit.train.checkpoint import Progress
from csakit.train.config import RunConfig, StageConfig
from csakit.train.corpus import Corpus, DataError
from csakit.train.evaluation import Evaluator, language_loss
from csakit.train.log import Console, MetricsFile


class Interrupted(Exception):
    """The run was asked to stop; it is saved and can be resumed."""


class TrainingError(Exception):
    """The run cannot go on. The message says why."""


class Trainer:
    """One run in one folder.

    `stop` is asked after every step; once it says yes the run is saved and `Interrupted` raised.
    """

    def __init__(
        self, config: RunConfig, corpus: Corpus, folder: Path, console: Console, *, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.config, self.folder, self.console, self.stop = config, folder, console, stop
        self.rows = Rows.of(corpus.training, config.data.sequence_length)
        _check_selection(config, self.rows)
        self.model = model.build(config)
        self.handle = model.install(self.model, config)
        self.evaluator = Evaluator(self.model, self.handle, Rows.of(corpus.heldout, config.data.sequence_length), config)
        self.progress = Progress(stage=0, step=0, total_steps=0, log_bytes=0)
        self.log: MetricsFile | None = None
        self._evaluated: tuple[tuple[bool, int] | None, dict[str, Any]] = (None, {})

    def run(self, *, resume: bool = False) -> None:
        """Train from the start, or from the newest whole checkpoint.

        Raises: Interrupted; CheckpointError; TrainingError when a loss or gradient is not finite.
        """
        found = checkpoint.newest(self.folder / "checkpoints") if resume else None
        if found:
            self.progress = checkpoint.read_progress(found)
            self.console.say(f"resuming from {found}")
        self.log = MetricsFile(self.folder / "metrics.jsonl", self.progress.log_bytes)
        try:
            for number, name in enumerate(self.config.stages):
                if number >= self.progress.stage and self.config.stage(name).steps:
                    self._run_stage(number, name, found)
                    found = None
        finally:
            self.console.stop()
            self.log.close()

    def _run_stage(self, number: int, name: str, found: Path | None) -> None:
        """One stage from its start, or from a checkpoint inside it."""
        stage = self.config.stage(name)
        begun = self.progress.step if number == self.progress.stage else 0
        self.handle.stage(name)
        optimizer = stages.make_optimizer(self.model, stage)
        if found:
            checkpoint.restore(found, self.model, optimizer)
        if not begun:
            self._evaluate(name, "before")
        self.console.start(name, stage.steps, begun)
        for step in range(begun, stage.steps):
            record = self._step(name, stage, optimizer, step)
            self._write(record)
            self.console.step(record, stage.steps)
            self.progress = Progress(number, step + 1, self.progress.total_steps + 1, 0)
            if stage.evaluate_every and (step + 1) % stage.evaluate_every == 0 and step + 1 < stage.steps:
                self._evaluate(name, "during")
            if self.stop():
                raise Interrupted(str(self._save(optimizer)))
            if (step + 1) % self.config.save_every == 0:
                self._save(optimizer)
        self.console.stop()
        self._evaluate(name, "after")
        # The next stage has an optimizer of its own: at its start there is no state to keep.
        self.model.zero_grad()
        self.progress = Progress(number + 1, 0, self.progress.total_steps, 0)
        self._save(None)

    def _step(self, name: str, stage: StageConfig, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
        """One optimizer step; its line of the log."""
        started = time.perf_counter()
        batches = self._batches(name, stage, step)
        predicted, real = (sum(int(mask.sum()) for mask in masks) for masks in zip(*((b.predicted, b.real) for b in batches)))
        # One divisor for the whole step: the same gradients however it is cut into micro-batches.
        self.handle.divisor = real
        self.model.train()
        optimizer.zero_grad()
        rates = stages.set_learning_rates(optimizer, stage, step)
        nats, layers = 0.0, dict[str, float]()
        for batch in batches:
            total = language_loss(self.model, batch)
            (total / max(1, predicted)).backward()
            nats += float(total.detach())
            for site, loss in self.handle.losses.items():
                layers[site] = layers.get(site, 0.0) + float(loss)
        divergence = sum(layers.values()) / len(layers) if layers else None
        norms = stages.clip_gradients(optimizer, stage.clip)
        if not all(math.isfinite(value) for value in (nats, *layers.values(), *norms.values())):
            raise TrainingError(
                f"{name}, step {step + 1}: loss or gradient is not finite (nats {nats}, KL {divergence}, gradient norms {norms}); "
                f"the run ends here, lower {name}.learning_rate or {name}.indexer_learning_rate"
            )
        optimizer.step()
        return {
            "kind": "step",
            "stage": name,
            "step": step + 1,
            "total_steps": self.progress.total_steps + 1,
            "bits_per_byte": nats / max(1, predicted) / math.log(2),
            "kl": divergence,
            "layers": layers,
            "learning_rates": rates,
            "gradient_norms": norms,
            "tokens": real,
            "tokens_per_second": real / (time.perf_counter() - started),
        }

    def _batches(self, name: str, stage: StageConfig, step: int) -> list[Batch]:
        """The micro-batches of a step."""
        earlier_stages = self.config.stages[: self.config.stages.index(name)]
        before = sum(self.config.stage(earlier).steps * _rows_of(self.config.stage(earlier)) for earlier in earlier_stages)
        numbers = self.rows.numbers(self.config.seed, before + step * _rows_of(stage), _rows_of(stage))
        return [self.rows.batch(numbers[start : start + stage.rows]) for start in range(0, len(numbers), stage.rows)]

    def _evaluate(self, name: str, when: str) -> None:
        """Evaluate in the attention of the stage, write it down and say it."""
        # Warm-up attends as the dense stage does: what ended the one begins the other.
        attention = (name == "sparse", self.progress.total_steps)
        if self._evaluated[0] != attention:
            self._evaluated = (attention, self.evaluator.run())
        record = {"kind": "evaluation", "stage": name, "when": when, "step": self.progress.step, **self._evaluated[1]}
        if name == "warmup" and when == "before":
            # What the untrained indexer would cost: the start of the scale on which warm-up is judged.
            self.handle.stage("sparse")
            record["bits_per_byte_sparse"] = self.evaluator.bits_per_byte()
            self.handle.stage(name)
        self._write(record)
        self.console.evaluated(record)

    def _write(self, record: dict[str, Any]) -> None:
        assert self.log is not None
        self.log.write(record)

    def _save(self, optimizer: torch.optim.Optimizer | None) -> Path:
        assert self.log is not None
        self.progress = replace(self.progress, log_bytes=self.log.bytes())
        return checkpoint.save(self.folder / "checkpoints", self.model, optimizer, self.progress, keep=self.config.keep)


def _rows_of(stage: StageConfig) -> int:
    return stage.rows * stage.accumulation


def _check_selection(config: RunConfig, rows: Rows) -> None:
    """Raise DataError when the sparse stage would have nothing to select from in this text."""
    ratio, topk = config.model.csa_ratio, config.model.index_topk
    if "sparse" in config.stages and config.sparse.steps and not rows.selecting(ratio, topk):
        raise DataError(
            f"{config.data.path or 'the text'}: no document is longer than model.csa_ratio * model.index_topk = {ratio * topk} bytes, so "
            "every query would select all it sees and the sparse stage would not be sparse; give longer documents or lower model.index_topk"
        )
