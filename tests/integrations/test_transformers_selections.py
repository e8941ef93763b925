"""Selections recorded in one forward and replayed in another: the same picks, bit for bit, and a loss that means what it meant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from v4_model import CSA, HCA, SLIDING, gap, gradients, indexer_part, tiny, tokens, worst_gap

import csakit
from csakit.integrations.transformers import Handle, Selections, install, selections

TWO_CSA = (CSA, SLIDING, CSA, HCA)
OPTIONS = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def recorded(handle: Handle, ids: Tensor, **arguments) -> Selections:
    with handle.record() as record, torch.no_grad():
        handle.model(ids, **arguments)
    return record


def disturb(handle: Handle) -> None:
    """Other indexer weights, which pick other entries."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in handle.indexer_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def test_a_record_holds_what_select_returned_per_document() -> None:
    model, ids = tiny(TWO_CSA), tokens(2, 45)
    seen: list[Tensor] = []
    original = csakit.select
    with pytest.MonkeyPatch.context() as patch, install(model) as handle:
        patch.setattr(csakit, "select", lambda *a, **k: [seen.append(found := original(*a, **k)), found][1])
        record = recorded(handle, ids)
    assert record.lengths == [45, 45] and record.positions.tolist() == [*range(45), *range(45)]
    assert record.picks.keys() == {"layers.0", "layers.2"}
    for picks, found in zip(record.picks.values(), seen):
        assert picks.dtype == torch.int32 and torch.equal(picks, found.indices.flatten(0, 1))
        assert (picks[:3] == -1).all() and (picks[44] >= 0).all(), "a token that closes no block sees nothing, the last one fills its slots"


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_replay_gives_the_same_output_loss_and_gradients(reentrant: bool | None) -> None:
    model, ids = tiny(TWO_CSA), tokens(2, 45)
    with install(model) as handle:
        if reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        with handle.record() as record:
            out = model(ids, labels=ids)
        out.loss.backward()
        wanted, losses = gradients(model), handle.metrics()["loss"]
        with handle.replay(record):
            again = model(ids, labels=ids)
        again.loss.backward()
        assert torch.equal(again.logits, out.logits)
        worst = worst_gap(gradients(model), wanted)
        assert worst[0] < 1e-5, worst
        assert handle.metrics()["loss"] == pytest.approx(losses, rel=1e-5)


def test_the_picks_are_the_records_whatever_the_indexers_have_become() -> None:
    """The scores and the loss are those of the indexers as they are now, over the old picks."""
    model, ids = tiny(TWO_CSA), tokens(2, 45)
    with install(model) as handle:
        record = recorded(handle, ids)
        with torch.no_grad():
            wanted = model(ids).logits
        disturb(handle)
        with handle.replay(record), handle.record() as again:
            out = model(ids)
        assert torch.equal(out.logits, wanted) and not torch.equal(model(ids).logits, wanted)
        assert all(torch.equal(again.picks[name], record.picks[name]) for name in record.picks)
        out.logits.sum().backward()
        assert len(indexer_part(gradients(model))) == 12


def test_the_loss_of_a_replay_is_the_kl_over_the_replayed_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the scores of every entry, picked out: with chunks of a few queries, too."""
    model, ids = tiny((CSA,)), tokens(2, 45)
    with install(model) as handle:
        record = recorded(handle, ids)
        disturb(handle)
        full: dict[str, Tensor] = {}
        original = csakit.distill

        def distill(scores, log_mass, layout, **options):
            full.update(scores=scores, log_mass=log_mass)
            return original(scores, log_mass, layout, **options)

        monkeypatch.setattr(csakit, "distill", distill)
        inputs: list = []
        scored = selections.scores_of
        monkeypatch.setattr("csakit.integrations.transformers.forwards.scores_of", lambda *a: [inputs.append(a), scored(*a)][1])
        for room in (1 << 22, 2 * 11 * 7):
            monkeypatch.setattr(selections, "_ROOM", room)
            with handle.replay(record):
                model(ids)
            index, picks, layout = inputs[-1]
            dense = csakit.index_scores(index.q, index.k, index.weights, layout, scale=index.scale)
            student = dense.gather(2, picks.clamp(min=0).long()).masked_fill(picks < 0, -torch.inf)
            assert torch.equal(full["scores"] == -torch.inf, picks < 0)
            assert gap(full["scores"].detach()[picks >= 0], student.detach()[picks >= 0]) < 1e-6
            assert float(handle.losses["layers.0"]) == pytest.approx(original(student, full["log_mass"], layout).loss.item(), rel=1e-5)


def test_a_rollout_is_replayed_in_a_training_forward_padded_or_packed() -> None:
    """Left-padded prompts, prefilled in chunks and decoded with a cache; trained whole, on the right, or behind each other."""
    model = tiny(TWO_CSA).eval()
    ids, mask = tokens(2, 21), torch.tensor([[1] * 21, [0] * 8 + [1] * 13])
    with install(model) as handle:
        with handle.record() as record:
            rollout = model.generate(ids * mask, attention_mask=mask, prefill_chunk_size=8, **OPTIONS)[:, :-1]
        whole = torch.nn.functional.pad(mask, (0, rollout.shape[1] - 21), value=1)
        assert record.lengths == whole.sum(1).tolist() == [29, 21], "the last token was never an input"
        disturb(handle)
        model.train()
        with handle.replay(record), handle.record() as again:
            left = model(rollout, attention_mask=whole).logits
        assert all(torch.equal(again.picks[name], record.picks[name]) for name in record.picks)
        shifted = torch.nn.functional.pad(rollout[1:, 8:], (0, 8))
        with handle.replay(record):
            right = model(torch.cat([rollout[:1], shifted]), attention_mask=torch.cat([whole[:1], whole[1:].flip(1)])).logits
            packed = model(torch.cat([rollout[:1], rollout[1:, 8:]], 1), cu_seqlens=torch.tensor([0, 29, 50])).logits
        for one, two in ((right[0], left[0]), (right[1, :21], left[1, 8:]), (packed[0, :29], left[0]), (packed[0, 29:], left[1, 8:])):
            assert gap(one.detach(), two.detach()) < 1e-5


def test_what_a_rollout_attended_to_is_what_its_replay_attends_to() -> None:
    """With the indexers unchanged the replay reproduces the logits that the rollout sampled from."""
    model, ids = tiny(TWO_CSA).eval(), tokens(2, 21)
    with install(model) as handle:
        with handle.record() as record:
            out = model.generate(ids, output_logits=True, return_dict_in_generate=True, **OPTIONS)
        with handle.replay(record), torch.no_grad():
            whole = model(out.sequences[:, :-1]).logits
        assert gap(whole[:, 20:], torch.stack(out.logits, 1)) < 1e-5


def test_micro_batches_take_their_documents_of_the_record() -> None:
    model, ids = tiny(TWO_CSA), tokens(4, 45)
    with install(model) as handle:
        record = recorded(handle, ids)
        disturb(handle)
        handle.divisor = float(ids.numel())
        with handle.replay(record):
            model(ids, labels=ids, num_items_in_batch=4 * 44).loss.backward()
        wanted = gradients(model)
        for rows, part in zip(ids.split(2), record.split(2)):
            with handle.replay(part):
                model(rows, labels=rows, num_items_in_batch=4 * 44).loss.backward()
        worst = worst_gap(gradients(model), wanted)
        assert worst[0] < 1e-4, worst
        assert record[-1].lengths == [45] and record[[3, 0]].picks["layers.0"][0].tolist() == record.picks["layers.0"][135].tolist()


def test_several_forwards_are_recorded_one_behind_the_other() -> None:
    model, ids = tiny((CSA,)), tokens(2, 45)
    with install(model) as handle:
        together = recorded(handle, ids)
        with handle.record() as record, torch.no_grad():
            model(ids[:1])
            model(torch.nn.functional.pad(ids[1:], (3, 0)), attention_mask=torch.tensor([[0] * 3 + [1] * 45]))
    assert torch.equal(record.picks["layers.0"], together.picks["layers.0"]) and record.lengths == together.lengths


def test_a_record_is_cut_to_what_the_trainer_keeps() -> None:
    model, ids = tiny((CSA,)), tokens(2, 45)
    with install(model) as handle:
        record = recorded(handle, ids).cut([45, 30])
        mask = torch.ones_like(ids)
        mask[1, 30:] = 0
        with handle.replay(record), torch.no_grad():
            out = model(ids, attention_mask=mask).logits
        with torch.no_grad():
            assert gap(out[1, :30], model(ids[1:, :30]).logits[0]) < 1e-5


@pytest.mark.parametrize("form", ["safetensors", "torch.save"])
def test_a_record_survives_a_file(form: str, tmp_path) -> None:
    with install(tiny(TWO_CSA)) as handle:
        record = recorded(handle, tokens(2, 45))
    path = tmp_path / "picks"
    if form == "safetensors":
        record.save(path)
        again = Selections.load(path)
    else:
        torch.save(record.state_dict(), path)
        again = Selections.from_state_dict(torch.load(path))
    assert torch.equal(again.positions, record.positions) and again.picks.keys() == record.picks.keys()
    for name, picks in record.picks.items():
        assert again.picks[name].dtype == torch.int32 and torch.equal(again.picks[name], picks) and (picks == -1).any()
    assert repr(again) == "Selections(2 documents, 90 tokens, slots {'layers.0': 4, 'layers.2': 4})"


def test_picks_may_come_in_any_order_and_integer_type_as_from_another_engine() -> None:
    model, ids = tiny((CSA,)), tokens(2, 45)
    with install(model) as handle, torch.no_grad():
        record = recorded(handle, ids)
        wanted = model(ids).logits
        turned = Selections(record.positions.long(), {name: picks.flip(1).long() for name, picks in record.picks.items()})
        with handle.replay(turned):
            assert gap(model(ids).logits, wanted) < 1e-5


# ---- what is refused -----------------------------------------------------------------------------------------------------


def changed(record: Selections, token: int, slot: int, value: int) -> Selections:
    picks = record.picks["layers.0"].clone()
    picks[token, slot] = value
    return Selections(record.positions, {"layers.0": picks})


INVALID = {
    "not visible": (lambda r: changed(r, 8, 0, 2), "entry 2 of row 0, token 8 is not visible"),
    "repeated": (lambda r: changed(r, 44, 1, int(r.picks["layers.0"][44, 0])), "row 0, token 44 stands more than once"),
    "out of range": (lambda r: changed(r, 50, 0, 99), "entry 99 of row 1, token 5 is out of range: the layout has 11 entries"),
    "below -1": (lambda r: changed(r, 50, 0, -7), "entry -7 of row 1, token 5 is below -1"),
    "other slots": (lambda r: Selections(r.positions, {"layers.0": r.picks["layers.0"][:, :3]}), "has 3 slots per token; .* selects 4"),
    "other layers": (lambda r: Selections(r.positions, {"layers.7": r.picks["layers.0"]}), r"picks of \['layers.7'\]; .* \['layers.0'\]"),
    "fewer documents": (lambda r: r[:1], r"documents of 45 tokens, this forward has 45, 45\. record\[i:j\]"),
    "shorter documents": (lambda r: r.cut([45, 44]), "documents of 45, 44 tokens, this forward has 45, 45"),
    "empty": (lambda r: Selections(), r"picks of \[\]"),
}


@pytest.mark.parametrize("case", INVALID)
def test_a_record_that_does_not_fit_the_forward_is_refused(case: str) -> None:
    change, message = INVALID[case]
    model, ids = tiny((CSA,)), tokens(2, 45)
    with install(model) as handle:
        record = change(recorded(handle, ids))
        with handle.replay(record), pytest.raises(ValueError, match=message):
            model(ids)
        model(ids)  # and leaves nothing behind


def test_picks_that_reach_into_another_document_are_refused() -> None:
    model, ids = tiny((CSA,)), tokens(1, 45)
    packed = {"cu_seqlens": torch.tensor([0, 20, 45])}
    with install(model) as handle:
        record = changed(recorded(handle, ids, **packed), 19, 0, 5)  # entry 5 of the row is the second document's first
        with handle.replay(record), pytest.raises(ValueError, match="entry 5 of row 0, token 19 is not visible"):
            model(ids, **packed)


MALFORMED = {
    "positions of two axes": (
        lambda: Selections(torch.zeros(2, 3, dtype=torch.int32)),
        r"positions must have shape \[N\] = \[any\]; got \[2, 3\]",
    ),
    "picks of another length": (
        lambda: Selections(torch.arange(4), {"layers.0": torch.zeros(3, 4, dtype=torch.int32)}),
        r"must have shape \[N, K\] = \[4, any\]; got \[3, 4\]",
    ),
    "positions with a gap": (lambda: Selections(torch.tensor([0, 1, 3])), "positions must count from 0 by ones"),
    "positions that begin later": (lambda: Selections(torch.tensor([2, 3])), "positions must count from 0 by ones"),
    "another file": (
        lambda: Selections.from_state_dict({"weight": torch.zeros(1)}),
        "not a record of selections: no 'positions' among weight",
    ),
    "too long a cut": (lambda: Selections(torch.arange(4)).cut([5]), r"lengths must be one per document, at most \[4\]; got \[5\]"),
    "another number of cuts": (lambda: Selections(torch.arange(4)).cut([2, 2]), "lengths must be one per document"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_records_are_refused(case: str) -> None:
    make, message = MALFORMED[case]
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match=r"positions must be .*int"):
        Selections(torch.zeros(4))


def test_recording_and_replaying_need_a_selection_and_whole_rows() -> None:
    model, ids = tiny((CSA,)).eval(), tokens(2, 45)
    with install(model) as handle:
        record = recorded(handle, ids)
        with handle.replay(record), pytest.raises(ValueError, match="a replay needs whole rows; pass use_cache=False"):
            model(ids, use_cache=True)
        with pytest.raises(TypeError, match=r"replay needs a csakit Selections, .* got dict"), handle.replay(record.state_dict()):
            pass
        with handle.record(), pytest.raises(RuntimeError, match="a recording is already open"), handle.record():
            pass
        handle.stage("dense")
        with pytest.raises(ValueError, match="selects nothing to record"), handle.record():
            pass
        with pytest.raises(ValueError, match="replays no selection"), handle.replay(record):
            pass
    for context in (handle.record, lambda: handle.replay(record)):
        with pytest.raises(RuntimeError, match="this handle was removed"), context():
            pass


def test_a_cache_is_recorded_from_its_first_token_or_not_at_all() -> None:
    model, ids = tiny((CSA,)).eval(), tokens(2, 45)
    with install(model) as handle, torch.no_grad():
        past = model(ids[:, :40], use_cache=True).cache
        with pytest.raises(ValueError, match="5 of the cache's 45 tokens were recorded"), handle.record():
            model(ids[:, 40:], cache=past)


def test_a_beam_search_cannot_be_recorded() -> None:
    with install(tiny((CSA,)).eval()) as handle, pytest.raises(ValueError, match="a beam search mixes rows"), handle.record():
        handle.model.generate(tokens(1, 21), num_beams=2, **OPTIONS)
