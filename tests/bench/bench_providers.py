"""Providers for the tests: right ones, and ones with a known mistake or a known appetite."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import torch

from csakit.bench.providers import Unsupported
from csakit.bench.providers.eager import Eager

MIB = 1 << 20


class Wrong(Eager):
    """The eager author, or another, with one mistake in the results."""

    def __init__(self, name: str, spoil: Callable, right=None) -> None:
        self.name = name
        self._spoil, self._right = spoil, right or Eager()

    def prepare(self, problem):
        work = self._right.prepare(problem)

        def run():
            results = dict(work())
            self._spoil(results, problem)
            return results

        return run


def compressed_only(results, problem):
    """The teacher of the picks alone, blind to window and sink."""
    x = problem.inputs
    picks = x["indices"][0]
    keys = x["entries"][0][picks.clamp(min=0)]
    logits = torch.einsum("thd,tkd->thk", x["q"][0], keys) * x["q"].shape[3] ** -0.5
    shares = logits.masked_fill((picks < 0)[:, None], -1e30).softmax(-1)
    shares = torch.where(picks >= 0, shares.sum(1), 0)
    results["teacher"] = (shares / shares.sum(-1, keepdim=True).clamp(min=1e-30))[None]


def swapped_pick(results, problem):
    """The worst visible entry in place of the first pick of the last query."""
    picked = results["indices"]
    visible = int(problem.layout.entry_stop[0, -1])
    left = sorted(set(range(visible)) - set(picked[0, -1].tolist()))
    picked[0, -1, 0] = left[0]


def _scaled(name: str, factor: float):
    def spoil(results, problem):
        results[name] = results[name] * factor

    return spoil


def _noise_elsewhere(results, problem):
    """A gradient for a query that has none."""
    results["d_q"][0, 20] += 1


MISTAKES = {
    "teacher from the picks alone": ("attend-teacher", compressed_only),
    "one part in a thousand too much output": ("attend", _scaled("out", 1.001)),
    "no sink gradient": ("attend-backward", _scaled("d_sink", 0.0)),
    "half of the gradient of the entries": ("attend-backward", _scaled("d_entries", 0.5)),
    "a gradient where none belongs": ("attend-backward", _noise_elsewhere),
    "NaN in the output": ("attend", _scaled("out", float("nan"))),
    "another pick": ("select", swapped_pick),
    "one pick twice": ("select", lambda results, problem: results["indices"][0, -1].fill_(0)),
    "a pick of the future": ("select", lambda results, problem: results["indices"][0, 0].fill_(problem.case.shape.entries - 1)),
    "one pick too few": ("select", lambda results, problem: results["indices"][0, -1, 0].fill_(-1)),
    "loss of another divisor": ("distill", _scaled("loss", 2.0)),
    "the dense loss without its gradient of the keys": ("dense", lambda results, problem: results.pop("d_k_index")),
}


class Appetite(Eager):
    """Takes 96 MiB, of which 32 are its result."""

    name = "appetite"

    def prepare(self, problem):
        def run():
            scratch = torch.ones(64 * MIB // 4)
            return {"out": scratch[: 32 * MIB // 4].clone()}

        return run


class Crash(Eager):
    """Fails."""

    name = "crash"

    def prepare(self, problem):
        raise RuntimeError("the kernel is not there\nsecond line")


class Elsewhere(Eager):
    """Cannot do it here."""

    name = "elsewhere"

    def prepare(self, problem):
        raise Unsupported("only on the moon")


class Killed(Eager):
    """Takes its process down with it, as one does that needs more memory than there is."""

    name = "killed"

    def prepare(self, problem):
        os.kill(os.getpid(), signal.SIGKILL)


class Big(Eager):
    """Would need more memory than there is."""

    name = "big"

    def bytes_needed(self, case):
        return 1 << 60


appetite, crash, elsewhere, big, killed = Appetite(), Crash(), Elsewhere(), Big(), Killed()
too_much = Wrong("too_much", MISTAKES["one part in a thousand too much output"][1])
incomplete = object()
