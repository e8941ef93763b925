"""Selections as data: what the indexers picked in some forwards, to be used again in others.

Reinforcement learning trains on what a rollout did, so the trainer has to attend to the entries the rollout attended to, bit for
bit, though other kernels, precision or weights would now pick others. A record holds them per document, so a rollout that
padded its prompts on the left and decoded token by token fits a trainer that packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import csakit
from csakit import Layout, checks
from csakit.nn.functional import IndexInputs

from .documents import queries_of
from .protocol import LayerSite

if TYPE_CHECKING:
    from .forwards import Forward

_POSITIONS = "positions"
_ROOM = 1 << 22  # scores of a chunk of queries, which are held for every entry


class Selections:
    """The entries that the indexers of a model picked for N real tokens of some documents, one document behind the other.

    Attributes:
        positions: [N] int32, the position of each token in its document; 0 begins a document.
        picks: layer name -> [N, K] int32, entry numbers counted from the document's first entry, -1 on empty slots.
    """

    def __init__(self, positions: Tensor | None = None, picks: dict[str, Tensor] | None = None) -> None:
        """An empty record, or one of tensors from elsewhere.

        Raises:
            TypeError, ValueError: tensors that are not [N] and [N, K] of integers, or positions that do not count from 0 by ones.
        """
        self.positions = torch.zeros(0, dtype=torch.int32) if positions is None else positions
        self.picks = {} if picks is None else dict(picks)
        checks.tensor(_POSITIONS, self.positions, "[N]", (None,), kind="index")
        for name, indices in self.picks.items():
            checks.tensor(f"picks[{name!r}]", indices, "[N, K]", (len(self.positions), None), kind="index")
        follows = torch.cat([self.positions.new_full((1,), -1), self.positions])[:-1] + 1
        if not ((self.positions == 0) | (self.positions == follows)).all():
            raise ValueError("positions must count from 0 by ones inside each document")

    def __repr__(self) -> str:
        slots = {name: indices.shape[1] for name, indices in self.picks.items()}
        return f"Selections({len(self)} documents, {len(self.positions)} tokens, slots {slots})"

    @property
    def lengths(self) -> list[int]:
        """The tokens of each document."""
        begins = (self.positions == 0).nonzero()[:, 0].tolist()
        return [stop - start for start, stop in zip(begins, [*begins[1:], len(self.positions)])]

    def __len__(self) -> int:
        return int((self.positions == 0).sum())

    def __getitem__(self, documents: int | slice | Sequence[int]) -> Selections:
        """The record of some documents, by number, in the order asked for: those of a micro-batch."""
        numbers = range(len(self))[documents] if isinstance(documents, (int, slice)) else [range(len(self))[i] for i in documents]
        return self._of([(number, None) for number in ([numbers] if isinstance(numbers, int) else numbers)])

    def split(self, documents: int) -> Iterator[Selections]:
        """Records of `documents` documents each, the last of what is left."""
        checks.whole("documents", documents, at_least=1)
        return (self[start : start + documents] for start in range(0, len(self), documents))

    def cut(self, lengths: Iterable[int]) -> Selections:
        """The record of the first `lengths[i]` tokens of each document: without what a rollout appended behind its end.

        Raises:
            ValueError: another number of lengths than documents, or a length that exceeds its document's.
        """
        wanted, known = [int(length) for length in lengths], self.lengths
        if len(wanted) != len(known) or any(not 0 <= new <= old for new, old in zip(wanted, known)):
            raise ValueError(f"lengths must be one per document, at most {known}; got {wanted}")
        return self._of(list(enumerate(wanted)))

    def _of(self, parts: list[tuple[int, int | None]]) -> Selections:
        lengths = self.lengths
        first = [sum(lengths[:number]) for number in range(len(lengths))]
        rows = [torch.arange(first[i], first[i] + (lengths[i] if count is None else count)) for i, count in parts]
        at = torch.cat([torch.zeros(0, dtype=torch.long), *rows]).to(self.positions.device)
        return Selections(self.positions[at], {name: indices[at] for name, indices in self.picks.items()})

    # files

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors by name, for `torch.save` or a message to another process; `Selections.from_state_dict` reads them."""
        return {_POSITIONS: self.positions, **self.picks}

    @classmethod
    def from_state_dict(cls, tensors: dict[str, Tensor]) -> Selections:
        """The record of such tensors.

        Raises:
            ValueError: no positions among them.
        """
        if _POSITIONS not in tensors:
            raise ValueError(f"not a record of selections: no {_POSITIONS!r} among {', '.join(tensors) or 'no tensors'}")
        return cls(tensors[_POSITIONS], {name: x for name, x in tensors.items() if name != _POSITIONS})

    def save(self, path: Any) -> None:
        """Writes the record as a safetensors file."""
        from safetensors.torch import save_file

        save_file({name: x.contiguous() for name, x in self.state_dict().items()}, path)

    @classmethod
    def load(cls, path: Any) -> Selections:
        """The record of a safetensors file. Raises ValueError where it holds something else."""
        from safetensors.torch import load_file

        return cls.from_state_dict(load_file(path))

    # in a forward

    def fill(self, sources: Iterable[Any]) -> None:
        """Takes over what was recorded, in this order: by forwards without a cache, and in caches.

        Raises:
            ValueError: a cache whose first tokens were not recorded.
        """
        parts = [_of_cache(source) if hasattr(source, "layers") else _of_forward(source) for source in sources]
        if parts:
            self.positions = torch.cat([positions for positions, _ in parts])
            self.picks = {name: torch.cat([picks[name] for _, picks in parts]) for name in parts[0][1]}

    def in_rows(self, sites: Sequence[LayerSite], layout_of: Callable[[int], Layout]) -> dict[str, Tensor]:
        """Layer name -> picks [B, T, K] int32 in row coordinates, for a forward of these documents.

        Args:
            sites: the layers of the model. layout_of: ratio -> the documents of the forward.

        Raises:
            ValueError: layers, slots or documents of another model or batch; picks that are repeated, out of range or not visible.
        """
        owners = {site.name: site for site in sites if site.indexer is not None}
        if self.picks.keys() != owners.keys():
            raise ValueError(f"the record holds the picks of {sorted(self.picks)}; this model selects in {sorted(owners)}")
        rows: dict[str, Tensor] = {}
        for name, site in owners.items():
            layout, picks = layout_of(site.ratio), self.picks[name]
            if picks.shape[1] != site.topk:
                raise ValueError(f"the record of {name} has {picks.shape[1]} slots per token; this model selects {site.topk}")
            self._check_documents(layout)
            picks = picks.to(layout.valid.device, torch.int32)
            rows[name] = picks.new_full((*layout.valid.shape, site.topk), -1)
            rows[name][layout.valid] = torch.where(picks >= 0, picks + layout.entry_start[layout.valid][:, None], picks)
            try:
                csakit.validate_indices(rows[name], layout)
            except ValueError as error:
                raise ValueError(f"the record of {name} does not fit this forward: {error}") from None
        return rows

    def _check_documents(self, layout: Layout) -> None:
        positions = layout.positions[layout.valid]
        if not torch.equal(positions, self.positions.to(positions)):
            given = Selections(positions).lengths
            raise ValueError(
                f"the record is of documents of {_short(self.lengths)} tokens, this forward has {_short(given)}. "
                "record[i:j] is that of a micro-batch, record.cut(lengths) that of shorter documents"
            )


def scores_of(index: IndexInputs, picks: Tensor, layout: Layout) -> Tensor:
    """The index scores [B, T, K] of given picks, differentiable; -inf on empty slots.

    In chunks of queries, so that the scores of every entry are never held for all of them.
    """
    tokens, entries = layout.positions.shape[1], layout.num_entries
    if entries == 0:
        return index.q.new_full(picks.shape, -torch.inf, dtype=torch.float32)
    step = max(1, _ROOM // (layout.positions.shape[0] * entries))
    parts = []
    for start in range(0, tokens, step):
        part, slot = slice(start, start + step), picks[:, start : start + step]
        scores = csakit.index_scores(
            index.q[:, part], index.k, index.weights[:, part], queries_of(layout, start, start + step), scale=index.scale
        )
        parts.append(scores.gather(2, slot.clamp(min=0).long()).masked_fill(slot < 0, -torch.inf))
    return torch.cat(parts, 1)


def _of_forward(forward: Forward) -> tuple[Tensor, dict[str, Tensor]]:
    """(positions [N], layer name -> picks [N, K] counted from the document's first entry) of a forward's real tokens."""
    assert forward.picks is not None
    found = {name: _in_documents(indices, layout) for name, (indices, layout) in forward.picks.items()}
    return forward.documents.positions[forward.documents.valid], found


def _of_cache(cache: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The same of all tokens in a cache, whose rows hold one document each: row coordinates are its own."""
    layout = Layout.from_mask(cache.layers[0].rows["valid"], ratio=1, window=0)
    found: dict[str, Tensor] = {}
    for layer in cache.layers:
        if layer.name is None:
            continue
        recorded = sum(picks.shape[1] for picks in layer.picks)
        if recorded != cache.get_seq_length():
            raise ValueError(
                f"{recorded} of the cache's {cache.get_seq_length()} tokens were recorded; open handle.record() before its first forward"
            )
        found[layer.name] = torch.cat(layer.picks, 1)[layout.valid]
        layer.picks = []
    return layout.positions[layout.valid], found


def _in_documents(indices: Tensor, layout: Layout) -> Tensor:
    picks = indices[layout.valid]
    return torch.where(picks >= 0, picks - layout.entry_start[layout.valid][:, None], picks)


def _short(lengths: list[int]) -> str:
    return ", ".join(map(str, lengths[:8])) + (f", .. ({len(lengths)} documents)" if len(lengths) > 8 else "")
