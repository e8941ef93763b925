"""Packing: what a row holds, what is predicted, and that a step alone decides its rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from csakit.train.batches import Piece, Rows, cut, pack
from csakit.train.tokens import ByteTokenizer, Encoded

LENGTH = 16


def documents(*sizes: int) -> list[Encoded]:
    """Documents of the given sizes whose bytes say where they come from."""
    return ByteTokenizer().encode([bytes((number * 37 + place) % 256 for place in range(size)) for number, size in enumerate(sizes)])


@given(st.lists(st.integers(0, 70), min_size=1, max_size=30))
def test_every_token_is_in_exactly_one_row_and_no_row_is_too_long(sizes):
    texts = documents(*sizes)
    rows = pack(cut(texts, LENGTH), LENGTH)
    assert all(sum(piece.stop - piece.start for piece in row) <= LENGTH for row in rows)
    tokens = [(piece.document, token) for row in rows for piece in row for token in range(piece.start, piece.stop)]
    assert sorted(tokens) == [(number, token) for number, size in enumerate(sizes) for token in range(size + 1)]


@given(st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=30))
def test_a_document_that_fits_into_a_row_is_never_cut(sizes):
    rows = pack(cut(documents(*sizes), LENGTH), LENGTH)
    assert sorted(piece for row in rows for piece in row) == [Piece(number, 0, size + 1) for number, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 70), min_size=1, max_size=30))
def test_at_most_one_row_is_less_than_half_full(sizes):
    rows = pack(cut(documents(*sizes), LENGTH), LENGTH)
    assert sum(2 * sum(piece.stop - piece.start for piece in row) <= LENGTH for row in rows) <= 1


@given(st.lists(st.integers(0, 70), min_size=1, max_size=30))
def test_every_byte_is_predicted_once_except_where_a_long_document_was_cut(sizes):
    texts = documents(*sizes)
    rows = Rows.of(texts, LENGTH, 256)
    batch = rows.batch(list(range(len(rows.rows))))
    cuts = sum(size // LENGTH for size in sizes)
    assert int(batch.predicted.sum()) == int(batch.sizes.sum()) == sum(sizes) - cuts
    assert torch.equal(batch.targets[:, :-1][batch.predicted[:, :-1]], batch.input_ids[:, 1:][batch.predicted[:, :-1]])
    assert not batch.predicted[:, -1].any() and int(batch.targets.max()) < 256


def test_a_row_shows_its_documents_by_position_and_number():
    batch = Rows.of(documents(4, 7), LENGTH, 256).batch([0])
    assert batch.position_ids[0].tolist() == [*range(8), *range(5), 0, 0, 0]
    assert batch.document_ids[0].tolist() == [0] * 8 + [1] * 5 + [-1] * 3
    assert batch.input_ids[0].tolist() == [256, *range(37, 44), 256, *range(4), 256, 256, 256]
    assert batch.predicted[0].tolist() == [True] * 7 + [False] + [True] * 4 + [False] * 4
    assert torch.equal(batch.real, batch.document_ids >= 0)


def test_the_second_piece_of_a_long_document_begins_without_a_separator():
    rows = Rows.of(documents(20), LENGTH, 256)
    batch = rows.batch([0, 1])
    assert batch.input_ids[0].tolist() == [256, *range(15)]
    assert batch.input_ids[1, :5].tolist() == [15, 16, 17, 18, 19] and batch.position_ids[1, :5].tolist() == [0, 1, 2, 3, 4]


def test_a_pass_draws_every_row_once_and_the_next_pass_in_another_order():
    rows = Rows.of(documents(*[15] * 40), LENGTH, 256)
    first, second = rows.numbers(3, 0, 40), rows.numbers(3, 40, 40)
    assert sorted(first) == sorted(second) == list(range(40)) and first != second
    assert rows.numbers(4, 0, 40) != first


@given(st.integers(0, 200), st.integers(1, 50))
def test_a_draw_is_the_same_whatever_was_drawn_before(start, count):
    rows = Rows.of(documents(*[15] * 23), LENGTH, 256)
    assert rows.numbers(0, start, count) == rows.numbers(0, 0, start + count)[start:]


@pytest.mark.parametrize("ratio, topk, expected", [(4, 1, 9), (4, 3, 1), (4, 4, 0), (2, 1, 13)])
def test_the_tokens_that_have_to_choose_are_those_that_see_more_than_topk_entries(ratio, topk, expected):
    rows = Rows.of(documents(15), LENGTH, 256)
    assert rows.selecting(ratio, topk) == expected == sum((position + 1) // ratio > topk for position in range(16))
