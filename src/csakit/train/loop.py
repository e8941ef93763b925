"""The training loop: dense, warm-up, sparse, with evaluation before and after each, checkpoints and resumption.

dense    attention over every visible entry; everything but the indexer learns language
warmup   the same attention; the indexer alone learns to match the teacher, over every visible entry
sparse   attention over what the indexer selects; everything learns, the indexer over its selection

These are the defaults of the three; each stage's settings say who trains, in which attention and for which objective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from csakit.train import backward, checkpoint, corpus, model, stages
from csakit.train import folder as run_folder
from csakit.train.batches import Batch, Rows
from csakit.train.checkpoint import Progress
from csakit.train.config import RunConfig, StageConfig
from csakit.train.corpus import Corpus, DataError
from csakit.train.evaluation import Evaluator, language_loss
from csakit.train.log import Board, Console, MetricsFile


class Interrupted(Exception):
    """The run was asked to stop; it is saved and can be resumed."""


class TrainingError(Exception):
    """The run cannot go on. The message says why."""


def prepare(
    config: RunConfig, folder: Path, *, resume: bool = False, console: Console | None = None, stop: Callable[[], bool] = lambda: False
) -> Trainer:
    """A run in its folder, its text read and its model made, ready to `run`.

    resume: go on with the run in the folder, which has these settings; otherwise the folder must hold none.

    Raises: DataError for a text that cannot be read, or is another than the run began with; ValueError for settings that do not go with the
        model, or a folder that holds a run; WeightsError; ImportError naming what is missing.
    """
    console = console or Console()
    texts = corpus.load(config.data)
    console.say(texts.describe())
    trainer = Trainer(config, texts, folder, console, stop=stop)
    text = f"{texts.fingerprint()}/{trainer.built.tokenizer.fingerprint}"
    if resume:
        run_folder.check_text(folder, text)
    else:
        run_folder.begin(folder, config, text)
    return trainer


class Trainer:
    """One run in one folder.

    `stop` is asked after every step; once it says yes the run is saved and `Interrupted` raised.
    """

    def __init__(
        self, config: RunConfig, texts: Corpus, folder: Path, console: Console, *, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.config, self.folder, self.console, self.stop = config, folder, console, stop
        self.built = model.build(config)
        for note in self.built.notes:
            console.say(note)
        self.rows, heldout = (self._packed([document.text for document in side]) for side in (texts.training, texts.heldout))
        self._check_selection()
        trained = self._trained()
        if config.precision == "bf16":
            model.store_as_bf16(self.built.model, trained)
        # What trains in no stage need not be stored where it can be read again.
        self.stored = trained if config.start.path else None
        self.evaluator = Evaluator(self.built, heldout, config)
        self.progress = Progress(stage=0, step=0, total_steps=0, log_bytes=0)
        self.logs: tuple[MetricsFile | Board, ...] = ()
        self._evaluated: tuple[tuple[str, int] | None, dict[str, Any]] = (None, {})

    def run(self, *, resume: bool = False) -> None:
        """Train from the start, or from the newest whole checkpoint.

        Raises: Interrupted; CheckpointError; TrainingError when a loss or gradient is not finite, or the log cannot be written.
        """
        found = checkpoint.newest(self.folder / "checkpoints") if resume else None
        if found:
            self.progress = checkpoint.read_progress(found)
            self.console.say(f"resuming from {found}")
        self.metrics = MetricsFile(self.folder / "metrics.jsonl", self.progress.log_bytes)
        self.logs = (self.metrics,)
        try:
            if self.config.tensorboard:
                self.logs = (self.metrics, Board(self.folder / "tensorboard", self.progress.total_steps))
            for number, name in enumerate(self.config.stages):
                if number >= self.progress.stage and self.config.stage(name).steps:
                    self._run_stage(number, name, found)
                    found = None
            if self.config.export:
                if found:  # of a run that is through
                    checkpoint.restore(found, self.built.model, None, names=self.stored)
                model.export(self.built, self.folder / "model")
        except OSError as error:
            good = checkpoint.last_good(self.folder / "checkpoints")
            raise TrainingError(f"{self.folder}: cannot be written: {error}; {good}; resume when that is mended") from error
        finally:
            self.console.stop()
            for log in self.logs:
                log.close()

    def _run_stage(self, number: int, name: str, found: Path | None) -> None:
        """One stage from its start, or from a checkpoint inside it."""
        stage = self.config.stage(name)
        begun = self.progress.step if number == self.progress.stage else 0
        model.set_stage(self.built, stage)
        model.set_checkpointing(self.built, self.config.gradient_checkpointing and stage.trains != "indexer")
        optimizer = stages.make_optimizer(self.built.model, stage)
        if found:
            checkpoint.restore(found, self.built.model, optimizer, names=self.stored)
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
        self.built.model.zero_grad()
        self.progress = Progress(number + 1, 0, self.progress.total_steps, 0)
        self._save(None)

    def _step(self, name: str, stage: StageConfig, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
        """One optimizer step; its line of the log."""
        started = time.perf_counter()
        batches = self._batches(name, stage, step)
        predicted, real, size = (sum(int(x.sum()) for x in found) for found in zip(*((b.predicted, b.real, b.sizes) for b in batches)))
        self.built.model.train()
        optimizer.zero_grad()
        rates = stages.set_learning_rates(optimizer, stage, step)
        nats, layers = self._gradients(stage, batches, predicted, real)
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
            "bits_per_byte": nats / max(1, size) / math.log(2),
            "kl": divergence,
            "layers": layers,
            "learning_rates": rates,
            "gradient_norms": norms,
            "tokens": real,
            "tokens_per_second": real / (time.perf_counter() - started),
        }

    def _gradients(self, stage: StageConfig, batches: list[Batch], predicted: int, real: int) -> tuple[float, dict[str, float]]:
        """Add up the gradients of a step; its nats, and the indexer's loss of each layer.

        Both losses have one divisor for the whole step: the same gradients however it is cut into micro-batches.
        """
        self.built.handle.divisor = real
        only_indexers = stage.trains == "indexer"
        nats, layers = 0.0, dict[str, float]()
        with backward.within_forward(model.attention_layers(self.built)) if only_indexers else nullcontext():
            for batch in batches:
                total = language_loss(self.built.model, batch.to(self.config.device), self.config.precision)
                if not only_indexers:
                    (total / max(1, predicted)).backward()
                nats += float(total.detach())
                for site, loss in self.built.handle.losses.items():
                    layers[site] = layers.get(site, 0.0) + float(loss)
        return nats, layers

    def _batches(self, name: str, stage: StageConfig, step: int) -> list[Batch]:
        """The micro-batches of a step."""
        earlier_stages = self.config.stages[: self.config.stages.index(name)]
        before = sum(self.config.stage(earlier).steps * _rows_of(self.config.stage(earlier)) for earlier in earlier_stages)
        numbers = self.rows.numbers(self.config.seed, before + step * _rows_of(stage), _rows_of(stage))
        return [self.rows.batch(numbers[start : start + stage.rows]) for start in range(0, len(numbers), stage.rows)]

    def _evaluate(self, name: str, when: str) -> None:
        """Evaluate in the attention of the stage, write it down and say it."""
        stage = self.config.stage(name)
        # Warm-up attends as the dense stage does: what ended the one begins the other.
        attention = (stage.attention, self.progress.total_steps)
        if self._evaluated[0] != attention:
            self._evaluated = (attention, self.evaluator.run())
        place = {"stage": name, "when": when, "step": self.progress.step, "total_steps": self.progress.total_steps}
        record = {"kind": "evaluation", **place, **self._evaluated[1]}
        if name == "warmup" and when == "before" and stage.attention == "dense":
            # What the untrained indexer would cost: the start of the scale on which warm-up is judged.
            self.built.handle.stage("sparse")
            record["bits_per_byte_sparse"] = self.evaluator.bits_per_byte()
            model.set_stage(self.built, stage)
        self._write(record)
        self.console.evaluated(record)

    def _write(self, record: dict[str, Any]) -> None:
        for log in self.logs:
            log.write(record)

    def _save(self, optimizer: torch.optim.Optimizer | None) -> Path:
        self.progress = replace(self.progress, log_bytes=self.metrics.bytes())
        folder = self.folder / "checkpoints"
        return checkpoint.save(folder, self.built.model, optimizer, self.progress, keep=self.config.keep, names=self.stored)

    def _packed(self, texts: list[bytes]) -> Rows:
        tokenizer = self.built.tokenizer
        return Rows.of(tokenizer.encode(texts), self.config.data.sequence_length, tokenizer.separator)

    def _trained(self) -> set[str]:
        """The names of the parameters that train in any stage. Raises ValueError for a stage that does not go with the model."""
        found = set[str]()
        for name, stage in self.config.active().items():
            try:
                found |= model.trains(self.built, stage)
            except ValueError as error:
                raise ValueError(f"{name}.{error}") from None
        return found

    def _check_selection(self) -> None:
        """Raise DataError when a stage would have nothing to select from in this text."""
        ratio, topk = self.built.ratio, self.built.topk
        if self.config.selects() and not self.rows.selecting(ratio, topk):
            raise DataError(
                f"{self.config.data.path or 'the text'}: no document is longer than model.csa_ratio * model.index_topk = {ratio * topk} "
                "tokens, so every query would select all it sees and the sparse stage would not be sparse; give longer documents or lower "
                "model.index_topk"
            )


def _rows_of(stage: StageConfig) -> int:
    return stage.rows * stage.accumulation
