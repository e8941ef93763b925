"""What csakit must know of a model family to run its attention and train its indexer.

One adapter per family. It says where the layers are, how their own projections, norms and rotations turn a hidden state
into index inputs, and how their attention call maps to `csakit.attend`. Everything else - documents, stages, the loss,
checkpointing, metrics, removal - is shared (`forwards.py`, `handle.py`).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from csakit.nn.functional import AttendInputs

if TYPE_CHECKING:
    from .forwards import Call


class LayerSite(NamedTuple):
    """One attention layer of the host."""

    name: str  # the layer's name inside the backbone, `layers.2`: the key of losses and metrics
    attention: Any
    indexer: Any  # None: nothing to select with
    ratio: int  # tokens per compressed entry
    topk: int  # entries a query may select; 0 without an indexer


class Tap(NamedTuple):
    """A module whose forward csakit replaces on the instance."""

    module: Any
    forward: Callable[..., Any]


class IndexerAdapter(Protocol):
    """One model family. The handle calls these; a new family implements them and is listed in `installation.ADAPTERS`."""

    model_types: ClassVar[tuple[str, ...]]
    carrier: ClassVar[str]  # the argument of the attention module that it hands to its compressor or indexer and uses for nothing else
    expected: ClassVar[Mapping[str, str]]  # qualified name of each tapped function -> fingerprint of the text this adapter was proven on

    def backbone(self, model: nn.Module) -> Any:
        """The module whose forward sees token ids, mask and positions and runs the layers."""

    def check(self, backbone: Any) -> None:
        """Raises for a configuration csakit cannot run faithfully."""

    def layers(self, backbone: Any) -> list[LayerSite]:
        """Every attention layer, in order, those without an indexer included."""

    def taps(self, site: LayerSite) -> list[Tap]:
        """The forwards to replace in one layer."""

    def sources(self, backbone: Any) -> list[Callable[..., Any]]:
        """The host functions whose text this adapter relies on."""

    def views(self, call: Call, query: Tensor, key: Tensor, sink: Tensor, scaling: float) -> AttendInputs:
        """The tensors of the host's attention call, as csakit's."""


def fingerprint(function: Callable[..., Any]) -> str:
    """The first 16 hex digits of the SHA-256 of a function's source text; "unreadable" where Python has no source."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        return "unreadable"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed_sources(adapter: IndexerAdapter, backbone: Any) -> list[str]:
    """The names of the tapped functions whose text is not the one the adapter was proven on."""
    found = {inspect.unwrap(function).__qualname__: fingerprint(function) for function in adapter.sources(backbone)}
    return sorted(name for name in {*found, *adapter.expected} if found.get(name) != adapter.expected.get(name))
