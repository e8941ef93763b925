"""The `csakit` command. One module for each subcommand: `NAME`, `SUMMARY`, `configure(parser)` and `run(args) -> exit code`.

A command module imports torch, and whatever needs it, only inside `run`, so that help and usage errors come at once.
Exit codes: 0 good, 1 a check or a run failed, 2 usage; 130 and 143 for a run that was interrupted and saved.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = ("train", "audit", "bench", "report", "build", "env")


class UsageError(Exception):
    """The command was called wrongly. The message says what was expected; the exit code is 2."""


class CommandError(Exception):
    """The command could not do its work. The message says why; the exit code is 1."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; argparse itself exits with 0 after help and 2 for unknown options."""
    # Threads that wait by spinning hold up each other as soon as other programs want a core too. Read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except (UsageError, CommandError) as error:
        print(f"csakit {args.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough; what is left must not be flushed into the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    whole = argparse.ArgumentParser(prog="csakit", description="Train DeepSeek-style sparse attention in PyTorch.")
    commands = whole.add_subparsers(dest="command", required=True, metavar="command")
    for name in COMMANDS:
        module = importlib.import_module(f"csakit.cli.{name}")
        command = commands.add_parser(
            module.NAME, help=module.SUMMARY, description=module.SUMMARY, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.configure(command)
        command.set_defaults(run=module.run)
    return whole
