"""Checkpoints: whole or not there, restored bit for bit, pruned, and a clear word when the disk says no."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
import torch
from torch import nn

from csakit.train import checkpoint
from csakit.train.checkpoint import CheckpointError, Progress
from csakit.train.config import StageConfig
from csakit.train.stages import make_optimizer


def trained(seed: int = 0, width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model after two steps of its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width, bias=False))
    optimizer = make_optimizer(model, StageConfig())
    for _ in range(2):
        model(torch.randn(2, width)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def at(step: int, stage: int = 0) -> Progress:
    return Progress(stage=stage, step=step, total_steps=step, log_bytes=17)


def test_weights_optimizer_state_and_random_state_come_back_bit_for_bit(tmp_path):
    model, optimizer = trained()
    saved = checkpoint.save(tmp_path, model, optimizer, at(5), keep=1)
    expected = torch.randn(4)
    other, other_optimizer = trained(seed=1)
    checkpoint.restore(saved, other, other_optimizer)
    assert torch.equal(torch.randn(4), expected)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    mine, theirs = ([optimizer.state[p] for p in m.parameters()] for m, optimizer in ((model, optimizer), (other, other_optimizer)))
    assert all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(mine, theirs))
    assert checkpoint.read_progress(saved) == at(5)


def test_only_the_newest_are_kept(tmp_path):
    model, optimizer = trained()
    for step in (1, 2, 10, 11):
        checkpoint.save(tmp_path, model, optimizer, at(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010-0", "step-00000011-0"]
    assert checkpoint.newest(tmp_path).name == "step-00000011-0"


def test_the_checkpoint_of_the_next_stage_is_newer_than_that_of_the_last_step(tmp_path):
    model, optimizer = trained()
    checkpoint.save(tmp_path, model, optimizer, at(10), keep=2)
    checkpoint.save(tmp_path, model, None, Progress(stage=1, step=0, total_steps=10, log_bytes=0), keep=2)
    assert checkpoint.read_progress(checkpoint.newest(tmp_path)).stage == 1


def test_a_folder_without_checkpoints_has_no_newest_one(tmp_path):
    assert checkpoint.newest(tmp_path) is None and checkpoint.newest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("damage", ["cut", "missing", "no state", "half a state", "unfinished name"])
def test_a_half_written_checkpoint_is_not_mistaken_for_a_whole_one(tmp_path, damage):
    model, optimizer = trained()
    whole = checkpoint.save(tmp_path, model, optimizer, at(1), keep=5)
    newer = checkpoint.save(tmp_path, model, optimizer, at(2), keep=5)
    weights, state = newer / "weights.safetensors", newer / "state.json"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing":
        weights.unlink()
    elif damage == "no state":
        state.unlink()
    elif damage == "half a state":
        state.write_text(state.read_text()[:30])
    else:
        newer.rename(newer.with_name(newer.name + checkpoint.UNFINISHED))
    assert checkpoint.newest(tmp_path) == whole


def test_the_remains_of_a_killed_save_do_not_disturb_the_next(tmp_path):
    model, optimizer = trained()
    saved = checkpoint.save(tmp_path, model, optimizer, at(3), keep=1)
    shutil.copytree(saved, saved.with_name(saved.name + checkpoint.UNFINISHED))
    (saved.with_name(saved.name + checkpoint.UNFINISHED) / "stray").write_text("")
    again = checkpoint.save(tmp_path, model, optimizer, at(3), keep=1)
    assert again == saved and sorted(path.name for path in tmp_path.iterdir()) == [saved.name]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_where_it_is(tmp_path, monkeypatch, number):
    model, optimizer = trained()
    good = checkpoint.save(tmp_path, model, optimizer, at(1), keep=1)
    calls = []

    def full(handle):
        calls.append(handle)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=rf"could not be written: .*No space left on device; the last good checkpoint is {good}"):
        checkpoint.save(tmp_path, model, optimizer, at(2), keep=1)
    assert checkpoint.newest(tmp_path) == good and [path.name for path in tmp_path.iterdir()] == [good.name]


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match=r"could not be written: .*; there is no earlier checkpoint"):
        checkpoint.save(tmp_path / "file", model, optimizer, at(1), keep=1)


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    model, optimizer = trained()
    saved = checkpoint.save(tmp_path, model, optimizer, at(1), keep=1)
    other, other_optimizer = trained(width=4)
    with pytest.raises(CheckpointError, match="the weights are those of another model"):
        checkpoint.restore(saved, other, other_optimizer)


def test_optimizer_state_of_parameters_that_do_not_train_here_is_refused(tmp_path):
    model, optimizer = trained()
    saved = checkpoint.save(tmp_path, model, optimizer, at(1), keep=1)
    model[1].requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"the optimizer state is of other parameters, the first is 1\.weight"):
        checkpoint.restore(saved, model, make_optimizer(model, StageConfig()))


def test_the_state_file_is_plain_json_with_the_counters(tmp_path):
    model, optimizer = trained()
    saved = checkpoint.save(tmp_path, model, optimizer, at(7), keep=1)
    assert json.loads((saved / "state.json").read_text())["progress"] == {"stage": 0, "step": 7, "total_steps": 7, "log_bytes": 17}
