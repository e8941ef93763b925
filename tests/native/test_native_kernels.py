"""The native kernels against the specification in float64, on every golden vector and on random hard layouts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import assert_close, build_layout, gradients
from test_golden import CASES, IN_16_BITS, disagreements, dtype_lines, evaluate

import csakit
from csakit import Layout
from csakit.backends.cpu.native import build

NAN, INF = float("nan"), float("inf")
WHY_NOT = build.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no native kernels here: {WHY_NOT}")

RUNS = [(name, torch.float32) for name in CASES] + [(name, torch.bfloat16) for name in IN_16_BITS]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=lambda x: str(x).removeprefix("torch."))
def test_golden_vectors(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    with csakit.backend("cpu-native"):
        got = evaluate(case, dtype)
        assert not (disagreements(case, got, dtype) + dtype_lines(case, got, dtype))
        if case.nan_in_padding:
            assert not disagreements(case, evaluate(case, dtype, hidden=True), dtype)


LAYOUTS = {
    "batch": {"kind": "batch", "rows": 2, "tokens": 37},
    "packed": {"kind": "packed", "cu_seqlens": [0, 3, 3, 19, 50], "tokens": 53},
    "room": {"kind": "packed", "cu_seqlens": [0, 9, 20], "cu_seqlens_padded": [0, 13, 30]},
    "left": {"kind": "mask", "mask": [[0] * 5 + [1] * 30, [1] * 35, [0] * 35]},
    "ids": {"kind": "document_ids", "ids": [[-1] + [0] * 9 + [-1] * 3 + [1] * 20, [3] * 33]},
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes of an attention call: heads, KV heads, sets, width, value width, own values, slots."""

    heads: int = 5
    groups: int = 1
    sets: int = 1
    width: int = 24
    value_width: int | None = None
    own_values: bool = False
    slots: int = 6


PROBLEMS = {
    "odd": Problem(heads=3, width=13),
    "one head": Problem(heads=1, width=1),
    "whole vectors": Problem(heads=16, width=64),
    "wide": Problem(heads=33, width=288, slots=9),
    "leading channels": Problem(heads=8, width=48, value_width=20),
    "own values": Problem(heads=6, width=16, own_values=True),
    "sets over KV heads": Problem(heads=12, groups=3, sets=2, width=16),
    "KV heads over sets": Problem(heads=12, groups=2, sets=6, width=9, own_values=True),
}


def attention_inputs(layout: Layout, p: Problem, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(p.heads * p.width)
    rows, tokens = layout.positions.shape
    shapes = {
        "q": (tokens, p.heads, p.width),
        "kv": (tokens + layout.kv_offset, p.groups, p.width),
        "entries": (layout.num_entries, p.groups, p.width),
    }
    if p.own_values:
        shapes |= {"values": (*shapes["kv"][:2], 7), "entry_values": (*shapes["entries"][:2], 7)}
    x = {name: torch.randn(rows, *shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    x["sink"] = torch.randn(p.heads, generator=generator).to(dtype)
    # any order, -1 and invisible numbers between
    candidates = torch.arange(-2, layout.num_entries + 3).expand(rows, tokens, p.sets, -1)
    order = torch.rand(candidates.shape, generator=generator).argsort(-1)[..., : p.slots]
    return x, candidates.gather(-1, order)


def run_attention(x, indices, layout, p, backend, dtype):
    x = {name: t.detach().to(dtype, copy=True).requires_grad_() for name, t in x.items()}
    with csakit.backend(backend):
        found = csakit.attend(**x, layout=layout, indices=indices, value_width=p.value_width, teacher=indices is not None)
        upstream = torch.randn(found.out.shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16).to(dtype)
        results = gradients(found.out, upstream, x)
    results |= {"out": found.out, "lse": found.lse} | ({} if indices is None else {"log_mass": found.log_mass})
    return {name: t.detach() for name, t in results.items()}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_attention_equals_the_reference(kind: str, problem: str) -> None:
    p, layout = PROBLEMS[problem], build_layout(LAYOUTS[kind], ratio=2, window=5)
    for dtype in (torch.float32, torch.bfloat16):
        x, indices = attention_inputs(layout, p, dtype)
        for chosen in (indices, indices.int(), None):
            want = run_attention(x, chosen, layout, p, "reference", torch.float64)
            got = run_attention(x, chosen, layout, p, "cpu-native", dtype)
            exact = ("lse",) if chosen is None else ("lse", "log_mass")
            assert_close(got, want, 3e-6, keys=exact)
            assert_close(got, want, 3e-6 if dtype is torch.float32 else 8e-3, label=f"{dtype}")


@pytest.mark.parametrize("rank", range(3))
def test_attention_over_a_shard_with_a_halo_equals_the_reference(rank: int) -> None:
    layout = Layout.packed(torch.tensor([0, 7, 30, 48]), ratio=4, window=6, tokens=48).shard(rank, 3)
    p = PROBLEMS["odd"]
    x, indices = attention_inputs(layout, p, torch.float32)
    for chosen in (indices, None):
        want = run_attention(x, chosen, layout, p, "reference", torch.float64)
        assert_close(run_attention(x, chosen, layout, p, "cpu-native", torch.float32), want, 3e-6)


@pytest.mark.parametrize("missing", ["kv", "entries", "sink", "slots"])
def test_attention_without_a_window_entries_sink_or_slots(missing: str) -> None:
    layout = Layout.batch(2, 19, ratio=3, window=0 if missing == "kv" else 4)
    p = Problem(slots=0 if missing == "slots" else 4)
    x, indices = attention_inputs(layout, p, torch.float32)
    x.pop(missing, None)
    x = {"kv": None, "entries": None, **x}
    chosen = None if missing == "entries" else indices

    def run(backend, dtype):
        given = {name: None if t is None else t.to(dtype).requires_grad_() for name, t in x.items()}
        with csakit.backend(backend):
            found = csakit.attend(**given, layout=layout, indices=chosen)
            return gradients(found.out, 1.0, given) | {"out": found.out.detach(), "lse": found.lse}

    assert_close(run("cpu-native", torch.float32), run("reference", torch.float64), 3e-6)


@pytest.mark.parametrize("sink", [150.0, INF, -INF])
def test_the_log_mass_is_exact_where_probabilities_underflow(sink: float) -> None:
    layout, p = Layout.batch(1, 40, ratio=2, window=3), PROBLEMS["odd"]
    x, indices = attention_inputs(layout, p, torch.float32)
    x["sink"][:2] = sink
    x["sink"][2] = 200.0
    want = run_attention(x, indices, layout, p, "reference", torch.float64)
    got = run_attention(x, indices, layout, p, "cpu-native", torch.float32)
    assert_close(got, want, 3e-6, keys=("out", "lse", "log_mass", "d_sink", "d_q"))
    seen = want["log_mass"].isfinite()
    assert sink == -INF or (want["log_mass"][seen] < -90).any()
    assert (got["log_mass"] - want["log_mass"])[seen].abs().max() < 1e-4


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_memory_a_query_does_not_attend_has_no_influence(poison: float) -> None:
    """Other documents, padding, and entries nobody chose; also when there are whole blocks of it."""
    layout, p = Layout.packed(torch.tensor([0, 8, 40]), ratio=2, window=4, tokens=43), PROBLEMS["whole vectors"]
    x, indices = attention_inputs(layout, p, torch.float32)
    indices = torch.where(indices % 3 == 1, -1, indices)
    want = run_attention(x, indices, layout, p, "cpu-native", torch.float32)
    hidden = {name: t.clone() for name, t in x.items()}
    for name, own in (("q", slice(8, 40)), ("kv", slice(8, 40)), ("entries", slice(4, 20))):
        for outside in (slice(0, own.start), slice(own.stop, None)):
            hidden[name][:, outside] = poison
    hidden["entries"][:, 1::3] = poison
    got = run_attention(hidden, indices, layout, p, "cpu-native", torch.float32)
    for name in ("out", "lse", "log_mass", "d_q", "d_kv"):
        assert torch.equal(got[name][:, 8:40], want[name][:, 8:40]), name


SCORERS = {"V4": (64, 128, 1), "odd": (5, 13, 1), "sets": (8, 16, 2), "one": (1, 1, 1)}


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("scorer", SCORERS)
def test_selection_scores_and_their_gradients_equal_the_reference(scorer: str, kind: str, relu: bool) -> None:
    layout, (heads, width, sets) = build_layout(LAYOUTS[kind], ratio=2, window=5), SCORERS[scorer]
    rows, tokens = layout.positions.shape
    generator = torch.Generator().manual_seed(heads)
    shapes = {"q": (tokens, heads, width), "k": (layout.num_entries, width), "weights": (tokens, heads)}
    for dtype in (torch.float32, torch.bfloat16):
        x = {name: torch.randn(rows, *shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        runs = []
        for backend, precision in (("reference", torch.float64), ("cpu-native", dtype)):
            given = {name: t.to(precision).requires_grad_() for name, t in x.items()}
            with csakit.backend(backend):
                chosen = csakit.select(*given.values(), 6, layout, relu=relu, sets=sets)
                scores = csakit.index_scores(*given.values(), layout, relu=relu, sets=sets)
                some, every = (torch.where(s.isfinite(), s, 0).sin().sum() for s in (chosen.scores, scores))
                found = {"chosen": chosen.scores.detach(), "scores": scores.detach()}
                for label, total in (("chosen", some), ("every", every)):
                    found |= {f"{name} {label}": g for name, g in gradients(total, None, given).items()}
            runs.append((chosen.indices, found))
        assert torch.equal(runs[1][0], runs[0][0])
        assert_close(runs[1][1], runs[0][1], 3e-6, keys=("chosen", "scores"))
        assert_close(runs[1][1], runs[0][1], 5e-6 if dtype is torch.float32 else 8e-3)


def test_ties_go_to_the_lowest_entry_also_between_zeros_of_both_signs() -> None:
    layout = Layout.batch(1, 600, ratio=1, window=1)
    generator = torch.Generator().manual_seed(1)
    q = torch.randint(-1, 2, (1, 600, 3, 2), generator=generator).float()
    k = torch.randint(-1, 2, (1, 600, 2), generator=generator).float()
    weights = torch.randint(-1, 2, (1, 600, 3), generator=generator).float()
    weights[:, ::7] = -0.0
    results = []
    for backend in ("reference", "cpu-native"):
        with csakit.backend(backend):
            results.append(csakit.select(q, k, weights, 50, layout))
    assert torch.equal(results[0].indices, results[1].indices)
    assert torch.equal(results[0].scores, results[1].scores)


@pytest.mark.parametrize("kind", ["random", "every sixteenth", "mostly zero", "NaN"])
def test_the_greatest_of_many_scores(kind: str) -> None:
    """Also where a sample of them misleads."""
    layout = Layout.batch(1, 700, ratio=1, window=1)
    generator = torch.Generator().manual_seed(2)
    q, k = torch.ones(1, 700, 1, 1), torch.randn(1, 700, 1, generator=generator)
    if kind == "every sixteenth":
        k[:, ::16] += 10
    elif kind == "mostly zero":
        k[:, torch.rand(700, generator=generator) < 0.97] = 0
    elif kind == "NaN":
        k[:, 5::9] = NAN
    for topk in (1, 7, 60):
        results = []
        for backend in ("reference", "cpu-native"):
            with csakit.backend(backend):
                results.append(csakit.select(q, k, None, topk, layout, relu=False))
        assert torch.equal(results[0].indices, results[1].indices)
        assert torch.equal(results[0].scores.nan_to_num(99), results[1].scores.nan_to_num(99))


def test_results_have_the_same_bits_for_any_number_of_threads() -> None:
    layout, p = Layout.packed(torch.tensor([0, 100, 500]), ratio=4, window=30, tokens=512), Problem(heads=8, groups=2, width=64, slots=40)
    x, indices = attention_inputs(layout, p, torch.float32)
    q, k, weights = torch.randn(1, 512, 16, 32), torch.randn(1, layout.num_entries, 32), torch.randn(1, 512, 16)
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        found = run_attention(x, indices, layout, p, "cpu-native", torch.float32)
        index = {"q": q.clone().requires_grad_(), "k": k.clone().requires_grad_(), "weights": weights.clone().requires_grad_()}
        with csakit.backend("cpu-native"):
            selection = csakit.select(*index.values(), 20, layout)
            total = torch.where(selection.scores.isfinite(), selection.scores, 0).sum()
            found |= {f"index {name}": g for name, g in gradients(total, None, index).items()}
        results.append(found | {"indices": selection.indices, "scores": selection.scores.detach()})
    for other in results[1:]:
        assert not [name for name, want in results[0].items() if not torch.equal(other[name], want)]


def test_strided_and_expanded_inputs_are_taken_as_they_are() -> None:
    layout, p = Layout.batch(2, 21, ratio=3, window=4), PROBLEMS["whole vectors"]
    x, indices = attention_inputs(layout, p, torch.float32)
    strided = {name: t.transpose(0, 1).contiguous().transpose(0, 1) if t.ndim == 4 else t for name, t in x.items()}
    want, got = (run_attention(y, indices, layout, p, "cpu-native", torch.float32) for y in (x, strided))
    assert all(torch.equal(got[name], want[name]) for name in want)
    with csakit.backend("cpu-native"):
        q = x["q"].clone().requires_grad_()
        csakit.attend(q, x["kv"], x["entries"], layout).out.sum().backward()
    with csakit.backend("reference"):
        other = x["q"].double().requires_grad_()
        csakit.attend(other, x["kv"].double(), x["entries"].double(), layout).out.sum().backward()
    assert_close(q.grad, other.grad, 3e-6)


def test_the_forced_backend_refuses_what_it_has_no_kernel_for() -> None:
    layout, x = Layout.batch(1, 6, ratio=2, window=2), torch.ones(1, 6, 1, 4, dtype=torch.float64)
    with csakit.backend("cpu-native"), pytest.raises(RuntimeError, match=r"take float32 and bfloat16; got torch\.float64"):
        csakit.attend(x, x[:, :, 0], None, layout)
    with pytest.raises(ValueError, match="cpu-native has none"):
        csakit.backend("cpu-native", tile=4)


def test_the_cpu_backend_takes_the_kernels_unless_a_tile_or_the_torch_path_is_asked_for() -> None:
    layout, p = Layout.batch(1, 300, ratio=2, window=50), PROBLEMS["whole vectors"]
    x, indices = attention_inputs(layout, p, torch.float32)

    def out(name, **options):
        with csakit.backend(name, **options):
            return csakit.attend(**x, layout=layout, indices=indices).out

    assert torch.equal(out("cpu"), out("cpu-native"))
    assert torch.equal(out("cpu", tile=8), out("cpu-torch", tile=8))
    assert not torch.equal(out("cpu"), out("cpu-torch")), "equal to the last bit: the kernels did not run"
