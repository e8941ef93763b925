"""`csakit train`: train a DeepSeek-V4 and its indexer on text, in up to three stages."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from csakit.cli import CommandError, UsageError
from csakit.train import folder as run_folder
from csakit.train import settings
from csakit.train.config import STAGES, RunConfig
from csakit.train.presets import PRESETS, settings_of

NAME = "train"
SUMMARY = "train a DeepSeek-V4 and its Lightning Indexer on text: dense, indexer warm-up, sparse"
RUNS = Path("runs")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options; the settings of a run are listed from its dataclasses."""
    parser.add_argument(
        "config", metavar="TOML", nargs="?", type=Path, help="file of settings; what it leaves out is that of its preset, or the default"
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), help="settings to start from (default without a file or --start: tiny)")
    parser.add_argument(
        "--start", metavar="PATH", help="weights to start from: a Transformers folder or one in the official format; or a config.json"
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="folder, text file, .zip, .jsonl or .parquet (default: the source of Python's standard library)",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the run (default: the next free runs/NAME-NUMBER)")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in --out (default: the newest below runs/) from its last checkpoint"
    )
    parser.add_argument("--stage", metavar="NAMES", help=f"stages to run, separated by commas (default: {','.join(STAGES)})")
    parser.add_argument("--seed", metavar="N", help="seed of weights and text order")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="change one setting of those below; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object; everything else goes to standard error")
    parser.epilog = _epilog()


def run(args: argparse.Namespace) -> int:
    """Train, write the report and print what was learnt."""
    stream = sys.stderr if args.json else sys.stdout
    try:
        folder, config = _resumed(args) if args.resume else _new(args)
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(str(error)) from error
    # From here on torch is needed.
    from csakit.report import page, summary
    from csakit.train import checkpoint, corpus, log, loop, weights

    console = log.Console(stream)
    asked = _Asked()
    try:
        trainer = loop.prepare(config, folder, resume=args.resume, console=console, stop=asked)
    except (ValueError, corpus.DataError, weights.WeightsError) as error:
        raise UsageError(str(error)) from error
    except (ImportError, OSError) as error:
        raise CommandError(str(error)) from error
    try:
        with asked:
            trainer.run(resume=args.resume)
        target = page.write(folder)
    except loop.Interrupted as saved:
        console.say(f"stopped; saved as {saved}\ngo on with: csakit train --resume --out {folder}")
        return 128 + asked.signal
    except (checkpoint.CheckpointError, loop.TrainingError, ImportError, OSError) as error:
        raise CommandError(str(error)) from error
    learnt = summary.summarise(summary.read_run(folder))
    console.say("\n".join(["", *summary.lines(learnt), f"report: {target}"]))
    if args.json:
        print(json.dumps({**learnt, "report": str(target)}))
    return 0


class _Asked:
    """Says yes once SIGINT or SIGTERM has come. The second SIGINT ends the program at once."""

    def __init__(self) -> None:
        self.signal = 0

    def __call__(self) -> bool:
        return self.signal != 0

    def __enter__(self) -> _Asked:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: Any) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number
        print("stopping after this step; once more to stop at once, unsaved", file=sys.stderr, flush=True)


def _asked_for(args: argparse.Namespace) -> tuple[str | None, dict[str, Any]]:
    """The preset and the settings that file and command line ask for; the command line has the last word."""
    values = {} if args.config is None else settings.read_toml(args.config)
    preset = values.pop("preset", None)
    if args.preset and preset not in (None, args.preset):
        raise ValueError(f"--preset {args.preset}: {args.config} is made for the preset {preset!r}; leave the option out")
    if args.config is not None:
        values = settings.with_absolute_paths(RunConfig, values, args.config.resolve().parent)
    given = [("start.path", args.start), ("data.path", args.data), ("stages", args.stage), ("seed", args.seed)]
    changes = {key: settings.parse(RunConfig, key, text) for key, text in given if text is not None}
    for assignment in args.set:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set: expected KEY=VALUE, got {assignment!r}")
        changes[key] = settings.parse(RunConfig, key, text)
    # Absolute, so that the run can be resumed from another folder.
    typed = settings.with_absolute_paths(RunConfig, settings.nested(changes), Path.cwd())
    return args.preset or preset, settings.merged(values, typed)


def _new(args: argparse.Namespace) -> tuple[Path, RunConfig]:
    """Folder and settings of a new run."""
    preset, values = _asked_for(args)
    if args.config is None and args.start is None:
        preset = preset or "tiny"
    config = settings_of(preset, values)
    name = args.config.stem if args.config is not None else preset or "run"
    folder = args.out or run_folder.next_free(RUNS, name)
    if run_folder.holds_run(folder):
        raise ValueError(f"--out {folder} holds a run already; add --resume to go on with it, or name another folder")
    return folder, config


def _resumed(args: argparse.Namespace) -> tuple[Path, RunConfig]:
    """Folder and settings of a run that goes on: the settings are the stored ones."""
    folder = args.out or run_folder.newest_run(RUNS)
    if folder is None:
        raise ValueError(f"--resume: no run below {RUNS}; name its folder with --out, or leave out --resume to start one")
    config = run_folder.stored_config(folder)
    preset, values = _asked_for(args)
    asked = settings_of(preset, values) if preset or args.config else settings.updated(config, values)
    if asked != config:
        before, after = settings.flat(config), settings.flat(asked)
        differing = "; ".join(f"{key} is {before[key]!r}, not {after[key]!r}" for key in before if before[key] != after[key])
        raise ValueError(f"--resume: the run in {folder} keeps its settings ({differing}); leave the option out, or start another run")
    return folder, config


def _epilog() -> str:
    """The settings for --help: key, default in the tiny preset, meaning."""
    values = settings.flat(PRESETS["tiny"])
    lines = ["settings (--set KEY=VALUE, or the same keys in a TOML file), with their values in the tiny preset:"]
    for key, (entry, _) in settings.all_settings(RunConfig).items():
        value = (
            ",".join(values[key])
            if isinstance(values[key], tuple)
            else str(values[key]).lower()
            if isinstance(values[key], bool)
            else values[key]
        )
        choices = f" ({', '.join(entry.metadata['choices'])})" if entry.metadata["choices"] else ""
        lines.append(f"  {key + '=' + str(value):34} {entry.metadata['help']}{choices}")
    lines += ["", "exit codes: 0 done, 1 the run failed, 2 usage, 130 or 143 interrupted by SIGINT or SIGTERM and saved"]
    return "\n".join(lines)
