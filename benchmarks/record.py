"""Records the tables of this folder: `python benchmarks/record.py --megatron PATH`.

Each table grows while it is measured, and what it holds already is not measured again: run it once more after a stop. `--fresh` begins
anew, `--only growth,step` records some of them, `--trial FOLDER` runs everything once at its smallest size and leaves this folder alone.
When it is through, pages and pictures are rendered (render.py). Logs stay where a command failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
SETTINGS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
NATIVE, BOTH = "csakit-cpu-native", "csakit-cpu-native,csakit-cpu-torch"
TRIAL = "--repeats 1 --patience 1 --no-memory --max-tokens 1024"


class Table(NamedTuple):
    """A table, in the order in which they are recorded.

    Attributes:
        about: what the page says of it.
        commands: options of `csakit bench`, with settings of the environment before them.
    """

    name: str
    title: str
    about: str
    commands: tuple[str, ...]


TABLES = (
    Table(
        "small",
        "Small calls",
        "What a call costs that has next to nothing to do, and what a fresh process waits for.",
        (f"--suite small --providers {BOTH},eager",),
    ),
    Table(
        "step",
        "Where the time of a step goes",
        "A training step of the tiny preset, and one V4-Flash-width layer. csakit's columns train the indexer, stock's do not. "
        "Other work ran on the second core beside the step.",
        ("--suite step --operations step", "--suite step --operations csa-backward --threads 2 --repeats 2"),
    ),
    Table(
        "variants",
        "Teacher, threads, dtype",
        "csakit against itself, in the same rounds: with and without the teacher, two threads and one, bfloat16 and float32.",
        (f"--suite variants --providers {NATIVE} --patience 15",),
    ),
    Table(
        "growth",
        "Growth",
        "V4-Flash proportions at 1/16 of both widths, so that the length at which scoring overtakes attention is that of the model.",
        (f"--suite growth --providers {NATIVE} --patience 25",),
    ),
    Table(
        "targets",
        "What the native kernels are held to",
        "The last lines are the goals. Speedups in the table are over the eager author; the CSV has those over everybody else too. "
        "Other work ran on the second core meanwhile.",
        (f"--suite targets --providers {BOTH},eager,megatron --megatron PATH --patience 40 --most-gib 15",),  # Megatron-LM takes them
    ),
    Table(
        "allocator",
        "Allocator",
        "Large fresh tensors cost page faults. Transparent huge pages, or an allocator that gives nothing back, help whoever makes many of "
        "them; csakit makes few.",
        tuple(
            f"{setting}--suite allocator --providers {NATIVE},eager --repeats 3"
            for setting in ("", "THP_MEM_ALLOC_ENABLE=1 ", "MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_MMAP_THRESHOLD_=4294967296 ")
        ),
    ),
    Table(
        "attention",
        "Uniform and clustered selections",
        "Clustered selections imitate trained indexers (below). Backward is with the teacher.",
        (f"--suite attention --operations attend-backward --providers {BOTH},eager --patience 10",),
    ),
    Table(
        "layers",
        "V4-Flash-width layers",
        "One attention layer of each kind, time and memory of the same calls. csakit's backward trains the indexer, stock's does not. What "
        "was skipped does not fit into the memory of the machine.",
        (
            "--suite layers --max-tokens 1024 --threads 2 --patience 15",
            # stock's forward at 4096 tokens takes most of the memory, and minutes
            "--suite layers --threads 2 --repeats 1 --most-gib 19.5 --providers csakit-nn,transformers",
        ),
    ),
)


def command(table: Table, options: str) -> str:
    """A command as the page shows it."""
    settings, _, rest = options.partition("--")
    fixed = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
    return f"{fixed} {settings}csakit bench --{rest} --append --out benchmarks/{table.name}.csv"


def record(table: Table, folder: Path, megatron: str | None, extra: str = "") -> bool:
    """Run the commands of a table, with their output in a log beside it; whether all went well."""
    good = True
    for options in table.commands:
        words = shlex.split(options)
        if "--megatron" in words:
            place = words.index("--megatron")
            words[place : place + 2] = ["--megatron", megatron] if megatron else []
            if not megatron:
                words[words.index("--providers") + 1] = words[words.index("--providers") + 1].removesuffix(",megatron")
        settings = dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("-"))
        words = [word for word in words if word.split("=", 1)[0] not in settings]
        line = [
            sys.executable,
            "-m",
            "csakit",
            "bench",
            *words,
            *shlex.split(extra),
            "--append",
            "--out",
            str(folder / f"{table.name}.csv"),
        ]
        begun = time.monotonic()
        with (folder / f"{table.name}.log").open("a") as log:
            code = subprocess.run(line, env={**os.environ, **SETTINGS, **settings}, stdout=log, stderr=log, check=False).returncode
        print(f"{time.strftime('%H:%M:%S')} {table.name}: exit code {code} after {time.monotonic() - begun:.0f} s", flush=True)
        good &= code == 0
    if good:
        (folder / f"{table.name}.log").unlink()
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, then render."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron", metavar="PATH", help="a checkout of Megatron-LM; without it its column is left out")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated tables")
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    parser.add_argument("--trial", type=Path, metavar="FOLDER", help="everything once, small, into this folder")
    args = parser.parse_args(arguments)
    folder = args.trial or FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [table for table in TABLES if args.only is None or table.name in args.only.split(",")]
    if args.fresh:
        for table in chosen:
            for kind in ("csv", "svg", "log"):
                (folder / f"{table.name}.{kind}").unlink(missing_ok=True)
    outcomes = [record(table, folder, args.megatron, TRIAL if args.trial else "") for table in chosen]
    if not args.trial:
        subprocess.run([sys.executable, str(FOLDER / "render.py")], check=True)
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
