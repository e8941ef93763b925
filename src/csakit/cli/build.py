"""`csakit build`: compile the native CPU kernels ahead of their first use."""

from __future__ import annotations

import argparse
import json
import os
import shutil

NAME = "build"
SUMMARY = "compile the native CPU kernels ahead of their first use"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--compiler", metavar="PATH", help="C++ compiler to use (default: $CXX, else the first of g++, c++, clang++)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line")
    parser.epilog = (
        "The library goes to ~/.cache/csakit, under a name made from its sources, its flags and the processor's vector width.\n"
        "Where it is there, first use loads it and needs no compiler.\n\n"
        "exit code: 0 built or already there, 1 it cannot be built here (the compiler's output follows), 2 usage"
    )


def run(args: argparse.Namespace) -> int:
    """Build, and print where the library is."""
    from csakit.backends.cpu.native import build
    from csakit.cli import CommandError

    try:
        path = build.library(cxx=_compiler(args.compiler))
    except build.Unavailable as error:
        output = getattr(error.__cause__, "stderr", None)
        raise CommandError(f"{error}\n{output}" if output else str(error)) from error
    facts = {"library": str(path), "level": build.level()}
    print(json.dumps(facts) if args.json else f"native kernels for {facts['level']}: {path}")
    return 0


def _compiler(named: str | None) -> str | None:
    from csakit.cli import UsageError

    named = named or (os.environ.get("CXX") or "").split(" ")[0] or None
    path = shutil.which(named) if named else None
    if named and path is None:
        raise UsageError(f"the compiler must be a program on the path; {named!r} is not")
    return path
