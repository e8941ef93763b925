"""How trained indexers pick, beside the selections that `csakit bench` makes up: `python benchmarks/selections.py RUN [TEXT]`.

RUN is the folder of a run of `csakit train`, TEXT a file (default: a module of the standard library). Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import csakit
from csakit import Layout
from csakit.bench import selections

LENGTHS = ((1024, 32), (2048, 64))  # tokens, picks: the sixth part of what an average query of the later half sees


def picks_of(model: torch.nn.Module, ids: Tensor, topk: int) -> list[Tensor]:
    """The picks [1, T, K] of every indexer of a model with csakit installed."""
    found, select = [], csakit.select

    def keeping(q, k, weights, own_topk, layout, **options):
        found.append(select(q, k, weights, topk, layout, **options).indices)
        return select(q, k, weights, own_topk, layout, **options)

    csakit.select = keeping
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        csakit.select = select
    return found


def trained(folder: Path) -> tuple[torch.nn.Module, int, int]:
    """(the model of a run at its newest checkpoint, its window, its ratio)."""
    from csakit.train import checkpoint, model
    from csakit.train.folder import stored_config

    config = stored_config(folder)
    built = model.build(config)
    newest = checkpoint.newest(folder / "checkpoints")
    if newest is None:
        sys.exit(f"{folder} has no whole checkpoint")
    checkpoint.restore(newest, built.model, None)
    model.set_stage(built, config.sparse)
    return built.model, config.model.sliding_window, config.model.csa_ratio


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("text", type=Path, nargs="?", default=Path(argparse.__file__))
    args = parser.parse_args(arguments)
    model, window, ratio = trained(args.run)
    text = args.text.read_bytes()
    for tokens, topk in LENGTHS:
        layout = Layout.batch(1, tokens, ratio=ratio, window=window)
        ids = torch.tensor(list(text[:tokens]))[None]
        found = {f"trained, indexer {number}": picked for number, picked in enumerate(picks_of(model, ids, topk), 1)}
        found |= {kind: selections.make(kind, layout, topk, torch.Generator().manual_seed(0)) for kind in ("clustered", "uniform")}
        columns = {name: selections.statistics(picked, layout) for name, picked in found.items()}
        print(f"| {tokens} tokens, {topk} picks of {tokens // ratio} entries | {' | '.join(columns)} |")
        print(f"| --- |{' --- |' * len(columns)}")
        for line in next(iter(columns.values())):
            print(f"| {line} | {' | '.join(f'{column[line]:.2f}' for column in columns.values())} |")
        print()


if __name__ == "__main__":
    main()
