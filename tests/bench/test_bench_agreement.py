"""What is right passes, what is wrong is caught, before anything is timed."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from bench_providers import MISTAKES, Wrong

from csakit.bench import agreement, problem, providers, runner
from csakit.bench.shapes import KERNELS, LAYERS, Case, Shape
from csakit.bench.suites import TINY, Suite, alone

SHAPE = Shape(80, 4, 16, 5, window=8, index_heads=3, index_width=8)  # more than four stretches of queries; K below what is visible


ATTEND = Suite("one case", alone(("attend",), (SHAPE,)))
LAYER = Shape(270, 4, 32, 8, window=16, index_heads=16, index_width=32)  # longer than the row it is compared on, and than HCA's ratio


def judge(provider, case: Case) -> agreement.Agreement:
    whole = problem.make(case)
    queries = agreement.stretches(case.shape.tokens)
    probe = whole.only(queries)
    return agreement.check(probe, provider.prepare(probe)(), queries)


@pytest.mark.parametrize("operation", KERNELS)
@pytest.mark.parametrize("name", ["csakit-reference", "csakit-cpu", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_right_providers_agree(name, operation, dtype):
    found = judge(providers.find(name), Case(operation, SHAPE, "clustered", dtype))
    assert found.holds, found


@pytest.mark.parametrize("operation", ["attend", "attend-backward", "select"])
def test_stock_transformers_agrees(operation):
    stock = providers.find("transformers")
    assert judge(stock, Case(operation, SHAPE)).holds
    with pytest.raises(providers.Unsupported, match="no indexer objective"):
        stock.prepare(problem.make(Case("distill", SHAPE)))


@pytest.mark.parametrize("operation", LAYERS)
def test_layers_agree_whole_and_a_wrong_one_is_caught(operation):
    whole = problem.make(Case(operation, LAYER))
    for name in providers.names(operation):
        verdict, run = agreement.judge(providers.find(name), whole)
        assert verdict["status"] == "ok" and run is not None, (name, verdict)

    def spoil(results, problem):
        results[max(results)] *= 1.001

    right = providers.find("csakit-nn")
    verdict, run = agreement.judge(Wrong("wrong", spoil, right), whole)
    assert verdict["status"] == "disagrees" and run is None


def test_a_stock_layer_trains_no_indexer_and_csakit_does():
    whole = problem.make(Case("csa-backward", LAYER))
    trained = {name: {key for key in providers.find(name).prepare(whole)() if "indexer" in key} for name in providers.names("csa-backward")}
    assert len(trained["csakit-nn"]) == 6 and trained["csakit-nn"] == trained["csakit-installed"] and not trained["transformers"]


def test_a_step_of_stock_and_of_csakit_begins_with_the_same_loss_and_learns():
    whole = problem.make(Case("step", TINY))
    for name in providers.names("step"):
        verdict, run = agreement.judge(providers.find(name), whole)
        assert verdict["status"] == "ok", verdict
        assert run()["loss"] > run()["loss"]


@pytest.mark.parametrize("name", ["csakit-cpu", "eager"])
def test_who_has_kernels_only_says_so(name):
    assert judge_status(name, Case("csa", LAYER)) == (
        "skipped",
        {"csakit-cpu": "a backend has kernels only"}.get(name, "the eager author wrote kernels only"),
    )


def judge_status(name, case):
    verdict, _ = agreement.judge(providers.find(name), problem.make(case))
    return verdict["status"], verdict["note"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_provider_is_caught(mistake):
    operation, spoil = MISTAKES[mistake]
    case = Case(operation, SHAPE)
    assert judge(Wrong(mistake, lambda results, problem: None), case).holds
    assert not judge(Wrong(mistake, spoil), case).holds


def test_a_result_of_another_shape_is_no_agreement():
    case = Case("attend", SHAPE)
    turned = Wrong("turned", lambda results, problem: results.update(out=results["out"].transpose(2, 3)))
    assert judge(turned, case).error == math.inf


def test_rounding_between_equal_scores_is_no_mistake():
    case = Case("select", SHAPE)
    whole = problem.make(case)
    twins = whole.inputs["k_index"]
    twins[:, 1::2] = twins[:, ::2]  # every score comes twice: which twin is picked is arbitrary
    queries = [slice(0, SHAPE.tokens)]
    picked = providers.find("csakit-cpu").prepare(whole)()["indices"]
    other = torch.where(picked >= 0, picked ^ 1, -1)  # each pick's twin
    seen = whole.layout.entry_stop[..., None]
    assert agreement.selection_error(whole, torch.where((other < seen).all(-1, keepdim=True), other, picked), queries) < 1e-12


def test_all_queries_are_compared_when_there_are_few_and_both_ends_always():
    assert agreement.stretches(72) == [slice(0, 72)]
    for tokens in (73, 5000):
        parts = agreement.stretches(tokens)
        assert parts[0].start == 0 and parts[-1].stop == tokens and all(part.stop - part.start == agreement.QUERIES for part in parts)
        assert all(before.stop <= after.start for before, after in pairwise(parts))


def test_heads_beyond_one_group_are_compared_too():
    case = Case("attend-backward", replace(SHAPE, heads=agreement.HEADS + 2))

    def spoil(results, problem):
        results["d_q"][:, :, -1] *= 2

    assert judge(Wrong("right", lambda results, problem: None), case).holds
    assert not judge(Wrong("last head", spoil), case).holds


def test_a_provider_that_disagrees_fails_or_cannot_is_reported_and_not_timed():
    names = ["eager", *(f"bench_providers:{name}" for name in ("too_much", "crash", "elsewhere", "big"))]
    rows = runner.run("test", ATTEND, names, runner.Options(repeats=2, memory=False))
    found = {row.provider: (row.status, row.note) for row in rows if row.figure == "error"}
    status = {name.rpartition(":")[2]: verdict for name, verdict in found.items()}
    assert status["eager"][0] == "ok"
    assert status["too_much"][0] == "disagrees" and "out is off by" in status["too_much"][1]
    assert status["crash"] == ("failed", "RuntimeError: the kernel is not there")
    assert status["elsewhere"] == ("skipped", "only on the moon")
    assert status["big"][0] == "skipped" and "GiB" in status["big"][1]
    assert {row.provider for row in rows if row.figure == "cpu"} == {"eager"}


def test_a_backend_that_cannot_run_here_is_skipped_and_its_other_errors_are_not(monkeypatch):
    def verdict(said: str) -> tuple[str, str]:
        def refuse(*_, **__):
            raise RuntimeError(said)

        monkeypatch.setattr("csakit.attend", refuse)
        (row,) = runner.run("test", ATTEND, ["csakit-cpu"], runner.Options(repeats=1, memory=False))
        return row.status, row.note

    reason = "backend 'cpu' was asked for, but there is no compiler"
    assert verdict(reason) == ("skipped", reason)
    assert verdict("out of memory") == ("failed", "RuntimeError: out of memory")
