"""install: what is patched in Megatron-LM, how it is recognised, and how it is taken back."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, NamedTuple

from .methods import parameters, replacements, with_loss_scale

_VARIANTS = "megatron.core.transformer.experimental_attention_variant"
_PLACES = {
    "_forward_unfused_csa": "unfused, SBHD",
    "_forward_unfused_csa_thd": "unfused, packed rows",
    "_forward_fused_indexer_training": "fused training, SBHD",
    "_forward_fused_indexer_training_thd": "fused training, packed rows",
}
_ACTIONS = {
    "csakit": "csakit's selection, attention, teacher and indexer loss",
    "megatron": "csakit's teacher and indexer loss beside Megatron's selection and attention",
}
_CALLED = {
    "CSAIndexer.forward_before_topk": ["self", "x", "qr", "packed_seq_params"],
    "DSAIndexerLossAutoScaler.set_loss_scale": ["scale"],
    "DSAIndexerLossLoggingHelper.save_loss_to_tracker": ["loss", "layer_number", "num_layers"],
    "CompressedSparseAttention._forward_fused_indexer_inference": [
        "self", "query", "x", "qr", "kv_full", "n_compressed", "offset", "window_idxs", "packed_seq_params",
    ],
    "CompressedSparseAttention._forward_fused_indexer_inference_thd": [
        "self", "query", "x", "qr", "kv_full_thd", "packed_seq_params", "total_q", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_kv_full",
        "window_idxs", "max_seqlen_q", "max_seqlen_compressed_idx", "max_seqlen_kv",
    ],
}  # fmt: skip


class Site(NamedTuple):
    """A place in Megatron-LM that is patched."""

    name: str  # module, class and function
    file: str  # path:line of the original
    action: str  # what stands there now


class Handle:
    """An installation. Printing it lists every patched place; `remove` takes it back; it can also be used as a context.

    Attributes:
        sites: the patched places.
        scale_cured: whether csakit had to set the scale of the indexer's loss because Megatron did not; None before the first step.
    """

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.scale_cured: bool | None = None
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
        self.remove()

    def __str__(self) -> str:
        state = "installed" if self._patches else "removed"
        return "\n".join([f"csakit in Megatron-LM, {state}:", *(f"  {s.name} ({s.file}): {s.action}" for s in self.sites)])

    def _patch(self, owner: Any, name: str, ours: Any, action: str) -> None:
        stock = owner.__dict__[name]
        file, line = inspect.getsourcefile(stock), inspect.getsourcelines(stock)[1]
        where = owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"
        self.sites.append(Site(f"{where}.{name}", f"{file}:{line}", action))
        self._patches.append((owner, name, stock, ours))
        setattr(owner, name, ours)


def install(*, attention: str = "csakit", denominator: str = "attended") -> Handle:
    """csakit inside every CSA layer that has an indexer, now and later built, until the handle is removed.

    Layers without an indexer, inference through the fused kernels, projections, compressors, norms and rotations stay Megatron's. The
    loss goes the way of Megatron's own: through its auto-scaler into the layer's output, and to its loss tracker.

    Args:
        attention: whose selection and attention give the layer's output. "csakit"; or "megatron": Megatron's own run, fused or not, and
            csakit adds teacher and loss over its own selection, which differs from Megatron's at most where index scores tie.
        denominator: of the teacher in the sparse objective: "attended", the layer's own softmax over window, selected entries and sink;
            "visible", that over all visible entries. The dense objective always has the latter.

    Raises:
        ImportError: no Megatron-LM with CSA can be imported.
        RuntimeError: an installation exists already, or a function that csakit would replace or call has other parameters than those it
            knows; the message names each, and nothing is changed.
        ValueError: another word for attention or denominator.
    """
    for name, value, words in (("attention", attention, tuple(_ACTIONS)), ("denominator", denominator, ("attended", "visible"))):
        if value not in words:
            raise ValueError(f"{name} must be {words[0]!r} or {words[1]!r}; got {value!r}")
    csa, schedules = import_megatron()
    layer, scaler, handle = csa.CompressedSparseAttention, csa.DSAIndexerLossAutoScaler, Handle()
    makers = replacements(csa.DSAIndexerLossLoggingHelper, attention, denominator)
    patched = [name for name in makers if hasattr(layer.__dict__.get(name), "__wrapped__")]
    if patched:
        raise RuntimeError(f"CompressedSparseAttention.{patched[0]} is patched already; if that is an installation of csakit, remove() it")
    ours = {name: make(layer.__dict__[name]) for name, make in makers.items() if name in layer.__dict__}
    _refuse_unknown(csa, schedules, ours, set(makers))
    for name, method in ours.items():
        serves = f"{_ACTIONS[attention]} ({_PLACES[name]})" if name in _PLACES else "refuses to train: csakit does not serve this path"
        handle._patch(layer, name, method, serves)
    scaled = with_loss_scale(schedules.forward_step_calc_loss, scaler, functools.partial(setattr, handle, "scale_cured"))
    handle._patch(schedules, "forward_step_calc_loss", scaled, "sets the scale of the indexer's loss where Megatron does not")
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


def _refuse_unknown(csa: Any, schedules: Any, ours: dict[str, Any], wanted: set[str]) -> None:
    """Raises RuntimeError unless everything csakit replaces or calls has the parameters it knows."""
    attention = csa.CompressedSparseAttention
    problems = [f"CompressedSparseAttention.{name} does not exist" for name in sorted(wanted - set(ours))]
    for name, method in ours.items():
        have, known = parameters(attention.__dict__[name]), parameters(method)
        if have != known:
            problems.append(f"CompressedSparseAttention.{name} takes {have}, known is {known}")
    for path, known in _CALLED.items():
        holder, name = path.split(".")
        function = getattr(getattr(csa, holder), name, None)
        if function is None or not set(known) <= set(parameters(function)):
            problems.append(f"{path} should take {known}")
    if not hasattr(csa.DSAIndexerLossAutoScaler, "main_loss_backward_scale"):
        problems.append("DSAIndexerLossAutoScaler has no main_loss_backward_scale")
    have = parameters(schedules.forward_step_calc_loss)
    if not {"config", "num_microbatches", "cp_group_size"} <= set(have):
        problems.append(f"schedules.forward_step_calc_loss takes {have}; config, num_microbatches and cp_group_size are needed")
    if problems:
        raise RuntimeError("this Megatron-LM differs from those csakit knows; nothing was changed:\n  " + "\n  ".join(problems))
