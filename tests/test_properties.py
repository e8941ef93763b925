"""Properties that hold for all problems: documents in any arrangement, heads and tokens in any split, queries in any tile.

Documents are lists of lengths; an arrangement says where they lie in memory. Results are compared per document.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import (
    TOKEN_RESULTS,
    Sizes,
    assert_close,
    assert_token_split_equals_whole,
    by_document_ids,
    chain,
    masked,
    normalise,
    packed,
    packed_with_room,
    random_documents,
    random_inputs,
    run_alone,
    run_documents,
)
from hypothesis import given
from hypothesis import strategies as st

import csakit
from csakit import Layout

FEW = st.integers(1, 3)
seeds = st.integers(0, 10_000)
tiles = st.sampled_from([None, 1, 2, 5, 16])


@st.composite
def problems(draw, documents: int = 4, heads: st.SearchStrategy = FEW) -> tuple[list[int], Sizes]:
    """Document lengths around multiples of the ratio, and sizes; windows of 0 and 1, K above and below the visible count."""
    ratio = draw(st.integers(1, 4))
    lengths = st.sampled_from([0, 1, ratio - 1, ratio, ratio + 1, 2 * ratio, 3 * ratio + 1, 11])
    sizes = Sizes(
        ratio=ratio,
        window=draw(st.sampled_from([0, 1, 2, 5, 40])),
        topk=draw(st.sampled_from([1, 2, 3, 9])),
        heads=draw(heads),
        index_heads=draw(st.integers(1, 3)),
        sink=draw(st.booleans()),
        overlap=draw(st.booleans()),
        objective=draw(st.sampled_from(["sparse", "dense"])),
    )
    return draw(st.lists(lengths, min_size=1, max_size=documents).filter(any)), sizes


def backend_of(tile: int | None):
    return csakit.backend("cpu", tile=tile) if tile else csakit.backend("reference")


def arrangements(lengths: list[int], sizes: Sizes, extra: int) -> dict:
    return {
        "packed": packed(lengths, sizes, spare=extra),
        "room": packed_with_room(lengths, sizes, room=extra),
        "left": masked(lengths, sizes, side="left", extra=extra),
        "right": masked(lengths, sizes, side="right", extra=extra),
        "ids": by_document_ids(lengths, sizes, between=extra),
        "one_row": by_document_ids(lengths, sizes, rows=1, between=max(extra, 1)),
    }


# ---- documents -------------------------------------------------------------------------------------------------------


@given(problems(), st.integers(0, 3), seeds, tiles)
def test_documents_give_the_same_results_in_every_arrangement_as_alone(problem, extra: int, seed: int, tile) -> None:
    lengths, sizes = problem
    documents, shared = random_documents(lengths, sizes, seed)
    with backend_of(tile):
        alone = run_alone(documents, shared, sizes)
        for name, arrangement in arrangements(lengths, sizes, extra).items():
            assert_close(run_documents(documents, shared, arrangement, sizes), alone, label=name)


@given(problems(), st.integers(1, 3), seeds, tiles, st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_what_padding_holds_changes_nothing(problem, extra: int, seed: int, tile, poison: float) -> None:
    lengths, sizes = problem
    documents, shared = random_documents(lengths, sizes, seed)
    with backend_of(tile):
        for arrangement in list(arrangements(lengths, sizes, extra).values())[seed % 2 :: 2]:
            clean, dirty = (run_documents(documents, shared, arrangement, sizes, filler=f) for f in (0.0, poison))
            assert_close(dirty, clean)


@given(problems(), seeds, tiles, st.randoms(use_true_random=False))
def test_permuting_documents_permutes_results(problem, seed: int, tile, random) -> None:
    lengths, sizes = problem
    order = random.sample(range(len(lengths)), len(lengths))
    documents, shared = random_documents(lengths, sizes, seed)
    with backend_of(tile):
        straight = run_documents(documents, shared, packed(lengths, sizes), sizes)
        permuted = run_documents([documents[i] for i in order], shared, packed([lengths[i] for i in order], sizes), sizes)
    common = ("loss", *(f"d_{name}" for name in shared))
    assert_close(permuted, straight, keys=common)
    for name in straight:
        if name not in common:
            parts = straight[name].split(lengths)
            assert_close(permuted[name], torch.cat([parts[i] for i in order]))


@given(problems(documents=2), st.integers(1, 9), seeds, tiles)
def test_appending_tokens_never_changes_earlier_rows(problem, more: int, seed: int, tile) -> None:
    """The last document grows; rows that were there keep output, selection, teacher and KL, and the gradients their own rows receive."""
    lengths, sizes = problem
    lengths[-1] += 1
    tokens = sum(lengths)
    grown, shared = random_documents([*lengths[:-1], lengths[-1] + more], sizes, seed)
    documents = [{name: x[:n] for name, x in d.items()} for d, n in zip(grown, lengths)]
    with backend_of(tile):
        before = run_documents(documents, shared, packed(lengths, sizes), sizes)
        after = run_documents(grown, shared, packed([len(d["q"]) for d in grown], sizes), sizes)
    for name in (*TOKEN_RESULTS, "d_q", "d_q_index", "d_weights"):
        if name in before:
            assert_close(after[name][:tokens], before[name])


@given(problems(), seeds)
def test_layouts_keep_their_promises(problem, seed: int) -> None:
    """The integers of every arrangement follow from row, first token and length of each document."""
    lengths, sizes = problem
    for arrangement in arrangements(lengths, sizes, seed % 4).values():
        for layout, ratio in ((arrangement.layout, sizes.ratio), (arrangement.layout.with_ratio(3), 3)):
            rows, tokens = layout.positions.shape
            assert (layout.ratio, layout.window, layout.num_entries, layout.kv_offset) == (ratio, sizes.window, tokens // ratio, 0)
            assert layout.valid.dtype is torch.bool and layout.entry_token.shape == (rows, tokens // ratio)
            assert all(
                getattr(layout, f).dtype is torch.int32 for f in ("positions", "window_start", "entry_start", "entry_stop", "entry_token")
            )
            want = {"positions": [[0] * tokens for _ in range(rows)], "valid": [[False] * tokens for _ in range(rows)]}
            want.update({name: [[0] * tokens for _ in range(rows)] for name in ("entry_start", "entry_stop")})
            want["window_start"] = [[t + 1 for t in range(tokens)] for _ in range(rows)]
            entry_token: list[list[int]] = [[] for _ in range(rows)]
            for (row, first), n in zip(arrangement.places, lengths):
                for p in range(n):
                    t = first + p
                    want["positions"][row][t], want["valid"][row][t] = p, True
                    want["window_start"][row][t] = first + max(0, p - sizes.window + 1)
                    want["entry_start"][row][t] = len(entry_token[row])
                    want["entry_stop"][row][t] = len(entry_token[row]) + (p + 1) // ratio
                entry_token[row] += [first + e * ratio for e in range(n // ratio)]
            want["entry_token"] = [row + [-1] * (tokens // ratio - len(row)) for row in entry_token]
            for name, value in want.items():
                assert getattr(layout, name).tolist() == value, name


# ---- heads -----------------------------------------------------------------------------------------------------------


@given(problems(heads=st.just(1)), seeds, tiles)
def test_with_one_head_window_and_sink_cancel_in_the_teacher(problem, seed: int, tile) -> None:
    lengths, sizes = problem
    documents, shared = random_documents(lengths, sizes, seed)
    other, other_shared = random_documents(lengths, sizes, seed + 1)
    moved = [d | {"kv": o["kv"]} for d, o in zip(documents, other)]
    moved_shared = shared | {name: other_shared[name] for name in ("sink",) if name in shared}
    with backend_of(tile):
        before, after = (run_documents(d, s, packed(lengths, sizes), sizes) for d, s in ((documents, shared), (moved, moved_shared)))
    names = ("kl", "loss", "d_q_index", "d_weights", "d_index_values", "d_index_gates", "d_index_bias")
    assert_close(after, before, keys=names)
    if sizes.objective == "sparse":
        assert_close(normalise(after["log_mass"]), normalise(before["log_mass"]))


@given(problems(heads=st.sampled_from([2, 4])), seeds, tiles, st.sampled_from([1, 2]))
def test_heads_in_parts_give_the_whole(problem, seed: int, tile, per_rank: int) -> None:
    """out, lse and gradients of a head part are those of the whole; log_mass combines by logsumexp."""
    lengths, sizes = problem
    sizes = replace(sizes, objective="sparse")
    layout = packed(lengths, sizes).layout
    inputs = random_inputs(1, sum(lengths), sizes, seed)
    with backend_of(tile):
        whole = chain(inputs, layout, sizes)
        ranks = sizes.heads // per_rank
        by_head = {name: inputs[name].chunk(ranks, 2) for name in ("q", "d_out")}
        sinks = inputs["sink"].chunk(ranks) if sizes.sink else None
        parts = []
        for rank in range(ranks):
            x = inputs | {name: chunks[rank] for name, chunks in by_head.items()}
            if sinks:
                x["sink"] = sinks[rank]
            parts.append(chain(x, layout, replace(sizes, heads=per_rank)))
    for name in ("out", "lse", "d_q"):
        assert_close(torch.cat([p[name] for p in parts], 2), whole[name])
    for name in ("d_kv", "d_values", "d_gates", "d_bias"):
        assert_close(sum(p[name] for p in parts), whole[name])
    mass = torch.stack([p["log_mass"] for p in parts]).logsumexp(0)
    assert_close(mass, whole["log_mass"])
    scores = whole["scores"].requires_grad_()
    together = csakit.distill(scores, mass, layout, weight=inputs["weight"], divisor=7.0)
    assert_close(together.loss, whole["loss"])


# ---- tokens ----------------------------------------------------------------------------------------------------------


@given(problems(), seeds, tiles, st.sampled_from([1, 2, 4, 8]))
def test_tokens_in_parts_give_the_whole(problem, seed: int, tile, world: int) -> None:
    lengths, sizes = problem
    layout = packed(lengths, sizes, spare=-sum(lengths) % world).layout
    with backend_of(tile):
        assert_token_split_equals_whole(random_inputs(1, layout.positions.shape[1], sizes, seed), layout, sizes, world)


@given(problems(), seeds)
def test_the_tile_changes_nothing_beyond_rounding(problem, seed: int) -> None:
    lengths, sizes = problem
    layout = by_document_ids(lengths, sizes).layout
    inputs = random_inputs(*layout.positions.shape, sizes, seed)
    with csakit.backend("reference"):
        want = chain(inputs, layout, sizes)
    for tile in (None, 1, 3, 16):
        with csakit.backend("cpu", tile=tile):
            assert_close(chain(inputs, layout, sizes), want)


MANY_CHUNKS = {
    "few of many entries": (Sizes(ratio=1, window=5, topk=3), [300]),
    "nearly every entry": (Sizes(ratio=4, window=5, topk=60), [300]),
    "window beyond a chunk": (Sizes(ratio=8, window=200, topk=4), [300]),
    "no window, every entry": (Sizes(ratio=2, window=0, objective="dense"), [300]),
    "many short documents": (Sizes(ratio=3, window=40, topk=2), [7, 1, 0, 3, 11, 2, 5] * 11),
    "long and short documents": (Sizes(ratio=2, window=9, topk=40, objective="dense", sink=False), [180, 3, 1, 119]),
}


@pytest.mark.parametrize("case", MANY_CHUNKS)
def test_the_fast_backend_equals_the_reference_over_many_chunks(case: str) -> None:
    """Lengths at which the backend itself chooses between blocks and gathered rows, in its own and in a small tile."""
    sizes, lengths = MANY_CHUNKS[case]
    layout = packed(lengths, sizes, spare=5).layout
    inputs = random_inputs(1, sum(lengths) + 5, sizes, seed=len(lengths))
    with csakit.backend("reference"):
        want = chain(inputs, layout, sizes)
    for tile in (None, 16):
        with csakit.backend("cpu", tile=tile):
            assert_close(chain(inputs, layout, sizes), want, 1e-11)


# ---- general attention -----------------------------------------------------------------------------------------------


@given(st.sampled_from([(4, 1, 2), (4, 2, 1), (4, 2, 4), (6, 3, 2), (4, 4, 2)]), st.integers(0, 4), seeds, tiles)
def test_kv_heads_and_sets_equal_one_run_per_head(shape, window: int, seed: int, tile) -> None:
    """H heads over G KV heads in S sets: head h alone, with KV head h // (H / G) and set h // (H / S), gives the same numbers."""
    heads, kv_heads, sets = shape
    layout = Layout.from_document_ids(
        torch.tensor([[0] * 5 + [1] * 9 + [-1], [-1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4]]), ratio=2, window=window
    )
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, sink = normal(2, 15, heads, 3), normal(heads)
    kv, values = (normal(2, 15, kv_heads, 3), normal(2, 15, kv_heads, 2)) if window else (None, None)
    entries, entry_values = normal(2, 7, kv_heads, 3), normal(2, 7, kv_heads, 2)
    index = normal(2, 15, sets * 2, 3), normal(2, 7, 3), normal(2, 15, sets * 2)
    with backend_of(tile):
        selection = csakit.select(*index, 2, layout, sets=sets)
        chosen = selection.indices if sets > 1 else selection.indices[:, :, None]
        whole = csakit.attend(
            q, kv, entries, layout, indices=selection.indices, sink=sink, values=values, entry_values=entry_values, teacher=True
        )
        masses: list[list] = [[] for _ in range(sets)]
        for h in range(heads):
            g, s = h // (heads // kv_heads), h // (heads // sets)
            one = csakit.attend(
                q[:, :, h : h + 1],
                None if kv is None else kv[:, :, g],
                entries[:, :, g],
                layout,
                indices=chosen[:, :, s],
                sink=sink[h : h + 1],
                values=None if values is None else values[:, :, g],
                entry_values=entry_values[:, :, g],
                teacher=True,
            )
            assert_close(whole.out[:, :, h], one.out[:, :, 0])
            assert_close(whole.lse[:, :, h], one.lse[:, :, 0])
            masses[s].append(one.log_mass)
        for s in range(sets):
            mass = whole.log_mass[:, :, s] if sets > 1 else whole.log_mass
            assert_close(mass, torch.stack(masses[s]).logsumexp(0))
            alone = csakit.select(index[0][:, :, 2 * s : 2 * s + 2], index[1], index[2][:, :, 2 * s : 2 * s + 2], 2, layout)
            assert torch.equal(alone.indices, chosen[:, :, s]), "a set is its own heads, with the scale of its own heads"
            assert_close(selection.scores[:, :, s] if sets > 1 else selection.scores, alone.scores)
        kl = [csakit.distill(selection.scores[:, :, s], whole.log_mass[:, :, s], layout).kl for s in range(sets)] if sets > 1 else []
        if kl:
            assert_close(csakit.distill(selection.scores, whole.log_mass, layout).kl, torch.stack(kl).mean(0))


@given(st.integers(1, 3), seeds, tiles)
def test_one_set_with_and_without_its_axis_is_the_same(topk: int, seed: int, tile) -> None:
    layout = Layout.batch(2, 9, ratio=2, window=2)
    inputs = random_inputs(2, 9, Sizes(), seed)
    entries = inputs["kv"][:, :4]
    with backend_of(tile):
        indices = csakit.select(inputs["q_index"], inputs["index_values"][:, :4, :3], inputs["weights"], topk, layout).indices
        plain = csakit.attend(inputs["q"], inputs["kv"], entries, layout, indices=indices, teacher=True)
        axis = csakit.attend(inputs["q"], inputs["kv"], entries, layout, indices=indices[:, :, None].long(), teacher=True)
    assert_close(axis.out, plain.out, 0.0)
    assert axis.log_mass.shape == (2, 9, 1, topk)
    assert_close(axis.log_mass[:, :, 0], plain.log_mass, 0.0)


@given(problems(documents=2), seeds, tiles, st.integers(0, 3))
def test_the_order_of_a_selection_and_its_empty_slots_do_not_matter(problem, seed: int, tile, holes: int) -> None:
    """Slots shuffled among empty ones, and one empty slot more: same output; log_mass moves with its slot."""
    lengths, sizes = problem
    layout = packed(lengths, sizes).layout
    inputs = random_inputs(1, sum(lengths), sizes, seed)
    kv = inputs["kv"] if sizes.window else None
    entries = inputs["kv"][:, : layout.num_entries]
    index = inputs["q_index"], inputs["index_values"][:, : layout.num_entries, :3], inputs["weights"]
    with backend_of(tile):
        indices = csakit.select(*index, sizes.topk, layout).indices
        more = torch.cat([indices, torch.full((*indices.shape[:2], holes), -1, dtype=torch.int32)], -1)
        order = torch.randperm(more.shape[-1], generator=torch.Generator().manual_seed(seed))
        plain, shuffled = (
            csakit.attend(inputs["q"], kv, entries, layout, indices=i, sink=inputs.get("sink"), teacher=True)
            for i in (indices, more[..., order])
        )
    assert_close(shuffled.out, plain.out)
    padded = torch.nn.functional.pad(plain.log_mass, (0, holes), value=-math.inf)
    assert_close(shuffled.log_mass, padded[..., order])


@pytest.mark.parametrize("world", [2, 4, 8])
def test_cuts_fall_inside_blocks_and_documents_in_the_split_tests(world: int) -> None:
    """The premise of the token split test: some cut lies inside a block and inside a document."""
    layout = Layout.packed(torch.tensor([0, 5, 5, 16, 23]), ratio=3, window=4, tokens=24)
    cuts = [rank * 24 // world for rank in range(1, world)]
    positions = layout.positions[0, cuts]
    assert (positions > 0).any() and (positions % 3 > 0).any()
