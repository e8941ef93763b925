"""read_attention and load_attention: attention weights out of a checkpoint of any dialect."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .files import Tensors, open_tensors
from .keys import format_key, parse_key
from .quantization import FP8, dequantize, dequantize_into

Source = str | os.PathLike[str] | Mapping[str, Tensor]


class LoadReport(NamedTuple):
    """What did not match, in official spelling.

    Attributes:
        missing: tensors that the layers have and the checkpoint lacks.
        unexpected: attention tensors of these layers in the checkpoint that the layers do not have.
    """

    missing: list[str]
    unexpected: list[str]


class _Found(NamedTuple):
    """The attention tensors of a checkpoint."""

    keys: dict[tuple[int, str], str]  # (layer, official name) -> key
    scales: dict[tuple[int, str], str]  # the same -> key of the block scales
    unknown: dict[int, list[str]]  # layer -> keys that no attention layer has


def read_attention(
    source: Source, *, layers: Iterable[int] | None = None, fp8_dtype: torch.dtype = torch.float32
) -> Iterator[tuple[int, str, Tensor]]:
    """Each attention tensor of a checkpoint: (number of the layer, official name relative to `attn.`, tensor), one at a time.

    Args:
        source: a folder with `model.safetensors.index.json` or `model.safetensors`, a safetensors file, or a state dict. Keys of any
            dialect, with or without `model.`.
        layers: only these; None: all.
        fp8_dtype: what tensors stored in FP8 become. Others keep their dtype.

    Raises:
        TypeError, FileNotFoundError: the source is none of these.
        ImportError: a file, and safetensors is not installed.
        ValueError: one tensor under two keys, FP8 without block scales, or block scales of another shape.
    """
    wanted = None if layers is None else set(layers)
    with open_tensors(source) as tensors:
        found = _find(tensors)
        for (layer, name), key in found.keys.items():
            if wanted is None or layer in wanted:
                tensor, scale = _read(tensors, key, found.scales.get((layer, name)))
                yield layer, name, tensor if scale is None else dequantize(tensor, scale, dtype=fp8_dtype)


def load_attention(
    layers: Mapping[int, nn.Module] | Iterable[nn.Module], source: Source, *, strict: bool = True, device: torch.device | str = "cpu"
) -> LoadReport:
    """Loads a checkpoint's attention weights into layers of `csakit.nn`; what was missing and unexpected.

    One tensor at a time: beside the layers themselves no more than one tensor is in memory. Parameters keep their dtype; FP8 tensors are
    dequantized. Names and shapes are checked before anything is loaded. A layer without an indexer needs no indexer weights; layers of the
    checkpoint that are not asked for, and tensors outside attention, are not looked at.

    Args:
        layers: number of the layer -> module; or modules, which are layers 0, 1, ...
        source: as in `read_attention`.
        strict: raise when something is missing or unexpected. False: load what matches.
        device: where parameters on the meta device are made. Others stay where they are.

    Raises:
        TypeError, FileNotFoundError, ImportError: as in `read_attention`.
        ValueError: missing or unexpected tensors (strict), other shapes, or what `read_attention` refuses; all of them listed.
    """
    modules = dict(layers) if isinstance(layers, Mapping) else dict(enumerate(layers))
    parameters = {(layer, name): value for layer, module in modules.items() for name, value in module.state_dict(keep_vars=True).items()}
    with open_tensors(source) as tensors:
        found = _find(tensors)
        report = _compare(modules, parameters, found)
        if strict and (report.missing or report.unexpected):
            lists = [
                f"{len(names)} {word}: {', '.join(names)}"
                for word, names in (("missing", report.missing), ("unexpected", report.unexpected))
                if names
            ]
            raise ValueError("the checkpoint does not fit the layers, nothing was loaded. " + "; ".join(lists))
        _check_shapes(tensors, found, parameters)
        for (layer, name), key in found.keys.items():
            if (layer, name) in parameters:
                _fill(_made(modules[layer], name, device), *_read(tensors, key, found.scales.get((layer, name))))
    return report


def _find(tensors: Tensors) -> _Found:
    found = _Found({}, {}, {})
    for key in tensors.keys():  # noqa: SIM118, not a dict
        parsed = parse_key(key)
        if parsed is None:
            continue
        if not parsed.known:
            found.unknown.setdefault(parsed.layer, []).append(key)
            continue
        table = found.scales if parsed.scale else found.keys
        first = table.setdefault((parsed.layer, parsed.name), key)
        if first != key:
            raise ValueError(f"{first} and {key} are two keys of one tensor; the checkpoint mixes dialects")
    for (layer, _), key in found.scales.items():
        if (layer, _) not in found.keys:
            found.unknown.setdefault(layer, []).append(key)
    return found


def _compare(modules: Mapping[int, nn.Module], parameters: Mapping[tuple[int, str], Tensor], found: _Found) -> LoadReport:
    missing = [_spell(layer, name) for layer, name in parameters if (layer, name) not in found.keys]
    unexpected = [_spell(layer, name) for layer, name in found.keys if layer in modules and (layer, name) not in parameters]
    unexpected += [key for layer in modules for key in found.unknown.get(layer, [])]
    return LoadReport(sorted(missing), sorted(unexpected))


def _check_shapes(tensors: Tensors, found: _Found, parameters: Mapping[tuple[int, str], Tensor]) -> None:
    wrong = [
        f"{key} is {list(tensors.shape(key))}, the layer has {list(parameters[place].shape)}"
        for place, key in found.keys.items()
        if place in parameters and tensors.shape(key) != tuple(parameters[place].shape)
    ]
    if wrong:
        raise ValueError("tensors of other shapes, nothing was loaded: " + "; ".join(wrong))


def _read(tensors: Tensors, key: str, scale_key: str | None) -> tuple[Tensor, Tensor | None]:
    """A tensor as it is stored, and its block scales if it is stored in FP8."""
    tensor = tensors.read(key)
    if (tensor.dtype == FP8) != (scale_key is not None):
        what = "FP8 without block scales" if scale_key is None else f"{tensor.dtype}, but the checkpoint has block scales {scale_key}"
        raise ValueError(f"{key} is {what}")
    return tensor, None if scale_key is None else tensors.read(scale_key)


def _made(module: nn.Module, name: str, device: torch.device | str) -> Tensor:
    """The parameter of this name; one on the meta device is made first."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    parameter = getattr(owner, leaf)
    if parameter.is_meta:
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        parameter = nn.Parameter(made, requires_grad=parameter.requires_grad)
        setattr(owner, leaf, parameter)
    return parameter


@torch.no_grad()
def _fill(parameter: Tensor, tensor: Tensor, scale: Tensor | None) -> None:
    if scale is None:
        parameter.copy_(tensor)
    else:
        dequantize_into(parameter, tensor, scale)


def _spell(layer: int, name: str) -> str:
    """The official key, also for a parameter that no dialect knows."""
    try:
        return format_key(layer, name)
    except ValueError:
        return f"layers.{layer}.attn.{name}"
