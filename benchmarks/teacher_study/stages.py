"""The stages of the study. Each is a file of records when it is done, so that a study can be stopped, resumed, and shared by processes."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import csakit

from . import evaluate
from .indexers import FLOOR, Loss, dense_loss, index, new_indexers, random_parts, sparse_loss, train
from .model import LanguageModel, LayerView, dense, without_entries
from .optimizer import Optimizers, trapezoid
from .presets import ARMS, PRESETS, REFERENCES, Preset
from .records import Record, Tally, write
from .teachers import denominators, log_mass
from .text import heldout_rows, training_rows


@dataclass(frozen=True)
class Study:
    """A preset and the folder of its files."""

    name: str
    folder: Path

    @property
    def preset(self) -> Preset:
        return PRESETS[self.name]

    @property
    def heldout(self) -> Tensor:
        return heldout_rows(self.preset.heldout_rows, self.preset.late_tokens)

    def file(self, task: str, suffix: str) -> Path:
        return self.folder / f"{self.name}-{task}{suffix}"

    def load_model(self, seed: int) -> LanguageModel:
        """The trained language model of a seed, frozen."""
        model = LanguageModel(self.preset)
        model.load_state_dict(torch.load(self.file(f"language-{seed}", ".pt"), weights_only=True))
        return model.requires_grad_(False)

    def load_indexers(self, language_seed: int, index_seed: int) -> dict[str, nn.ModuleList]:
        """The trained indexers of every arm."""
        states = torch.load(self.file(f"index-{language_seed}-{index_seed}", ".pt"), weights_only=True)
        found = {arm: new_indexers(self.preset, index_seed) for arm in states}
        for arm, own in found.items():
            own.load_state_dict(states[arm])
        return found


def language(study: Study, seed: int) -> list[Record]:
    """Trains a language model with dense attention; kept every 100 steps."""
    preset, part = study.preset, study.file(f"language-{seed}", ".checkpoint")
    torch.manual_seed(seed)
    model = LanguageModel(preset)
    optimizers = Optimizers(model)
    monitor, tally, first = study.heldout[:16], Tally(), 0
    if part.exists():
        kept = torch.load(part, weights_only=False)
        model.load_state_dict(kept["model"])
        for optimizer, state in zip(optimizers.both, kept["optimizers"]):
            optimizer.load_state_dict(state)
        first, tally = kept["step"], kept["tally"]
    steps = preset.language_steps
    for step in range(first, steps):
        late = step >= steps * (1 - preset.late_share)
        tokens = preset.late_tokens if late else preset.tokens
        rows = preset.rows * preset.late_tokens // tokens
        loss = model.bits(training_rows(seed, step, rows, tokens)).mean()
        loss.backward()
        optimizers.step(trapezoid(step, steps))
        if (step + 1) % max(1, steps // 12) == 0:
            for arm, policy in (("dense", dense), ("without entries", without_entries)):
                evaluate.bits(model, monitor, policy, tally, arm=f"{arm}, step {step + 1}")
            say(study, f"language {seed}: step {step + 1} of {steps}, {loss.item():.3f} bits")
        if (step + 1) % 100 == 0:
            states = [optimizer.state_dict() for optimizer in optimizers.both]
            _save({"model": model.state_dict(), "optimizers": states, "step": step + 1, "tally": tally}, part)
    _save(model.state_dict(), study.file(f"language-{seed}", ".pt"))
    part.unlink(missing_ok=True)
    return tally.records(preset=study.name, language_seed=seed, stage="language")


def gates(study: Study, seed: int) -> list[Record]:
    """How heads differ, the selections that need no indexer, and whether there is anything for a teacher to win."""
    preset, model, rows, tally = study.preset, study.load_model(seed), study.heldout, Tally()
    evaluate.heads(model, rows, tally)
    evaluate.lone_heads(model, rows[:4], tally)
    evaluate.captures(model, rows, {}, preset.capture_topks, tally)
    evaluate.bits(model, rows, dense, tally, arm="dense")
    evaluate.bits(model, rows, without_entries, tally, arm="without entries")
    for topk in preset.bits_topks:
        for name in REFERENCES:
            evaluate.bits(model, rows, evaluate.referred(name, topk), tally, arm=name, topk=topk)
    return tally.records(preset=study.name, language_seed=seed, stage="frozen", against="oracle")


def indexers(study: Study, seed: int, index_seed: int) -> list[Record]:
    """The dense objective on the frozen model, every arm from the same start on the same queries."""
    preset, model = study.preset, study.load_model(seed)
    arms = ARMS if index_seed == preset.index_seeds[0] else preset.later_arms
    students = {arm: new_indexers(preset, index_seed) for arm in arms}
    log = _progress(study, f"index {seed}-{index_seed}", preset.index_steps)
    train(model, students, random_parts(preset, arms, index_seed), teachers=arms, steps=preset.index_steps, seed=index_seed, log=log)
    _save({arm: own.state_dict() for arm, own in students.items()}, study.file(f"index-{seed}-{index_seed}", ".pt"))
    tally = Tally()
    evaluate.captures(model, study.heldout, students, preset.capture_topks, tally)
    _all_bits(study, model, students, tally)
    return tally.records(preset=study.name, language_seed=seed, index_seed=index_seed, stage="frozen", against="full")


def control(study: Study, seed: int) -> list[Record]:
    """The positive control: heads made to differ by raised sinks, then the same comparison."""
    preset, model, tally = study.preset, study.load_model(seed), Tally()
    for sink in model.sinks():
        sink[::2] += preset.raised_sinks
    students = {arm: new_indexers(preset, 0) for arm in ("full", "compressed-only")}
    log = _progress(study, f"control {seed}", preset.control_steps)
    train(model, students, random_parts(preset, tuple(students), 0), teachers=students, steps=preset.control_steps, seed=0, log=log)
    evaluate.heads(model, study.heldout, tally)
    evaluate.captures(model, study.heldout, {}, preset.capture_topks, tally)
    evaluate.captures(model, study.heldout, students, preset.capture_topks, tally)
    return tally.records(preset=study.name, language_seed=seed, index_seed=0, stage="control", against="full")


def sparse(study: Study, seed: int) -> list[Record]:
    """The sparse objective on the frozen model, after the dense one, beside more of the dense one."""
    preset, model, tally = study.preset, study.load_model(seed), Tally()
    started = study.load_indexers(seed, preset.index_seeds[0])
    sparse_arms = {
        "full, attended": ("full", "attended"),
        "full, visible": ("full", "visible"),
        "compressed-only, attended": ("compressed-only", "attended"),
    }
    students = {arm: deepcopy(started[teacher]) for arm, (teacher, _) in sparse_arms.items()}
    students |= {f"{teacher}, dense": deepcopy(started[teacher]) for teacher in ("full", "compressed-only")}

    def losses(step: int) -> dict[str, Loss]:
        chosen = {arm: sparse_loss(teacher, denominator, preset.sparse_topk) for arm, (teacher, denominator) in sparse_arms.items()}
        return chosen | {f"{teacher}, dense": dense_loss(teacher) for teacher in ("full", "compressed-only")}

    log = _progress(study, f"sparse {seed}", preset.sparse_steps)
    train(model, students, losses, teachers=evaluate.RANKED, steps=preset.sparse_steps, seed=50, peak=FLOOR, log=log)
    evaluate.captures(model, study.heldout, students, preset.capture_topks, tally)
    return tally.records(preset=study.name, language_seed=seed, index_seed=0, stage="sparse objective", against="full, attended")


def joint(study: Study, seed: int) -> list[Record]:
    """Sparse training of everything, each arm with its own teacher and selection, on the same rows."""
    preset, tally = study.preset, Tally()
    topk, rows = preset.joint_topk, study.heldout
    for teacher, students in study.load_indexers(seed, preset.index_seeds[0]).items():
        if teacher not in ("full", "compressed-only"):
            continue
        model = study.load_model(seed).requires_grad_(True)
        optimizers = Optimizers(model, scale=0.1)
        own = torch.optim.Adam(students.parameters(), lr=FLOOR, betas=(0.9, 0.98))

        def attend(view: LayerView, students: nn.ModuleList = students, teacher: str = teacher) -> Tensor:
            q, k, weights, scale = index(students, view)
            selection = csakit.select(q, k, weights, topk, view.layout, scale=scale)
            mass = log_mass(view, denominators(view, selection.indices, arms=(teacher,))[teacher], selection.indices)
            loss = csakit.distill(selection.scores, mass, view.layout).loss
            return csakit.attach_loss(view.attend(selection.indices).out, loss)

        log = _progress(study, f"joint {seed} {teacher}", preset.joint_steps)
        for step in range(preset.joint_steps):
            cost = model.bits(training_rows(30_000 + seed, step, preset.joint_rows, preset.late_tokens), attend).mean()
            cost.backward()
            optimizers.step(trapezoid(step, preset.joint_steps))
            own.step()
            own.zero_grad()
            log(step, {"bits": cost.item()})
        model.requires_grad_(False)
        evaluate.bits(model, rows, evaluate.indexed(students, topk), tally, arm=teacher, topk=topk)
        evaluate.bits(model, rows, dense, tally, arm=f"{teacher}, attended densely")
        evaluate.captures(model, rows, {teacher: students}, preset.capture_topks, tally)
    return tally.records(preset=study.name, language_seed=seed, index_seed=0, stage="joint", against="full")


def tasks(study: Study) -> dict[str, tuple[tuple[str, ...], Callable[[], list[Record]]]]:
    """Every task of a study by name, in the order of importance: what it needs, and what it does."""
    preset, found = study.preset, {}
    first, *later = preset.index_seeds
    for s in preset.language_seeds:
        found[f"language-{s}"] = ((), lambda s=s: language(study, s))
    for s in preset.language_seeds:
        found[f"gates-{s}"] = ((f"language-{s}",), lambda s=s: gates(study, s))
    for s in preset.language_seeds:
        found[f"index-{s}-{first}"] = ((f"language-{s}",), lambda s=s: indexers(study, s, first))
    for s in preset.language_seeds:
        found[f"control-{s}"] = ((f"language-{s}",), lambda s=s: control(study, s))
        found[f"joint-{s}"] = ((f"index-{s}-{first}",), lambda s=s: joint(study, s))
        for i in later:
            found[f"index-{s}-{i}"] = ((f"language-{s}",), lambda s=s, i=i: indexers(study, s, i))
        found[f"sparse-{s}"] = ((f"index-{s}-{first}",), lambda s=s: sparse(study, s))
    return found


def run(study: Study, *, until: float = float("inf")) -> None:
    """Does what is not done yet. Several processes may run the same study: each takes tasks that no other has.

    Args:
        until: a time (`time.time()`) after which no task is begun.
    """
    study.folder.mkdir(parents=True, exist_ok=True)
    open_tasks = tasks(study)
    while open_tasks and time.time() < until:
        for name, (needs, work) in list(open_tasks.items()):
            done = study.file(name, ".csv")
            if not done.exists():
                if time.time() >= until or not all(study.file(need, ".csv").exists() for need in needs):
                    continue
                with _claim(study.file(name, ".lock")) as mine:
                    if not mine:
                        continue
                    if not done.exists():
                        began = time.time()
                        write(done, work())
                        say(study, f"{name}: done in {time.time() - began:.0f} s")
            del open_tasks[name]
            break
        else:
            time.sleep(2)  # what is left is with other processes, or waits for them


@contextmanager
def _claim(path: Path) -> Iterator[bool]:
    """Whether this process holds the task; a claim dies with its process."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _all_bits(study: Study, model: LanguageModel, students: dict[str, nn.ModuleList], tally: Tally) -> None:
    for topk in study.preset.bits_topks:
        for arm, own in students.items():
            evaluate.bits(model, study.heldout, evaluate.indexed(own, topk), tally, arm=arm, topk=topk)


def _progress(study: Study, name: str, steps: int) -> Callable[[int, dict[str, float]], None]:
    def log(step: int, losses: dict[str, float]) -> None:
        if (step + 1) % max(1, steps // 6) == 0:
            say(study, f"{name}: step {step + 1} of {steps}, " + ", ".join(f"{arm} {loss:.3f}" for arm, loss in losses.items()))

    return log


def say(study: Study, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {study.name} {text}", flush=True)


def _save(state: object, path: Path) -> None:
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)
