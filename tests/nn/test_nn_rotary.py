"""Rotations, the norm of the queries and the grouped projection are their plain formulas, forward and backward, and copy no more."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from stock_layers import CSA, HIDDEN, gap, hidden_states, one_document, own_layer, stock_layer
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from csakit.nn.parts import GroupedLinear, unit_rows
from csakit.nn.rotary import Angles, rotate, rotate_, rotate_unit_rows

EPS = 0.1
SHAPES = [(2, 5, 8), (2, 5, 11), (2, 5, 3, 11), (2, 5, 2, 3, 10)]  # eight channels are rotated, after an even or an odd number of others


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def angles_of(dtype: torch.dtype = torch.float64) -> Angles:
    angle = 3 * normal(2, 5, 4, seed=1)
    return Angles(angle.cos().to(dtype), angle.sin().to(dtype))


def formula(x: Tensor, angles: Angles, *, inverse: bool = False) -> Tensor:
    """Pair by pair."""
    rotated, sign = x.to(angles.cos.dtype).clone(), -1 if inverse else 1
    for row in range(x.shape[0]):
        for token in range(x.shape[1]):
            for pair in range(4):
                even, odd = x.shape[-1] - 8 + 2 * pair, x.shape[-1] - 7 + 2 * pair
                cos, sin = angles.cos[row, token, pair], sign * angles.sin[row, token, pair]
                a, b = x[row, token, ..., even].to(cos.dtype), x[row, token, ..., odd].to(cos.dtype)
                rotated[row, token, ..., even], rotated[row, token, ..., odd] = a * cos - b * sin, a * sin + b * cos
    return rotated.to(x.dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inverse", [False, True])
def test_a_rotation_is_the_formula_and_leaves_its_input(shape: tuple[int, ...], inverse: bool) -> None:
    x, angles = normal(*shape), angles_of()
    kept, want = x.clone(), formula(x, angles, inverse=inverse)
    torch.testing.assert_close(rotate(x, angles, inverse=inverse), want, rtol=1e-14, atol=1e-14)
    assert torch.equal(x, kept)
    assert rotate_(x, angles, inverse=inverse) is x and torch.equal(x, rotate(kept, angles, inverse=inverse))


@pytest.mark.parametrize("shape", SHAPES)
def test_rotated_unit_rows_are_unit_rows_that_are_rotated(shape: tuple[int, ...]) -> None:
    x, angles = normal(*shape), angles_of()
    kept = x.clone()
    torch.testing.assert_close(rotate_unit_rows(x, angles, EPS), formula(unit_rows(x, EPS), angles), rtol=1e-14, atol=1e-14)
    assert torch.equal(x, kept)


FUNCTIONS = {
    "rotate": rotate,
    "rotate back": partial(rotate, inverse=True),
    "rotate_unit_rows": partial(rotate_unit_rows, eps=EPS),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_differences(function, shape: tuple[int, ...]) -> None:
    assert torch.autograd.gradcheck(lambda x: function(x, angles_of()), normal(*shape).requires_grad_())


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_strided_inputs_and_gradients_serve_and_are_left_as_they_are(function) -> None:
    x, above = (normal(2, 3, 5, 11, seed=seed).transpose(1, 2) for seed in (0, 1))
    kept = above.clone()
    results = []
    for change in (lambda y: y, Tensor.contiguous):
        leaf = change(x).detach().requires_grad_()
        out = function(leaf, angles_of())
        results.append((out, *torch.autograd.grad(out, leaf, change(above))))
    for strided, contiguous in zip(*results):
        assert torch.equal(strided, contiguous)
    assert torch.equal(above, kept)
    assert rotate(x, angles_of()).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_worked_in_fp32(dtype: torch.dtype) -> None:
    """Results and gradients are rounded where fp32 hands them over: within one step of the number format."""
    angles, x, above = angles_of(torch.float32), normal(2, 5, 3, 32, dtype=dtype), normal(2, 5, 3, 32, seed=2, dtype=dtype)
    step = torch.finfo(dtype).eps
    for function in FUNCTIONS.values():
        found = []
        for kind in (dtype, torch.float32):
            leaf = x.detach().to(kind).requires_grad_()
            out = function(leaf, angles)
            assert out.dtype == kind
            found.append((out, *torch.autograd.grad(out, leaf, above.to(kind))))
        for low, exact in zip(*found):
            assert low.dtype == dtype
            assert gap(low.float(), exact) < step
        assert torch.equal(found[0][0][..., :-8], found[1][0][..., :-8].to(dtype))  # rounded once


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_second_derivatives_and_forward_mode_are_refused(function) -> None:
    x = normal(2, 5, 3, 11).requires_grad_()
    (gradient,) = torch.autograd.grad(function(x, angles_of()).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward mode AD"):
        function(forward_ad.make_dual(x.detach(), torch.ones_like(x)), angles_of())


def test_the_projection_overwrites_the_heads_only_where_no_gradients_are_recorded() -> None:
    layer, layout = own_layer(CSA, stock_layer(CSA)), one_document(1, 24)
    angles = layer.project(hidden_states(1, 24), layout)[2]
    heads = normal(1, 24, 4, 32, dtype=torch.float32)
    kept = heads.clone()
    want = layer.output(heads, angles)
    assert torch.equal(heads, kept)
    with torch.no_grad():
        assert torch.equal(layer.output(heads, angles), want)
    assert torch.equal(heads, rotate(kept, angles, inverse=True))


def test_a_selective_checkpoint_may_keep_the_attention() -> None:
    layer, layout, hidden = own_layer(CSA, stock_layer(CSA), indexer_loss="sparse"), one_document(1, 40), hidden_states(1, 40)
    kept = (torch.ops.csakit.attend.default, torch.ops.aten.mm.default)

    def policy(context, op, *args, **options) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def gradients(run) -> dict[str, Tensor]:
        (run(hidden, layout)[0] * torch.linspace(-1, 1, HIDDEN)).sum().backward()
        found = {name: parameter.grad for name, parameter in layer.named_parameters()}
        layer.zero_grad()
        return found

    contexts = partial(create_selective_checkpoint_contexts, policy)
    got = gradients(lambda *inputs: checkpoint(layer, *inputs, use_reentrant=False, context_fn=contexts))
    for name, want in gradients(layer).items():
        assert torch.equal(got[name], want), name


def test_the_grouped_projection_has_the_gradients_of_differences_and_none_where_frozen() -> None:
    linear = GroupedLinear(2, 3, 4, dtype=torch.float64)
    x = normal(1, 5, 2, 3).requires_grad_()
    weight = normal(8, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: torch.func.functional_call(linear, {"weight": weight}, (x,)), (x, weight))
    want = torch.autograd.grad(linear(x).square().sum(), (x, linear.weight))
    assert want[1].is_contiguous()
    linear.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(linear(x).square().sum(), x)[0], want[0])
    linear.requires_grad_(True)
    assert torch.equal(torch.autograd.grad(linear(x.detach()).square().sum(), linear.weight)[0], want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_the_grouped_projection_multiplies_low_and_gives_gradients_of_the_inputs_dtypes(dtype: torch.dtype) -> None:
    linear = GroupedLinear(2, 16, 4)
    with torch.no_grad():
        linear.weight.copy_(normal(8, 16, seed=1))
    x = normal(1, 5, 2, 16, dtype=dtype).requires_grad_()
    exact = torch.autograd.grad(linear(x.float()).square().sum(), (x, linear.weight))
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x)
    assert out.dtype == torch.bfloat16
    for got, like, want in zip(torch.autograd.grad(out.float().square().sum(), (x, linear.weight)), (x, linear.weight), exact):
        assert got.dtype == like.dtype and gap(got.float(), want.float()) < 0.03
