"""`csakit audit`: is this indexer loss the right one?"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from csakit.cli import CommandError, UsageError

if TYPE_CHECKING:
    from csakit.audit import Report

NAME = "audit"
SUMMARY = "run the probes on an indexer loss: csakit's, your own, or a known mistake"

EPILOG = """candidates:
  csakit              the library's own verbs
  torch               plain dense torch, right
  megatron            Megatron-LM's compressed sparse attention, path by path: --path CHECKOUT
  megatron-core-dsa   DeepSeek-V3.2's indexer loss in the released megatron-core
  transformers        a stock DeepSeek-V4 layer of Transformers
  flash-mla           csakit beside a fused kernel's contract
  megatron-csakit, transformers-csakit   csakit installed in the same code
  compressed-only ..  each known mistake, by its name (no candidate: lists them all)
  module:attribute    your own: a function loss(case), or an object with that method; see csakit.audit.case
  all                 the table of what catches what, every known mistake under every probe
or --tensors FILE.safetensors: what another framework computed, see docs/audit_tensors.md

exit code: 0 every probe passed (all: every mistake was caught), 1 a probe failed, 2 usage"""
SIZE_OPTIONS = {"times": "tokens and top-k, this many times the probe's own", "heads": "heads", "window": "window", "width": "head width"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("candidates", nargs="*", metavar="candidate", help="who is audited; none: list candidates and probes")
    parser.add_argument("--path", type=Path, metavar="CHECKOUT", help="a Megatron-LM checkout, for megatron and megatron-csakit")
    parser.add_argument("--tensors", type=Path, metavar="FILE", help="audit tensors that another program has written (.safetensors)")
    parser.add_argument("--probes", metavar="NAMES", help="comma-separated names of the probes to run (default: all)")
    parser.add_argument("--size", choices=("small", "real"), default="small", help="of the cases whose whole losses are compared")
    for name, text in SIZE_OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"of those cases: {text}")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as one self-contained HTML page")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    shape.add_argument("--markdown", action="store_true", help="with `all`: print the table as Markdown")


def run(args: argparse.Namespace) -> int:
    """Audit the candidates and print their verdicts."""
    if args.markdown and args.candidates != ["all"]:
        raise UsageError("--markdown goes with the candidate `all` alone")
    if "all" in args.candidates and (len(args.candidates) > 1 or args.probes):
        raise UsageError("the candidate `all` stands alone, under every probe")
    if args.tensors is not None:
        if args.candidates or args.probes:
            raise UsageError("--tensors stands alone: a file has no candidate that probes could ask")
        return _tensors(args)
    if not args.candidates:
        return _list(args)
    return _matrix(args) if args.candidates == ["all"] else _reports(args)


def _reports(args: argparse.Namespace) -> int:
    from csakit import audit

    sys.path.insert(0, os.getcwd())  # an import path means the caller's modules, as with `python -m`
    _find_checkout(args)
    probes = args.probes.split(",") if args.probes else None
    sizes = {name: value for name in SIZE_OPTIONS if (value := getattr(args, name)) is not None}
    try:
        size = dataclasses.replace(audit.SIZES[args.size], **sizes)
        candidates = [candidate for name in args.candidates for candidate in audit.candidates.load_all(name)]
        reports = [audit.run(candidate, probes, size=size) for candidate in candidates]
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    return _tell(args, reports)


def _find_checkout(args: argparse.Namespace) -> None:
    """Puts the Megatron-LM checkout first on the import path."""
    wanted = [name for name in args.candidates if name in ("megatron", "megatron-csakit")]
    if args.path is None:
        return
    if not wanted:
        raise UsageError("--path names a Megatron-LM checkout: it goes with megatron or megatron-csakit")
    if not (args.path / "megatron" / "core").is_dir():
        raise UsageError(f"--path must be a Megatron-LM checkout, a folder with megatron/core in it; got {args.path}")
    sys.path.insert(0, str(args.path.resolve()))
    loaded = sys.modules.get("megatron.core")
    if loaded is not None and not Path(str(loaded.__file__)).is_relative_to(args.path.resolve()):
        raise UsageError(f"another Megatron is loaded in this process: {loaded.__file__}")


def _tensors(args: argparse.Namespace) -> int:
    from csakit.audit.tensors import run as judged

    try:
        report = judged(args.tensors)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return _tell(args, [report])


def _tell(args: argparse.Namespace, reports: Sequence[Report]) -> int:
    if args.html is not None:
        from csakit.audit.page import write

        try:
            write(args.html, reports)
        except OSError as error:
            raise CommandError(f"--html: {error}") from error
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

    hosts = {name: text for name, (text, _) in audit.candidates.HOSTS.items()}
    known = {"csakit": "the library's own verbs", "torch": "plain dense torch, right", **hosts, **audit.candidates.MISTAKES}
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
    console.print(f"{report.summary}\n{report.conclusion}", style="green" if report.passed else "red", highlight=False, markup=False)
