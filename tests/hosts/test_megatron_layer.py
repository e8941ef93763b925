"""The Megatron adapter without a checkout: its layout conversions, context and tensor parallelism.

`layer` here holds only the attributes the adapter reads from a CSA layer; `test_megatron.py` runs the real one.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close, gap
from torch import Tensor

import csakit
from csakit import Layout
from csakit.integrations.megatron import context
from csakit.integrations.megatron.layer import Inputs, forward, sbhd_inputs, thd_inputs

HEADS, WIDTH, RATIO, WINDOW, INDEX_HEADS, INDEX_WIDTH, TOPK, COEFFICIENT = 4, 6, 4, 3, 8, 5, 2, 0.5


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_layer(index: tuple[Tensor, ...] = (), tp: object = None, **settings) -> SimpleNamespace:
    config = {"dsa_indexer_loss_coeff": COEFFICIENT, "dsa_indexer_use_sparse_loss": True, "calculate_per_token_loss": False}
    return SimpleNamespace(
        config=SimpleNamespace(**(config | settings)),
        indexer=SimpleNamespace(
            forward_before_topk=lambda x, qr, packed: index, index_topk=TOPK, softmax_scale=0.4, pg_collection=SimpleNamespace(tp=tp)
        ),
        compress_ratio=RATIO, window_size=WINDOW, attn_sink=normal(9, HEADS), softmax_scale=0.3, training=True,
    )  # fmt: skip


def random_inputs(layout: Layout) -> Inputs:
    rows, tokens = layout.positions.shape
    entries = layout.num_entries
    shapes = ((tokens, HEADS, WIDTH), (tokens, WIDTH), (entries, WIDTH), (tokens, INDEX_HEADS, INDEX_WIDTH), (entries, INDEX_WIDTH))
    return Inputs(layout, *(normal(i, rows, *shape) for i, shape in enumerate((*shapes, (tokens, INDEX_HEADS)))))


def test_sbhd_tensors_are_transposed_and_kv_full_is_cut_behind_the_tokens() -> None:
    want = random_inputs(Layout.batch(2, 10, ratio=RATIO, window=WINDOW))
    q, kv, entries, *index = (x.transpose(0, 1) for x in want[1:7])
    hidden = torch.zeros(1, requires_grad=True)
    got = sbhd_inputs(make_layer(tuple(index)), q, hidden, hidden, torch.cat([kv, entries]), 10, None)
    for x, y in zip(got[1:7], want[1:7]):
        assert torch.equal(x, y)
    assert got.layout.positions.shape == (2, 10) and (got.layout.ratio, got.layout.window) == (RATIO, WINDOW)


@pytest.mark.parametrize("compressed_padding", [False, True], ids=["real tokens compressed", "padding compressed too"])
def test_thd_segments_with_padding_are_found_in_kv_full(compressed_padding: bool) -> None:
    real, room = torch.tensor([0, 9, 9, 19]), torch.tensor([0, 12, 12, 24])
    layout = Layout.packed(real, cu_seqlens_padded=room, tokens=24, ratio=RATIO, window=WINDOW)
    want = random_inputs(layout)
    lengths = (room if compressed_padding else real).diff() // RATIO
    cu_entries = torch.cat([room[:1], lengths.cumsum(0)])
    host_entries, host_keys = normal(11, int(cu_entries[-1]), WIDTH), normal(12, int(cu_entries[-1]), INDEX_WIDTH)
    rows = [0, 1, *((3, 4) if compressed_padding else (2, 3))]  # documents of 9 and 10 tokens have 2 entries each
    kv_full = torch.cat([torch.cat([want.kv[0, a:b], host_entries[c:d]]) for a, b, c, d in zip(room, room[1:], cu_entries, cu_entries[1:])])
    index = (want.q_index.transpose(0, 1), host_keys[:, None], want.weights.transpose(0, 1), cu_entries)
    hidden, packed = torch.zeros(1), SimpleNamespace(cu_seqlens_q=real)
    got = thd_inputs(make_layer(index), want.q[0], hidden, hidden, kv_full, room, room + cu_entries, packed)
    assert torch.equal(got.q, want.q) and torch.equal(got.kv, want.kv)
    assert torch.equal(got.entries[0, :4], host_entries[rows]) and not got.entries[0, 4:].any()
    assert torch.equal(got.k_index[0, :4], host_keys[rows]) and not got.k_index[0, 4:].any()
    assert torch.equal(got.layout.valid, layout.valid)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("sparse", [True, False])
def test_the_loss_is_coefficient_times_kl_over_real_tokens_or_their_sum(sparse: bool, per_token: bool) -> None:
    layout = Layout.packed(torch.tensor([0, 9, 20]), tokens=24, ratio=RATIO, window=WINDOW)
    inputs = random_inputs(layout)
    layer = make_layer(dsa_indexer_use_sparse_loss=sparse, calculate_per_token_loss=per_token)
    out, loss = forward(layer, inputs, "attended")
    index, options = (inputs.q_index, inputs.k_index, inputs.weights), {"sink": layer.attn_sink, "scale": 0.3}
    with csakit.backend("reference"):
        picked = csakit.select(*index, TOPK, layout, scale=0.4)
        seen = csakit.attend(inputs.q, inputs.kv, inputs.entries, layout, indices=picked.indices, teacher=True, **options)
        visible = csakit.attend(inputs.q, inputs.kv, inputs.entries, layout, **options).lse
        if sparse:
            want = csakit.distill(picked.scores, seen.log_mass, layout)
        else:
            want = csakit.distill_dense(*index, inputs.q, inputs.entries, visible, layout, index_scale=0.4, scale=0.3)
    assert_close(out, seen.out.flatten(2).transpose(0, 1))
    assert loss is not None
    assert_close(loss, COEFFICIENT * (want.loss * 20 if per_token else want.loss))


def test_without_training_there_is_no_loss() -> None:
    inputs, layer = random_inputs(Layout.batch(1, 12, ratio=RATIO, window=WINDOW)), make_layer()
    out, _ = forward(layer, inputs, "attended")
    with torch.no_grad():
        same, loss = forward(layer, inputs, "attended")
    assert loss is None and torch.equal(same, out)


def tensor_parallel_rank(rank: int, path: str, queue) -> None:
    """Half of the heads, in a real group of two: the loss and the gradient of the index keys."""
    torch.set_num_threads(1)
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    queue.put({sparse: head_part(sparse, slice(2 * rank, 2 * rank + 2), dist.group.WORLD) for sparse in (True, False)})
    dist.barrier()
    dist.destroy_process_group()


def head_part(sparse: bool, heads: slice, group: object = None) -> list:
    inputs = random_inputs(Layout.batch(2, 13, ratio=RATIO, window=WINDOW))
    layer = make_layer(tp=group, dsa_indexer_use_sparse_loss=sparse)
    layer.attn_sink = layer.attn_sink[heads]
    inputs = inputs._replace(q=inputs.q[:, :, heads], k_index=inputs.k_index.requires_grad_())
    loss = forward(layer, inputs, "attended")[1]
    assert loss is not None
    return [loss.item(), torch.autograd.grad(loss, inputs.k_index)[0].tolist()]


def test_heads_sharded_over_a_tensor_parallel_group_give_the_loss_of_all_heads(tmp_path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=tensor_parallel_rank, args=(rank, str(tmp_path / "meet"), queue)) for rank in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=600) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    for sparse in (True, False):
        want = head_part(sparse, slice(None))
        for found in results:
            for got, whole in zip(found[sparse], want):
                assert gap(torch.tensor(got, dtype=torch.float64), torch.tensor(whole, dtype=torch.float64)) < 1e-12


class Ranks:
    """A stand-in for Megatron's context-parallel path on WORLD ranks, one after the other: two documents, 24 tokens, a cut inside a block.

    The gathered buffer holds the host's compressed rows (padding is compressed too) in no order; `in_order` says where each is.
    """

    world, rows, boundary = 2, 12, 8
    real, room = torch.tensor([0, 9, 9, 18]), torch.tensor([0, 10, 10, 24])

    def __init__(self) -> None:
        self.layout = Layout.packed(self.real, cu_seqlens_padded=self.room, tokens=24, ratio=RATIO, window=WINDOW)
        self.whole = Inputs(*(x.requires_grad_() if isinstance(x, Tensor) else x for x in random_inputs(self.layout)[:7]))
        self.cu_compressed = torch.tensor([0, 2, 2, 5])
        numbers = torch.tensor([0, 1, 2, 3])  # the host's number of each of the layout's entries; 4 is made of padding
        self.in_order = torch.tensor([6, 1, 4, 3, 0, -1])
        self.buffer = [torch.zeros(8, x.shape[2], dtype=x.dtype).index_put((self.in_order[numbers],), x[0, :4]) for x in self.whole[3:6:2]]
        self.buffer = [x.index_put((self.in_order[4],), torch.tensor(99.0, dtype=x.dtype)) for x in self.buffer]
        self.chosen: list[Tensor] = []

    def layer(self, rank: int, **settings) -> SimpleNamespace:
        layer = make_layer(**settings)
        layer.pg_collection = SimpleNamespace(cp=SimpleNamespace(rank=lambda: rank, size=lambda: self.world))
        layer.use_fused_kernels = False
        return layer

    def path(self, attention: str, skip: str = "") -> object:
        """Megatron's method, as far as csakit sees it, with csakit's functions in it."""
        prepared = context.prepared(lambda *_: (None, None, self.in_order.to(torch.int32)))
        selected = context.selected(attention)(lambda *_, **__: (torch.zeros(self.rows, TOPK, dtype=torch.int32), None))
        csa = SimpleNamespace(unfused_compressed_sparse_attn=lambda query, *_: 2 * query.flatten(1))
        attended = context.attended(attention, "attended", csa)(lambda *_: (None, None))

        def stock(layer, query, key, x, qr, boundary_hidden, boundary_kv, packed_seq_params):
            rank = layer.pg_collection.cp.rank()
            own = slice(rank * self.rows, (rank + 1) * self.rows)
            prepared(x, boundary_hidden, self.room, self.cu_compressed, rank * self.rows, self.world, RATIO)
            index = self.whole.q_index[0, own], self.whole.weights[0, own], self.buffer[1].index_select(0, self.in_order.clamp(min=0))
            if skip != "selection":
                chosen, _ = selected(
                    *index, self.room, self.cu_compressed, rank * self.rows, RATIO, TOPK, 0.4, max_seqlen_q=14, use_fused=False
                )
                self.chosen.append(chosen)
            kv_full = torch.cat([boundary_kv, self.whole.kv[0, own], self.buffer[0]])
            if skip or not layer.training:
                return query.flatten(1)[:, None]
            out, loss = attended(query, kv_full, layer.attn_sink, *[None] * 15)
            self.losses.append(loss)
            return out[:, None]

        return context.method(attention)(stock)

    def run(self, attention: str = "csakit", skip: str = "", **settings) -> Tensor:
        """The output of all ranks, [T, 1, H * D]; their losses are in `losses`."""
        self.losses: list[Tensor] = []
        method, parts = self.path(attention, skip), []
        packed = SimpleNamespace(cu_seqlens_q=self.real, cu_seqlens_q_padded=self.room)
        for rank in range(self.world):
            own = slice(rank * self.rows, (rank + 1) * self.rows)
            before = torch.cat([torch.full((self.boundary, WIDTH), torch.nan), self.whole.kv[0]])[rank * self.rows :][: self.boundary]
            hidden = torch.zeros(self.boundary, 1, 1)
            parts.append(method(self.layer(rank, **settings), self.whole.q[0, own], None, None, None, hidden, before, packed))
        return torch.cat(parts)


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_the_ranks_of_a_context_parallel_row_give_what_one_rank_gives(sparse: bool, per_token: bool) -> None:
    ranks, settings = Ranks(), {"dsa_indexer_use_sparse_loss": sparse, "calculate_per_token_loss": per_token}
    out = ranks.run(**settings)
    want_out, want_loss = forward(make_layer(**settings), ranks.whole, "attended")
    assert_close(out, want_out)
    assert want_loss is not None
    assert_close(torch.stack(ranks.losses).sum(), want_loss)
    leaves, upstream = ranks.whole[1:7], torch.randn_like(out)
    got = torch.autograd.grad((out * upstream).sum() + 3 * sum(ranks.losses), leaves)
    want = torch.autograd.grad((want_out * upstream).sum() + 3 * want_loss, leaves)
    assert_close(dict(enumerate(got)), dict(enumerate(want)))
    picked = csakit.select(ranks.whole.q_index, ranks.whole.k_index, ranks.whole.weights, TOPK, ranks.layout, scale=0.4).indices[0]
    first = torch.tensor([0] * 10 + [2] * 14)[:, None]  # numbers within the document go to Megatron's kernels
    assert torch.equal(torch.cat(ranks.chosen), torch.where(picked >= 0, picked - first, -1).to(torch.int32))


def test_megatrons_attention_can_stay_in_the_context_parallel_path() -> None:
    ranks = Ranks()
    out = ranks.run("megatron")
    assert torch.equal(out[:, 0], 2 * ranks.whole.q[0].flatten(1))
    _, want = forward(make_layer(), ranks.whole, "attended")
    assert want is not None
    assert_close(torch.stack(ranks.losses).sum(), want)
    layer = ranks.layer(0)
    layer.use_fused_kernels = True
    with pytest.raises(RuntimeError, match='attention="megatron" has no fused output in the context-parallel path'):
        ranks.path("megatron")(layer, ranks.whole.q[0, :12], None, None, None, torch.zeros(8, 1, 1), None, None)


def test_without_a_coefficient_a_context_parallel_step_gives_the_indexer_zero_gradients() -> None:
    ranks = Ranks()
    out = ranks.run(skip="loss", dsa_indexer_loss_coeff=None)
    for gradient in torch.autograd.grad(out.sum(), [ranks.whole.q_index, ranks.whole.k_index, ranks.whole.weights]):
        assert not gradient.any()


@pytest.mark.parametrize("skipped", ["selection", "loss"])
def test_a_context_parallel_path_that_goes_round_csakit_is_an_error(skipped: str) -> None:
    with pytest.raises(RuntimeError, match=f"context-parallel path did not ask for the {skipped}"):
        Ranks().run(skip=skipped)


def test_outside_of_a_training_step_megatrons_context_parallel_functions_are_megatrons() -> None:
    assert context.prepared(lambda *_: "made")(*range(7)) == "made"
    assert context.selected("csakit")(lambda *a, **k: (a, k))(*range(9), max_seqlen_q=1, use_fused=True)[1] == {
        "max_seqlen_q": 1,
        "use_fused": True,
    }
    made = context.attended("csakit", "attended", None)(lambda *a, **k: (len(a), k))
    assert made(*range(18)) == (18, {}) and made(*range(18), tp_group=3) == (18, {"tp_group": 3})
