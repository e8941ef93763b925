"""install: what is patched in Megatron-LM, how it is recognised, and how it is taken back."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from . import context
from .methods import replacements
from .scale import with_loss_scale

_VARIANTS = "megatron.core.transformer.experimental_attention_variant"
_PLACES = {
    "_forward_unfused_csa": "unfused, SBHD",
    "_forward_unfused_csa_thd": "unfused, packed rows",
    "_forward_fused_indexer_training": "fused training, SBHD",
    "_forward_fused_indexer_training_thd": "fused training, packed rows",
    "_forward_thd_cp": "context parallel",
    "_unfused_indexer_sparse_attn_from_topk": "context parallel",
}
_ACTIONS = {
    "csakit": "csakit's selection, attention, teacher and indexer loss",
    "megatron": "csakit's teacher and indexer loss beside Megatron's selection and attention",
}
_CALLED = {
    "CSAIndexer.forward_before_topk": ["self", "x", "qr", "packed_seq_params"],
    "DSAIndexerLossAutoScaler.set_loss_scale": ["scale"],
    "DSAIndexerLossLoggingHelper.save_loss_to_tracker": ["loss", "layer_number", "num_layers"],
}
_CALLED_TO_ATTEND = {  # with attention="megatron"
    "unfused_compressed_sparse_attn": ["query", "kv_full", "attn_sink", "topk_indices", "softmax_scale"],
    "CompressedSparseAttention._forward_fused_indexer_inference": [
        "self", "query", "x", "qr", "kv_full", "n_compressed", "offset", "window_idxs", "packed_seq_params",
    ],
    "CompressedSparseAttention._forward_fused_indexer_inference_thd": [
        "self", "query", "x", "qr", "kv_full_thd", "packed_seq_params", "total_q", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_kv_full",
        "window_idxs", "max_seqlen_q", "max_seqlen_compressed_idx", "max_seqlen_kv",
    ],
}  # fmt: skip
_TEACHER = re.compile(r"fused.*indexer", re.IGNORECASE)  # what Megatron's functions that make teacher and loss are called


class Site(NamedTuple):
    """A place in Megatron-LM that is patched."""

    name: str  # module, class and function
    file: str  # path:line of the original
    action: str  # what stands there now
    calls: tuple[str, ...] = ()  # path:line of each use, in the original, of a function that makes Megatron's own teacher and loss


class Handle:
    """An installation. Printing it lists every patched place; `remove` takes it back; it can also be used as a context.

    Attributes:
        sites: the patched places.
        scale_cured: whether the scale that Megatron gave the indexer's loss was missing or wrong; None before the first step.
    """

    def __init__(self, options: tuple[str, str]) -> None:
        self.sites: list[Site] = []
        self.scale_cured: bool | None = None
        self._options = options
        self._borrowed = 0
        self._patches: list[tuple[Any, str, Any, Any]] = []

    def remove(self) -> None:
        """Puts Megatron's own functions back. Calling it again changes nothing.

        Raises:
            RuntimeError: somebody else has patched one of the places since; nothing is changed then.
        """
        for owner, name, _, ours in self._patches:
            if owner.__dict__.get(name) is not ours:
                raise RuntimeError(f"{owner.__name__}.{name} was patched again after csakit; undo that first")
        for owner, name, stock, _ in self._patches:
            setattr(owner, name, stock)
        self._patches = []

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        if self._borrowed:  # an inner `with install()` leaves the outer installation as it found it
            self._borrowed -= 1
        else:
            self.remove()

    def __str__(self) -> str:
        lines = [f"csakit in Megatron-LM, {'installed' if self._patches else 'removed'}:"]
        for site in self.sites:
            lines.append(f"  {site.name} ({site.file}): {site.action}")
            lines += [f"    in place of Megatron's teacher at {call}" for call in site.calls]
        return "\n".join(lines)

    def _patch(self, owner: Any, name: str, ours: Any, action: str) -> None:
        stock = owner.__dict__[name]
        where = owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"
        self.sites.append(Site(f"{where}.{name}", _location(stock), action, _teacher_calls(stock)))
        ours.csakit_handle = self
        self._patches.append((owner, name, stock, ours))
        setattr(owner, name, ours)


def install(*, attention: str = "csakit", denominator: str = "attended") -> Handle:
    """csakit inside every CSA layer that has an indexer, now and later built, until the handle is removed.

    Layers without an indexer, inference through the fused kernels, projections, compressors, norms, rotations and the exchange between
    context parallel ranks stay Megatron's. The loss goes the way of Megatron's own: through its auto-scaler into the layer's output, and
    to its loss tracker. Installing again with the same options gives the same handle.

    Args:
        attention: whose selection and attention give the layer's output. "csakit"; or "megatron": Megatron's own run, fused or not, and
            csakit adds teacher and loss over its own selection, which differs from Megatron's at most where index scores tie.
        denominator: of the teacher in the sparse objective: "attended", the layer's own softmax over window, selected entries and sink;
            "visible", that over all visible entries. The dense objective always has the latter.

    Raises:
        ImportError: no Megatron-LM with CSA can be imported.
        RuntimeError: an installation with other options exists, somebody else has patched a place, or a function that csakit would
            replace or call has other parameters than those it knows; the message names each, and nothing is changed.
        ValueError: another word for attention or denominator.
    """
    for name, value, words in (("attention", attention, tuple(_ACTIONS)), ("denominator", denominator, ("attended", "visible"))):
        if value not in words:
            raise ValueError(f"{name} must be {words[0]!r} or {words[1]!r}; got {value!r}")
    csa, schedules = import_megatron()
    handle = Handle((attention, denominator))
    places = _places(csa, attention, denominator)
    present = [(owner, name, make) for owner, name, make in places if name in owner.__dict__]
    for owner, name, _ in present:
        there = getattr(owner.__dict__[name], "csakit_handle", None)
        if there is not None and there._options == handle._options:
            there._borrowed += 1
            return there
        if there is not None:
            raise RuntimeError(f"csakit is installed already, with attention and denominator {there._options}; remove() that handle first")
        if hasattr(owner.__dict__[name], "__wrapped__"):
            raise RuntimeError(f"{owner.__name__}.{name} is patched already, not by csakit; undo that first")
    ours = [(owner, name, make(owner.__dict__[name])) for owner, name, make in present]
    called = _CALLED | (_CALLED_TO_ATTEND if attention == "megatron" else {})
    _refuse_unknown(csa, schedules, ours, [(owner, name) for owner, name, _ in places], called)
    for owner, name, function in ours:
        action = f"{_ACTIONS[attention]} ({_PLACES[name]})" if name in _PLACES else "tells csakit, in a context-parallel training step"
        handle._patch(owner, name, function, action)
    scaled = with_loss_scale(
        schedules.forward_step_calc_loss,
        csa.DSAIndexerLossAutoScaler,
        schedules.parallel_state.get_context_parallel_world_size,
        functools.partial(setattr, handle, "scale_cured"),
    )
    handle._patch(schedules, "forward_step_calc_loss", scaled, "gives the indexer's loss the scale that is due")
    return handle


def import_megatron() -> tuple[Any, Any]:
    """Megatron's modules csa and schedules.

    Raises:
        ImportError: there is no Megatron-LM with compressed sparse attention on the Python path.
    """
    try:
        return importlib.import_module(f"{_VARIANTS}.csa"), importlib.import_module("megatron.core.pipeline_parallel.schedules")
    except ImportError as error:
        raise ImportError(
            f"install needs a Megatron-LM with compressed sparse attention ({_VARIANTS}.csa; megatron-core 0.16.1 from PyPI "
            "has none): put a checkout of its dev branch on the Python path"
        ) from error


def _places(csa: Any, attention: str, denominator: str) -> list[tuple[Any, str, Callable[..., Any]]]:
    """(owner, name, what makes the successor) of everything that is replaced, but for the loss scale."""
    layer, ranks = csa.CompressedSparseAttention, getattr(csa, "cp_utils", csa)
    methods = replacements(csa.DSAIndexerLossLoggingHelper, attention, denominator)
    return [
        *((layer, name, make) for name, make in methods.items()),
        (csa, "_unfused_indexer_sparse_attn_from_topk", context.attended(attention, denominator, csa)),
        (ranks, "compute_cp_indexer_topk", context.selected(attention)),
        (ranks, "prepare_cp_compressor_input", context.prepared),
    ]


def _refuse_unknown(
    csa: Any, schedules: Any, ours: list[tuple[Any, str, Any]], wanted: list[tuple[Any, str]], called: dict[str, list[str]]
) -> None:
    """Raises RuntimeError unless everything csakit replaces or calls has the parameters it knows."""
    found = [(owner, name) for owner, name, _ in ours]
    problems = [f"{owner.__name__}.{name} does not exist" for owner, name in wanted if (owner, name) not in found]
    for owner, name, function in ours:
        have, known = parameters(owner.__dict__[name]), parameters(function)
        if have not in (known, parameters(function, required=True)):
            problems.append(f"{owner.__name__}.{name} takes {have}, known is {known}")
    for path, expected in called.items():
        function = functools.reduce(lambda holder, name: getattr(holder, name, None), path.split("."), csa)
        if function is None or not set(expected) <= set(parameters(function)):
            problems.append(f"{path} should take {expected}")
    if not hasattr(csa.DSAIndexerLossAutoScaler, "main_loss_backward_scale"):
        problems.append("DSAIndexerLossAutoScaler has no main_loss_backward_scale")
    have = parameters(schedules.forward_step_calc_loss)
    if not {"config", "num_microbatches", "cp_group_size"} <= set(have):
        problems.append(f"schedules.forward_step_calc_loss takes {have}; config, num_microbatches and cp_group_size are needed")
    if problems:
        raise RuntimeError("this Megatron-LM differs from those csakit knows; nothing was changed:\n  " + "\n  ".join(problems))


def parameters(function: Callable[..., Any], *, required: bool = False) -> list[str]:
    """The names of a function's own parameters (functools.wraps makes inspect show the wrapped one's), or of those without a default."""
    own = inspect.signature(function, follow_wrapped=False).parameters.values()
    return [p.name for p in own if not required or p.default is inspect.Parameter.empty]


def _location(function: Callable[..., Any]) -> str:
    return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"


def _teacher_calls(function: Callable[..., Any]) -> tuple[str, ...]:
    """path:line of each name in the function's body that belongs to Megatron's teacher and loss."""
    lines, first = inspect.getsourcelines(function)
    body = ast.parse(textwrap.dedent("".join(lines))).body[0]
    found = {node.lineno for node in ast.walk(body) if isinstance(node, ast.Name) and _TEACHER.search(node.id)}
    return tuple(f"{inspect.getsourcefile(function)}:{first + line - 1}" for line in sorted(found))
