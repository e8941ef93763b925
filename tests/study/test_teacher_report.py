"""The page of the study says what was recorded, and its words of certainty follow the protocol's rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.teacher_study import picture, records, report
from benchmarks.teacher_study.__main__ import RESULTS, ROOT, main

RECORDED = RESULTS / "reduced.csv"
ONE = records.Record("smoke", 0, 0, "frozen", 1, "compressed-only", "full", 4, "late", "capture", -0.02, 0.001, 8)


def test_the_tables_of_the_page_are_those_of_the_records() -> None:
    page = (ROOT / "docs/teacher_study.md").read_text()
    filled = report.fill(page, report.Results(records.read(RECORDED)))
    assert filled == page, "run `python -m benchmarks.teacher_study report`"
    assert filled.count("<!-- table: ") == len(report.TABLES)


def test_the_picture_is_drawn_from_the_records(tmp_path: Path) -> None:
    picture.draw(report.Results(records.read(RECORDED)), tmp_path / "study.svg")
    drawn = (tmp_path / "study.svg").read_text()
    assert drawn.startswith("<?xml") and "wrong oracle" in drawn
    recorded = (ROOT / "docs/teacher_study.svg").read_text()
    assert recorded.startswith("<?xml")


def test_the_report_command_records_a_run_and_fills_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.teacher_study.__main__.RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    oracle, wrong = replace(ONE, arm="oracle", against="", value=0.5), replace(ONE, arm="wrong oracle", against="", value=0.4)
    records.write(tmp_path / "smoke-gates-0.csv", [replace(r, metric="mass-weighted capture") for r in (oracle, wrong)])
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: capture -->\nold\n<!-- end -->\nafter\n")
    main(["report", "--preset", "smoke", "--out", str(tmp_path), "--page", str(page)])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text and "| 0.4000 | 0.5000 |" in text
    assert len(records.read(tmp_path / "results/smoke.csv")) == 2


def test_records_survive_the_file(tmp_path: Path) -> None:
    records.write(tmp_path / "some.csv", [ONE])
    assert records.read(tmp_path / "some.csv") == [ONE]


@pytest.mark.parametrize(
    ("values", "claimed"), [((0.010, 0.011, 0.012), True), ((0.001, 0.02, 0.04), False), ((-0.0001, *(0.03,) * 5), False), ((0.01,), False)]
)
def test_an_effect_is_claimed_only_by_the_rule_of_the_protocol(values: tuple[float, ...], claimed: bool) -> None:
    found = report.Results(replace(ONE, language_seed=seed, value=value) for seed, value in enumerate(values))
    spread = found.find("capture", "compressed-only", layer=1, topk=4, against="full")
    assert spread is not None and spread.claimed() is claimed


def test_a_model_s_number_is_the_mean_over_its_indexer_seeds() -> None:
    runs = [replace(ONE, language_seed=s, index_seed=i, value=v) for s, i, v in ((0, 0, 1.0), (0, 1, 3.0), (1, 0, 5.0))]
    found = report.Results(runs)
    both = found.find("capture", "compressed-only", layer=1, topk=4, against="full")
    one = found.find("capture", "compressed-only", layer=1, topk=4, against="full", index_seed=0)
    assert both is not None and both.each == (2.0, 5.0) and both.mean == 3.5
    assert one is not None and one.each == (1.0, 5.0)
    assert found.find("capture", "full", layer=1, topk=4) is None


def test_records_of_two_presets_and_unknown_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="one preset"):
        report.Results([ONE, replace(ONE, preset="full")])
    with pytest.raises(ValueError, match="one preset; got none"):
        report.Results([])
    with pytest.raises(ValueError, match="table must be one of gates"):
        report.fill("<!-- table: nothing -->\n<!-- end -->", report.Results([ONE]))
