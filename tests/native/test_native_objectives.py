"""Teacher and objectives in native kernels against the specification in float64: log-mass beside another kernel, distill, distill_dense."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, build_layout, gradients, ragged_indices
from test_native_kernels import LAYOUTS, PROBLEMS, WHY_NOT, Problem, attention_inputs

import csakit
from csakit import Layout
from csakit.backends.cpu import dense

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no native kernels here: {WHY_NOT}")
RUNS = (("reference", torch.float64), ("cpu-native", torch.float32))


def given_lse(layout: Layout, heads: int) -> torch.Tensor:
    """Any denominators; heads that attend nothing (-inf), and one whose sink takes all (+inf)."""
    lse = 3 + torch.randn(*layout.positions.shape, heads, generator=torch.Generator().manual_seed(heads))
    lse[:, ::5, 0] = -INF
    lse[:, 1::7] = -INF
    lse[:, 2::7, -1] = INF
    return lse


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_log_mass_beside_another_kernel_equals_the_reference(kind: str, problem: str) -> None:
    p, layout = PROBLEMS[problem], build_layout(LAYOUTS[kind], ratio=2, window=5)
    lse = given_lse(layout, p.heads)
    for dtype in (torch.float32, torch.bfloat16):
        x, indices = attention_inputs(layout, p, dtype)
        for options in ({"indices": indices}, {"indices": indices.int()}, {"sets": p.sets}, {}):
            found = []
            for backend, precision in (("reference", torch.float64), ("cpu-native", dtype)):
                with csakit.backend(backend):
                    q, entries = x["q"].to(precision), x["entries"].to(precision)
                    found.append(
                        csakit.teacher_log_mass(q, entries, lse.to(torch.promote_types(precision, torch.float32)), layout, **options)
                    )
            assert_close(found[1], found[0], 3e-6, label=f"{dtype} {options.keys()}")


def test_the_log_mass_is_exact_where_every_head_underflows() -> None:
    layout, p = Layout.batch(1, 30, ratio=2, window=3), PROBLEMS["odd"]
    x, _ = attention_inputs(layout, p, torch.float32)
    lse = torch.full((1, 30, p.heads), 200.0)
    found = []
    for backend, dtype in RUNS:
        with csakit.backend(backend):
            found.append(csakit.teacher_log_mass(x["q"].to(dtype), x["entries"].to(dtype), lse.to(dtype), layout))
    assert found[0][found[0].isfinite()].max() < -150
    assert_close(found[1], found[0], 1e-6)


def objective_inputs(layout: Layout, sets: int, slots: int) -> dict[str, torch.Tensor]:
    """Scores and log-mass with everything that can stand in them: no candidates, one, no mass, magnitudes of 1e3."""
    rows, tokens = layout.positions.shape
    generator = torch.Generator().manual_seed(slots)
    scores, mass = (torch.randn(rows, tokens, sets, slots, generator=generator) for _ in range(2))
    empty = torch.rand(scores.shape, generator=generator) < 0.3
    scores = scores.masked_fill(empty, -INF)
    mass = mass.masked_fill(torch.rand(mass.shape, generator=generator) < 0.2, -INF)
    scores[:, 3::9], mass[:, 4::9] = -INF, -INF
    scores[:, 5::9] = -INF
    scores[:, 5::9, :, 0], mass[:, 5::9, :, 0] = 2.0, -300.0
    scores[:, 6::9] *= 1e3
    mass[:, 7::9] = mass[:, 7::9] * 1e3 - 2e3
    scores[~layout.valid], mass[~layout.valid] = NAN, NAN
    weight = torch.rand(rows, tokens, generator=generator)
    weight[~layout.valid] = NAN
    return {"scores": scores, "log_mass": mass, "weight": weight}


@pytest.mark.parametrize(("sets", "slots"), [(1, 1), (1, 5), (3, 8), (2, 61), (1, 1100)])
@pytest.mark.parametrize("kind", ["packed", "left"])
def test_the_sparse_objective_equals_the_reference(kind: str, sets: int, slots: int) -> None:
    layout = build_layout(LAYOUTS[kind], ratio=2, window=5)
    x = objective_inputs(layout, sets, slots)
    found = []
    for backend, dtype in RUNS:
        given = {name: t.to(dtype) for name, t in x.items()}
        given["scores"].requires_grad_()
        with csakit.backend(backend):
            result = csakit.distill(**given, layout=layout)
            with torch.no_grad():
                assert torch.equal(csakit.distill(**given, layout=layout).kl, result.kl)
            found.append({"kl": result.kl, "loss": result.loss, **gradients(result.loss, None, {"scores": given["scores"]})})
    assert found[0]["kl"].max() > 1e2 or slots == 1
    assert_close(found[1], found[0], 2e-6)


def test_a_bad_score_shows_in_the_loss_and_stays_in_its_row() -> None:
    layout = Layout.batch(1, 8, ratio=1, window=1)
    scores, mass = torch.randn(1, 8, 4), torch.randn(1, 8, 4)
    scores[0, 2, 1], mass[0, 5, 3] = NAN, NAN
    with csakit.backend("cpu-native"):
        kl = csakit.distill(scores, mass, layout).kl
    assert kl.isnan().nonzero().tolist() == [[0, 2], [0, 5]]


DENSE = {
    "plain": (Problem(), 1),
    "whole vectors": (PROBLEMS["whole vectors"], 1),
    "sets over KV heads": (Problem(heads=12, groups=3, width=9), 2),
}


@pytest.mark.parametrize("chunk", [1, 200, 1 << 20])
@pytest.mark.parametrize("problem", DENSE)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_dense_objective_and_its_gradients_equal_the_reference(kind: str, problem: str, chunk: int, monkeypatch) -> None:
    """However many queries are taken at a time, with poison in the padding."""
    monkeypatch.setattr(dense, "CHUNK", chunk)
    layout, (p, sets) = build_layout(LAYOUTS[kind], ratio=2, window=5), DENSE[problem]
    rows, tokens = layout.positions.shape
    generator = torch.Generator().manual_seed(chunk)
    shapes = {"q_index": (tokens, 4, 10), "k_index": (layout.num_entries, 10), "weights": (tokens, 4)}
    for dtype in (torch.float32, torch.bfloat16):
        index = {name: torch.randn(rows, *shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        x, _ = attention_inputs(layout, p, dtype)
        hidden = [t.clone() for t in (index["q_index"], index["weights"], x["q"])]
        for t in hidden:
            t[~layout.valid] = NAN
        lse, weight = given_lse(layout, p.heads), torch.rand(rows, tokens, generator=generator)
        found = []
        for backend, precision in (("reference", torch.float64), ("cpu-native", dtype)):
            q_index, weights, q = (index["q_index"], index["weights"], x["q"]) if backend == "reference" else hidden
            given = {"q_index": q_index, "k_index": index["k_index"], "weights": weights}
            given = {name: t.to(precision).requires_grad_() for name, t in given.items()}
            statistics = torch.promote_types(precision, torch.float32)
            with csakit.backend(backend):
                result = csakit.distill_dense(
                    **given, q=q.to(precision), entries=x["entries"].to(precision), lse=lse.to(statistics), layout=layout,
                    weight=weight.to(statistics), sets=sets,
                )  # fmt: skip
                found.append({"kl": result.kl, "loss": result.loss, **gradients(result.loss, None, given)})
        assert_close(found[1], found[0], 5e-6, keys=("kl", "loss"))
        assert_close(found[1], found[0], 1e-5 if dtype is torch.float32 else 8e-3)


def test_teacher_and_objectives_have_the_same_bits_for_any_number_of_threads() -> None:
    layout, p = Layout.packed(torch.tensor([0, 300, 1500]), ratio=2, window=30, tokens=1500), Problem(heads=8, width=64, slots=60)
    x, _ = attention_inputs(layout, p, torch.float32)
    index = (torch.randn(1, 1500, 8, 32), torch.randn(1, layout.num_entries, 32), torch.randn(1, 1500, 8))
    lse, indices = torch.randn(1, 1500, 8), ragged_indices(layout, 60)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            given = {name: t.clone().requires_grad_() for name, t in zip(("q", "k", "weights"), index)}
            with csakit.backend("cpu-native"):
                mass = csakit.teacher_log_mass(x["q"], x["entries"], lse, layout, indices=indices)
                loss = csakit.distill_dense(*given.values(), x["q"], x["entries"], lse, layout)
                sparse = csakit.distill(mass.sin().masked_fill(indices < 0, -INF), mass, layout)
            results.append({"mass": mass, "kl": loss.kl, "sparse": sparse.kl, **gradients(loss.loss, None, given)})
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert not [name for name, want in results[0].items() if not torch.equal(other[name], want)]
