"""A suite from beginning to end: contests, a run that is stopped, layers in processes of their own, profile, starts, goals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_providers import Elsewhere

from csakit.bench import goals, measurement, problem, profile, providers, records, runner, table
from csakit.bench.measurement import Sample
from csakit.bench.providers.eager import Eager
from csakit.bench.records import PARTS
from csakit.bench.shapes import Case, Shape
from csakit.bench.suites import FLASH, MODERATE, Suite, against, alone

SHAPE = Shape(48, 2, 8, 4, window=8, index_heads=2, index_width=4)
LAYER = Shape(140, 4, 32, 8, window=16, index_heads=16, index_width=32)
QUICK = runner.Options(repeats=2, memory=False)


def figures(rows, case, provider):
    return {row.figure: row for row in rows if (row.case, row.provider) == (case, provider)}


# ---- contests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def variants():
    case = Case("attend", SHAPE)
    changes = ({"operation": "attend-teacher"}, {"threads": 2}, {"dtype": "bfloat16"})
    suite = Suite("for tests", tuple(against(case, change) for change in changes))
    return case, runner.run("test", suite, ["csakit-cpu", "csakit-cpu-torch", "eager"], QUICK)


@pytest.mark.parametrize(
    ("change", "baseline"), [({"operation": "attend-teacher"}, "attend"), ({"threads": 2}, "1 thread"), ({"dtype": "bfloat16"}, "float32")]
)
def test_cases_of_a_contest_are_compared_pair_by_pair(variants, change, baseline):
    case, rows = variants
    row = figures(rows, replace(case, **change), "csakit-cpu")["against"]
    assert row.baseline == baseline and row.repeats == 2 and row.low <= row.value <= row.high
    assert "against" not in figures(rows, case, "csakit-cpu")
    assert any(line.startswith("csakit-cpu: ") and f"over {baseline}: " in line for line in table.remarks(rows))


def test_only_csakit_runs_against_itself(variants):
    case, rows = variants
    assert {row.provider for row in rows} == {"csakit-cpu", "csakit-cpu-torch", "matrix product"}
    assert [row.baseline for row in rows if row.figure == "speedup" and row.case == replace(case, threads=2)] == [
        "csakit-cpu-torch",
        "csakit-cpu",
    ]


def test_threads_are_those_of_the_case_and_then_the_callers_again(variants):
    seen = []

    class Counting(Elsewhere):
        def prepare(self, problem):
            seen.append((problem.case.threads, torch.get_num_threads()))
            return super().prepare(problem)

    before = torch.get_num_threads()
    suite = Suite("for tests", alone(("attend",), (SHAPE,)))
    suite = replace(suite, contests=tuple(replace(c, cases=(replace(c.cases[0], threads=n),)) for c in suite.contests for n in (1, 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "find", lambda name, megatron: Counting())
        runner.run("test", suite, ["counting"], QUICK)
    assert seen == [(1, 1), (2, 2)] and torch.get_num_threads() == before


def test_patience_ends_the_rounds_but_not_the_first():
    def call():
        return Sample(1.0, 1.0, None)

    answers = iter([True, False, True])
    found, failed = measurement.interleaved({"a": call, "b": call}, 5, go_on=lambda: next(answers))
    assert not failed
    assert {name: len(samples) for name, samples in found.items()} == {"a": 2, "b": 2}
    assert len(measurement.interleaved({"a": call}, 3, go_on=lambda: False)[0]["a"]) == 1


def test_who_fails_at_the_clock_is_reported_and_holds_up_nobody():
    class Tired(Eager):
        name, calls = "tired", 0

        def prepare(self, problem):
            work = super().prepare(problem)

            def run():
                self.calls += 1
                if self.calls == 3:  # the first is checked, the second timed
                    raise MemoryError("no more")
                return work()

            return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "find", lambda name, megatron: Tired() if name == "tired" else Eager())
        rows = runner.run("test", Suite("for tests", alone(("attend",), (SHAPE,))), ["tired", "eager"], QUICK)
    case = Case("attend", SHAPE)
    assert figures(rows, case, "tired").keys() == {"error"}
    assert (figures(rows, case, "tired")["error"].status, figures(rows, case, "tired")["error"].note) == ("failed", "MemoryError: no more")
    assert figures(rows, case, "eager")["cpu"].repeats == 2


# ---- a run that is stopped ---------------------------------------------------------------------------------------------


def test_rows_are_kept_contest_by_contest_and_a_second_run_goes_on(tmp_path):
    path = tmp_path / "rows.csv"
    suite = Suite("for tests", alone(("attend", "attend-teacher", "select"), (SHAPE,)))
    kept = []

    def keep(rows):
        records.append(path, rows)
        kept.append(rows[0].operation)
        if len(kept) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run("test", suite, ["eager"], QUICK, keep=keep)
    assert list(dict.fromkeys(row.operation for row in records.read_csv(path))) == ["attend", "attend-teacher"]
    runner.run("test", suite, ["eager"], QUICK, done=records.read_csv(path), keep=keep)
    assert kept == ["attend", "attend-teacher", "select"]
    assert len({row.key for row in records.read_csv(path)}) == len(records.read_csv(path))


def test_other_allocator_settings_are_measured_again():
    suite = Suite("for tests", alone(("attend",), (SHAPE,)))
    rows = runner.run("test", suite, ["eager"], QUICK)
    assert runner.run("test", suite, ["eager"], QUICK, done=rows) == []
    again = runner.run("test", suite, ["eager"], replace(QUICK, settings={"THP_MEM_ALLOC_ENABLE": "1"}), done=rows)
    assert again and {row.allocator for row in again} == {"THP_MEM_ALLOC_ENABLE=1"}
    assert [block.title.split("; ")[0].split("allocator ")[1] for block in table.blocks(rows + again)] == [
        "default",
        "THP_MEM_ALLOC_ENABLE=1",
    ]


# ---- layers and steps --------------------------------------------------------------------------------------------------


def test_a_layer_is_measured_in_a_process_of_its_own_time_memory_and_parts():
    suite = Suite("for tests", alone(("csa-backward",), (LAYER,)), parts=True)
    rows = runner.run("test", suite, ["csakit-nn", "eager", "bench_providers:killed"], QUICK)
    found = figures(rows, Case("csa-backward", LAYER), "csakit-nn")
    assert {"error", "cpu", "wall", "throughput", "of peak", "memory peak", "memory extra"} <= found.keys()
    assert found["cpu"].repeats == 2 and found["memory peak"].value > 0
    parts = {name.removeprefix("part "): row.value for name, row in found.items() if name.startswith("part ")}
    assert parts.keys() == set(PARTS) and all(
        parts[name] > 0 for name in ("attention", "scoring", "objective", "compression", "projections")
    )
    assert any("where the time goes" in line for line in table.remarks(rows))
    notes = {row.provider: (row.status, row.note) for row in rows if row.figure == "error"}
    assert notes["eager"] == ("skipped", "the eager author wrote kernels only")
    assert notes["bench_providers:killed"][0] == "failed" and "exit code -9" in notes["bench_providers:killed"][1]


def test_a_profile_gives_gradients_to_the_part_they_are_of():
    shape = replace(LAYER, tokens=1500, index_heads=64)
    run = providers.find("csakit-nn").prepare(problem.make(Case("csa-backward", shape)))
    found = profile.parts(run)
    assert found["scoring"] + found["objective"] > found["attention"] > 0  # 64 x 32 index heads, twice, against 4 x 32 on few keys
    stock = profile.parts(providers.find("transformers").prepare(problem.make(Case("sliding-backward", shape))))
    assert stock["attention"] > 0.5 * sum(value for name, value in stock.items() if name != "python")
    assert stock["scoring"] == stock["objective"] == stock["compression"] == 0


def test_steps_tell_tokens_per_second():
    row = replace(runner.run("test", Suite("", alone(("attend",), (SHAPE,))), ["eager"], QUICK)[1], operation="step", figure="tokens")
    assert any(line.startswith("eager: trains ") for line in table.remarks([row]))


def test_starts_are_those_of_fresh_processes(monkeypatch):
    monkeypatch.setattr("csakit.bench.starts.PROCESSES", 1)
    suite = Suite("for tests", alone(("attend",), (SHAPE,)), starts=True)
    rows = runner.run("test", suite, ["csakit-cpu-torch", "eager"], QUICK)
    found = figures(rows, Case("attend", SHAPE), "csakit-cpu-torch")
    assert found["import"].value > 0 and found["first call"].value > 0
    assert "import" not in figures(rows, Case("attend", SHAPE), "eager")
    assert sum("import takes" in line for line in table.remarks(rows)) == 1


# ---- goals -------------------------------------------------------------------------------------------------------------


def test_goals_are_judged_by_the_native_rows(variants):
    _, rows = variants
    any_row = next(row for row in rows if row.figure == "cpu")

    def row(case, figure, value, baseline="", provider="csakit-cpu-native"):
        fields = {**vars(case.shape), "operation": case.operation, "threads": case.threads, "dtype": case.dtype}
        return replace(any_row, **fields, provider=provider, figure=figure, value=value, baseline=baseline)

    longer = Case("select", replace(MODERATE, tokens=4096, topk=512))
    made = [
        row(Case("attend-backward", MODERATE), "speedup", 20.0, "megatron"),
        row(Case("attend-backward", MODERATE), "speedup", 6.0, "eager"),
        row(Case("attend-backward", replace(FLASH, tokens=2048)), "of peak", 80.0),
        row(Case("attend-teacher", MODERATE), "against", 0.5, "attend"),
        row(Case("attend-backward", MODERATE, threads=2), "against", 1.8, "1 thread"),
        row(longer, "memory peak", 10.0),
        row(longer, "memory peak", 100.0, provider="eager"),
        row(longer, "memory extra", 70.0),
        row(longer, "memory extra", 900.0, provider="eager"),
        row(Case("attend-backward", MODERATE), "speedup", 99.0, "eager", provider="csakit-cpu-torch"),
    ]
    said = goals.lines(made)
    assert said == [
        "held    2048 x 16 x 128, K 256, with teacher and backward, over Megatron-LM: 20x, at least 18x",
        "missed  2048 x 16 x 128, K 256, the same over the eager author: 6x, at least 7x",
        "held    2048 x 64 x 512, K 512, the same, of the matrix-product peak: 80 %, at least 75 %",
        "missed  the teacher on top of attention, 2048 x 16 x 128: 100 %, at most 3 %",
        "held    select, the same, share of the eager author's memory: 0.1 of it, at most 0.125 of it",
        "missed  memory beyond inputs, outputs and gradients, all cases: 70 MiB, at most 64 MiB",
        "held    two threads over one, 2048 x 16 x 128: 1.8x, at least 1.7x",
    ]
    assert all(line in table.remarks(made) for line in said)
    assert goals.lines([row(Case("attend", MODERATE), "cpu", 1.0)]) == []


@pytest.mark.parametrize(
    ("seconds", "dtype", "timed"), [(2, "bfloat16", "float32"), (0.5, "bfloat16", "bfloat16"), (2, "float64", "float64")]
)
def test_the_peak_of_16_bits_is_that_of_float32_where_products_in_16_bits_are_slower(monkeypatch, seconds, dtype, timed):
    monkeypatch.setattr(measurement, "_product_seconds", lambda name: 1 if name == "float32" else seconds)
    found = measurement.products(dtype, "cpu").values()
    assert {multiply.__defaults__[0].dtype for multiply, _ in found} == {getattr(torch, timed)}


@pytest.mark.parametrize(("seconds", "calls"), [(0.002, 10), (1.0, 1)])
def test_a_short_call_is_made_several_times_in_a_sample(monkeypatch, seconds, calls):
    now, made = [0.0], []

    def call():
        made.append(now[0])
        now[0] += seconds

    monkeypatch.setattr(measurement.time, "perf_counter", lambda: now[0])
    sample = measurement.sampled(call, "cpu")
    assert sample().wall == pytest.approx(seconds)
    before = len(made)
    assert sample().wall == pytest.approx(seconds)
    assert len(made) - before == calls
