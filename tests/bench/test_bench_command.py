"""`csakit bench` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from csakit.bench import providers, records, runner
from csakit.bench.shapes import Shape
from csakit.bench.suites import SUITES, Suite, alone
from csakit.cli import main

QUICK = ["bench", "--repeats", "2", "--providers", "csakit-cpu,eager"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The smoke suite, once, from end to end."""
    folder = tmp_path_factory.mktemp("bench")
    code = main([*QUICK, "--out", str(folder / "smoke.csv"), "--picture", str(folder / "smoke.svg")])
    return code, folder / "smoke.csv"


def test_the_smoke_suite_runs_every_operation_and_all_agree(recorded):
    code, path = recorded
    rows = records.read_csv(path)
    assert code == 0
    assert {row.case for row in rows} == set(SUITES["smoke"].cases)
    assert {row.status for row in rows} == {"ok"} and max(row.value for row in rows if row.figure == "error") < 1e-5
    assert path.with_suffix(".svg").read_text().startswith("<svg")


def test_a_recorded_table_is_shown_without_measuring(recorded, capsys):
    assert main(["bench", "--read", str(recorded[1]), "--compare", str(recorded[1])]) == 0
    said = capsys.readouterr().out
    assert "attend-backward: 96 tokens" in said and "nothing moved beyond the noise" in said


def test_a_table_that_is_there_is_gone_on_with_only_when_asked_for(recorded, capsys):
    before = recorded[1].read_bytes()
    assert main([*QUICK, "--out", str(recorded[1])]) == 2
    assert "smoke.csv is there already; go on with it with --append" in capsys.readouterr().err
    assert main([*QUICK, "--out", str(recorded[1]), "--append"]) == 0
    assert capsys.readouterr().err.count("measured before") == len(SUITES["smoke"].contests)
    assert recorded[1].read_bytes() == before


def test_json_holds_every_row(recorded, capsys):
    assert main(["bench", "--read", str(recorded[1]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and len(found["rows"]) == len(records.read_csv(recorded[1])) and found["moved"] == []


def test_a_provider_that_disagrees_gives_exit_code_1(capsys):
    code = main(["bench", "--shape", "48x2x8x4", "--operations", "attend", "--selection", "uniform", "--repeats", "1", "--no-memory",
                 "--providers", "eager,bench_providers:too_much", "--json"])  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert code == 1 and not found["passed"]
    assert {row["provider"] for row in found["rows"] if row["status"] == "disagrees"} == {"bench_providers:too_much"}


def test_nothing_timed_gives_exit_code_1(capsys):
    code = main(["bench", "--shape", "48x2x8x4", "--operations", "attend", "--providers", "bench_providers:elsewhere", "--no-memory"])
    assert code == 1 and "nothing was timed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operations", "fly"], "--operations must be among attend"),
        (["--suite", "smoke", "--shape", "8x1x4x2"], "exclude each other"),
        (["--shape", "8x1x4"], "a shape must read"),
        (["--max-tokens", "5"], "no case is left"),
        (["--providers", "nobody"], "provider must be one of csakit-reference, csakit-cpu"),
        (["--providers", "megatron"], "give its path with --megatron"),
        (["--megatron", "/nowhere"], "must be the root of a Megatron-LM checkout"),
        (["--against", "nobody", "--providers", "eager"], "--against must be one of the providers measured, eager"),
        (["--append"], "--append needs --out"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--threads", "0"], "threads must be at least 1"),
        (["--device", "meta"], "device must be cpu or a CUDA device"),
        (["--read", "/nowhere.csv"], "nowhere.csv"),
    ],
)
def test_usage_errors_have_exit_code_2(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_suite_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "--suite", "everything"])
    assert stopped.value.code == 2 and "growth" in capsys.readouterr().err


def test_help_names_suites_and_providers_without_torch():
    script = "import sys\nfrom csakit.cli import main\ntry: main(['bench', '--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in (*SUITES, "module:attribute", "exit code: 0"))


def test_every_backend_is_a_provider_and_the_reference_only_when_named(monkeypatch):
    monkeypatch.setattr("csakit.backends.NAMES", ("reference", "cpu", "another"))
    assert providers.names("attend") == ["csakit-cpu", "csakit-another", "eager", "transformers"]
    assert providers.names("attend", megatron=True)[-1] == "megatron"
    assert providers.names("csa") == ["csakit-nn", "csakit-installed", "transformers"]
    assert providers.names("step") == ["csakit-installed", "transformers"]
    assert providers.find("csakit-reference").name == "csakit-reference"


def test_your_own_provider_must_be_there_and_whole():
    with pytest.raises(ValueError, match="'bench_providers:nobody' was not found"):
        providers.find("bench_providers:nobody")
    with pytest.raises(ValueError, match="it lacks name, version, bytes_needed, prepare"):
        providers.find("bench_providers:incomplete")


def test_a_checkout_without_the_functions_is_skipped_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    with pytest.raises(providers.Unsupported, match=r"does not import here|has no"):
        providers.find("megatron", megatron=str(tmp_path))
    suite = Suite("one case", alone(("attend",), (Shape(16, 1, 4, 2),)))
    rows = runner.run("test", suite, ["megatron"], runner.Options(megatron=str(tmp_path), memory=False))
    assert [(row.status, row.value) for row in rows] == [("skipped", None)]


def test_a_gpu_that_is_not_there_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "--device", "cuda"]) == 2
    assert "this torch sees no GPU" in capsys.readouterr().err
