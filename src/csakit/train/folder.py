"""The folder of a run: `run.json` with its settings, its text and the versions it began with. Needs no torch.

Beside it lie `run.toml`, the same settings as a file for `csakit train`, `metrics.jsonl` and `tensorboard/` (log.py), `checkpoints/`
(checkpoint.py), `model/` (model.py) and `report.html` (csakit report).
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from csakit.train import settings
from csakit.train.config import RunConfig
from csakit.train.corpus import DataError

RUN_FILE = "run.json"
TOML_FILE = "run.toml"
PACKAGES = ("csakit", "torch", "transformers", "safetensors")


def next_free(parent: Path, name: str) -> Path:
    """The first of `name-001`, `name-002`, .. below `parent` that is not there yet."""
    number = 1
    while (folder := parent / f"{name}-{number:03d}").exists():
        number += 1
    return folder


def newest_run(parent: Path) -> Path | None:
    """The folder below `parent` whose run began last, None when there is none."""
    found = sorted(parent.glob(f"*/{RUN_FILE}"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent if found else None


def holds_run(folder: Path) -> bool:
    """Whether a run has begun in this folder."""
    return (folder / RUN_FILE).exists()


def begin(folder: Path, config: RunConfig, text: str) -> None:
    """Make the folder of a new run and write down what it is. text: a fingerprint of everything it reads and of its tokens.

    Raises: ValueError when the folder holds a run.
    """
    if holds_run(folder):
        raise ValueError(f"{folder} holds a run already; resume it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    explained = "# The settings of this run, all of them. `csakit train` takes this file and starts another run like it.\n"
    (folder / TOML_FILE).write_text(explained + settings.to_toml(config), encoding="utf-8")
    stored = {"config": asdict(config), "text": text, "environment": versions()}
    # Last and at once: a folder holds a run, or it does not.
    unfinished = folder / f"{RUN_FILE}.unfinished"
    unfinished.write_text(json.dumps(stored, indent=1), encoding="utf-8")
    unfinished.rename(folder / RUN_FILE)


def stored_config(folder: Path) -> RunConfig:
    """The settings of the run in a folder.

    Raises: ValueError when there is none, or its file cannot be read.
    """
    return settings.updated(RunConfig(), _read(folder)["config"])


def check_text(folder: Path, text: str) -> None:
    """Raise DataError unless text and tokens are those the run in the folder began with."""
    if text != _read(folder)["text"]:
        raise DataError(f"the text is not that with which the run in {folder} began; bring it back, or start another run")


def versions() -> dict[str, str]:
    """What a run notes about the machine it began on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"platform": platform.platform()}


def _read(folder: Path) -> dict[str, Any]:
    try:
        stored = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        if not {"config", "text", "environment"} <= stored.keys():
            raise ValueError("it lacks settings, text or environment")
    except (OSError, ValueError) as error:
        raise ValueError(f"no run in {folder} ({error})") from error
    return stored
