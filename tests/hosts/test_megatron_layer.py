"""The Megatron adapter without a checkout: its layout conversions, tensor parallelism, loss scale, and what it refuses.

`layer` here holds only the attributes the adapter reads from a CSA layer; `test_megatron.py` runs the real one.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import assert_close, gap
from torch import Tensor

import csakit
from csakit import Layout
from csakit.integrations import megatron
from csakit.integrations.megatron.layer import Inputs, forward, sbhd_inputs, thd_inputs
from csakit.integrations.megatron.methods import parameters, replacements, with_loss_scale

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
    q, kv, entries, *index = (x.transpose(0, 1) for x in want[1:])
    hidden = torch.zeros(1, requires_grad=True)
    got = sbhd_inputs(make_layer(tuple(index)), q, hidden, hidden, torch.cat([kv, entries]), 10, None)
    for x, y in zip(got[1:], want[1:]):
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
    results = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    for sparse in (True, False):
        want = head_part(sparse, slice(None))
        for found in results:
            for got, whole in zip(found[sparse], want):
                assert gap(torch.tensor(got, dtype=torch.float64), torch.tensor(whole, dtype=torch.float64)) < 1e-12


class Scaler:
    main_loss_backward_scale: Tensor | None = None

    @classmethod
    def set_loss_scale(cls, scale: Tensor) -> None:
        cls.main_loss_backward_scale = scale


@pytest.mark.parametrize("per_token, context_parallel, want", [(False, None, 128.0), (False, 2, 256.0), (True, 2, 512.0)])
def test_a_missing_loss_scale_is_that_of_the_main_loss(per_token: bool, context_parallel: int | None, want: float) -> None:
    cured: list[bool] = []
    config = SimpleNamespace(calculate_per_token_loss=per_token, grad_scale_func=lambda one: 512 * one)

    def step(output, config, num_microbatches, cp_group_size=None):
        return output, 0

    scaled = with_loss_scale(step, Scaler, cured.append)
    for _ in range(2):
        Scaler.main_loss_backward_scale = torch.tensor(1.0)  # left over from an earlier step
        scaled(torch.zeros(1), config, num_microbatches=4, cp_group_size=context_parallel)
        assert Scaler.main_loss_backward_scale is not None and float(Scaler.main_loss_backward_scale) == want
    assert cured == [True, True]


def test_a_host_that_sets_the_loss_scale_keeps_its_own() -> None:
    cured: list[bool] = []

    def step(output, config, num_microbatches, cp_group_size=None):
        Scaler.set_loss_scale(torch.tensor(7.0))
        return output, 0

    with_loss_scale(step, Scaler, cured.append)(torch.zeros(1), None, 4)
    assert float(Scaler.main_loss_backward_scale) == 7.0 and cured == [False]


def test_the_known_parameters_of_each_method_are_written_down_in_one_place() -> None:
    def stock(*_: object) -> None: ...

    known = {name: parameters(make(stock)) for name, make in replacements(None, "csakit", "attended").items()}
    assert known["_forward_unfused_csa"] == [
        "self", "query", "x", "qr", "kv_full", "compressed_kv", "n_compressed", "offset", "window_idxs", "packed_seq_params",
    ]  # fmt: skip
    assert all(names[0] == "self" and "packed_seq_params" in names for names in known.values()) and len(known) == 5


def test_without_a_megatron_that_has_csa_the_error_says_what_is_needed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    for name in [name for name in sys.modules if name.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="put a checkout of its dev branch on the Python path"):
        megatron.install()
    with pytest.raises(ValueError, match="denominator must be 'attended' or 'visible'; got 'full'"):
        megatron.install(denominator="full")
    with pytest.raises(ValueError, match="attention must be 'csakit' or 'megatron'; got 'host'"):
        megatron.install(attention="host")
