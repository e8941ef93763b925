"""Real code under the audit by its name: Transformers, megatron-core, the fused kernel's contract, and a Megatron-LM checkout."""

from __future__ import annotations

import os
import warnings

import pytest

from csakit import audit

FEW = ["window", "sink", "worked-teacher", "extreme-scores", "indexer-trains", "packed-leak", "sparse-loss", "dense-loss", "attention"]


def reports(name: str, probes: list[str]) -> list[audit.Report]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [audit.run(candidate, probes) for candidate in audit.candidates.load_all(name)]


def test_csakit_beside_a_fused_kernel_is_correct():
    (report,) = reports("flash-mla", [*FEW, "selection", "attention-packed", "attention-padding"])
    assert report.verdict == "correct", str(report)
    assert not [verdict for verdict in report.verdicts if verdict.status == "not tested"]


def test_a_stock_transformers_layer_trains_no_indexer_and_mixes_documents():
    pytest.importorskip("transformers.models.deepseek_v4", reason="pip install csakit[hf]")
    (report,) = reports("transformers", ["sparse-loss", "indexer-trains", "selection", "attention", "attention-packed", "compression"])
    assert report.failed == ("indexer-trains", "attention-packed", "compression")
    told = {verdict.probe: verdict.explanation for verdict in report.verdicts}
    assert "its queries, keys and weights have grad None after backward" in told["indexer-trains"]
    assert "packed, padding on the left" in told["compression"]
    assert "there is no loss for the indexer" in told["sparse-loss"]


def test_the_same_layer_with_csakit_in_it_is_correct():
    pytest.importorskip("transformers.models.deepseek_v4", reason="pip install csakit[hf]")
    (report,) = reports("transformers-csakit", [*FEW, "attention-packed", "compression", "loss-off"])
    assert report.verdict == "correct", str(report)


def test_the_loss_of_megatron_core_is_right_for_tokens_up_to_its_epsilon():
    try:
        (report,) = reports(
            "megatron-core-dsa", ["window", "extreme-scores", "gradient-isolation", "sparse-loss", "dense-loss", "loss-off"]
        )
    except ValueError as error:
        pytest.skip(str(error))
    assert report.failed == ("extreme-scores", "loss-off")
    assert report.verdict == "defects"
    assert report.fit is not None
    assert report.fit.mistakes == ("epsilon-in-logarithm",)


def test_a_megatron_checkout_is_judged_path_by_path():
    path = os.environ.get("CSAKIT_MEGATRON")
    if not path:
        pytest.skip("no Megatron-LM checkout: set CSAKIT_MEGATRON")
    import sys

    sys.path.insert(0, path)
    unfused, context, fused = reports(
        "megatron", ["window", "sink", "extreme-scores", "underflow", "sparse-loss", "row-divisor", "loss-off"]
    )
    assert "loss-off" in unfused.failed
    assert "extreme-scores" in context.failed
    assert "row-divisor" in fused.failed
    if "window" in unfused.failed:
        assert unfused.verdict == "wrong"
        assert unfused.fit is not None
        assert unfused.fit.mistakes == ("compressed-only",)
        assert unfused.verdicts[0].measured == unfused.verdicts[1].measured == 0
    else:
        assert {unfused.verdict, context.verdict, fused.verdict} == {"defects"}
        assert "e^-88" in next(verdict.explanation for verdict in unfused.verdicts if verdict.probe == "underflow")


def test_what_a_host_needs_and_does_not_find_is_named(monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers.models.deepseek_v4.modeling_deepseek_v4", None)
    with pytest.raises(ValueError, match=r"transformers needs .*modeling_deepseek_v4.*pip install csakit\[hf\]"):
        audit.candidates.load_all("transformers")
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.experimental_attention_variant.dsa", None)
    with pytest.raises(ValueError, match="pip install --no-deps megatron-core"):
        audit.candidates.load_all("megatron-core-dsa")
