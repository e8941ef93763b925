"""Where attention tensors come from: safetensors files, read one tensor at a time, or a state dict; and how shards are written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Tensors:
    """The tensors of a checkpoint by key. Shapes are known without reading a tensor; a tensor is read when asked for."""

    def __init__(self, state: Mapping[str, Tensor], files: Mapping[str, Path]) -> None:
        self._state = state
        self._files = files
        self._open: dict[Path, Any] = {}

    def keys(self) -> list[str]:
        """All keys, those of one file behind each other."""
        return [*self._state, *sorted(self._files, key=lambda key: (str(self._files[key]), key))]

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        if key in self._state:
            return tuple(self._state[key].shape)
        return tuple(self._file(key).get_slice(key).get_shape())

    def read(self, key: str) -> Tensor:
        """The tensor. One from a file shares the file's pages: copy it to keep it."""
        return self._state[key] if key in self._state else self._file(key).get_tensor(key)

    def close(self) -> None:
        """Closes all files."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)

    def _file(self, key: str) -> Any:
        """The open file of a key. Two stay open, a shard and the one with its scales: the pages of open files count as memory."""
        path = self._files[key]
        if path not in self._open:
            if len(self._open) == 2:
                self._open.pop(next(iter(self._open))).__exit__(None, None, None)
            self._open[path] = safetensors().safe_open(path, framework="pt").__enter__()
        return self._open[path]


@contextmanager
def open_tensors(source: str | os.PathLike[str] | Mapping[str, Tensor]) -> Iterator[Tensors]:
    """The tensors of a state dict, of a safetensors file, or of a folder with `model.safetensors.index.json` or `model.safetensors`.

    Raises:
        TypeError: none of these.
        FileNotFoundError: no such file, or a shard that the index names is not there.
        ValueError: an index without weight_map.
    """
    if isinstance(source, Mapping):
        yield Tensors(source, {})
        return
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"source must be a path or a state dict; got {type(source).__name__}")
    tensors = Tensors({}, _files(Path(source)))
    try:
        yield tensors
    finally:
        tensors.close()


def _files(path: Path) -> dict[str, Path]:
    """Key -> file."""
    index = path / INDEX if path.is_dir() else path
    if index.suffix == ".json":
        if index.is_file():
            return _indexed(index)
        index = path / SINGLE
    if not index.is_file():
        raise FileNotFoundError(f"{path} is no safetensors file, nor a folder with {INDEX} or {SINGLE}")
    with safetensors().safe_open(index, framework="pt") as file:
        return dict.fromkeys(file.keys(), index)


def _indexed(index: Path) -> dict[str, Path]:
    weight_map = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map: not the index of a safetensors checkpoint")
    absent = sorted({name for name in weight_map.values() if not (index.parent / name).is_file()})
    if absent:
        raise FileNotFoundError(f"{index} names shards that are not there: {', '.join(absent)}")
    return {key: index.parent / name for key, name in weight_map.items()}


class ShardWriter:
    """Writes the shards of a new checkpoint into a folder of another name; `finish` writes the index and gives it its name.

    So a checkpoint that was cut off half way is never taken for a whole one.
    """

    def __init__(self, folder: Path, count: int) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"{folder} exists and is not empty; save into a new folder")
        self.folder = folder
        self._unfinished = folder.with_name(folder.name + ".unfinished")
        self._count = count
        self._weight_map: dict[str, str] = {}
        self._bytes = 0
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)

    def write(self, tensors: dict[str, Tensor]) -> None:
        """One shard."""
        number = len(set(self._weight_map.values())) + 1
        name = SINGLE if self._count == 1 else f"model-{number:05d}-of-{self._count:05d}.safetensors"
        path = self._unfinished / name
        safetensors().torch.save_file(tensors, path, metadata={"format": "pt"})
        _sync(path)
        self._weight_map |= dict.fromkeys(tensors, name)
        self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def finish(self) -> None:
        """The index, and the folder's own name."""
        path = self._unfinished / INDEX
        path.write_text(json.dumps({"metadata": {"total_size": self._bytes}, "weight_map": self._weight_map}, indent=1), encoding="utf-8")
        _sync(path)
        if self.folder.exists():
            self.folder.rmdir()
        self._unfinished.rename(self.folder)
        _sync(self.folder.parent)

    def discard(self) -> None:
        """Nothing of it stays."""
        shutil.rmtree(self._unfinished, ignore_errors=True)


def safetensors() -> Any:
    """The safetensors package.

    Raises:
        ImportError: it is not installed; names the extra.
    """
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError("safetensors files need the package safetensors: pip install 'csakit[hf]'") from error
    return safetensors


def plain(tensor: Tensor) -> Tensor:
    """The tensor as a file takes it: detached, contiguous, on the CPU."""
    return tensor.detach().to(torch.device("cpu")).contiguous()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
