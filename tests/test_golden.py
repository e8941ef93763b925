"""Every golden vector, forward and every gradient, in every precision, on every backend, in several tile sizes.

The values come from a float64 oracle that shares no code with csakit. The general set's block cases belong to block layouts.
"""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import torch
from golden.read_golden import Case, gap, hide, load
from helpers import LAYOUT_FIELDS, build_layout, gradients, normalise, on

import csakit
from csakit.backends.cpu.native import build

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = {case.name: case for case in load(GOLDEN / "index.json")}
CASES |= {case.name: case for case in load(GOLDEN / "index_general.json") if case.name.startswith(("gqa_", "sets_"))}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TILES = {
    "fp64": ["reference", "cpu", "cpu-tile1", "cpu-tile3", "cpu-tile8"],
    "fp32": ["reference", "cpu", "cpu-torch", "cpu-tile3"],
    "bf16": ["reference", "cpu", "cpu-torch", "cpu-tile3"],
    "fp16": ["reference", "cpu"],
}
IN_16_BITS = [name for name in CASES if not name.startswith("worked_")]  # the inputs of the others are not exact there
RUNS = [(name, p, b) for p, backends in TILES.items() for b in backends for name in (IN_16_BITS if p in ("bf16", "fp16") else CASES)]
STATISTICS = ("scores", "selected_scores", "lse", "lse_visible", "teacher", "loss", "kl", "divisor", "d_scores")


def evaluate(case: Case, dtype: torch.dtype, *, hidden: bool = False) -> dict[str, torch.Tensor]:
    """Everything the case states, from csakit's public names; more than one way to a value appears as `name (how)`."""
    o = case.options
    layout = build_layout(o["layout"], ratio=o["ratio"], window=o["window"])
    got = {name: getattr(layout, name) for name in LAYOUT_FIELDS}
    raw = hide(case.inputs, case.expected["valid"], case.expected["entry_token"]) if hidden else case.inputs
    x = {name: torch.tensor(a, dtype=dtype).requires_grad_(not name.startswith("d_") and name != "weight") for name, a in raw.items()}
    if "gates" in x:
        args = {name: x[name] for name in ("values", "gates", "bias")}
        got["compressed"] = csakit.compress(*args.values(), layout, overlap=o["overlap"])
        got |= gradients(got["compressed"], x["d_compressed"], args)
    if "rows" in x:
        got["to_entries"] = layout.to_entries(x["rows"])
        got |= gradients(got["to_entries"], x["d_to_entries"], {"rows": x["rows"]})
    indices = None
    index = {name: x.get(name) for name in ("q_index", "k_index", "weights")}
    index_options = {"relu": o.get("relu", True), "sets": o.get("sets", 1)}
    if "q_index" in x:
        got["scores"] = csakit.index_scores(*index.values(), layout, scale=o["index_scale"], **index_options)
        if o["topk"]:
            selection = csakit.select(*index.values(), o["topk"], layout, scale=o["index_scale"], **index_options)
            indices = got["indices"] = selection.indices
            got["selected_scores"] = selection.scores
    if "q" in x:
        memory = {name: x.get(name) for name in ("q", "kv", "entries", "sink", "entry_values")}
        memory["values"] = None if "gates" in x else x.get("values")
        options = dict(memory, scale=o["scale"], value_width=o.get("value_width"), layout=layout)
        attention = csakit.attend(**options, indices=indices, teacher=indices is not None)
        got.update(out=attention.out, lse=attention.lse)
        got |= gradients(attention.out, x["d_out"], memory)
    if o["objective"]:
        got |= objective(case, x, layout, options, attention, selection if indices is not None else None, index, index_options)
    return {name: t.detach() for name, t in got.items()}


def objective(case, x, layout, options, attention, selection, index, index_options) -> dict[str, torch.Tensor]:
    """Teacher, loss and the gradients of the loss; the sparse objective of `selection`, or the dense one."""
    o, got, lse = case.options, {}, attention.lse
    rows = {"weight": x.get("weight"), "divisor": o["divisor"]}
    if o["denominator"] == "visible":
        lse = got["lse_visible"] = csakit.attend(**options).lse
    chosen = {"indices": selection.indices} if selection else {"sets": index_options["sets"]}
    mass = csakit.teacher_log_mass(x["q"], x["entries"], lse, layout, scale=o["scale"], **chosen)
    got["log_mass"] = mass
    if selection and o["denominator"] == "attended":
        got["log_mass"], got["log_mass (teacher_log_mass)"] = attention.log_mass, mass
        for ranks in o.get("ranks", ()):
            got[f"log_mass_rank{ranks}"] = rank_log_mass(options, selection.indices, ranks)
            got[f"log_mass (of {ranks} ranks)"] = got[f"log_mass_rank{ranks}"].logsumexp(0)
    got["teacher"] = normalise(got["log_mass"])
    if selection:
        result = csakit.distill(selection.scores, got["log_mass"], layout, **rows)
        got |= gradients(result.loss, o["d_loss"], {"scores": selection.scores, **index})
    else:
        scores = csakit.index_scores(*index.values(), layout, scale=o["index_scale"], **index_options).detach().requires_grad_()
        small = csakit.distill(scores, mass, layout, **rows)
        got |= {"loss (distill)": small.loss, "kl (distill)": small.kl, "divisor (distill)": torch.as_tensor(small.divisor)}
        got |= gradients(small.loss, o["d_loss"], {"scores": scores})
        scales = {"scale": o["scale"], "index_scale": o["index_scale"]}
        result = csakit.distill_dense(*index.values(), x["q"], x["entries"], lse, layout, **scales, **rows, **index_options)
        got |= gradients(result.loss, o["d_loss"], index)
    return got | {"loss": result.loss, "kl": result.kl, "divisor": torch.as_tensor(result.divisor)}


def rank_log_mass(options: dict, indices: torch.Tensor, ranks: int) -> torch.Tensor:
    """[ranks, B, T, K]: the log-mass of each rank's consecutive heads."""
    q, sink = options["q"].chunk(ranks, 2), options["sink"].chunk(ranks)
    return torch.stack([csakit.attend(**options | {"q": a, "sink": b}, indices=indices, teacher=True).log_mass for a, b in zip(q, sink)])


def allowed(case: Case, name: str, dtype: torch.dtype) -> float:
    """The tolerance of the golden README; in 16 bits one rounding of the value itself comes on top where it is returned in 16 bits.

    Kernels that multiply pairs of bfloat16 have rounded probabilities, and their gradients, before they come to the sums.
    """
    if dtype is torch.float64:
        return 1e-12
    fp32 = 8 * case.fp32_error.get(name, 0.0) + 2e-6
    statistic = name in STATISTICS or name.startswith("log_mass")
    roundings = 2 if dtype is torch.bfloat16 and in_pairs() else 1
    return fp32 if statistic or dtype is torch.float32 else fp32 + roundings * torch.finfo(dtype).eps / 2


def in_pairs() -> bool:
    return build.why_not() is None and build.load().csakit_pairs()


def disagreements(case: Case, got: dict[str, torch.Tensor], dtype: torch.dtype) -> list[str]:
    """One line for each result that misses its golden value; results nobody stated and statements nobody computed are also lines."""
    stated = {name for name in case.expected if not name.startswith("wrong_")}
    computed = {name.split(" (")[0] for name in got}
    lines = [f"{name}: no golden value" for name in computed - stated] + [f"{name}: not computed" for name in stated - computed]
    for label, value in got.items():
        name = label.split(" (")[0]
        if name not in stated:
            continue
        want = case.expected[name]
        if want.dtype.kind in "biu":
            if not np.array_equal(value.numpy(), want):
                lines.append(f"{label}: got {value.tolist()}, expected {want.tolist()}")
        else:
            error, limit = gap(value.double().numpy(), case, name), allowed(case, name, dtype)
            if not error <= limit:
                lines.append(f"{label}: {error:.3g} is beyond {limit:.3g}")
    return lines


def dtype_lines(case: Case, got: dict[str, torch.Tensor], dtype: torch.dtype) -> list[str]:
    """One line for each result of another dtype than promised: statistics at least float32, outputs and gradients that of the inputs."""
    wide = dtype if dtype is torch.float64 else torch.float32
    lines = []
    for label, value in got.items():
        name = label.split(" (")[0]
        if value.is_floating_point():
            want = wide if name in STATISTICS or name.startswith("log_mass") else dtype
            if value.dtype is not want and name != "divisor":
                lines.append(f"{label}: {value.dtype}, expected {want}")
    return lines


@pytest.mark.parametrize("name, precision, backend", RUNS)
def test_results_and_gradients_equal_the_golden_vectors(name: str, precision: str, backend: str) -> None:
    case, dtype = CASES[name], DTYPES[precision]
    with on(backend):
        got = evaluate(case, dtype)
        assert not (disagreements(case, got, dtype) + dtype_lines(case, got, dtype))
        if case.nan_in_padding:
            hidden = evaluate(case, dtype, hidden=True)
            assert not disagreements(case, hidden, dtype), "NaN in memory nobody may read changed the result"


@pytest.mark.parametrize("name", [name for name in CASES if "wrong_teacher" in CASES[name].expected])
def test_the_compressed_only_teacher_is_far_from_the_result(name: str, backend: str) -> None:
    case = CASES[name]
    got = evaluate(case, torch.float64)
    wrong = torch.tensor(case.expected["wrong_teacher"])
    assert (got["teacher"] - wrong).abs().max() > 1e-2
    if got["divisor"]:
        assert abs(got["loss"].item() - float(case.expected["wrong_loss"])) > 1e-6


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_mean_of_per_rank_teachers_is_far_from_the_result(ranks: int, backend: str) -> None:
    got = evaluate(CASES["head_split"], torch.float64)
    wrong = torch.tensor(CASES["head_split"].expected[f"wrong_teacher_rank_mean{ranks}"])
    assert (normalise(got[f"log_mass_rank{ranks}"]).mean(0) - wrong).abs().max() < 1e-12
    assert (got["teacher"] - wrong).abs().max() > 1e-2


@pytest.mark.parametrize("name", CASES)
def test_golden_inputs_pass_the_value_checks_of_debug(name: str, backend: str) -> None:
    with csakit.debug(True):
        assert not disagreements(CASES[name], evaluate(CASES[name], torch.float64), torch.float64)


def test_layouts_of_different_constructors_for_the_same_rows_are_equal() -> None:
    """Batch, mask, document ids, offsets and offsets with room say the same in different words."""
    for tokens, ratio, window in ((1, 4, 5), (9, 2, 3), (13, 4, 1), (8, 1, 0)):
        build = {
            "batch": {"kind": "batch", "rows": 1, "tokens": tokens},
            "packed": {"kind": "packed", "cu_seqlens": [0, tokens]},
            "static": {"kind": "packed", "cu_seqlens": [0, tokens, tokens, tokens], "tokens": tokens},
            "room": {"kind": "packed", "cu_seqlens": [0, tokens], "cu_seqlens_padded": [0, tokens]},
            "mask": {"kind": "mask", "mask": [[1] * tokens]},
            "document_ids": {"kind": "document_ids", "ids": [[5] * tokens]},
        }
        layouts = {name: build_layout(spec, ratio=ratio, window=window) for name, spec in build.items()}
        for name, layout in layouts.items():
            for part in LAYOUT_FIELDS:
                assert torch.equal(getattr(layout, part), getattr(layouts["batch"], part)), f"{name}: {part}"
            assert (layout.ratio, layout.window, layout.num_entries) == (ratio, window, tokens // ratio)
