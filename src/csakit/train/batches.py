"""Rows of packed documents, as tensors.

A document is a separator followed by its tokens, so that every token is predicted exactly once. Documents that fit into a
row are never cut; longer ones are cut into rows of their own and a rest. Pieces are packed so that little of a row stays
empty. Which rows a step sees follows from the seed and the number of the step alone: a resumed run replays nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from csakit.train.tokens import Encoded


class Piece(NamedTuple):
    """Tokens `start .. stop-1` of one document, the separator being its token 0."""

    document: int
    start: int
    stop: int


class Batch(NamedTuple):
    """A micro-batch. A token of an empty place is a separator that is a document of its own and counts nowhere."""

    input_ids: Tensor  # [B, T] int64
    position_ids: Tensor  # [B, T] int64: place inside the piece; 0 on empty places
    document_ids: Tensor  # [B, T] int64: number of the piece in its row; -1 on empty places
    targets: Tensor  # [B, T] int64: the following token; 0 where there is none
    sizes: Tensor  # [B, T] int64: bytes of text the following token stands for; 0 where there is none
    predicted: Tensor  # [B, T] bool: the following token is of the same piece

    @property
    def real(self) -> Tensor:
        """[B, T] bool: the places that hold text."""
        return self.document_ids >= 0

    def to(self, device: torch.device | str) -> Batch:
        """The same on a device."""
        return Batch(*(tensor.to(device) for tensor in self))


def cut(documents: Sequence[Encoded], length: int) -> list[Piece]:
    """Every token of every document in pieces of at most `length` tokens."""
    pieces = []
    for number, document in enumerate(documents):
        tokens = len(document.ids) + 1
        pieces += [Piece(number, start, min(start + length, tokens)) for start in range(0, tokens, length)]
    return pieces


def pack(pieces: list[Piece], length: int) -> list[list[Piece]]:
    """The pieces in rows of at most `length` tokens: the longest piece first, each into the fullest row that takes it."""
    rows: list[list[Piece]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for piece in sorted(pieces, key=lambda piece: (piece.start - piece.stop, piece)):
        size = piece.stop - piece.start
        place = bisect_left(free, (size, 0))
        if place < len(free):
            left, row = free.pop(place)
            rows[row].append(piece)
        else:
            left, row = length, len(rows)
            rows.append([piece])
        if left > size:
            insort(free, (left - size, row))
    return rows


@dataclass(frozen=True)
class Rows:
    """The packed rows of some documents."""

    documents: Sequence[Encoded]
    rows: list[list[Piece]]
    length: int
    separator: int

    @classmethod
    def of(cls, documents: Sequence[Encoded], length: int, separator: int) -> Rows:
        """The documents packed into rows of `length` tokens."""
        return cls(documents, pack(cut(documents, length), length), length, separator)

    def numbers(self, seed: int, start: int, count: int) -> list[int]:
        """Which rows the draws `start .. start+count-1` are: each pass over the rows has its own order."""
        found: list[int] = []
        while len(found) < count:
            passed, place = divmod(start + len(found), len(self.rows))
            order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed((seed << 20) + passed))
            found += order[place : place + count - len(found)].tolist()
        return found

    def batch(self, numbers: list[int]) -> Batch:
        """The rows of the given numbers as tensors."""
        shape = (len(numbers), self.length)
        empty = torch.zeros(shape, dtype=torch.int64)
        input_ids, document_ids = torch.full_like(empty, self.separator), torch.full_like(empty, -1)
        position_ids, targets, sizes = (empty.clone() for _ in range(3))
        predicted = torch.zeros(shape, dtype=torch.bool)
        for row, number in enumerate(numbers):
            begin = 0
            for place, piece in enumerate(self.rows[number]):
                tokens, bytes_of = self._tokens(piece)
                end = begin + len(tokens)
                input_ids[row, begin:end] = tokens
                position_ids[row, begin:end] = torch.arange(len(tokens))
                document_ids[row, begin:end] = place
                targets[row, begin : end - 1] = tokens[1:]
                sizes[row, begin : end - 1] = bytes_of[1:]
                predicted[row, begin : end - 1] = True
                begin = end
        return Batch(input_ids, position_ids, document_ids, targets, sizes, predicted)

    def selecting(self, ratio: int, topk: int) -> int:
        """How many tokens see more than `topk` entries, so that they have to choose."""
        first = ratio * (topk + 1) - 1
        return sum(max(0, piece.stop - piece.start - first) for row in self.rows for piece in row)

    def _tokens(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """The ids of a piece and the bytes each stands for, int64; a separator stands for none."""
        ids, sizes = self.documents[piece.document]
        inside = slice(max(piece.start - 1, 0), piece.stop - 1)
        tokens = ids[inside].long()
        bytes_of = torch.ones_like(tokens) if sizes is None else sizes[inside].long()
        if piece.start:
            return tokens, bytes_of
        return torch.cat([tokens.new_tensor([self.separator]), tokens]), torch.cat([bytes_of.new_zeros(1), bytes_of])
