"""Rows of text: every row lies inside one document, so that its end has seen a long past."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from csakit.train.config import DataConfig
from csakit.train.corpus import Corpus, Document, load


@cache
def corpus() -> Corpus:
    """The source of Python's standard library, in training and held-out documents."""
    return load(DataConfig())


def training_rows(seed: int, step: int, rows: int, tokens: int) -> Tensor:
    """[rows, tokens + 1] int64 bytes from random places of the training documents; the same for the same seed and step."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    documents = [document for document in corpus().training if len(document.text) > tokens]
    places = torch.tensor([len(document.text) - tokens for document in documents]).cumsum(0)
    drawn = torch.randint(int(places[-1]), (rows,), generator=generator)
    numbers = torch.searchsorted(places, drawn, right=True)
    return torch.stack([_row(documents[n], int(places[n] - 1 - at), tokens) for n, at in zip(numbers.tolist(), drawn)])


def heldout_rows(rows: int, tokens: int) -> Tensor:
    """[rows, tokens + 1] int64 bytes: whole stretches of the held-out documents, spread evenly over them.

    Raises:
        ValueError: the held-out documents have fewer.
    """
    places = [(d, start) for d in corpus().heldout for start in range(0, len(d.text) - tokens, tokens)]
    if len(places) < rows:
        raise ValueError(f"rows must be at most {len(places)}, the held-out stretches of {tokens} bytes; got {rows}")
    return torch.stack([_row(*places[number * len(places) // rows], tokens) for number in range(rows)])


def _row(document: Document, start: int, tokens: int) -> Tensor:
    return torch.frombuffer(bytearray(document.text[start : start + tokens + 1]), dtype=torch.uint8).long()
