"""Where the time of one call goes: milliseconds by part, from a profile.

While the profile runs, each module's forward and each of csakit's verbs is a range named after its part, and every operation counts for
the innermost range. An operation of the backward pass counts for the part of the forward operation whose gradient it is.
What the wall clock shows beyond all operations is Python's.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import csakit

from .records import PARTS

_RANGE = "csakit.part/"
_VERBS = {"attend": "attention", "select": "scoring", "compress": "compression"} | dict.fromkeys(
    ("distill", "distill_dense", "teacher_log_mass", "attach_loss"), "objective"
)
_GRADIENTS = {"csakit::scores_backward": "objective"}  # of scoring; only the objective asks for them
_STOCK = "transformers.models.deepseek_v4.modeling_deepseek_v4"
_MODULES = {
    # how the names of classes begin, or end, and their part; the first that fits
    "Linear": "projections",
    "GroupedLinear": "projections",
    "Norm": "rotation and norms",
    "RotaryEmbedding": "rotation and norms",
    "Compressor": "compression",
    "Scorer": "scoring",
    "Indexer": "scoring",
    "HyperConnection": "streams",
    "HyperHead": "streams",
    "SparseMoeBlock": "experts",
    "DecoderLayer": "streams",
}
_WHOLE = ("experts", "streams")  # what lies inside counts for them too
_AROUND = ("Attention", "Model", "ForCausalLM")  # what such a module does itself, outside the attention, is rotation and reshaping


def parts(run: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds by part of one call; the call is made three times: to warm up, for the clock, under the profiler."""
    run()
    wall = time.perf_counter()
    run()
    wall = time.perf_counter() - wall
    with _ranges(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        run()
    found = dict.fromkeys(PARTS, 0.0)
    for part, milliseconds in _by_part(profiler.events()).items():
        found[part] += milliseconds
    found["python"] = max(0.0, 1e3 * wall - sum(found.values()))
    return found


def _by_part(events: Any) -> dict[str, float]:
    """Milliseconds by part of the operations among the events."""
    forward: dict[int, str] = {}  # of the operation with this number, which its gradient carries too
    for event in events:
        if event.sequence_nr >= 0 and not event.name.startswith("autograd::"):
            forward.setdefault(event.sequence_nr, _part(event, {}))
    found: dict[str, float] = {}
    for event in events:
        if not event.name.startswith(_RANGE):
            part = _part(event, forward)
            found[part] = found.get(part, 0.0) + event.self_cpu_time_total / 1e3
    return found


def _part(event: Any, forward: dict[int, str]) -> str:
    """The part an event counts for: of the innermost range, or gradient, around it."""
    while event is not None:
        name = event.name
        if name.startswith(_RANGE):
            return name.removeprefix(_RANGE)
        if name.startswith("Optimizer.step"):
            return "optimizer"
        if name in _GRADIENTS:
            return _GRADIENTS[name]
        if name.startswith("autograd::engine") and event.sequence_nr in forward:
            return forward[event.sequence_nr]
        event = event.cpu_parent
    return "other"


@contextlib.contextmanager
def _ranges() -> Iterator[None]:
    """While this lasts the forwards of modules, csakit's verbs and stock's attention function are ranges named after their part."""
    opened: list[tuple[str, Any]] = []

    def enter(module: nn.Module, _: Any) -> None:
        part = _part_of(module, inside=opened[-1][0] if opened else "")
        scope = torch.profiler.record_function(_RANGE + part)
        scope.__enter__()
        opened.append((part, scope))

    def leave(*_: Any) -> None:
        opened.pop()[1].__exit__(None, None, None)

    with contextlib.ExitStack() as undo:
        undo.callback(nn.modules.module.register_module_forward_pre_hook(enter).remove)
        undo.callback(nn.modules.module.register_module_forward_hook(leave, always_call=True).remove)
        for verb, part in _VERBS.items():
            undo.enter_context(_named(csakit, verb, part))
        if _STOCK in sys.modules:
            undo.enter_context(_named(sys.modules[_STOCK], "eager_attention_forward", "attention"))
        yield


@contextlib.contextmanager
def _named(module: Any, name: str, part: str) -> Iterator[None]:
    """While this lasts a function of a module is a range of a part."""
    function = getattr(module, name)

    def named(*args: Any, **options: Any) -> Any:
        with torch.profiler.record_function(_RANGE + part):
            return function(*args, **options)

    setattr(module, name, named)
    try:
        yield
    finally:
        setattr(module, name, function)


def _part_of(module: nn.Module, inside: str) -> str:
    if inside in _WHOLE and not type(module).__name__.endswith(_AROUND):
        return inside if "Moe" not in type(module).__name__ else "experts"
    name = type(module).__name__
    for word, part in _MODULES.items():
        if name.startswith(word) or name.endswith(word):
            return part
    return "rotation and norms" if name.endswith(_AROUND) else inside or "other"
