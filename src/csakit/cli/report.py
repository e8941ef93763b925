"""`csakit report RUN_DIR`: write the HTML report of a run anew and print what the run learnt."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from csakit.cli import CommandError

NAME = "report"
SUMMARY = "write report.html of a training run, finished or not, and print what it learnt"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run_dir", type=Path, help="folder of the run, as given to csakit train --out")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Write the report; 1 when the folder holds no run."""
    from csakit.report import page, summary

    try:
        target = page.write(args.run_dir)
        learnt = summary.summarise(summary.read_run(args.run_dir))
    except (summary.ReportError, OSError) as error:
        raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps({**learnt, "report": str(target)}))
    else:
        print("\n".join([*summary.lines(learnt), f"report: {target}"]))
    return 0
