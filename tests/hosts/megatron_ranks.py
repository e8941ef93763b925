"""What two processes of a real checkout check about the layer with csakit in it: context, tensor and pipeline parallelism.

Each process imports Megatron once and runs every case; a case raises when something differs.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

WORLD, SCALE = 2, 128.0
CONTEXT_PARALLEL = [
    (attention, sparse, per_token, padded, fused)
    for attention, sparse, per_token, padded, fused in (
        ("csakit", True, False, False, False),
        ("csakit", True, True, True, False),
        ("csakit", False, False, True, True),
        ("csakit", False, True, False, False),
        ("megatron", True, False, True, False),
        ("megatron", False, False, False, False),
    )
]
TENSOR_PARALLEL = [(sparse, packed) for sparse in (True, False) for packed in (True, False)]


def launch(checkout: str, meeting: str, queue: Any) -> None:
    """Imports Megatron, then forks the ranks: one import for both."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.path.insert(0, checkout)
    from megatron.core.transformer.experimental_attention_variant import csa

    context = torch.multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(csa, rank, meeting, queue)) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0


def rank_main(csa, rank: int, meeting: str, queue: Any) -> None:
    """Runs every case and puts {case: traceback or ""} into the queue."""
    limit = timedelta(seconds=120)  # a rank that fails leaves the other in a collective
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD, timeout=limit)
    found = {}
    for name, (check, case) in CASES.items():
        with pytest.MonkeyPatch.context() as patch:
            try:
                check(csa, patch, *case)
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
        if found[name]:
            break  # what the ranks say to each other no longer fits together
    queue.put(found)
    queue.close()
    queue.join_thread()


def context_parallel(csa, patch, attention: str, sparse: bool, per_token: bool, padded: bool, fused: bool) -> None:
    """A row of 32 tokens, cut inside a block of a document: output, loss and gradients are those of the documents by themselves."""
    from helpers import assert_close
    from megatron_kernels import replace_kernels
    from megatron_layer import COEFFICIENT, Data, by_document, gradients, make_data, make_layer, packed_params, run

    from csakit.integrations import megatron

    replace_kernels(csa, patch)
    patch.setattr(csa.cp_utils, "_build_cp_indexer_layout", eager(csa.cp_utils._build_cp_indexer_layout))
    real, room = [9, 0, 14, 2], [10, 0, 16, 4] if padded else [9, 0, 14, 2]
    rank, group, rows = dist.get_rank(), dist.group.WORLD, 16
    settings = {"dsa_indexer_use_sparse_loss": sparse, "calculate_per_token_loss": per_token, "dsa_indexer_n_heads": 8}
    layer = make_layer(csa, patch, cp=group, **settings)
    for switch in ("use_fused_kernels", "apply_dsa_kernel_fusion"):
        if hasattr(layer, switch):
            setattr(layer, switch, fused)
    whole = make_data(WORLD * rows, 1)
    own = slice(rank * rows, (rank + 1) * rows)
    data = Data(*(x[own].detach().clone().requires_grad_() for x in whole))
    with megatron.install(attention=attention):
        params = packed_params(real, room, cp_partition_mode="contiguous")
        boundary = [csa.cp_utils.exchange_cp_boundary_hidden(x, 4, layer.window_size, group) for x in (data.x, data.key)]
        out = run(layer, data, params, boundary)
        csa.DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(SCALE, dtype=torch.float64))
        upstream = torch.randn(WORLD * rows, 1, out[0].numel(), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        if attention == "megatron":  # its padding attends too
            upstream *= is_real(real, room, WORLD * rows)[:, None, None]
        got = gradients((out * upstream[own]).sum(), layer, data)
    tracker = csa.DSAIndexerLossLoggingHelper.tracker
    logged = tracker["values"][0].double()
    assert tracker["reduce_group"] is group
    dist.all_reduce(logged)
    single = make_layer(csa, patch, **settings)
    single.load_state_dict(layer.state_dict())
    want_out, total = by_document(single, whole, real, room, sparse)
    want_loss = COEFFICIENT * total / (1 if per_token else sum(real))
    want = gradients((want_out * upstream).sum() + SCALE * want_loss, single, whole)
    for name, gradient in got.items():
        if name in data._fields:
            want[name] = want[name][own]
        else:
            dist.all_reduce(gradient)
    tolerance = 1e-9 if attention == "csakit" else 5e-5  # Megatron's attention is in float32
    seen = upstream[own] != 0
    assert_close(out * seen, want_out[own] * seen, tolerance / 10, label="output")
    assert_close(logged, want_loss.detach(), max(tolerance, 1e-6), label="loss")
    assert got["indexer.linear_wq_b.weight"].abs().max() > 0
    assert_close(got, want, tolerance, label="gradient")


def tensor_parallel(csa, patch, sparse: bool, packed: bool) -> None:
    """Half of the heads on each rank: the indexer's gradients are whole on both, the others add up."""
    from helpers import assert_close
    from megatron_layer import COEFFICIENT, HEADS, by_document, gradients, make_data, make_layer, packed_params, run

    from csakit.integrations import megatron

    real = [9, 0, 13] if packed else [22]
    rank, settings = dist.get_rank(), {"dsa_indexer_use_sparse_loss": sparse}
    layer, single = make_layer(csa, patch, tp=dist.group.WORLD, **settings), make_layer(csa, patch, **settings)
    whole = make_data(22, 1)
    data = whole._replace(query=whole.query.chunk(WORLD, 2)[rank].detach().clone().requires_grad_())
    with megatron.install():
        out = run(layer, data, packed_params(real, real) if packed else None)
    csa.DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(SCALE, dtype=torch.float64))
    logged = csa.DSAIndexerLossLoggingHelper.tracker["values"][0]
    want_out, total = by_document(single, whole, real, real, sparse)
    want_loss = COEFFICIENT * total / 22
    upstream = torch.randn(want_out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    want = gradients((want_out * upstream).sum() + SCALE * want_loss, single, whole)
    got = gradients((out * upstream.chunk(WORLD, 2)[rank]).sum(), layer, data)
    for name, gradient in got.items():
        if name in ("query", "attn_sink"):
            want[name] = want[name].chunk(WORLD, 2 if name == "query" else 0)[rank]
        elif not name.startswith("indexer."):
            dist.all_reduce(gradient)
    assert layer.attn_sink.numel() == HEADS // WORLD
    assert_close(out, want_out.chunk(WORLD, 2)[rank], 1e-10, label="output")
    assert_close(logged.double(), want_loss.detach(), 1e-6, label="loss")
    # Megatron's compressor takes its softmax, and the gradient through it, in float32: each rank's part is rounded by itself
    rounded = {"compressor.ape", "compressor.linear_wgate.weight", "x"}
    assert_close({name: got[name] for name in rounded}, {name: want[name] for name in rounded}, 1e-6, label="gradient")
    assert_close({name: got[name] for name in got.keys() - rounded}, {name: want[name] for name in want.keys() - rounded}, 1e-9)


def pipeline(csa, patch) -> None:
    """Megatron's 1F1B schedule, a layer on each rank, four micro-batches: both layers' gradients are those of one process."""
    from helpers import assert_close
    from megatron_stage import by_hand, make_stages, schedule

    from csakit.integrations import megatron

    rank = dist.get_rank()
    with megatron.install() as handle:
        got = schedule(csa, patch, make_stages(csa, patch, WORLD)[rank], 4, dist.group.WORLD)
        assert handle.scale_cured is not None, "every stage sets the scale, the first too"
        want = by_hand(csa, make_stages(csa, patch, WORLD))[rank]
    assert got["layer.indexer.linear_wq_b.weight"].abs().max() > 0
    assert_close(got, want, 1e-6, label="gradient")  # Megatron's compressor has a softmax in float32, whose rounding goes with the batch


CASES = {
    **{f"context parallel {'/'.join(map(str, case))}": (context_parallel, case) for case in CONTEXT_PARALLEL},
    **{f"tensor parallel {'/'.join(map(str, case))}": (tensor_parallel, case) for case in TENSOR_PARALLEL},
    "pipeline parallel": (pipeline, ()),
}


def is_real(real: list[int], room: list[int], tokens: int) -> Tensor:
    marks = [mark for length, space in zip(real, room) for mark in [1.0] * length + [0.0] * (space - length)]
    return torch.tensor(marks + [0.0] * (tokens - len(marks)), dtype=torch.float64)


def eager(function: Any) -> Any:
    """A function without its torch.compile."""
    return getattr(function, "_torchdynamo_orig_callable", function)
