"""The report: one file, well formed, nothing fetched, every number of the log where it belongs; the terminal's progress."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict
from html.parser import HTMLParser

import pytest

from csakit.report import page, summary, svg
from csakit.report.summary import ReportError, Run
from csakit.train.log import Console, MetricsFile, describe, mean_over_layers, read_metrics
from csakit.train.presets import PRESETS

VOID = {"meta", "br", "link", "img", "input"}


class Checker(HTMLParser):
    """Notes what a page refers to and that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def evaluation(stage: str, when: str, **changes) -> dict:
    layer = {"kl": 0.5, "uniform_kl": 1.0, "captured": 0.6, "recall": 0.7, "top1": 0.8, "entries": 0.4}
    layer |= {"heads_entries": [0.25, 0.55], "heads_cv": 0.375}
    query = {
        "position": 11,
        "entries": ["<b>x", "&amp", 'quo"'],
        "tail": "é",
        "target": "\n",
        "layers": {"layers.1": {"teacher": [0.7, 0.2, 0.1], "student": [0.2, 0.3, 0.5], "picked": [2]}},
    }
    numbers = {"bits_per_byte": 2.5, "random": 0.25, "layers": {"layers.1": layer}, "queries": [query]}
    return {"kind": "evaluation", "stage": stage, "when": when, "step": 0, **numbers, **changes}


def step(stage: str, number: int, **changes) -> dict:
    numbers = {"bits_per_byte": 3.0 / number, "kl": None if stage == "dense" else 0.1, "gradient_norms": {"backbone": 0.5}}
    return {
        "kind": "step",
        "stage": stage,
        "step": number,
        "total_steps": number,
        "tokens": 100,
        "tokens_per_second": 50.0,
        **numbers,
        **changes,
    }


def run_of(tmp_path, *records) -> Run:
    (tmp_path / "run.json").write_text(json.dumps({"config": asdict(PRESETS["tiny"]), "environment": {"torch": "2.x"}}))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return summary.read_run(tmp_path)


def test_the_page_is_one_well_formed_file_that_fetches_nothing(tmp_path):
    run_of(
        tmp_path,
        evaluation("dense", "before"),
        step("dense", 1),
        step("dense", 2),
        evaluation("dense", "after"),
        evaluation("warmup", "after"),
    )
    text = page.write(tmp_path).read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.open == [] and checker.references == [] and "url(" not in text and "<script" not in text


def test_text_of_a_corpus_is_shown_as_text_and_not_as_markup(tmp_path):
    shown = page.render(run_of(tmp_path, evaluation("warmup", "after")))
    assert "<b>x" not in shown and "&lt;b&gt;x" in shown and "&amp;amp" in shown


def test_each_layer_shows_how_far_its_heads_differ(tmp_path):
    shown = page.render(run_of(tmp_path, evaluation("warmup", "after")))
    assert "<td>0.4000</td><td>0.25 to 0.55</td><td>0.3750</td>" in shown


@pytest.mark.parametrize(
    "records",
    [
        (),
        (evaluation("dense", "before"),),
        (evaluation("dense", "before"), step("dense", 1)),
        (evaluation("sparse", "before"), step("sparse", 1, kl=0.0), evaluation("sparse", "after", layers={}, queries=[])),
        (evaluation("warmup", "after", layers={"layers.1": {"kl": None, "uniform_kl": None, "captured": None}}, random=None),),
    ],
)
def test_a_run_at_any_point_has_a_page_and_a_summary(tmp_path, records):
    run = run_of(tmp_path, *records)
    assert page.render(run).startswith("<!doctype html>") and summary.lines(summary.summarise(run))


def test_the_summary_has_the_means_over_layers_before_and_after(tmp_path):
    layers = {"layers.1": {"kl": 0.2, "captured": 0.5}, "layers.3": {"kl": 0.4, "captured": 0.7}}
    found = summary.summarise(
        run_of(tmp_path, evaluation("warmup", "before"), step("warmup", 1), evaluation("warmup", "after", layers=layers))
    )
    assert found["stages"]["warmup"]["after"]["kl"] == pytest.approx(0.3) and found["stages"]["warmup"]["after"][
        "captured"
    ] == pytest.approx(0.6)
    assert found["stages"]["warmup"]["after"]["recall"] is None and found["tokens"] == 100
    text = "\n".join(summary.lines(found))
    assert "from 0.5000 to 0.3000 nats" in text and "60.0% of the attention to compressed entries, 60.0% before" in text


def test_a_folder_that_holds_no_run_is_refused(tmp_path):
    with pytest.raises(ReportError, match=r"not the folder of a run, expected run\.json and metrics\.jsonl"):
        summary.read_run(tmp_path)


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [0.0, 0.0], [-1.0, 5.0], [1e-6, 1e3], [math.nan, 1.0], [1.0, math.inf]])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_chart_of_any_numbers_stays_inside_its_picture(values, logarithmic):
    drawn = svg.chart([svg.Curve("a", list(enumerate(values)), "a")], [svg.Band("all", 0, 3)], unit="u", logarithmic=logarithmic)
    assert "nan" not in drawn and "inf" not in drawn
    if drawn:
        points = [tuple(map(float, point.split(","))) for part in drawn.split('points="')[1:] for point in part.split('"')[0].split()]
        assert all(svg.LEFT - 1 <= x <= svg.WIDTH and 0 <= y <= svg.HEIGHT for x, y in points)


def test_axis_ticks_are_round_and_few():
    axes = svg._Axes(0, 1, 2.13, 7.9, False)
    assert axes.ticks() == [4.0, 6.0]
    assert svg._Axes(0, 1, -2.2, 1.1, True).ticks() == [0.01, 0.1, 1.0, 10.0]


def test_the_bars_of_a_query_show_both_sides_and_every_pick():
    drawn = svg.bars([0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1, 2])
    assert drawn.count('class="teacher"') == drawn.count('class="student"') == 3 and drawn.count('class="picked"') == 2
    assert "entry 1: student 0.8000" in drawn


def test_the_log_goes_on_after_the_bytes_it_is_told_to_keep(tmp_path):
    log = MetricsFile(tmp_path / "metrics.jsonl")
    log.write({"a": 1})
    kept = log.bytes()
    log.write({"a": 2})
    log.close()
    again = MetricsFile(tmp_path / "metrics.jsonl", kept)
    again.write({"a": 3})
    again.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"a": 1}, {"a": 3}]


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n{"a": ')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"a": 1}]


def test_a_step_is_described_with_what_its_stage_has():
    assert describe(step("dense", 1)) == "3.000 bits/byte  50 tokens/s"
    assert describe(step("warmup", 2), 0.5) == "1.500 bits/byte  KL 0.1000  captured 50.0%  50 tokens/s"


def test_a_mean_over_layers_leaves_out_those_without_the_number():
    record = {"layers": {"a": {"kl": 1.0}, "b": {"kl": None}, "c": {}}}
    assert mean_over_layers(record, "kl") == 1.0 and mean_over_layers(record, "recall") is None


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_bar_with_the_numbers(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = Console(stream)
    console.evaluated(evaluation("warmup", "before"))
    console.start("warmup", 2, 0)
    console.step(step("warmup", 2), 2)
    console.say("a line between")
    console.stop()
    assert "2/2" in stream.getvalue() and "KL 0.1000  captured 60.0%" in stream.getvalue() and "a line between" in stream.getvalue()


def test_without_rich_the_bar_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    with pytest.raises(ImportError, match=r"pip install 'csakit\[train\]'"):
        Console(Terminal()).start("dense", 1, 0)
