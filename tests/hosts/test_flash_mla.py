"""The adapter for fused sparse kernels gives the teacher of csakit's own attention, in every index space and convention."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from fused_kernel import flash_mla_sparse_fwd
from helpers import assert_close

import csakit
from csakit import Layout
from csakit.integrations import flash_mla
from csakit.integrations.flash_mla import Addresses

HEADS, WIDTH, TOPK, INF = 3, 8, 3, float("inf")
MASK = torch.tensor([[1] * 21, [0] * 4 + [1] * 15 + [0] * 2])
LENGTHS, ROOM = torch.tensor([0, 9, 9, 21, 24]), torch.tensor([0, 12, 12, 26, 32])


class Case(NamedTuple):
    layout: Layout
    addresses: Addresses
    q: torch.Tensor
    kv: torch.Tensor
    entries: torch.Tensor
    chosen: torch.Tensor
    sink: torch.Tensor


def packed() -> Layout:
    return Layout.packed(LENGTHS, cu_seqlens_padded=ROOM, tokens=32, ratio=4, window=5)


ADDRESSES = {
    "sbhd": lambda: Addresses.sbhd(Layout.batch(2, 21, ratio=4, window=5)),
    "sbhd with padding": lambda: Addresses.sbhd(Layout.from_mask(MASK, ratio=4, window=5)),
    "bshd with padding": lambda: Addresses.bshd(Layout.from_mask(MASK, ratio=4, window=5)),
    "thd with padded documents": lambda: Addresses.thd(packed(), ROOM),
    "thd, padding compressed too": lambda: Addresses.thd(packed(), ROOM, cu_entries=torch.tensor([0, 3, 3, 6, 7])),
    "entries behind a packed row": lambda: Addresses.sbhd(packed()),
    "a context-parallel rank": lambda: Addresses.sbhd(packed().shard(1, 2)),
    "no window": lambda: Addresses.sbhd(Layout.batch(2, 12, ratio=1, window=0)),
}


@pytest.fixture(params=ADDRESSES)
def case(request: pytest.FixtureRequest) -> Case:
    return make(ADDRESSES[request.param]())


def make(addresses: Addresses) -> Case:
    layout, random = addresses.layout, torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    rows, tokens = layout.positions.shape
    q, kv = normal(rows, tokens, HEADS, WIDTH), normal(rows, tokens + layout.kv_offset, WIDTH)
    entries, scores = normal(rows, layout.num_entries, WIDTH), normal(rows, tokens, layout.num_entries)
    number = torch.arange(layout.num_entries)
    seen = (number >= layout.entry_start[..., None]) & (number < layout.entry_stop[..., None])
    best = scores.masked_fill(~seen, -INF).topk(TOPK)
    chosen = torch.where(best.values > -INF, best.indices, -1).to(torch.int32)
    return Case(layout, addresses, 3 * q, kv, entries, chosen, torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64))


def run(case: Case, indices: torch.Tensor, sink: torch.Tensor | None, **options):
    memory = case.addresses.memory(case.kv, case.entries)[:, None]
    return flash_mla_sparse_fwd(
        case.addresses.flatten(case.q), memory, indices[:, None], WIDTH**-0.5, WIDTH, None if sink is None else sink.float(), **options
    )


@pytest.mark.parametrize("sink", [None, [0.5, -2.0, 3.0], [-INF, 0.0, INF]])
@pytest.mark.parametrize("compacted", [False, True])
def test_output_lse_and_teacher_of_a_fused_kernel_are_those_of_attend(case: Case, compacted: bool, sink) -> None:
    sink = None if sink is None else torch.tensor(sink, dtype=torch.float64)
    want = csakit.attend(case.q, case.kv, case.entries, case.layout, indices=case.chosen, sink=sink, teacher=True)
    indices, lengths = case.addresses.indices(case.chosen, multiple=16), None
    if compacted:
        indices, lengths = flash_mla.compact(indices)
        indices = torch.where(
            indices < 0, case.addresses.entries.max().int(), indices
        )  # what lies behind a row's length is not read, whatever it says
    out, greatest, lse = run(case, indices, sink, topk_length=lengths)
    got = flash_mla.read(lse, indices, case.addresses, sink=sink, slots=TOPK, lengths=lengths, max_logits=greatest)
    valid = case.layout.valid[..., None, None]
    assert_close(torch.where(valid, case.addresses.unflatten(out), 0), want.out, 1e-12)
    assert_close(got.lse, want.lse, 1e-12)
    assert torch.equal(got.indices.sort(-1).values, case.chosen.sort(-1).values)
    mass = csakit.teacher_log_mass(case.q, case.entries, got.lse, case.layout, indices=case.chosen)
    assert_close(mass, want.log_mass, 1e-12)


@pytest.mark.parametrize("dense", [False, True])
def test_attend_by_a_kernel_is_attend(case: Case, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashMLA's function is found where it is installed; padding gives 0 whatever the kernel wrote there."""

    def kernel(*given):
        assert given[5].dtype == torch.float32 and given[0].requires_grad is False
        out, greatest, lse = flash_mla_sparse_fwd(*given)
        empty = (given[2] < 0).all(-1)[..., None]
        return out.masked_fill(empty, float("nan")), greatest, lse

    monkeypatch.setitem(sys.modules, "flash_mla", SimpleNamespace(flash_mla_sparse_fwd=kernel))
    indices = None if dense else case.chosen
    q = case.q.clone().requires_grad_()
    want = csakit.attend(
        case.q, case.kv if case.layout.window else None, case.entries, case.layout, indices=indices, sink=case.sink, teacher=True
    )
    got = flash_mla.attend(q, case.kv, case.entries, case.addresses, indices=indices, sink=case.sink, teacher=True)
    assert not got.out.requires_grad
    assert_close(got.out, want.out, 1e-12)
    assert_close(got.lse, want.lse, 1e-12)
    assert (got.log_mass is None) == (indices is None)
    if indices is not None:
        assert_close(got.log_mass, want.log_mass, 1e-12)


def test_attend_by_a_kernel_of_another_form() -> None:
    """cuDNN's takes keys and indices without a head axis and returns more; TileLang's works in powers of two and marks no empty row."""
    case = make(ADDRESSES["sbhd with padding"]())
    want = csakit.attend(case.q, case.kv, case.entries, case.layout, indices=case.chosen, sink=case.sink)

    def cudnn(q, kv, indices, scale, width, sink):
        assert kv[:, 0].shape == (case.addresses.size, WIDTH)
        found = dict(zip(("out", "max_logits", "lse"), flash_mla_sparse_fwd(q, kv, indices, scale, width, sink)), lse_indexer=None)
        return found["out"], found["max_logits"], found["lse"]

    def tilelang(q, kv, indices, scale, width, sink):
        out, _, lse = flash_mla_sparse_fwd(q, kv, indices, scale, width, sink)
        return out, None, torch.where(lse == INF, -INF, lse) / math.log(2)

    for kernel, base in ((cudnn, "e"), (tilelang, "2")):
        got = flash_mla.attend(
            case.q, case.kv, case.entries, case.addresses, indices=case.chosen, sink=case.sink, kernel=kernel, base=base, multiple=1
        )
        assert_close(got.lse, want.lse, 1e-12)
        assert_close(got.out, want.out, 1e-12)


def test_without_flash_mla_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    case = make(ADDRESSES["sbhd"]())
    with pytest.raises(ImportError, match=r"flash_mla is not installed. Build it from .*kernel=, or call csakit.attend"):
        flash_mla.attend(case.q, case.kv, case.entries, case.addresses)


def test_slots_keep_their_order_so_the_hosts_index_scores_stay_aligned(case: Case) -> None:
    indices = case.addresses.indices(case.chosen)
    lse = run(case, indices, case.sink)[2]
    assert torch.equal(flash_mla.read(lse, indices, case.addresses, sink=case.sink, slots=TOPK).indices, case.chosen)


@pytest.mark.parametrize("marker", [INF, -INF, 0.0])
@pytest.mark.parametrize("base", ["e", "2"])
def test_the_logarithms_base_and_the_mark_of_an_empty_row_change_nothing(case: Case, base, marker: float) -> None:
    indices = case.addresses.indices(case.chosen)
    lse = run(case, indices, case.sink)[2]
    want = flash_mla.read(lse, indices, case.addresses, sink=case.sink, slots=TOPK)
    other = torch.where(lse == INF, marker, lse) / (math.log(2) if base == "2" else 1)
    got = flash_mla.read(other, indices, case.addresses, sink=case.sink, slots=TOPK, base=base)
    assert_close(got.lse, want.lse, 1e-13)
    by_token = flash_mla.read(case.addresses.unflatten(other), indices, case.addresses, sink=case.sink, slots=TOPK, base=base)
    assert_close(by_token.lse, want.lse, 1e-13)


def test_a_call_over_all_visible_entries_gives_the_denominator_of_the_dense_objective(case: Case) -> None:
    layout, random = case.layout, torch.Generator().manual_seed(2)
    rows, tokens = layout.positions.shape
    indices = case.addresses.indices()
    lse = run(case, indices, case.sink)[2]
    got = flash_mla.read(lse, indices, case.addresses, sink=case.sink, slots=layout.num_entries).lse
    want = csakit.attend(case.q, case.kv, case.entries, layout, sink=case.sink).lse
    assert_close(got, want, 1e-12)
    index = [torch.randn(*shape, generator=random, dtype=torch.float64) for shape in ((rows, tokens, 2, 4), (rows, layout.num_entries, 4))]
    loss, same = (csakit.distill_dense(*index, None, case.q, case.entries, x, layout).loss for x in (got, want))
    assert_close(loss, same, 1e-12)


@pytest.mark.parametrize("kind", ["sbhd", "thd with padded documents"])
def test_lse_indexer_is_refused_because_it_leaves_out_the_window(kind: str) -> None:
    case = make(ADDRESSES[kind]())
    indices = case.addresses.indices(case.chosen)
    lse_indexer = run(case, indices, case.sink, indexer_topk=TOPK)[3]
    with pytest.raises(ValueError, match=r"attends something.*\(lse_indexer\) leaves out the window.*Pass lse"):
        flash_mla.read(lse_indexer, indices, case.addresses, sink=case.sink, slots=TOPK)


def test_an_lse_below_the_greatest_logit_is_refused() -> None:
    case = make(ADDRESSES["sbhd"]())
    case = case._replace(kv=case.kv + 4 * case.q[:, :, 0])  # each query's own key takes nearly all of head 0
    indices = case.addresses.indices(case.chosen)
    _, greatest, lse, part = run(case, indices, None, indexer_topk=TOPK)
    part = torch.where(part == INF, lse, part)  # as if every query saw an entry
    with pytest.raises(ValueError, match=r"below its greatest logit .* Pass lse"):
        flash_mla.read(part, indices, case.addresses, sink=None, slots=TOPK, max_logits=greatest)
    assert flash_mla.read(lse, indices, case.addresses, sink=None, slots=TOPK, max_logits=greatest).lse.isfinite().all()


def test_the_window_counts_in_the_teacher_with_several_heads_and_not_with_one() -> None:
    case = make(ADDRESSES["sbhd"]())

    def teacher(kv: torch.Tensor, heads: slice) -> torch.Tensor:
        part = case._replace(kv=kv, q=case.q[:, :, heads])
        indices = case.addresses.indices(case.chosen)
        lse = run(part, indices, None)[2]
        read = flash_mla.read(lse, indices, case.addresses, sink=None, slots=TOPK)
        mass = csakit.teacher_log_mass(part.q, case.entries, read.lse, case.layout, indices=read.indices)
        return mass[(case.chosen >= 0).sum(-1) > 1].softmax(-1)

    one, all_heads = slice(0, 1), slice(None)
    assert_close(teacher(case.kv, one), teacher(2 * case.kv, one), 1e-12)
    assert (teacher(case.kv, all_heads) - teacher(2 * case.kv, all_heads)).abs().max() > 0.1


def test_gradients_flow_through_the_memory_of_the_kernel(case: Case) -> None:
    kv, entries = case.kv.clone().requires_grad_(), case.entries.clone().requires_grad_()
    case.addresses.memory(kv, entries).sum().backward()
    live = case.layout.entry_token >= 0
    assert torch.equal(entries.grad, live[..., None].double().expand_as(entries))
    assert torch.equal(kv.grad, (case.addresses.tokens >= 0)[..., None].double().expand_as(kv))


def test_thd_puts_each_documents_entries_behind_its_tokens() -> None:
    addresses = Addresses.thd(packed(), ROOM)
    # documents of 9, 0, 12, 3 tokens in rooms of 12, 0, 14, 6: 2, 0, 3, 0 entries
    assert addresses.entries[0].tolist() == [12, 13, 28, 29, 30, -1, -1, -1]
    assert addresses.tokens[0].tolist() == [*range(12), *range(14, 28), *range(31, 37)]


def test_sbhd_interleaves_the_rows_of_a_batch() -> None:
    addresses = Addresses.sbhd(Layout.batch(2, 5, ratio=2, window=2))
    assert addresses.tokens.tolist() == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert addresses.entries.tolist() == [[10, 12], [11, 13]]
    assert addresses.indices(torch.tensor([[[0, -1]] * 5] * 2)).tolist()[6:] == [
        [10, -1, 4, 6],
        [11, -1, 5, 7],
        [10, -1, 6, 8],
        [11, -1, 7, 9],
    ]


def test_wrong_arguments_are_named() -> None:
    case = make(ADDRESSES["sbhd"]())
    addresses, indices = case.addresses, case.addresses.indices(case.chosen)
    lse = run(case, indices, None)[2]

    def read(lse=lse, indices=indices, addresses=addresses, slots=TOPK, **options):
        return flash_mla.read(lse, indices, addresses, sink=None, slots=slots, **options)

    for match, call in {
        "slots must be at most the 8 slots of indices; got 9": lambda: read(slots=9),
        "slots must be at least 0": lambda: read(slots=-1),
        r"slot 2 of row 0, token 1\d? holds an entry, but slots says that only the first 2 do": lambda: read(slots=2),
        "window after": lambda: read(indices=indices.flip(-1)),
        "holds an entry of another row": lambda: read(addresses=Addresses.bshd(case.layout)),
        r"lse must have shape \[N, H\] = \[42, any\]; got \[3, 42\]": lambda: read(lse=lse.T),
        r"lse must have shape \[N, H\] or \[B, T, H\] = .* need a transpose": lambda: read(lse=addresses.unflatten(lse).mT),
        'base must be "e" or "2"': lambda: read(base="10"),
        r"lengths must have shape \[N\] = \[42\]": lambda: read(lengths=torch.zeros(3, dtype=torch.int32)),
        r"indices must have shape \[N, slots\]": lambda: read(indices=indices[:3]),
        "the kernel's rows must be the 42 queries": lambda: addresses.unflatten(lse[:5]),
        "multiple must be at least 1": lambda: addresses.indices(multiple=0),
        "one set per query; got 2 sets": lambda: addresses.indices(case.chosen[:, :, None].expand(-1, -1, 2, -1)),
        r"kv must have shape \[B, T_kv, D\]": lambda: addresses.memory(case.kv[:, 1:], case.entries),
        "entries must have shape": lambda: addresses.memory(case.kv, case.entries[:, 1:]),
        "thd is for one packed row without a halo; got 2 rows": lambda: Addresses.thd(case.layout, ROOM),
        "at least one document": lambda: Addresses.thd(packed(), ROOM[:1]),
        r"cu_entries must have shape of the shape of cu_seqlens = \[5\]": lambda: Addresses.thd(packed(), ROOM, cu_entries=ROOM[:2]),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match=r"indices must be an int32 or int64 tensor \[N, K\]"):
        flash_mla.compact(lse)
    with pytest.raises(TypeError, match="cu_seqlens must be an int32 or int64 tensor"):
        Addresses.thd(packed(), ROOM.float())


def test_debugging_also_checks_that_the_kernels_entries_are_visible() -> None:
    case = make(ADDRESSES["sbhd"]())
    indices = case.addresses.indices(case.chosen)
    indices[:, 0] = case.addresses.flatten(case.addresses.entries[:, -1:].expand(-1, 21))  # the last entry, for everybody
    lse = run(case, indices, None)[2]
    with csakit.debug(True), pytest.raises(ValueError, match="entry 4 of row 0, token 0 is not visible"):
        flash_mla.read(lse, indices, case.addresses, sink=None, slots=TOPK)
