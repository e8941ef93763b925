"""`csakit audit`: is this indexer loss the right one?"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from typing import TYPE_CHECKING

from csakit.cli import UsageError

if TYPE_CHECKING:
    from csakit.audit import Report

NAME = "audit"
SUMMARY = "run the probes on an indexer loss: csakit's, your own, or a known mistake"

EPILOG = """candidates:
  csakit              the library's own verbs
  torch               plain dense torch, right
  compressed-only ..  each known mistake, by its name (no candidate: lists them all)
  module:attribute    your own: a function loss(case), or an object with that method; see csakit.audit.case
  all                 the table of what catches what, every known mistake under every probe

exit code: 0 every probe passed (all: every mistake was caught), 1 a probe failed, 2 usage"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("candidates", nargs="*", metavar="candidate", help="who is audited; none: list candidates and probes")
    parser.add_argument("--probes", metavar="NAMES", help="comma-separated names of the probes to run (default: all)")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    shape.add_argument("--markdown", action="store_true", help="with `all`: print the table as Markdown")


def run(args: argparse.Namespace) -> int:
    """Audit the candidates and print their verdicts."""
    if args.markdown and args.candidates != ["all"]:
        raise UsageError("--markdown goes with the candidate `all` alone")
    if "all" in args.candidates and (len(args.candidates) > 1 or args.probes):
        raise UsageError("the candidate `all` stands alone, under every probe")
    if not args.candidates:
        return _list(args)
    return _matrix(args) if args.candidates == ["all"] else _reports(args)


def _reports(args: argparse.Namespace) -> int:
    from csakit import audit

    sys.path.insert(0, os.getcwd())  # an import path means the caller's modules, as with `python -m`
    probes = args.probes.split(",") if args.probes else None
    try:
        candidates = [audit.candidates.load(name) for name in args.candidates]
        reports = [audit.run(candidate, probes) for candidate in candidates]
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    passed = all(report.passed for report in reports)
    if args.json:
        print(json.dumps({"passed": passed, "reports": [report.as_dict() for report in reports]}))
    else:
        for report in reports:
            _show(report)
    return 0 if passed else 1


def _matrix(args: argparse.Namespace) -> int:
    from csakit import audit

    table = audit.matrix()
    if args.json:
        print(json.dumps(table.as_dict()))
    elif args.markdown:
        print(table.markdown({name: probe.holds for name, probe in audit.PROBES.items()}, audit.candidates.MISTAKES))
    else:
        print(table)
    return 0 if table.passed else 1


def _list(args: argparse.Namespace) -> int:
    from csakit import audit

    known = {"csakit": "the library's own verbs", "torch": "plain dense torch, right", **audit.candidates.MISTAKES}
    probes = {name: probe.holds for name, probe in audit.PROBES.items()}
    if args.json:
        print(json.dumps({"candidates": known, "probes": probes}))
        return 0
    for title, lines in (("candidates", known), ("probes", probes)):
        print(f"{title}:")
        for name, text in lines.items():
            print(f"  {name:22} {text}")
    return 0


def _show(report: Report) -> None:
    """The report in colour where a person looks on and rich is installed, plain lines otherwise."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        print(f"{report}\n")
        return
    from rich.console import Console
    from rich.table import Table

    from csakit.audit.report import HEADER

    table = Table(*HEADER, title=report.candidate, title_justify="left", box=None)
    colours = {"pass": "green", "fail": "red", "not tested": "yellow"}
    for probe, status, *rest in report.rows():
        table.add_row(probe, f"[{colours[status]}]{status}", *rest)
    console = Console()
    console.print(table)
    console.print(report.summary, style="green" if report.passed else "red", highlight=False)
