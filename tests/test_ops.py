"""torch.library.opcheck on every registered op, with the arguments that real calls of the verbs pass."""

from __future__ import annotations

import pytest
import torch
from helpers import Sizes, chain, random_inputs
from torch.utils._python_dispatch import TorchDispatchMode

import csakit
import csakit.ops  # defines the ops: names of the package are imported when first used
from csakit import Layout

DEFINED = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("csakit::"))


class Recorder(TorchDispatchMode):
    """Keeps one call of each op for each pattern of arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple, tuple] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "csakit":
            pattern = tuple((x.ndim, x.dtype) if isinstance(x, torch.Tensor) else x for x in args)
            kept = tuple(x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args)
            self.calls.setdefault((op.name(), pattern), (op, kept))
        return op(*args, **(kwargs or {}))


def general_attention() -> None:
    """KV heads, sets, values of their own, no window, no sink; and scores of every entry, with and without weights."""
    layout = Layout.packed(torch.tensor([0, 4, 9]), ratio=2, window=3, tokens=10)
    q, kv, values = torch.randn(1, 10, 4, 3), torch.randn(1, 10, 2, 3), torch.randn(1, 10, 2, 5)
    x = {"q": q, "kv": kv, "entries": kv[:, :5], "values": values, "entry_values": values[:, :5]}
    x = {name: t.clone().requires_grad_() for name, t in x.items()}
    q_index, k_index = torch.randn(1, 10, 4, 3, requires_grad=True), torch.randn(1, 5, 3, requires_grad=True)
    selection = csakit.select(q_index, k_index, None, 2, layout, sets=2)
    attention = csakit.attend(**x, layout=layout, indices=selection.indices, teacher=True)
    loss = csakit.distill(selection.scores, attention.log_mass, layout).loss
    scores = csakit.index_scores(q_index, k_index, None, layout, relu=False)
    mass = csakit.teacher_log_mass(q, x["entries"], attention.lse, layout, sets=2)
    (loss + attention.out.sum() + scores[scores.isfinite()].sum()).backward()
    assert mass.shape == (1, 10, 2, 5)


def recorded_calls() -> list:
    calls = {}
    for backend in ("reference", "cpu"):
        with csakit.backend(backend), Recorder() as recorder:
            for objective, dtype in (("sparse", torch.float32), ("dense", torch.float32), ("sparse", torch.bfloat16)):
                sizes = Sizes(objective=objective)
                layout = Layout.from_mask(torch.tensor([[1] * 7 + [0], [0, 0] + [1] * 6]), ratio=2, window=3)
                chain({n: t.to(dtype) for n, t in random_inputs(2, 8, sizes).items()}, layout, sizes)
            general_attention()
        calls |= recorder.calls
    return list(calls.values())


CALLS = recorded_calls()


def test_the_recorded_calls_reach_every_op() -> None:
    assert {op.name() for op, _ in CALLS} == set(DEFINED) and DEFINED


@pytest.mark.parametrize("number", range(len(CALLS)), ids=lambda n: f"{n}-{CALLS[n][0].name().removeprefix('csakit::')}")
def test_opcheck(number: int) -> None:
    """Schema, registration, fake against real results (shape, dtype, stride), and dynamic shapes under AOT dispatch."""
    op, args = CALLS[number]
    torch.library.opcheck(op, args)


def four_verbs(x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    layout = Layout.batch(1, 12, ratio=2, window=3)
    index = (x["q_index"], x["k_index"], x["weights"])
    selection = csakit.select(*index, 3, layout)
    attention = csakit.attend(x["q"], x["kv"], x["entries"], layout, indices=selection.indices, teacher=True)
    sparse = csakit.distill(selection.scores, attention.log_mass, layout)
    dense = csakit.distill_dense(*index, x["q"], x["entries"], attention.lse, layout)
    return [selection.scores, attention.out, csakit.index_scores(*index, layout), sparse.loss, sparse.kl, dense.loss, dense.kl]


def verb_inputs() -> dict[str, torch.Tensor]:
    shapes = {"q": (12, 2, 4), "kv": (12, 4), "entries": (6, 4), "q_index": (12, 2, 4), "k_index": (6, 4), "weights": (12, 2)}
    return {name: torch.randn(1, *shape) for name, shape in shapes.items()}


def test_results_are_the_same_bits_whether_a_gradient_is_asked_for_or_not() -> None:
    x = verb_inputs()
    wanted = four_verbs({name: t.clone().requires_grad_() for name, t in x.items()})
    assert [r.requires_grad for r in wanted] == [True, True, True, True, False, True, False]
    plain = four_verbs(x)
    assert not any(r.requires_grad for r in plain)
    assert all(torch.equal(a, b) for a, b in zip(plain, wanted))
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(four_verbs({name: t.clone().requires_grad_() for name, t in x.items()}), wanted))


@pytest.mark.parametrize("name", ["q", "q_index"])
def test_forward_mode_differentiation_is_refused_and_never_ignored(name: str) -> None:
    x = verb_inputs()
    with torch.autograd.forward_ad.dual_level():
        x[name] = torch.autograd.forward_ad.make_dual(x[name], torch.ones_like(x[name]))
        with pytest.raises(NotImplementedError, match="jvp"):
            four_verbs(x)


def test_ops_show_themselves_to_profilers_and_modes_though_they_are_plain_calls_elsewhere():
    layout = Layout.batch(1, 8, ratio=2, window=3)
    q, kv = torch.randn(1, 8, 2, 4), torch.randn(1, 8, 4)

    def attended() -> torch.Tensor:
        return csakit.attend(q, kv, kv[:, :4], layout).out

    out = attended()
    with torch.profiler.profile() as profile, Recorder() as recorder:
        seen = attended()
    assert torch.equal(out, seen)
    assert "csakit::attend" in {event.key for event in profile.key_averages()}
    assert {name for name, _ in recorder.calls} == {"csakit::attend"}
    with torch.profiler.profile() as profile:
        attended()
    assert "csakit::attend" in {event.key for event in profile.key_averages()}
