"""`csakit audit`: tables, JSON, exit codes, and the example."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from csakit import audit
from csakit.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "audit_your_own_loss.py"
OWN = """
from csakit.audit.candidates import PlainTorch

def right(case):
    return PlainTorch().loss(case)

class Wrong:
    def loss(self, case):
        return PlainTorch("sink-without-window").loss(case)
"""


def test_the_exit_code_is_0_when_every_probe_passes_and_1_when_one_fails(capsys: pytest.CaptureFixture[str]):
    assert main(["audit", "torch", "--probes", "window,sink"]) == 0
    assert main(["audit", "torch", "compressed-only", "--probes", "window,sink"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("window keys do not reach the teacher") == 1
    assert "compressed-only: 0 passed, 2 failed, 0 not tested; its loss is that of compressed-only" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["colour"], "candidate must be one of csakit"),
        (["csakit.audit:PROBES"], "candidate must be a function loss(case)"),
        (["torch", "--probes", "colour"], "probes must be names from window"),
        (["all", "torch"], "the candidate `all` stands alone"),
        (["all", "--probes", "window"], "the candidate `all` stands alone"),
        (["torch", "--markdown"], "--markdown goes with the candidate `all` alone"),
        (["torch", "--path", "."], "--path names a Megatron-LM checkout: it goes with megatron"),
        (["megatron", "--path", "no/such/folder"], "--path must be a Megatron-LM checkout, a folder with megatron/core in it"),
        (["torch", "--width", "0"], "width of a size must be a whole number of at least 1"),
        (["torch", "--tensors", "x.safetensors"], "--tensors stands alone"),
        (["--tensors", "no_such_file.safetensors"], "no_such_file.safetensors"),
    ],
    ids=" ".join,
)
def test_a_wrong_call_is_exit_code_2_and_says_what_was_expected(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    assert main(["audit", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert not shown.out


def test_json_holds_every_verdict_under_fixed_names(capsys: pytest.CaptureFixture[str]):
    assert main(["audit", "torch", "window-without-sink", "--probes", "sink,tie-rule", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"passed", "reports"}
    assert found["passed"] is False
    right, wrong = found["reports"]
    for report in (right, wrong):
        assert set(report) == {"candidate", "passed", "verdict", "fits", "fit", "conventions", "places", "picture", "verdicts"}
        for verdict in report["verdicts"]:
            assert set(verdict) == {"probe", "status", "measured", "limit", "explanation"}
            assert isinstance(verdict["measured"], float)
    assert (right["candidate"], right["passed"], right["fits"]) == ("torch", True, None)
    assert (wrong["candidate"], wrong["passed"]) == ("window-without-sink", False)
    assert [verdict["status"] for verdict in wrong["verdicts"]] == ["fail", "pass"]
    assert wrong["verdicts"][0]["measured"] == 0


def test_without_a_candidate_it_lists_who_can_be_audited_and_what_is_asked(capsys: pytest.CaptureFixture[str]):
    assert main(["audit"]) == 0
    shown = capsys.readouterr().out
    assert main(["audit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["candidates"]) == ["csakit", "torch", *audit.candidates.HOSTS, *audit.candidates.WRONG]
    assert list(found["probes"]) == list(audit.PROBES)
    for text in (*found["candidates"].values(), *found["probes"].values()):
        assert text in shown


def test_all_prints_the_table_and_fails_when_a_mistake_goes_uncaught(
    table: audit.Matrix, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(audit, "matrix", lambda: table)
    assert main(["audit", "all"]) == 0
    assert capsys.readouterr().out == f"{table}\n"
    assert main(["audit", "all", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("|  | 1 | 2 |")
    assert main(["audit", "all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == table.as_dict()
    monkeypatch.setattr(audit, "matrix", lambda: audit.Matrix(table.right, table.right))
    assert main(["audit", "all"]) == 1


def test_an_import_path_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "audited_by_path.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["audit", "audited_by_path:right", "--probes", "window"]) == 0
    assert main(["audit", "audited_by_path:Wrong", "--probes", "window"]) == 1
    assert "its loss is that of sink-without-window" in capsys.readouterr().out


def test_on_a_terminal_the_table_is_drawn_by_rich_and_says_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("rich", reason="the coloured table needs rich; without it the plain one is printed")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["audit", "compressed-only", "--probes", "window,tie-rule"]) == 1
    shown = capsys.readouterr().out
    for text in ("window keys do not reach the teacher", "pass", "fail", "compressed-only: 1 passed, 1 failed, 0 not tested"):
        assert text in shown


def test_on_a_terminal_without_rich_the_plain_table_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["audit", "torch", "--probes", "window"]) == 0
    assert capsys.readouterr().out == f"{audit.run(audit.candidates.load('torch'), ['window'])}\n\n"


def test_the_example_passes_what_it_supports_and_fits_on_a_page(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "your_loss: 18 passed, 0 failed, 13 not tested" in capsys.readouterr().out
    assert len(EXAMPLE.read_text().splitlines()) <= 40


@pytest.mark.parametrize(
    ("right", "wrong", "probe"),
    [("[near, far, sink]", "[near, far]", "sink"), ("query - case.window)", "query - case.window - 1)", "window-width")],
    ids=["no sink", "window plus one"],
)
def test_the_mistakes_that_the_example_suggests_are_named(tmp_path: Path, right: str, wrong: str, probe: str):
    source = EXAMPLE.read_text()
    assert right in source
    (tmp_path / "changed.py").write_text(source.replace(right, wrong))
    loss = runpy.run_path(str(tmp_path / "changed.py"))["your_loss"]
    assert audit.run(loss, ["window", "sink", "window-width"]).failed == (probe,)
