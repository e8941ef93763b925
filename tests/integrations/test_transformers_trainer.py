"""The library's Trainer: one scale for both losses however a step is split, honest logs, checkpoints that resume."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments
from v4_model import tiny, tokens, worst_gap

from csakit.integrations.transformers import install
from csakit.integrations.transformers.trainer import IndexerTrainer


def rows(count: int = 8) -> list[dict[str, Tensor]]:
    """Padded rows of unequal length: micro-batches hold unequal numbers of tokens."""
    ids = tokens(count, 45)
    mask = (torch.arange(45) < torch.tensor([45, 20, 33, 9, 45, 28, 16, 40])[:count, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    return [{"input_ids": i, "attention_mask": m, "labels": t} for i, m, t in zip(ids, mask, labels)]


def train(
    folder: Path, kind: type[Trainer] = IndexerTrainer, *, csakit: bool = True, coef: float = 1.0, resume: str | None = None, **settings
) -> tuple[torch.nn.Module, list[dict[str, float]]]:
    """A tiny model after a few plain gradient steps, and what was logged at each."""
    model = tiny()
    if csakit:
        install(model, coef=coef)
    fixed = {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 0}
    plain = {"learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 1e9, "lr_scheduler_type": "constant", "max_steps": 2}
    trainer = kind(model=model, args=TrainingArguments(str(folder), **{**fixed, **plain, **settings}), train_dataset=rows())
    trainer.train(resume_from_checkpoint=resume)
    return model, [entry for entry in trainer.state.log_history if "loss" in entry]


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def moved(model: torch.nn.Module) -> dict[str, Tensor]:
    """How far each weight went from where it began: the sum of the gradients, times the rate."""
    return {name: value - start for (name, value), start in zip(weights(model).items(), weights(tiny()).values())}


@pytest.mark.parametrize("kind", [IndexerTrainer, Trainer], ids=lambda kind: kind.__name__)
def test_one_and_four_micro_batches_train_alike(kind: type[Trainer], tmp_path: Path) -> None:
    """With the library's own Trainer too: the count of the step reaches csakit with the forward."""
    one, logged = train(tmp_path, kind, per_device_train_batch_size=4)
    four, logged_four = train(tmp_path, kind, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    worst = worst_gap(moved(four), moved(one))
    assert worst[0] < 1e-3, worst
    assert {".indexer." in name for name, step in moved(one).items() if step.any()} == {True, False}
    for key in ("loss", "grad_norm", *(["indexer_loss"] if kind is IndexerTrainer else [])):
        assert [entry[key] for entry in logged_four] == pytest.approx([entry[key] for entry in logged], rel=1e-4)


def test_a_trainer_without_the_count_of_a_step_averages_its_micro_batches(tmp_path: Path) -> None:
    """Trainers with a loss of their own divide it by the micro-batches; the indexers' is then weighted so, too."""

    class Own(IndexerTrainer):
        def __init__(self, **arguments) -> None:
            super().__init__(**arguments)
            self.model_accepts_loss_kwargs = False

    seen: list[float] = []
    original = IndexerTrainer._factor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexerTrainer, "_factor", lambda *a: [seen.append(factor := original(*a)), factor][1])
        _, (first, _) = train(tmp_path, Own, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert seen == [0.25] * 8
    plain = tiny()
    with install(plain) as handle:
        means = []
        for row in rows():
            plain(**{name: value[None] for name, value in row.items()})
            means.append(float(handle.losses["layers.1"]))
    assert min(means) / 2 < first["indexer_loss"] < max(means), "a mean of means, not their sum"


def test_the_reported_loss_is_the_language_models_and_the_indexers_stands_beside_it(tmp_path: Path) -> None:
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1}
    _, (stock,) = train(tmp_path, Trainer, csakit=False, use_cache=False, **settings)
    with_loss, (ours,) = train(tmp_path, **settings)
    without, (off,) = train(tmp_path, coef=0.0, **settings)
    assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-5) == off["loss"]
    assert "indexer_loss" not in stock and ours["indexer_loss"] > 0 and off["indexer_loss"] == 0
    for name, value in weights(with_loss).items():
        assert torch.equal(value, weights(without)[name]) is (".indexer." not in name), name


@pytest.mark.parametrize("settings", [{"activation_checkpointing": True}, {"bf16": True}], ids=str)
def test_checkpointing_and_bf16_give_the_losses_of_a_plain_run(settings: dict, tmp_path: Path) -> None:
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    _, plain = train(tmp_path, **split)
    _, logged = train(tmp_path, **split, **settings)
    near = 0.05 if "bf16" in settings else 1e-5
    for key in ("loss", "indexer_loss"):
        assert [entry[key] for entry in logged] == pytest.approx([entry[key] for entry in plain], rel=near)


def test_a_resumed_run_gives_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """With moments in the optimizer, an accumulated step and the best model loaded at the end."""
    settings = {
        "max_steps": 4,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "lr_scheduler_type": "linear",
    }
    whole, logged = train(tmp_path, **settings)
    resumed, rest = train(tmp_path, resume=str(tmp_path / "checkpoint-2"), **settings)
    assert len(rest) == 4, "the log of the first two steps is kept"
    for key in ("loss", "indexer_loss", "grad_norm"):
        assert [entry[key] for entry in rest] == [entry[key] for entry in logged]
    assert all(torch.equal(weights(resumed)[name], value) for name, value in weights(whole).items())


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    model = tiny()
    install(model)
    args = TrainingArguments(
        str(tmp_path), max_steps=2, learning_rate=10.0, optim="sgd", max_grad_norm=1e9, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = IndexerTrainer(model=model, args=args, train_dataset=rows(), eval_dataset=rows(2))
    trainer.train()
    best = trainer.state.best_model_checkpoint
    loaded = type(model).from_pretrained(best)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_model_without_csakit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"csakit is not installed in this DeepseekV4ForCausalLM; call install\(model\) first"):
        train(tmp_path, csakit=False)


def test_a_divisor_of_ones_own_is_left_as_it_is(tmp_path: Path) -> None:
    model = tiny()
    handle = install(model)
    handle.divisor = 1000.0
    args = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = IndexerTrainer(model=model, args=args, train_dataset=rows())
    trainer.train()
    assert handle.step_weight == 1.0 and handle.divisor == 1000.0


# ---- two processes -------------------------------------------------------------------------------------------------------


def one_of_two(rank: int, port: int, folder: str, queue) -> None:
    """One rank of a run over two processes, in which each sees half of the rows of every step."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    model, logged = train(Path(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1, ddp_backend="gloo")
    queue.put((rank, {name: value.tolist() for name, value in moved(model).items()}, logged))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """accelerate wraps the model for data-parallel training; the step of all eight rows is that of one process."""
    one, (logged,) = train(tmp_path, per_device_train_batch_size=8, max_steps=1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=one_of_two, args=(rank, port, str(tmp_path), queue)) for rank in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=400) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    for _, steps, (entry,) in results:
        worst = worst_gap({name: torch.tensor(value) for name, value in steps.items()}, moved(one))
        assert worst[0] < 1e-3, worst
        assert entry["indexer_loss"] == pytest.approx(logged["indexer_loss"], rel=1e-4)
