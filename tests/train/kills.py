"""Run by test_train_kills.py in a process of its own: a run that is killed with SIGKILL again and again, and one that is not.

Each stretch of the run is a fork of this process, so that nothing of it but its folder outlives the kill. Prints how each one ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import micro
import safetensors.torch
import torch
from transformers import DeepseekV4ForCausalLM  # noqa: F401, loaded once, before the forks

from csakit.train import checkpoint, log

Trigger = Callable[[], None]


def settings():
    """Two steps a stage, a checkpoint after each."""
    config = micro.config(save_every=1)
    return replace(config, **{name: replace(config.stage(name), steps=2) for name in config.stages})


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_step(total: int) -> Trigger:
    """After a step is logged, before it is saved."""

    def arm() -> None:
        log.Console.step = lambda self, record, steps: die() if record["total_steps"] == total else None

    return arm


def at_evaluation(stage: str, when: str) -> Trigger:
    """When an evaluation is logged: at the boundary of a stage."""

    def arm() -> None:
        log.Console.evaluated = lambda self, record: die() if (record["stage"], record["when"]) == (stage, when) else None

    return arm


def half_written(name: str, number: int) -> Trigger:
    """Inside a checkpoint: with half of a file, the given time that file is written."""

    def arm() -> None:
        whole, seen = safetensors.torch.save_file, []

        def half(tensors, path):
            whole(tensors, path)
            seen.append(path)
            if sum(Path(p).name == name for p in seen) == number:
                os.truncate(path, os.path.getsize(path) // 2)
                die()

        safetensors.torch.save_file = half

    return arm


def at_sync(number: int) -> Trigger:
    """Inside a checkpoint: when it is brought to the disk, file by file (1 to 4); when it has its name (5)."""

    def arm() -> None:
        real, seen = checkpoint._sync, []

        def sync(path):
            seen.append(path)
            real(path)
            if len(seen) == number:
                die()

        checkpoint._sync = sync

    return arm


def before_renaming() -> Trigger:
    """Inside a checkpoint: all is written, and has not its name yet."""

    def arm() -> None:
        Path.rename = die

    return arm


# The stretches in their order; each goes on where the one before left something whole.
KILLS: dict[str, Trigger] = {
    "before the first checkpoint": at_step(1),
    "half of the first weights": half_written("weights.safetensors", 1),
    "half of the optimizer": half_written("optimizer.safetensors", 2),
    "after a step": at_step(2),
    "the end of the dense stage": at_evaluation("dense", "after"),
    "before the first renaming": before_renaming(),
    "the start of the warm-up": at_evaluation("warmup", "before"),
    "a synchronization": at_sync(2),
    "a checkpoint with its name, the old ones there": at_sync(5),
    "after the last step of the warm-up": at_step(4),
    "half of the weights between two stages": half_written("weights.safetensors", 2),
    "the start of the sparse stage": at_evaluation("sparse", "before"),
    "inside the sparse stage": at_step(5),
    "the very end": at_evaluation("sparse", "after"),
}


def stretch(folder: Path, arm: Trigger | None) -> int:
    """The signal that ended a process that went on with the run in this folder; 0 when it came to the end of it."""
    child = os.fork()
    if child == 0:
        if arm is not None:
            arm()
        micro.trainer(folder, settings()).run(resume=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    ends = {"unbroken": stretch(root / "unbroken", None)}
    ends |= {name: stretch(root / "killed", arm) for name, arm in KILLS.items()}
    ends["to the end"] = stretch(root / "killed", None)
    print(json.dumps(ends))
