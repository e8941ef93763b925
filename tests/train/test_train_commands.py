"""`csakit train`, `csakit report`, `csakit env` as a user meets them: output, exit codes, interruption, help without torch."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import micro
import pytest

from csakit.cli import main, parser, train
from csakit.train import checkpoint, log
from csakit.train.settings import flat, read_toml


def micro_options(**changes) -> list[str]:
    """The settings of the micro run as options of the command."""
    wanted = {**flat(micro.config()), **changes}
    texts = {
        key: ",".join(value) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in wanted.items()
    }
    return [part for key, text in texts.items() for part in ("--set", f"{key}={text}")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run made by the command."""
    folder = tmp_path_factory.mktemp("command") / "run"
    assert main(["train", "--out", str(folder), *micro_options()]) == 0
    return folder


def test_help_and_usage_errors_need_no_torch():
    """In a fresh process: help of every command, then a setting that does not exist."""
    code = """
import sys
from csakit.cli import COMMANDS, main
codes = []
for arguments in (["--help"], *([name, "--help"] for name in COMMANDS), ["train", "--set", "x=1"]):
    try:
        codes.append(main(arguments))
    except SystemExit as end:
        codes.append(end.code)
assert codes == [0] * (1 + len(COMMANDS)) + [2], codes
assert "torch" not in sys.modules, "torch was imported"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_run_without_a_terminal_prints_plain_lines_what_was_learnt_and_where_the_report_is(tmp_path, capsys):
    assert main(["train", "--out", str(tmp_path / "run"), "--stage", "warmup", *micro_options(stages=("warmup",))]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith(str(Path(json.__file__).parent)) and "held out" in lines[0]
    assert any(line.startswith("warmup     4/4  ") and "bits/byte" in line and "KL" in line and "tokens/s" in line for line in lines)
    assert "warm-up: the distance of the indexer" in printed.out and lines[-1] == f"report: {tmp_path / 'run' / 'report.html'}"
    assert "\x1b" not in printed.out


def test_json_puts_one_object_on_standard_output_and_the_rest_elsewhere(finished, capsys):
    assert main(["train", "--resume", "--out", str(finished), "--json"]) == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert summary["steps"] == 12 and set(summary["stages"]) == {"dense", "warmup", "sparse"} and Path(summary["report"]).exists()
    assert summary["stages"]["warmup"]["after"]["kl"] < summary["stages"]["warmup"]["before"]["kl"]
    assert "held out" in printed.err


def test_report_is_written_anew_from_the_folder_alone(finished, capsys):
    (finished / "report.html").unlink()
    assert main(["report", str(finished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == str(finished / "report.html")
    assert "<svg" in (finished / "report.html").read_text(encoding="utf-8")


def test_the_folder_of_a_run_holds_its_settings_log_checkpoints_and_report(finished):
    assert sorted(path.name for path in finished.iterdir()) == ["checkpoints", "metrics.jsonl", "report.html", "run.json", "run.toml"]
    stored = json.loads((finished / "run.json").read_text())
    assert stored["config"]["warmup"]["steps"] == 4 and stored["environment"]["torch"]


def test_the_file_a_run_writes_starts_the_same_run(finished, tmp_path, capsys):
    assert main(["train", str(finished / "run.toml"), "--stage", "dense", "--out", str(tmp_path / "again")]) == 0
    again, first = ((folder / "metrics.jsonl").read_text().splitlines()[1] for folder in (tmp_path / "again", finished))
    assert {**json.loads(again), "tokens_per_second": 0} == {**json.loads(first), "tokens_per_second": 0}
    assert read_toml(tmp_path / "again" / "run.toml")["stages"] == ["dense"]
    assert main(["train", str(finished / "run.toml"), "--resume", "--out", str(finished)]) == 0
    assert main(["train", str(finished / "run.toml"), "--resume", "--out", str(tmp_path / "again")]) == 2
    assert "keeps its settings (stages is ('dense',)" in capsys.readouterr().err


def test_a_file_may_name_a_preset_and_paths_beside_it_and_the_command_line_has_the_last_word(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.toml").write_text('preset = "small"\nseed = 1\n[data]\npath = "texts"\n[dense]\nsteps = 7\nrows = 5\n')
    monkeypatch.chdir(tmp_path)
    args = parser().parse_args(["train", "run.toml", "--set", "dense.rows=6", "--seed", "2"])
    folder, config = train._new(args)
    assert folder == Path("runs/run-001") and config.data.path == str(tmp_path / "texts")
    assert (config.seed, config.dense.steps, config.dense.rows, config.dense.ramp) == (2, 7, 6, 100)
    assert main(["train", "run.toml", "--preset", "tiny"]) == 2
    assert "--preset tiny: run.toml is made for the preset 'small'" in capsys.readouterr().err


def test_weights_to_start_from_need_no_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, config = train._new(parser().parse_args(["train", "--start", "weights", "--stage", "warmup"]))
    assert folder == Path("runs/run-001") and config.start.path == str(tmp_path / "weights") and config.warmup.steps == 1000
    assert train._new(parser().parse_args(["train", "--start", "weights", "--preset", "tiny"]))[1].warmup.steps == 60


def test_runs_without_a_name_are_numbered(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny-001").mkdir(parents=True)
    assert main(["train", "--stage", "dense", *micro_options(stages=("dense",))]) == 0
    assert (tmp_path / "runs" / "tiny-002" / "report.html").exists()
    assert main(["train", "--resume"]) == 0 and "resuming from runs/tiny-002" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--set", "warmup.steps"], "--set: expected KEY=VALUE, got 'warmup.steps'"),
        (["--set", "warmup.steps=-1"], "warmup.steps: expected an integer of at least 0, got -1"),
        (["--set", "gradient_checkpointing=yes"], "gradient_checkpointing: expected true or false, got 'yes'"),
        (["--stage", "sparse,dense"], "stages: expected each of dense, warmup, sparse at most once and in this order"),
        (["--stage", "rl"], "stages: expected one of dense, warmup, sparse, got 'rl'"),
        (["--set", "data.sequence_length=64", "--set", "model.index_topk=16"], "the sparse stage would not be sparse"),
        (["--data", "nowhere"], "no such file or folder"),
        (["--resume", "--out", "nowhere"], "no run in nowhere ("),
        (["--resume"], "--resume: no run below runs; name its folder with --out"),
        (["--set", "device=gpu"], "device: expected a torch device of this machine, got 'gpu': "),
        (["nowhere.toml"], "nowhere.toml: cannot be read: No such file"),
        (["--start", "nowhere"], "start.path: expected a config.json, alone or in a folder with weights"),
        ([*micro_options(), "--set", "dense.freeze=nothing"], "dense.freeze: expected patterns of parameter names"),
    ],
)
def test_a_wrong_call_ends_with_code_2_and_the_reason(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_an_unknown_preset_is_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--preset", "huge"])
    assert "small" in capsys.readouterr().err


def test_a_folder_with_a_run_is_not_overwritten(finished, capsys):
    before = (finished / "metrics.jsonl").read_bytes()
    assert main(["train", "--out", str(finished), *micro_options()]) == 2
    assert "holds a run already; add --resume" in capsys.readouterr().err
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_resumed_run_does_not_change_its_settings(finished, capsys):
    assert main(["train", "--resume", "--out", str(finished), "--set", "warmup.steps=9"]) == 2
    assert "keeps its settings (warmup.steps is 4, not 9)" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(finished), "--set", "warmup.steps=4"]) == 0


def test_a_run_does_not_go_on_with_another_text(tmp_path, capsys):
    texts = tmp_path / "texts"
    texts.mkdir()
    for path in Path(json.__file__).parent.glob("*.py"):
        (texts / path.name).write_bytes(path.read_bytes())
    options = micro_options(**{"stages": ("dense",), "data.path": str(texts)})
    assert main(["train", "--out", str(tmp_path / "run"), *options]) == 0
    (texts / "more.py").write_text("print('more')\n" * 10)
    assert main(["train", "--resume", "--out", str(tmp_path / "run")]) == 2
    assert "the text is not that with which the run in" in capsys.readouterr().err


def test_a_text_that_cannot_be_read_any_more_leaves_the_run_as_it_is(tmp_path, capsys):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"line {n} " * 30}) + "\n" for n in range(20)))
    options = micro_options(**{"stages": ("dense",), "data.path": str(texts), "dense.steps": 1})
    assert main(["train", "--out", str(tmp_path / "run"), *options]) == 0
    good = checkpoint.newest(tmp_path / "run" / "checkpoints")
    texts.write_text(texts.read_text()[:-9])
    assert main(["train", "--resume", "--out", str(tmp_path / "run")]) == 2
    assert "texts.jsonl, line 20: not JSON" in capsys.readouterr().err and checkpoint.newest(tmp_path / "run" / "checkpoints") == good


def test_a_log_that_cannot_grow_ends_with_code_1_and_names_the_last_good_checkpoint(tmp_path, monkeypatch, capsys):
    written = []

    def full(self, record):
        written.append(record)
        if len(written) == 6:
            raise OSError(28, "No space left on device")
        write(self, record)

    write = log.MetricsFile.write
    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(log.MetricsFile, "write", full)
        assert main(["train", "--out", str(folder), *micro_options(stages=("dense",))]) == 1
    good = checkpoint.newest(folder / "checkpoints")
    message = capsys.readouterr().err
    assert checkpoint.read_progress(good).step == 3
    assert (
        f"cannot be written: [Errno 28] No space left on device; the last good checkpoint is {good}; resume when that is mended" in message
    )
    assert main(["train", "--resume", "--out", str(folder)]) == 0


def test_a_folder_without_a_run_has_no_report(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "not the folder of a run, expected run.json and metrics.jsonl" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_with_code_1(tmp_path, capsys):
    options = {"stages": ("dense",), "dense.learning_rate": 1e30, "dense.ramp": 0}
    assert main(["train", "--out", str(tmp_path / "run"), *micro_options(**options)]) == 1
    assert "loss or gradient is not finite" in capsys.readouterr().err


def test_a_file_that_cannot_grow_ends_with_code_1_and_keeps_the_last_good_checkpoint(tmp_path, capsys):
    """A limit on the size of files stands for the full disk: the optimizer state of the indexer fits, that of everything does not."""
    settings = micro.config(stages=("warmup", "sparse"), save_every=2)
    weights = sum(4 * parameter.numel() for parameter in micro.trainer(tmp_path / "size", settings).built.model.parameters())
    folder = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(1.5 * weights), hard))
    try:
        code = main(["train", "--out", str(folder), *micro_options(stages=("warmup", "sparse"), save_every=2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    good = checkpoint.newest(folder / "checkpoints")
    assert code == 1 and checkpoint.read_progress(good) == checkpoint.Progress(1, 0, 4, checkpoint.read_progress(good).log_bytes)
    message = capsys.readouterr().err
    assert (
        "the checkpoint could not be written: " in message
        and "File too large" in message
        and f"the last good checkpoint is {good}" in message
    )
    assert main(["train", "--resume", "--out", str(folder)]) == 0


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_is_saved_and_says_how_to_go_on(tmp_path, monkeypatch, capsys, number, code):
    folder = tmp_path / "run"
    monkeypatch.setattr(
        log.Console, "step", lambda self, record, total: signal.raise_signal(number) if record["total_steps"] == 5 else None
    )
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert main(["train", "--out", str(folder), *micro_options()]) == code
    printed = capsys.readouterr()
    saved = checkpoint.newest(folder / "checkpoints")
    assert printed.out.endswith(f"stopped; saved as {saved}\ngo on with: csakit train --resume --out {folder}\n")
    assert "stopping after this step; once more to stop at once" in printed.err
    progress = checkpoint.read_progress(saved)
    assert (progress.stage, progress.step, progress.total_steps) == (1, 1, 5)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_a_second_interruption_ends_at_once(tmp_path, monkeypatch, capsys):
    def twice(self, record, total):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(log.Console, "step", twice)
    assert main(["train", "--out", str(tmp_path / "run"), *micro_options()]) == 130
    assert checkpoint.newest(tmp_path / "run" / "checkpoints") is None


def test_env_names_versions_threads_backends_and_compilers(capsys):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (
        facts["packages"]["torch"]
        and facts["torch"]["threads"] >= 1
        and "cpu" in facts["csakit"]["backends"]
        and "c++" in facts["compilers"]
    )
    assert main(["env"]) == 0
    assert "packages:" in capsys.readouterr().out
