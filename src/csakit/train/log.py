"""What a run says: `metrics.jsonl` for programs, TensorBoard's event files, a progress bar or plain lines for people."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

SECONDS_BETWEEN_LINES = 10.0


class MetricsFile:
    """One JSON object a line: `"kind": "step"` for a step, `"kind": "evaluation"` for an evaluation."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        """Open for appending after the first `keep_bytes` bytes; what lies behind belongs to steps a resumed run repeats."""
        path.touch()
        os.truncate(path, min(keep_bytes, path.stat().st_size))
        # Unbuffered: after a write that failed nothing is left that closing would try to write again.
        self._file = path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Add a line."""
        line = (json.dumps(record) + "\n").encode()
        while line:
            line = line[self._file.write(line) :]

    def bytes(self) -> int:
        """The size of the file, which is on the disk when this returns."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Board:
    """The numbers of the same records for TensorBoard, by their steps in all."""

    def __init__(self, folder: Path, begin: int) -> None:
        """Open a new event file in the folder; what earlier ones say of steps after `begin` is void.

        Raises: ImportError when tensorboard is missing.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("tensorboard = true needs the package tensorboard: pip install 'csakit[tensorboard]'") from error
        self._writer = SummaryWriter(str(folder), purge_step=begin + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Add the numbers of a record."""
        kind = "training" if record["kind"] == "step" else "held-out"
        for name, value in _scalars({key: value for key, value in record.items() if key not in ("step", "total_steps", "queries")}):
            self._writer.add_scalar(f"{kind}/{name}", value, record["total_steps"])

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()


def _scalars(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number in nested dictionaries and lists, by its path."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            yield from _scalars(dict(enumerate(value)), f"{prefix}{key}/")  # type: ignore[arg-type]
        elif isinstance(value, (int, float)):
            yield f"{prefix}{key}", value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`; a last line cut off by a kill is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def describe(record: dict[str, Any], captured: float | None = None) -> str:
    """The numbers of a step, as far as the stage has them, in one short line; captured mass is that of the last evaluation."""
    parts = [
        f"{record['bits_per_byte']:.3f} bits/byte",
        f"KL {record['kl']:.4f}" if record.get("kl") is not None else "",
        f"captured {captured:.1%}" if captured is not None and record.get("kl") is not None else "",
        f"{record['tokens_per_second']:,.0f} tokens/s",
    ]
    return "  ".join(part for part in parts if part)


class Console:
    """Progress for people: a bar on a terminal, otherwise a line now and then."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._bar: Any = None
        self._last_line = 0.0
        self._captured: float | None = None

    def say(self, text: str) -> None:
        """A line."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def start(self, stage: str, total: int, done: int) -> None:
        """A stage begins or goes on."""
        self._last_line = 0.0
        if self._stream.isatty():
            try:
                from rich.console import Console as RichConsole
                from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
            except ImportError as error:
                raise ImportError("the progress bar of csakit train needs rich: pip install 'csakit[train]'") from error
            columns = (
                TextColumn("{task.description:6}"),
                BarColumn(None),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self._bar = Progress(*columns, console=RichConsole(file=self._stream), expand=True)
            self._task = self._bar.add_task(stage, total=total, completed=done, text="")
            self._bar.start()

    def step(self, record: dict[str, Any], total: int) -> None:
        """A step is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], text=describe(record, self._captured))
        elif record["step"] == total or time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.say(f"{record['stage']:6} {record['step']:>5}/{total}  {describe(record, self._captured)}")

    def evaluated(self, record: dict[str, Any]) -> None:
        """An evaluation is done."""
        self._captured = mean_over_layers(record, "captured")
        self.say(f"{record['stage']:6} {record['when']:6} held-out: {describe_evaluation(record)}")

    def stop(self) -> None:
        """The stage is over, for better or worse."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def mean_over_layers(record: dict[str, Any], key: str) -> float | None:
    """The mean of a number over the layers of an evaluation that have it, None when none has."""
    values = [values[key] for values in record["layers"].values() if values.get(key) is not None]
    return sum(values) / len(values) if values else None


def describe_evaluation(record: dict[str, Any]) -> str:
    """The numbers of an evaluation in one line."""
    parts = [f"{record['bits_per_byte']:.4f} bits/byte"]
    if "bits_per_byte_sparse" in record:
        parts.append(f"({record['bits_per_byte_sparse']:.4f} if the untrained indexer selected)")
    for key, form in (
        ("kl", "KL {:.4f}"),
        ("uniform_kl", "(uniform {:.4f})"),
        ("captured", "captured {:.1%}"),
        ("recall", "recall {:.1%}"),
        ("top1", "top-1 {:.1%}"),
    ):
        value = mean_over_layers(record, key)
        if value is not None:
            parts.append(form.format(value))
        if key == "captured" and record.get("random") is not None:
            parts.append(f"(random {record['random']:.1%})")
    return "  ".join(parts)
