"""The command of the study: `python -m benchmarks.teacher_study run|report`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from .picture import draw
from .presets import PRESETS
from .records import read, write
from .report import Results, fill, gather
from .stages import Study, run

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[2]


def publish(preset: str, out: Path | None, page: Path) -> None:
    """The tables of a page and the picture beside it, from the recorded numbers; those of a run's folder are recorded first."""
    recorded = RESULTS / f"{preset}.csv"
    if out is not None:
        write(recorded, gather(out, preset))
    results = Results(read(recorded))
    page.write_text(fill(page.read_text(), results))
    draw(results, page.with_suffix(".svg"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.teacher_study", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="train and measure what is not there yet; several processes share one folder")
    runs.add_argument("--preset", choices=PRESETS, default="full")
    runs.add_argument("--out", type=Path, default=Path("runs/teacher_study"))
    runs.add_argument("--threads", type=int, default=1, help="threads of this process")
    runs.add_argument("--minutes", type=float, default=float("inf"), help="begin no task after so many minutes")
    reports = commands.add_parser("report", help="the tables of docs/teacher_study.md and its picture, from the records")
    reports.add_argument("--preset", choices=PRESETS, default="reduced")
    reports.add_argument("--out", type=Path, help="folder of a run, to record its numbers first; default: what is recorded already")
    reports.add_argument("--page", type=Path, default=ROOT / "docs/teacher_study.md", help="its picture lies beside it")
    chosen = parser.parse_args(arguments)
    if chosen.command == "report":
        publish(chosen.preset, chosen.out, chosen.page)
        return
    torch.set_num_threads(chosen.threads)
    run(Study(chosen.preset, chosen.out), until=time.time() + 60 * chosen.minutes)


if __name__ == "__main__":
    main()
