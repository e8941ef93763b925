"""`csakit audit --tensors`: right files of every form, each known teacher by its name, errors that name the tensor, the examples."""

from __future__ import annotations

import dataclasses
import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from csakit import audit
from csakit.audit import oracle, page, tensors
from csakit.audit.candidates import PlainTorch
from csakit.cli import main

pytest.importorskip("safetensors", reason="the files are safetensors files: pip install csakit[train]")

EXAMPLES = Path(__file__).parents[2] / "examples"
CASE = audit.random_case(2, 18, topk=3)


def write(path: Path, x: dict[str, Tensor], **metadata: str) -> Path:
    from safetensors.torch import save_file

    path = path / "layer.safetensors"
    given = {name: value.contiguous().clone() for name, value in x.items()}
    save_file(given, path, {"ratio": "2", "window": "3", "name": "layer", **metadata})
    return path


def layer(mistake: str | None = None, case: audit.Case = CASE, **fields: Any) -> dict[str, Tensor]:
    """What a layer with a mistake would write."""
    case = dataclasses.replace(case, **fields)
    plain = PlainTorch(mistake)
    result, right = plain.loss(case), PlainTorch()
    _, visible = right._masks(case)
    scores = right._scores(case, visible)
    assert result.kl is not None and result.teacher is not None and result.indices is not None
    x = {name: getattr(case, name) for name in ("q", "kv", "entries", "sink")}
    found = {"scores": scores, "indices": result.indices, "teacher": result.teacher, "kl": result.kl, "loss": result.loss}
    return {name: value.float() if value.is_floating_point() else value.int() for name, value in {**x, **found}.items()}


def verdict(report: audit.Report, name: str) -> audit.Verdict:
    return next(one for one in report.verdicts if one.probe == name)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("objective", ["sparse", "dense"])
def test_a_right_layer_is_called_correct_in_every_layout_and_objective(tmp_path: Path, layout: str, objective: str):
    case = CASE if layout != "thd" else audit.random_case(1, 18, topk=3)
    x = layer(case=case, objective=objective)
    if objective == "dense":
        del x["indices"]
    if layout == "sbhd":
        x |= {name: x[name].transpose(0, 1) for name in ("q", "kv", "entries")}
    if layout == "thd":
        x = {name: value if name in ("sink", "loss") else value[0] for name, value in x.items()}
    report = tensors.run(write(tmp_path, x, layout=layout))
    assert report.verdict == "correct", str(report)
    assert report.picture is not None
    assert report.picture.difference < 1e-5


def test_slots_and_entries_say_the_same_and_empty_slots_may_stand_anywhere(tmp_path: Path):
    x = layer()
    order = torch.tensor([2, 0, 1])
    x["indices"] = x["indices"][..., order]
    safe, empty = x["indices"].clamp(min=0).long(), x["indices"] < 0
    x |= {name: x[name].gather(2, safe).masked_fill(empty, 0.0) for name in ("teacher", "scores")}
    report = tensors.run(write(tmp_path, x))
    assert report.verdict == "correct", str(report)
    assert "selection" not in {one.probe for one in report.verdicts}, "scores of the slots alone cannot tell what was left out"


@pytest.mark.parametrize(
    "mistake",
    ["compressed-only", "sink-without-window", "window-without-sink", "window-plus-one", "base-2-lse", "reverse-kl"],
)
def test_a_wrong_layer_is_recognised_by_its_mistake_with_the_runner_up(tmp_path: Path, mistake: str):
    report = tensors.run(write(tmp_path, layer(mistake)))
    assert report.verdict == "wrong"
    assert report.fit is not None
    assert mistake in report.fit.mistakes, report.fits
    assert report.fit.distance is not None and report.fit.runner_up_distance is not None
    assert report.fit.distance < 1e-5 < 1e-3 < report.fit.runner_up_distance


def test_a_teacher_of_nobody_is_none_of_the_known(tmp_path: Path):
    x = layer()
    x["teacher"] = x["teacher"].flip(-1)
    assert (tensors.run(write(tmp_path, {name: x[name] for name in x if name not in ("kl", "loss")})).fits or "").startswith(
        "none of the known"
    )


def test_the_visible_denominator_is_found_and_a_declared_one_counts(tmp_path: Path):
    path = write(tmp_path, layer(denominator="visible"))
    assert tensors.run(path).verdict == "correct"
    assert tensors.run(path).conventions["denominator"] == "visible, found by comparing"
    assert tensors.run(write(tmp_path, layer(denominator="visible"), denominator="attended")).verdict == "wrong"


def test_another_divisor_is_named_and_right_once_it_is_declared(tmp_path: Path):
    x = layer()
    x["loss"] = x["loss"] * 36
    found = verdict(tensors.run(write(tmp_path, x)), "loss")
    assert found.status == "fail"
    assert "write divisor = 1 into the metadata" in found.explanation
    assert tensors.run(write(tmp_path, x, divisor="1")).verdict == "correct"
    x["loss"] = x["loss"] * 0.25
    assert tensors.run(write(tmp_path, x, divisor="1", coefficient="0.25")).verdict == "correct"


def test_padding_weights_and_packed_rows_are_read(tmp_path: Path):
    mask = torch.arange(18) < torch.tensor([18, 11])[:, None]
    x = layer(mask=mask)
    assert tensors.run(write(tmp_path, {**x, "mask": mask.to(torch.uint8)})).verdict == "correct"
    packed = audit.random_case(lengths=(5, 0, 9, 4), topk=2)
    assert packed.cu_seqlens is not None
    assert tensors.run(write(tmp_path, {**layer(case=packed), "cu_seqlens": packed.cu_seqlens})).verdict == "correct"
    weight = CASE.kv[..., 0].abs()
    weighted = layer(case=dataclasses.replace(CASE, weight=weight))
    assert tensors.run(write(tmp_path, {**weighted, "weight": weight.float()})).verdict == "correct"
    assert verdict(tensors.run(write(tmp_path, weighted)), "loss").status == "fail"


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("sink", ["in", "out"])
def test_an_lse_of_either_base_with_or_without_the_sink_is_understood(tmp_path: Path, base: str, sink: str):
    case = audit.random_case(2, 18, topk=3)
    x = layer(case=case)
    out, _ = oracle.attend(case, torch.zeros_like(case.q))
    lse = torch.full(case.q.shape[:3], math.inf, dtype=torch.float64)
    for query in oracle.queries(case):
        places = oracle.chosen_of(case, query, oracle.scores_of(case, query))
        parts = [*oracle.logits_of(case, query, places), *([case.sink[:, None]] if sink == "in" else [])]
        lse[query.row, query.token] = torch.cat(parts, 1).logsumexp(1)
    x |= {"lse": (lse / (math.log(2) if base == "2" else 1)).float(), "out": out.float()}
    report = tensors.run(write(tmp_path, x))
    assert report.verdict == "correct", str(report)
    assert f"base {base}, sink {sink}" in verdict(report, "lse").explanation
    wrong = tensors.run(write(tmp_path, x, lse_base="2" if base == "e" else "e"))
    assert verdict(wrong, "lse").status == "fail"


def test_a_selection_that_is_not_the_best_repeated_or_not_visible_is_found(tmp_path: Path):
    x = layer()
    report = tensors.run(write(tmp_path, {**x, "scores": torch.where(x["scores"].isfinite(), -x["scores"], x["scores"])}))
    assert verdict(report, "selection").status == "fail"
    repeated = x["indices"].clone()
    repeated[0, 17, 1] = repeated[0, 17, 0]
    assert verdict(tensors.run(write(tmp_path, {**x, "indices": repeated})), "indices").measured == 1


def test_with_one_head_a_file_says_what_it_cannot_tell(tmp_path: Path):
    case = audit.random_case(2, 18, topk=3, heads=1)
    report = tensors.run(write(tmp_path, layer("compressed-only", case=case)))
    assert report.verdict == "correct"
    assert "compressed-only" in report.conventions["blind to"]
    assert "with one head the denominator cancels" in report.conventions["blind to"]
    assert "blind to" not in tensors.run(write(tmp_path, layer())).conventions


def test_bfloat16_files_are_judged_by_the_precision_they_have(tmp_path: Path):
    def low(x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.bfloat16() if value.is_floating_point() else value for name, value in x.items()}

    assert tensors.run(write(tmp_path, low(layer()))).verdict == "correct"
    assert tensors.run(write(tmp_path, low(layer("compressed-only")))).verdict == "wrong"


@pytest.mark.parametrize(
    ("change", "metadata", "message"),
    [
        ({"q": None}, {}, "tensors q, kv and entries are needed; q is missing"),
        ({"keys": torch.zeros(1)}, {}, "tensors must be named q, kv.*got keys"),
        ({"kv": torch.zeros(2, 17, 4)}, {}, r"kv must be \[B, T, D\]; got \[2, 17, 4\], where B = 2 \(q\), T = 18 \(q\)"),
        ({"indices": torch.zeros(2, 18, 3)}, {}, "indices must hold integers; got torch.float32"),
        ({"q": torch.zeros(2, 18, 3, 4, dtype=torch.int32)}, {}, "q must hold floating-point numbers"),
        ({"scores": torch.zeros(2, 18, 5)}, {}, "scores must have a last axis of the 9 entries or the 3 slots of indices; got 5"),
        ({"scores": None}, {}, "scores are needed to judge loss, kl or d_scores"),
        ({"indices": None}, {"objective": "sparse"}, "the sparse objective needs indices"),
        ({"teacher": None, "kl": None, "loss": None}, {}, "there is nothing to judge: at least one of loss, kl"),
        (
            {"entries": torch.zeros(2, 4, 4), "scores": None, "kl": None, "loss": None, "teacher": torch.zeros(2, 18, 3)},
            {},
            "the 9 blocks of 2",
        ),
        ({"mask": torch.ones(2, 18), "cu_seqlens": torch.tensor([0, 18])}, {}, "mask and cu_seqlens exclude each other"),
        ({"cu_seqlens": torch.tensor([0, 18])}, {}, "cu_seqlens must rise from 0 to the 18 tokens of one row"),
        ({}, {"ratio": "zero"}, "metadata ratio must be a whole number; got 'zero'"),
        ({}, {"scale": "0"}, "metadata scale must be a positive number; got '0'"),
        ({}, {"layout": "hdbs"}, "metadata layout must be one of bshd, sbhd, thd; got 'hdbs'"),
        ({}, {"rope": "1"}, "metadata must be among.*got rope"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path, change: dict, metadata: dict[str, str], message: str):
    x = {name: value for name, value in {**layer(), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        tensors.run(write(tmp_path, x, **metadata))


def test_a_file_without_ratio_or_too_large_or_no_file_at_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from safetensors.torch import save_file

    save_file(layer(), tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match="metadata must hold ratio and window, as strings; ratio, window is missing"):
        tensors.run(tmp_path / "bare.safetensors")
    (tmp_path / "text.safetensors").write_text("not tensors at all")
    with pytest.raises(ValueError, match="cannot be read as a safetensors file"):
        tensors.run(tmp_path / "text.safetensors")
    monkeypatch.setattr("csakit.audit.dump.MOST", 100)
    with pytest.raises(ValueError, match="too many for a float64 audit on the CPU: write the first tokens"):
        tensors.run(write(tmp_path, layer()))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match=r"--tensors needs safetensors: pip install csakit\[train\]"):
        tensors.run(tmp_path / "bare.safetensors")


@pytest.mark.parametrize("framework", ["numpy", "pytorch", "jax", "paddle"])
def test_the_dump_examples_write_files_that_the_audit_reads(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    if framework in ("jax", "paddle"):
        pytest.importorskip(framework, reason=f"the {framework} example needs {framework}")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    file = tmp_path / "layer.safetensors"
    for arguments, code in (([], 0), (["--compressed-only"], 1)):
        monkeypatch.setattr(sys, "argv", ["dump", str(file), *arguments])
        runpy.run_path(str(EXAMPLES / f"dump_{framework}.py"), run_name="__main__")
        assert main(["audit", "--tensors", str(file), "--json"]) == code
        found = json.loads(capsys.readouterr().out)["reports"][0]
        assert found["verdict"] == ("wrong" if code else "correct")
    assert "compressed-only" in found["fit"]["mistakes"]


def test_the_page_needs_nothing_else_and_shows_both_teachers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "audit.html"
    assert main(["audit", "compressed-only", "torch", "--probes", "window,worked-teacher", "--html", str(target)]) == 1
    capsys.readouterr()
    text = target.read_text()
    assert text.count("<svg") == 2
    assert "http" not in text
    for part in (
        "verdict: wrong: window, worked-teacher",
        "verdict: correct",
        "its loss is that of compressed-only",
        "plain.py",
        "candidates",
    ):
        assert part in text
    assert main(["audit", "torch", "--probes", "window", "--html", str(tmp_path / "no" / "folder.html")]) == 1
    assert "--html" in capsys.readouterr().err


def test_the_picture_recovers_the_teacher_from_the_gradient_alone():
    right = audit.run(lambda case: PlainTorch().loss(case).loss, ["window"]).picture
    wrong = audit.run(lambda case: PlainTorch("compressed-only").loss(case).loss, ["window"]).picture
    assert right is not None and wrong is not None
    assert right.difference < 1e-10
    assert wrong.difference > 0.01
    assert sum(wrong.found) == pytest.approx(1)
    assert all(sum(shares) == pytest.approx(1) for shares in wrong.shares)
    assert audit.run(lambda case: PlainTorch().loss(case).loss.detach(), ["window"]).picture is not None
    assert page.render([audit.run(PlainTorch(), ["window"])]).startswith("<!doctype html>")
