"""Whole layers and steps: csakit's modules, and stock Transformers with csakit in it.

csakit-nn         a layer of csakit.nn
csakit-installed  the stock module with `csakit.integrations.transformers.install`

Both train the indexer in backward, which the stock module does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import csakit

from .. import layers
from ..problem import Problem
from ..shapes import LAYERS, Case
from . import Results, Unsupported


class Module:
    """csakit.nn."""

    name = "csakit-nn"

    def __init__(self) -> None:
        self.version = csakit.__version__

    def bytes_needed(self, case: Case) -> int:
        return 0

    def prepare(self, problem: Problem) -> Callable[[], Results]:
        case, x = problem.case, problem.inputs
        if case.operation not in LAYERS:
            raise Unsupported("csakit.nn has layers only")
        layer = layers.own(case.shape, case.kind, x, trains=case.backward)
        return layer_run(problem, lambda hidden: layer(hidden, problem.layout).out, dict(layer.named_parameters()))


class Installed:
    """The stock module or model with csakit installed."""

    name = "csakit-installed"

    def __init__(self) -> None:
        self.version = csakit.__version__

    def bytes_needed(self, case: Case) -> int:
        return 0

    def prepare(self, problem: Problem) -> Callable[[], Results]:
        return hosted(problem, own=True)


def hosted(problem: Problem, *, own: bool) -> Callable[[], Results]:
    """The function to time of a stock layer or model, with csakit in it or as it stands.

    Raises:
        Unsupported: another operation, or no Transformers.
    """
    case = problem.case
    if case.operation not in (*LAYERS, "step"):
        raise Unsupported("layers and steps only")
    try:
        if case.operation == "step":
            from ..steps import Step

            return Step(problem, own=own)
        model, parameters = layers.stock(case.shape, case.kind, problem.inputs, trains=case.backward)
    except ImportError as error:
        raise Unsupported(f"Transformers with DeepSeek-V4 is not installed ({error}); install csakit[hf]") from error
    if own:
        from csakit.integrations.transformers import install

        # not strict: the decoder layer around the attention is the bench's own
        install(model, objective="sparse" if case.kind == "csa" else "off", strict=False)
    trained = {name: parameter for name, parameter in parameters.items() if own or not name.startswith("indexer.")}
    return layer_run(problem, lambda hidden: model(inputs_embeds=hidden, use_cache=False).last_hidden_state, trained)


def layer_run(problem: Problem, forward: Callable[[Tensor], Tensor], parameters: dict[str, torch.nn.Parameter]) -> Callable[[], Results]:
    """One forward of a layer, with backward to its input and parameters where the case has one."""
    backward, hidden = problem.case.backward, problem.inputs["hidden"]

    def run() -> Results:
        leaf = hidden.detach().requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            out = forward(leaf)
            results = {"out": out.detach()}
            if backward:
                results |= problem.gradients(out, problem.inputs["d_out"], {"hidden": leaf, **parameters})
        return results

    return run
