"""csakit in a real Megatron-LM checkout on two processes: context, tensor and pipeline parallelism. Needs `--megatron PATH`."""

from __future__ import annotations

from pathlib import Path

import megatron_ranks
import pytest
import torch


@pytest.fixture(scope="module")
def outcomes(megatron, tmp_path_factory) -> list[dict[str, str]]:
    """{case: what went wrong, or ""} of each process; all cases run in one pair, as importing Megatron takes longest."""
    checkout = str(Path(megatron.__file__).parents[4])
    context = torch.multiprocessing.get_context("spawn")
    queue, meeting = context.Queue(), str(tmp_path_factory.mktemp("ranks") / "meeting")
    process = context.Process(target=megatron_ranks.launch, args=(checkout, meeting, queue))
    process.start()
    found = [queue.get(timeout=900) for _ in range(megatron_ranks.WORLD)]
    process.join(timeout=60)
    assert process.exitcode == 0
    return found


@pytest.mark.parametrize("case", megatron_ranks.CASES)
def test_two_processes_give_what_one_gives(outcomes, case: str) -> None:
    for outcome in outcomes:
        assert outcome.get(case, "not run: an earlier case failed") == ""
