"""The kernels as processors with AVX512 and its bfloat16 products run them, with plain code in place of those instructions."""

from __future__ import annotations

import subprocess

import pytest
import test_native_kernels as kernels
import torch
from test_golden import CASES, IN_16_BITS, disagreements, dtype_lines, evaluate

import csakit
from csakit import Layout
from csakit.backends.cpu.native import build

WHY_NOT = build.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no native kernels here: {WHY_NOT}")


@pytest.fixture(scope="module")
def library():
    flags = build.FLAGS
    build.FLAGS = (*flags, "-DCSAKIT_EMULATE")
    try:
        return build.opened(build.library())
    finally:
        build.FLAGS = flags


@pytest.fixture(autouse=True)
def emulated(library, monkeypatch):
    monkeypatch.setattr(build, "load", lambda: library)
    assert library.csakit_lanes() == 16 and library.csakit_pairs()


@pytest.mark.parametrize("level", build.LEVELS)
def test_the_kernels_compile_for_every_kind_of_processor(level: str) -> None:
    command = [build.compiler(), *build.FLAGS, *build.LEVELS[level], "-fsyntax-only", str(build.SOURCES / "kernels.cpp")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_golden_vectors(dtype: torch.dtype) -> None:
    with csakit.backend("cpu-native"):
        for name in CASES if dtype is torch.float32 else IN_16_BITS:
            got = evaluate(CASES[name], dtype)
            assert not (disagreements(CASES[name], got, dtype) + dtype_lines(CASES[name], got, dtype)), name


@pytest.mark.parametrize("problem", kernels.PROBLEMS)
@pytest.mark.parametrize("kind", ["packed", "left"])
def test_attention(kind: str, problem: str) -> None:
    kernels.test_attention_equals_the_reference(kind, problem)


@pytest.mark.parametrize("scorer", kernels.SCORERS)
def test_selection(scorer: str) -> None:
    kernels.test_selection_scores_and_their_gradients_equal_the_reference(scorer, "ids", relu=True)
    kernels.test_selection_scores_and_their_gradients_equal_the_reference(scorer, "room", relu=False)


@pytest.mark.parametrize("poison", [kernels.NAN, kernels.INF])
def test_memory_a_query_does_not_attend_has_no_influence_in_pairs(poison: float) -> None:
    """An odd number of rows has a last one that is nobody's pair; what lies next to it must not be taken for one."""
    layout = Layout.packed(torch.tensor([0, 8, 40]), ratio=2, window=5, tokens=43)
    x, indices = kernels.attention_inputs(layout, kernels.PROBLEMS["whole vectors"], torch.bfloat16)
    want = kernels.run_attention(x, indices, layout, kernels.PROBLEMS["whole vectors"], "cpu-native", torch.bfloat16)
    hidden = {name: t.clone() for name, t in x.items()}
    for name, own in (("q", slice(8, 40)), ("kv", slice(8, 40)), ("entries", slice(4, 20))):
        hidden[name][:, : own.start] = poison
        hidden[name][:, own.stop :] = poison
    got = kernels.run_attention(hidden, indices, layout, kernels.PROBLEMS["whole vectors"], "cpu-native", torch.bfloat16)
    for name in ("out", "lse", "log_mass", "d_q", "d_kv"):
        assert torch.equal(got[name][:, 8:40], want[name][:, 8:40]), name


def test_results_have_the_same_bits_for_any_number_of_threads_in_pairs() -> None:
    layout, p = Layout.batch(1, 300, ratio=4, window=30), kernels.Problem(heads=8, groups=2, width=64, slots=40)
    x, indices = kernels.attention_inputs(layout, p, torch.bfloat16)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(kernels.run_attention(x, indices, layout, p, "cpu-native", torch.bfloat16))
    torch.set_num_threads(before)
    assert not [name for name, want in results[0].items() if not torch.equal(results[1][name], want)]
