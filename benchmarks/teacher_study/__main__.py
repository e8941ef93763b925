"""The command of the study: `python -m benchmarks.teacher_study run|report`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from .presets import PRESETS
from .stages import Study, run


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.teacher_study", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="train and measure what is not there yet; several processes share one folder")
    runs.add_argument("--preset", choices=PRESETS, default="full")
    runs.add_argument("--out", type=Path, default=Path("runs/teacher_study"))
    runs.add_argument("--threads", type=int, default=1, help="threads of this process")
    runs.add_argument("--minutes", type=float, default=float("inf"), help="begin no task after so many minutes")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    run(Study(chosen.preset, chosen.out), until=time.time() + 60 * chosen.minutes)


if __name__ == "__main__":
    main()
