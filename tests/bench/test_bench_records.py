"""One row per figure: the CSV, what it says of the machine, what two of them say of each other, table and picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from csakit.bench import picture, records, runner, suites, table, worker
from csakit.bench.records import COLUMNS, FIGURES, PEAK, STATUSES
from csakit.bench.shapes import Case, Shape
from csakit.bench.suites import alone

SHAPE = Shape(48, 2, 8, 4, window=8, index_heads=2, index_width=4)


@pytest.fixture(scope="module")
def rows():
    suite = suites.Suite("for tests", alone(("attend", "select"), (SHAPE,)), memory=False)
    options = runner.Options(repeats=3, memory=False, settings={"OMP_WAIT_POLICY": "PASSIVE"})
    return runner.run("test", suite, ["csakit-cpu", "eager", "bench_providers:elsewhere"], options)


def test_every_provider_has_a_row_for_each_figure(rows):
    for operation in ("attend", "select"):
        mine = [row for row in rows if row.operation == operation]
        assert [row.figure for row in mine if row.provider == PEAK] == ["throughput"]
        for provider in ("csakit-cpu", "eager"):
            assert [row.figure for row in mine if row.provider == provider] == ["error", "cpu", "wall", "throughput", "of peak", "speedup"]


def test_rows_say_what_they_are_and_where_they_were_measured(rows):
    for row in rows:
        assert row.status in STATUSES and row.unit == FIGURES[row.figure][0]
        assert row.csakit and row.torch and row.python and row.processor and row.date
        assert (row.suite, row.threads, row.device, row.allocator) == ("test", 1, "cpu", "OMP_WAIT_POLICY=PASSIVE")
        if row.figure in ("cpu", "wall", "throughput", "speedup"):
            assert row.repeats == 3 and row.low <= row.value <= row.high


def test_speedups_are_relative_to_the_baseline(rows):
    assert {row.baseline for row in rows if row.figure == "speedup"} == {"eager"}
    assert {row.provider for row in rows if row.figure == "speedup"} == {"eager", "csakit-cpu"}
    assert all(row.value == 1 for row in rows if row.figure == "speedup" and row.provider == "eager")


def test_a_table_survives_its_file(rows, tmp_path):
    path = tmp_path / "rows.csv"
    records.append(path, rows[:3])
    records.append(path, rows[3:])
    assert [line for line in path.read_text().splitlines() if line.startswith("suite,")] == [",".join(COLUMNS)]
    assert records.read_csv(path) == rows and list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_no_table_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no table of csakit bench: it lacks the columns suite"):
        records.read_csv(path)


def test_a_value_that_is_no_number_is_refused_with_its_line(rows, tmp_path):
    path = tmp_path / "rows.csv"
    records.append(path, rows)
    path.write_text(path.read_text().replace(f",{rows[1].tokens},", ",many,", 1))
    with pytest.raises(ValueError, match=r"line 2: .*many"):
        records.read_csv(path)


def test_a_run_compared_with_itself_has_not_moved(rows):
    moves, common = records.compare(rows, rows)
    assert moves == [] and common == sum(row.value is not None and row.figure != "error" for row in rows)


def test_what_moved_beyond_the_noise_is_shown_with_its_direction(rows):
    slower = next(row for row in rows if row.figure == "cpu")
    faster = next(row for row in rows if row.figure == "throughput" and row.provider == "eager")
    factors = {slower: 10, faster: 5}
    new = [replace(row, value=row.value * f, low=row.low * f, high=row.high * f) if (f := factors.get(row)) else row for row in rows]
    moves, _ = records.compare(rows, new)
    assert [(move.old, move.better) for move in moves] == [(slower, False), (faster, True)]
    assert moves[0].factor == pytest.approx(10)
    said = table.moves(moves, 20)
    assert "2 of 20 figures moved" in said and "worse" in said and "better" in said


def test_other_threads_are_another_measurement(rows):
    assert records.compare(rows, [replace(row, threads=2) for row in rows]) == ([], 0)


def test_memory_moves_by_more_than_five_percent_and_a_mebibyte(rows):
    base = replace(rows[1], figure="memory peak", unit="MiB", value=100.0, low=None, high=None)
    for value, count in ((104.0, 0), (106.0, 1), (94.0, 1)):
        moves, _ = records.compare([base], [replace(base, value=value)])
        assert len(moves) == count
    assert records.compare([replace(base, value=1.0)], [replace(base, value=1.5)])[0] == []


def test_the_table_names_every_provider_and_why_one_was_not_timed(rows):
    said = table.text(rows)
    assert "attend: 48 tokens, 2 heads x 8" in said and "matrix product" in said
    assert "csakit-cpu" in said and "skipped: only on the moon" in said
    assert "1 thread" in table.conditions(rows)


def test_growth_says_where_scoring_overtakes(rows):
    made = []
    for operation, power in (("attend", 1), ("select", 2)):
        first = next(row for row in rows if row.operation == operation and row.figure == "cpu" and row.provider == "eager")
        made += [replace(first, tokens=n, value=n**power / (1 if power == 1 else 2000)) for n in (1000, 4000, 8000)]
    assert table.growth(made) == [
        "eager: attention as T^1.00, scoring as T^2.00 over the longer half of the lengths",
        "eager: scoring overtakes attention at about 2000 tokens",
    ]
    assert table.growth(rows) == []
    drawn = picture.draw([*made, *(replace(row, figure="memory peak", unit="MiB") for row in made if row.operation == "attend")])
    assert drawn.count("<polyline") == 3 and drawn.count("stroke-dasharray") == 1 and "1000 MiB" in drawn
    ElementTree.fromstring(drawn)


def test_pictures_are_well_formed_bars_and_curves(rows):
    bars = picture.draw(rows)
    assert bars.count("<rect") == 1 + 4 and "csakit-cpu" in bars
    times = [row for row in rows if row.figure == "cpu"]
    curves = picture.draw([replace(row, tokens=row.tokens << n) for row in times for n in range(3)])
    assert curves.count("<polyline") == 4
    other = picture.draw([*times, *(replace(row, allocator="another") for row in times)])
    assert other.count("<rect") == 1 + 8 and "float32, another</text>" in other
    mixed = picture.draw([replace(row, tokens=row.tokens << n, heads=row.heads + n) for row in times for n in range(3)])
    assert "<polyline" not in mixed  # three lengths, but of different heads: no curve
    for drawn in (bars, curves, other, mixed):
        ElementTree.fromstring(drawn)
    with pytest.raises(ValueError, match="nothing was timed"):
        picture.draw([row for row in rows if row.figure == "error"])


def test_memory_is_that_of_a_fresh_process_split_into_results_and_the_rest():
    used = worker.measure("bench_providers:appetite", Case("attend", SHAPE), device="cpu")
    assert used.results == pytest.approx(32, abs=0.1)
    assert 90 < used.peak < 110


def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"bench_providers:crash at attend: 48 tokens.*second line"):
        worker.measure("bench_providers:crash", Case("attend", SHAPE), device="cpu")
