"""Checkpoints of a run: weights and optimizer state as safetensors, counters and random state beside them.

A checkpoint is written into a folder of another name, brought to the disk and then renamed, and its state file lists the
size of every other file: what was cut off half way has no name that is looked at, or does not match its list.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PREFIX = "step-"
UNFINISHED = ".unfinished"


class CheckpointError(Exception):
    """A checkpoint cannot be written or read. The message says why, and what is still good."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands: the number of its stage in the settings, steps done in it, steps done in all, bytes of the log."""

    stage: int
    step: int
    total_steps: int
    log_bytes: int


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    progress: Progress,
    *,
    keep: int,
    names: Set[str] | None = None,
) -> Path:
    """Write a checkpoint below `folder`, drop all but the newest `keep`, and return its folder.

    names: the tensors of the model to store, None for all: what never trains can be had again from where it came.

    Raises: CheckpointError when it cannot be written; the older checkpoints are untouched then.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = folder / f"{PREFIX}{progress.total_steps:08d}-{progress.stage}"
    unfinished = target.with_name(target.name + UNFINISHED)
    try:
        for remains in folder.glob(f"{PREFIX}*{UNFINISHED}"):  # of a process that was killed while it wrote
            _remove(remains)
        unfinished.mkdir(parents=True)
        save_file(_model_tensors(model, names), str(unfinished / "weights.safetensors"))
        save_file(_optimizer_tensors(optimizer), str(unfinished / "optimizer.safetensors"))
        save_file({"cpu": torch.get_rng_state()}, str(unfinished / "random.safetensors"))
        sizes = {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())}
        (unfinished / "state.json").write_text(json.dumps({"progress": asdict(progress), "sizes": sizes}, indent=1))
        for path in unfinished.iterdir():
            _sync(path)
        _remove(target)
        unfinished.rename(target)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(f"{target}: the checkpoint could not be written: {error}; {last_good(folder)}") from error
    for old in _complete(folder)[:-keep]:
        _remove(old)
    return target


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint below `folder`, None when there is none."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def last_good(folder: Path) -> str:
    """The newest whole checkpoint, as the end of a sentence about what went wrong."""
    good = newest(folder)
    return f"the last good checkpoint is {good}" if good else "there is no earlier checkpoint"


def read_progress(checkpoint: Path) -> Progress:
    """Where the run stood at a checkpoint."""
    return Progress(**_state(checkpoint)["progress"])


def restore(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, names: Set[str] | None = None) -> None:
    """Bring model, optimizer and random state to those of a checkpoint that was saved with the same names.

    Raises: CheckpointError when it belongs to another model or optimizer, or cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights, stored, random = (load_file(str(checkpoint / f"{name}.safetensors")) for name in ("weights", "optimizer", "random"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint}: the checkpoint cannot be read: {error}; delete it to go on from the one before") from error
    mine = _model_tensors(model, names)
    differing = sorted(set(mine) ^ set(weights)) or [name for name in mine if mine[name].shape != weights[name].shape]
    if differing:
        raise CheckpointError(f"{checkpoint}: the weights are those of another model, the first that differs is {differing[0]}")
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(weights[name])
    if optimizer is not None and stored:
        _restore_optimizer(checkpoint, optimizer, stored)
    torch.set_rng_state(random["cpu"])


def _restore_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer, stored: dict[str, Tensor]) -> None:
    state = optimizer.state_dict()
    names = [name for group in optimizer.param_groups for name in group["names"]]
    places: dict[str, dict[str, Tensor]] = {}
    for key, tensor in stored.items():
        kind, name = key.split("/", 1)
        places.setdefault(name, {})[kind] = tensor
    if set(places) - set(names):
        raise CheckpointError(f"{checkpoint}: the optimizer state is of other parameters, the first is {min(set(places) - set(names))}")
    state["state"] = {number: places[name] for number, name in enumerate(names) if name in places}
    optimizer.load_state_dict(state)


def _model_tensors(model: nn.Module, names: Set[str] | None) -> dict[str, Tensor]:
    """The tensors of a model under their names, shared ones once."""
    kept = model.state_dict().keys()
    tensors = {**dict(model.named_parameters()), **{name: buffer for name, buffer in model.named_buffers() if name in kept}}
    return {name: tensor.detach() for name, tensor in tensors.items() if names is None or name in names}


def _optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    if optimizer is None:
        return {}
    return {
        f"{kind}/{name}": tensor
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"])
        for kind, tensor in optimizer.state.get(parameter, {}).items()
    }


def _complete(folder: Path) -> list[Path]:
    """The whole checkpoints below `folder`, oldest first."""
    found = sorted(path for path in folder.glob(f"{PREFIX}*") if not path.name.endswith(UNFINISHED))
    return [path for path in found if _is_whole(path)]


def _is_whole(checkpoint: Path) -> bool:
    try:
        sizes = _state(checkpoint)["sizes"]
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "state.json").read_text())


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _sync(path: Path) -> None:
    """Have the disk hold what was written: a rename must not arrive before the bytes it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
