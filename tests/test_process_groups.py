"""Heads sharded over real process groups (gloo, spawned processes): the objective of every rank is that of the whole."""

from __future__ import annotations

import math

import torch
from helpers import Sizes, gap, random_inputs

import csakit
from csakit import Layout


def head_rank(rank: int, world: int, path: str, cases: list, queue) -> None:
    """One process of the head-sharded run: loss and indexer gradients from its own heads, in the whole group and in pairs."""
    torch.set_num_threads(1)
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    pairs = [dist.new_group([a, a + 1]) for a in range(0, world, 2)]
    results = []
    for ranks, group in ((world, dist.group.WORLD), (2, pairs[rank // 2])):
        results += [sharded_objective(rank % ranks, ranks, group, *case) for case in cases]
    queue.put((rank, results))
    dist.barrier()
    dist.destroy_process_group()


def sharded_objective(rank: int, ranks: int, group, inputs: dict, sizes: Sizes) -> dict[str, list]:
    """Loss, KL and indexer gradients of one rank; with ranks = 1 and no group, of the whole."""
    layout = Layout.packed(torch.tensor([0, 5, 12]), ratio=2, window=3, tokens=13)
    names = ("q_index", "k_index", "weights")
    index = {name: inputs[name].clone().requires_grad_() for name in names}
    q, sink = inputs["q"].chunk(ranks, 2)[rank], inputs["sink"].chunk(ranks)[rank]
    if sizes.objective == "sparse":
        selection = csakit.select(*index.values(), sizes.topk, layout)
        attention = csakit.attend(q, inputs["kv"], inputs["entries"], layout, indices=selection.indices, sink=sink, teacher=True)
        result = csakit.distill(selection.scores, attention.log_mass, layout, group=group)
    else:
        attention = csakit.attend(q, inputs["kv"], inputs["entries"], layout, sink=sink)
        result = csakit.distill_dense(*index.values(), q, inputs["entries"], attention.lse, layout, group=group)
    grads = torch.autograd.grad(result.loss, list(index.values()))
    found = dict(loss=result.loss, kl=result.kl, **{f"d_{name}": g for name, g in zip(names, grads)})
    return {name: t.tolist() for name, t in found.items()}


def test_real_process_groups_of_two_and_four_head_ranks_equal_the_whole(tmp_path) -> None:
    """One head per rank in a group of four; then two groups of two. One case has a rank without mass, one has little mass on all."""
    cases = []
    for objective in ("sparse", "dense"):
        sizes = Sizes(heads=4, topk=2, objective=objective)
        inputs = random_inputs(1, 13, sizes, seed=4)
        inputs.update(entries=inputs["kv"][:, :6] + 1, k_index=inputs["index_values"][:, :6, :3])
        cases.append((inputs, sizes))
        cases.append((inputs | {"sink": inputs["sink"].index_fill(0, torch.tensor([2]), math.inf)}, sizes))
        cases.append((inputs | {"sink": inputs["sink"] + 2000}, sizes))  # e^-2000 is 0 without the row maximum
    whole = [sharded_objective(0, 1, None, *case) for case in cases]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=head_rank, args=(rank, 4, str(tmp_path / "rendezvous"), cases, queue)) for rank in range(4)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=600) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert sorted(rank for rank, _ in results) == [0, 1, 2, 3]
    for rank, found in results:
        for number, got in enumerate(found):
            for name, want in whole[number % len(whole)].items():
                assert gap(torch.tensor(got[name]), torch.tensor(want)) < 1e-12, (rank, number, name)
