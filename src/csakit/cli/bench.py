"""`csakit bench`: how fast, how lean, and against whom."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from csakit.bench import shapes, suites
from csakit.cli import CommandError, UsageError

if TYPE_CHECKING:
    from csakit.bench.records import Row
    from csakit.bench.runner import Options

NAME = "bench"
SUMMARY = "measure csakit against others: agreement first, then time and memory"

# settings of the environment that decide what an allocation or a parallel region costs; recorded with every figure
SETTINGS = (
    "THP_MEM_ALLOC_ENABLE",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_WAIT_POLICY",
)

EPILOG = f"""suites:
{chr(10).join(f"  {name:10} {suite.about}" for name, suite in suites.SUITES.items())}

operations:
{chr(10).join(f"  {name:16} {about}" for name, about in shapes.OPERATIONS.items())}

providers:
  csakit-NAME       csakit's backend of that name (csakit-reference only when named)
  csakit-nn         layers of csakit.nn
  csakit-installed  stock layers and models with csakit installed
  eager             what a good author writes by hand
  transformers      the functions, layers and models of stock DeepSeek-V4
  megatron          Megatron-LM's functions, with --megatron
  module:attribute  your own; see csakit.bench.providers

A provider whose results differ from the float64 reference is reported and not timed. Throughput and speedup go by CPU time on one thread,
wall time on more, device time on a GPU; the median of the repeats with the 20 and 80 % quantiles. Speedups compare the measurements of each
round pair by pair. The table in --out grows contest by contest; --append goes on with it after a stop, or under other settings.

exit code: 0 good, 1 a provider disagreed or failed, or nothing could be timed, 2 usage"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("--suite", choices=sorted(suites.SUITES), help="what to measure (default: smoke)")
    parser.add_argument(
        "--shape", action="append", metavar="SHAPE", help="TOKENSxHEADSxWIDTHxK[:INDEX_HEADSxINDEX_WIDTH] instead of a suite; repeatable"
    )
    parser.add_argument("--operations", metavar="NAMES", help="comma-separated: only these operations")
    parser.add_argument("--providers", metavar="NAMES", help="comma-separated (default: all that have the operation)")
    parser.add_argument("--megatron", metavar="PATH", help="root of a Megatron-LM checkout, to measure its functions too")
    parser.add_argument("--against", metavar="NAME", help="the provider that speedups are relative to (default: eager or transformers)")
    parser.add_argument("--selection", choices=shapes.SELECTIONS, help="only this kind of selection")
    parser.add_argument("--dtype", choices=shapes.DTYPES, help="of the inputs (default: the suite's)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="leave longer shapes out")
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds; each measures everybody once (default: the suite's, mostly 5)")
    parser.add_argument("--patience", type=float, metavar="S", help="begin no further round of a contest after this many seconds")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch (default: 1, or the suite's)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--most-gib", type=float, metavar="G", help="skip providers that would need more memory (default: 60 %% of what is free)"
    )
    parser.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, help="measure peak memory in fresh processes (default: not in smoke)"
    )
    parser.add_argument("--read", type=Path, metavar="CSV", help="show a recorded table; measure nothing")
    parser.add_argument("--compare", type=Path, metavar="CSV", help="show what moved beyond the noise since that table")
    parser.add_argument("--out", type=Path, metavar="CSV", help="write the table, contest by contest")
    parser.add_argument(
        "--append", action="store_true", help="go on with the table in --out; what it holds under these settings is left out"
    )
    parser.add_argument("--picture", type=Path, metavar="SVG", help="draw the table")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Measure, or read; then show, draw and compare."""
    from csakit.bench import records, table

    old = None if args.compare is None else _read(args.compare)
    rows = _read(args.read) if args.read else _measure(args)
    moved, common = ([], 0) if old is None else records.compare(old, rows)
    if args.picture:
        from csakit.bench import picture

        try:
            args.picture.write_text(picture.draw(rows))
        except (OSError, ValueError) as error:
            raise CommandError(str(error)) from error
    timed = any(row.figure in ("cpu", "device") for row in rows)
    wrong = [row for row in rows if row.status in ("disagrees", "failed")]
    passed = timed and not wrong
    if args.json:
        moves = [{"old": asdict(move.old), "new": asdict(move.new), "factor": move.factor, "better": move.better} for move in moved]
        print(json.dumps({"passed": passed, "rows": [asdict(row) for row in rows], "moved": moves, "compared": common}))
        return 0 if passed else 1
    _show(rows)
    for line in (*table.remarks(rows), *([] if old is None else [table.moves(moved, common)])):
        print(line)
    if not timed:
        print("csakit bench: nothing was timed", file=sys.stderr)
    return 0 if passed else 1


def _measure(args: argparse.Namespace) -> list[Row]:
    """The rows of the suite; those of the table that is gone on with come first."""
    from csakit.bench import records, runner

    name = "shapes" if args.shape else args.suite or "smoke"
    suite = _suite(args)
    before = _begun(args)
    sys.path.insert(0, os.getcwd())  # module:attribute means the caller's modules, as with `python -m`
    names = args.providers.split(",") if args.providers else None
    if args.against and names is not None and args.against not in names:
        raise UsageError(f"--against must be one of the providers measured, {', '.join(names)}; got {args.against!r}")

    def keep(rows: Sequence[Row]) -> None:
        if args.out:
            records.append(args.out, rows)

    tell = None if args.json else lambda line: print(line, file=sys.stderr, flush=True)
    try:
        return before + runner.run(name, suite, names, _options(args, suite.memory), done=before, keep=keep, tell=tell)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise CommandError(str(error)) from error


def _begun(args: argparse.Namespace) -> list[Row]:
    """The rows of the table that is to be gone on with; none of a new one."""
    if args.append and not args.out:
        raise UsageError("--append needs --out, the table to go on with")
    if args.out is None or not args.out.exists():
        return []
    if not args.append:
        raise UsageError(f"--out: {args.out} is there already; go on with it with --append, or give another name")
    return _read(args.out)


def _options(args: argparse.Namespace, memory: bool) -> Options:
    from csakit.bench.runner import Options

    return Options(
        repeats=args.repeats,
        patience=float("inf") if args.patience is None else args.patience,
        device=args.device,
        baseline=args.against,
        most_gib=args.most_gib,
        memory=memory if args.memory is None else args.memory,
        megatron=args.megatron,
        settings={name: value for name in SETTINGS if (value := os.environ.get(name))},
    )


def _suite(args: argparse.Namespace) -> suites.Suite:
    """The contests that the options ask for."""
    if args.shape and args.suite:
        raise UsageError("--shape and --suite exclude each other; give one")
    operations = args.operations.split(",") if args.operations else list(shapes.KERNELS if args.shape else shapes.OPERATIONS)
    for name in operations:
        if name not in shapes.OPERATIONS:
            raise UsageError(f"--operations must be among {', '.join(shapes.OPERATIONS)}; got {name!r}")
    if args.shape:
        try:
            chosen = suites.alone(tuple(operations), tuple(map(suites.parse_shape, args.shape)), shapes.SELECTIONS)
        except ValueError as error:
            raise UsageError(str(error)) from error
        suite = suites.Suite("shapes of the caller", chosen)
    else:
        suite = suites.SUITES[args.suite or "smoke"]

    def wanted(case: shapes.Case) -> bool:
        fits = args.max_tokens is None or case.shape.tokens <= args.max_tokens
        selection = case.operation not in shapes.ATTENTION or args.selection in (None, case.selection)
        return fits and selection and case.operation in operations

    changes = {name: value for name in ("dtype", "threads") if (value := getattr(args, name)) is not None}
    contests = []
    for contest in suite.contests:
        cases = [case for case in contest.cases if wanted(case)]
        alike = {name: value for name, value in changes.items() if len({getattr(case, name) for case in cases}) == 1}
        if cases:
            contests.append(replace(contest, cases=tuple(replace(case, **alike) for case in cases)))
    if not contests:
        raise UsageError("no case is left; widen --operations, --selection or --max-tokens")
    return replace(suite, contests=tuple(contests))


def _read(path: Path) -> list[Row]:
    from csakit.bench.records import read_csv

    try:
        rows = read_csv(path)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    if not rows:
        raise UsageError(f"{path} holds no rows")
    return rows


def _show(rows: list[Row]) -> None:
    """The blocks with rich where a person looks on and rich is installed, plain otherwise."""
    from csakit.bench import table

    print(table.conditions(rows))
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        print(f"\n{table.text(rows)}\n")
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for block in table.blocks(rows):
        shown = Table(title=block.title, title_justify="left", box=None)
        for number, name in enumerate(block.header):
            shown.add_column(name, justify="left" if number in (0, len(block.header) - 1) else "right", no_wrap=number == 0)
        for line in block.lines:
            shown.add_row(*line, style="red" if line[-1].startswith(("disagrees", "failed")) else "dim" if line[-1] else None)
        console.print(shown, "")
