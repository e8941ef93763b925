"""csakit's form for DeepSeek-V3.2 (ratio 1, no window, no sink) against the indexer loss of the released `megatron-core` package.

Written for megatron-core 0.16.1 (`compute_dsa_indexer_loss`), which needs only torch, numpy and packaging and imports on the CPU.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close

import csakit
from csakit import Layout

ROWS, TOKENS, HEADS, WIDTH, VALUE_WIDTH, TOPK, SCALE = 2, 13, 4, 12, 8, 4, 0.3
PARAMETERS = ["index_scores", "topk_indices", "query", "key", "softmax_scale", "loss_coeff", "sparse_loss", "pg_collection"]
ONE_RANK = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
LAYOUT = Layout.batch(ROWS, TOKENS, ratio=1, window=0)


@pytest.fixture(scope="module")
def host_loss() -> Callable[..., torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dsa = pytest.importorskip(
            "megatron.core.transformer.experimental_attention_variant.dsa",
            reason="megatron-core is not installed: pip install --no-deps megatron-core==0.16.1",
        )
    if list(inspect.signature(dsa.compute_dsa_indexer_loss).parameters) != PARAMETERS:
        pytest.skip("the Megatron that imports here is not megatron-core 0.16.1: compute_dsa_indexer_loss has other parameters")
    return dsa.compute_dsa_indexer_loss


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def host_arguments(scores: torch.Tensor, indices: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, sparse: bool) -> tuple:
    """The host's layout: [S, B, H, D], keys repeated for every head, scores -inf in the future. Empty slots name entry 0, seen by all."""
    per_head = keys.expand(-1, -1, HEADS, -1) if keys.shape[2] == 1 else keys
    return scores.clone(), indices.clamp(min=0).long(), q.transpose(0, 1), per_head.transpose(0, 1), SCALE, 1.0, sparse, ONE_RANK


def ours(index: tuple[torch.Tensor, ...], q: torch.Tensor, keys: torch.Tensor, sparse: bool) -> tuple[torch.Tensor, csakit.Selection]:
    picked = csakit.select(*index, TOPK, LAYOUT)
    chosen = picked.indices if sparse else None
    seen = csakit.attend(q, None, keys, LAYOUT, indices=chosen, scale=SCALE, value_width=VALUE_WIDTH, teacher=sparse)
    assert seen.out.shape == (ROWS, TOKENS, HEADS, VALUE_WIDTH)
    if sparse:
        return csakit.distill(picked.scores, seen.log_mass, LAYOUT).loss, picked
    return csakit.distill_dense(*index, q, keys, seen.lse, LAYOUT, scale=SCALE).loss, picked


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("kv_heads", [1, HEADS], ids=["absorbed", "a key per head"])
def test_loss_and_gradients_are_those_of_megatron_core_up_to_its_epsilon(host_loss, sparse: bool, kv_heads: int) -> None:
    index = tuple(normal(i, *shape) for i, shape in enumerate([(ROWS, TOKENS, 3, 5), (ROWS, TOKENS, 5), (ROWS, TOKENS, 3)]))
    q, keys = normal(7, ROWS, TOKENS, HEADS, WIDTH), normal(8, ROWS, TOKENS, kv_heads, WIDTH)
    leaves = [x.clone().requires_grad_() for x in index]
    loss, picked = ours(tuple(leaves), q, keys, sparse)
    loss.backward()
    same = [x.clone().requires_grad_() for x in index]
    want = host_loss(*host_arguments(csakit.index_scores(*same, LAYOUT), picked.indices, q, keys, sparse))
    want.backward()
    assert abs(loss.item() - want.item()) < 2e-6
    for got, expected in zip(leaves, same):
        assert_close(got.grad, expected.grad, 1e-5)


def test_the_hosts_epsilon_caps_the_loss_where_the_student_is_sure_and_wrong(host_loss) -> None:
    # teacher [1/2, 1/2] for the second token, scores [0, -200]: KL = 100 - ln 2; the host's log(student + 1e-10) cannot exceed ln 1e10
    layout, q, keys = Layout.batch(1, 2, ratio=1, window=0), torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 1)
    scores = torch.tensor([[[0.0, -torch.inf], [0.0, -200.0]]], requires_grad=True)
    indices = torch.tensor([[[0, -1], [0, 1]]])
    mass = csakit.attend(q, None, keys, layout, indices=indices, teacher=True).log_mass
    loss = csakit.distill(scores, mass, layout).loss
    (slope,) = torch.autograd.grad(loss, scores)
    assert loss.item() == pytest.approx((100 - 0.693147) / 2, rel=1e-6)
    assert slope[0, 1].tolist() == pytest.approx([0.25, -0.25])
    copy = torch.where(scores.isinf(), -torch.inf, scores)  # the host adds to its argument in place
    theirs = host_loss(copy, indices.clamp(min=0), q.transpose(0, 1), keys.transpose(0, 1), 1.0, 1.0, True, ONE_RANK)
    (slope,) = torch.autograd.grad(theirs, scores)
    assert theirs.item() == pytest.approx((0.5 * 23.02585 - 0.693147) / 2, rel=1e-5)
    assert abs(slope[0, 1, 1]) < 1e-6, "the host's gradient vanishes exactly where the student is most wrong"


def test_the_host_divides_by_rows_and_csakit_by_real_tokens(host_loss) -> None:
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    mask[1, 5:] = False
    padded = Layout.from_mask(mask, ratio=1, window=0)
    q, keys = normal(7, ROWS, TOKENS, HEADS, WIDTH), normal(8, ROWS, TOKENS, 1, WIDTH)
    index = tuple(normal(i, *shape) for i, shape in enumerate([(ROWS, TOKENS, 3, 5), (ROWS, TOKENS, 5), (ROWS, TOKENS, 3)]))
    picked = csakit.select(*index, TOPK, LAYOUT)
    mass = csakit.attend(q, None, keys, LAYOUT, indices=picked.indices, scale=SCALE, teacher=True).log_mass
    got = csakit.distill(picked.scores, mass, padded)
    assert int(got.divisor) == TOKENS + 5
    host = host_loss(*host_arguments(csakit.index_scores(*index, LAYOUT), picked.indices, q, keys, True))
    everything = csakit.distill(picked.scores, mass, LAYOUT)
    assert abs(float(host) - float(everything.kl.sum()) / (ROWS * TOKENS)) < 2e-6, "padding rows count in the host's mean"
    assert abs(float(got.loss) - float(everything.kl[mask].sum()) / (TOKENS + 5)) < 2e-6
