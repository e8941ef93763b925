"""What the tests of the ops share: layouts from a description, one run of the four verbs, random documents, comparisons."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch

import csakit
from csakit import Layout

BACKENDS = {
    "reference": {"name": "reference"},
    "cpu": {"name": "cpu"},
    "cpu-torch": {"name": "cpu-torch"},
    "cpu-tile1": {"name": "cpu", "tile": 1},
    "cpu-tile3": {"name": "cpu", "tile": 3},
    "cpu-tile8": {"name": "cpu", "tile": 8},
}
INF = float("inf")
LAYOUT_FIELDS = ("positions", "valid", "window_start", "entry_start", "entry_stop", "entry_token")


def on(backend: str):
    """A context in which one backend of the table above runs."""
    return csakit.backend(**BACKENDS[backend])


# ---- comparing -------------------------------------------------------------------------------------------------------


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference relative to the largest expected value (at least 1e-3); inf where shapes or non-finite values differ."""
    got, want = (np.asarray(a.detach().double()) for a in (got, want))
    live = np.isfinite(want)
    if got.shape != want.shape or not np.array_equal(got[~live], want[~live]):
        return float("inf")
    error = np.nan_to_num(np.abs(got[live] - want[live]), nan=np.inf).max(initial=0)
    return float(error / max(np.abs(want[live]).max(initial=0), 1e-3))


def assert_close(got: torch.Tensor | dict, want: torch.Tensor | dict, tolerance: float = 1e-12, *, keys=None, label: str = "") -> None:
    """`gap` is within the tolerance, for one tensor or for every key (or the given keys) of two dictionaries."""
    if isinstance(want, dict):
        keys = sorted(want) if keys is None else keys
        gaps = {key: gap(got[key], want[key]) for key in keys}
        worst = {key: g for key, g in gaps.items() if not g <= tolerance}
        assert not worst, f"{label} beyond {tolerance}: {worst}"
    else:
        assert gap(got, want) <= tolerance, f"{label} {gap(got, want)} is beyond {tolerance}"


def normalise(log_mass: torch.Tensor) -> torch.Tensor:
    """The teacher: softmax of log_mass over its last axis, 0 in rows without any mass."""
    total = log_mass.logsumexp(-1, keepdim=True)
    return (log_mass - torch.where(total.isfinite(), total, torch.zeros_like(total))).exp()


def gradients(result: torch.Tensor, upstream: torch.Tensor | float | None, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """{"d_name": gradient of sum(upstream * result)} for the inputs that require one; zeros where an input has no influence."""
    inputs = {name: x for name, x in inputs.items() if x is not None and x.requires_grad}
    if upstream is not None and not isinstance(upstream, torch.Tensor):
        upstream = torch.full_like(result, upstream)
    found = torch.autograd.grad(result, list(inputs.values()), upstream, allow_unused=True, materialize_grads=True, retain_graph=True)
    return {f"d_{name}": g for name, g in zip(inputs, found)}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Standard normal numbers, drawn in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def build_layout(spec: dict, *, ratio: int, window: int) -> Layout:
    """The layout of a golden description: `kind` and the arguments of the constructor of that name."""
    options = {"ratio": ratio, "window": window}
    if spec["kind"] == "batch":
        return Layout.batch(spec["rows"], spec["tokens"], **options)
    if spec["kind"] == "packed":
        room = spec.get("cu_seqlens_padded")
        room = None if room is None else torch.tensor(room, dtype=torch.int32)
        return Layout.packed(
            torch.tensor(spec["cu_seqlens"], dtype=torch.int32), tokens=spec.get("tokens"), cu_seqlens_padded=room, **options
        )
    if spec["kind"] == "mask":
        return Layout.from_mask(torch.tensor(spec["mask"]), **options)
    return Layout.from_document_ids(torch.tensor(spec["ids"]), **options)


def visible(layout: Layout) -> torch.Tensor:
    """[B, T, E] bool: which query sees which entry."""
    entry = torch.arange(layout.num_entries)
    return (entry >= layout.entry_start[..., None]) & (entry < layout.entry_stop[..., None]) & layout.valid[..., None]


def ragged_indices(layout: Layout, topk: int, *, seed: int = 0) -> torch.Tensor:
    """Random distinct visible entries in random slots, -1 elsewhere: [B, T, K] int32."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(*layout.positions.shape, layout.num_entries, generator=generator).masked_fill(~visible(layout), 2.0)
    taken = keys.sort(-1)
    indices = torch.where((taken.values < 1) & (taken.values > 0.15), taken.indices, -1)[..., :topk].to(torch.int32)
    return torch.nn.functional.pad(indices, (0, topk - indices.shape[-1]), value=-1)


def relative(indices: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Selected entries counted from the first entry of their own document; -1 stays."""
    return torch.where(indices >= 0, indices - layout.entry_start[..., None], -1)


# ---- one problem, four verbs -----------------------------------------------------------------------------------------

TOKEN_INPUTS = ("values", "gates", "index_values", "index_gates", "q_index", "weights", "q", "kv", "d_out", "weight")
SHARED_INPUTS = ("bias", "index_bias", "sink")
TOKEN_RESULTS = ("out", "lse", "picked", "scores", "log_mass", "kl")
CONSTANTS = ("d_out", "weight")


@dataclass(frozen=True)
class Sizes:
    """Widths of a random problem."""

    ratio: int = 2
    window: int = 3
    topk: int = 2
    heads: int = 3
    width: int = 4
    index_heads: int = 2
    index_width: int = 3
    sink: bool = True
    overlap: bool = True
    objective: str = "sparse"


def random_inputs(rows: int, tokens: int, sizes: Sizes, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Random inputs of the whole chain: everything has one row per token or is shared by all tokens."""
    generator = torch.Generator().manual_seed(seed)
    halves = 2 if sizes.overlap else 1
    shapes = {
        "values": (halves * sizes.width,),
        "gates": (halves * sizes.width,),
        "index_values": (halves * sizes.index_width,),
        "index_gates": (halves * sizes.index_width,),
        "q_index": (sizes.index_heads, sizes.index_width),
        "weights": (sizes.index_heads,),
        "q": (sizes.heads, sizes.width),
        "kv": (sizes.width,),
        "d_out": (sizes.heads, sizes.width),
    }

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs = {name: normal(rows, tokens, *shape) for name, shape in shapes.items()}
    inputs["weight"] = torch.rand(rows, tokens, generator=generator, dtype=torch.float64) + 0.5
    inputs["bias"], inputs["index_bias"] = normal(sizes.ratio, halves * sizes.width), normal(sizes.ratio, halves * sizes.index_width)
    if sizes.sink:
        inputs["sink"] = normal(sizes.heads)
    return inputs


def chain(inputs: dict[str, torch.Tensor], layout: Layout, sizes: Sizes, *, divisor: float | None = 7.0) -> dict[str, torch.Tensor]:
    """All results of compress, select, attend and distill, and the gradients of sum(d_out * out) + loss for every input."""
    x = {name: t.detach().clone().requires_grad_(name not in CONSTANTS) for name, t in inputs.items()}
    entries = csakit.compress(x["values"], x["gates"], x["bias"], layout, overlap=sizes.overlap)
    k_index = csakit.compress(x["index_values"], x["index_gates"], x["index_bias"], layout, overlap=sizes.overlap)
    index = x["q_index"], k_index, x["weights"]
    memory = x["q"], x["kv"] if layout.window else None, entries
    results = {"entries": entries}
    if sizes.objective == "sparse":
        selection = csakit.select(*index, sizes.topk, layout)
        attention = csakit.attend(*memory, layout, indices=selection.indices, sink=x.get("sink"), teacher=True)
        objective = csakit.distill(selection.scores, attention.log_mass, layout, weight=x["weight"], divisor=divisor)
        results.update(picked=relative(selection.indices, layout), scores=selection.scores, log_mass=attention.log_mass)
    else:
        attention = csakit.attend(*memory, layout, sink=x.get("sink"))
        objective = csakit.distill_dense(*index, x["q"], entries, attention.lse, layout, weight=x["weight"], divisor=divisor)
    results.update(out=attention.out, lse=attention.lse, kl=objective.kl, loss=objective.loss, divisor=torch.as_tensor(objective.divisor))
    total = (x["d_out"] * attention.out).sum() + objective.loss
    results.update(gradients(total, None, x))
    return {name: t.detach() for name, t in results.items()}


# ---- documents in any arrangement ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrangement:
    """A layout and where each document lies in it: (row, first token) per document."""

    layout: Layout
    places: list[tuple[int, int]] = field(default_factory=list)


def packed(lengths: list[int], sizes: Sizes, *, spare: int = 0) -> Arrangement:
    """Documents one after another in one row, with spare tokens at the end."""
    offsets = [0, *np.cumsum(lengths).tolist()]
    layout = build_layout({"kind": "packed", "cu_seqlens": offsets, "tokens": offsets[-1] + spare}, ratio=sizes.ratio, window=sizes.window)
    return Arrangement(layout, [(0, first) for first in offsets[:-1]])


def packed_with_room(lengths: list[int], sizes: Sizes, *, room: int = 2) -> Arrangement:
    """Documents in one row, each with free tokens after it."""
    offsets, padded = [0, *np.cumsum(lengths).tolist()], [0, *np.cumsum([n + room for n in lengths]).tolist()]
    layout = build_layout({"kind": "packed", "cu_seqlens": offsets, "cu_seqlens_padded": padded}, ratio=sizes.ratio, window=sizes.window)
    return Arrangement(layout, [(0, first) for first in padded[:-1]])


def masked(lengths: list[int], sizes: Sizes, *, side: str, extra: int = 1) -> Arrangement:
    """One document per row, padded on the left or on the right."""
    tokens = max(lengths, default=0) + extra
    firsts = [tokens - n if side == "left" else 0 for n in lengths]
    mask = [[int(first <= t < first + n) for t in range(tokens)] for first, n in zip(firsts, lengths)]
    return Arrangement(build_layout({"kind": "mask", "mask": mask}, ratio=sizes.ratio, window=sizes.window), list(enumerate(firsts)))


def by_document_ids(lengths: list[int], sizes: Sizes, *, rows: int = 2, between: int = 1) -> Arrangement:
    """Documents dealt out over rows, padding before, between and after them."""
    ids: list[list[int]] = [[-1] * between for _ in range(rows)]
    places = []
    for number, n in enumerate(lengths):
        row = number % rows
        places.append((row, len(ids[row])))
        ids[row] += [number] * n + [-1] * between
    tokens = max(map(len, ids))
    ids = [row + [-1] * (tokens - len(row)) for row in ids]
    return Arrangement(build_layout({"kind": "document_ids", "ids": ids}, ratio=sizes.ratio, window=sizes.window), places)


def random_documents(lengths: list[int], sizes: Sizes, seed: int = 0) -> tuple[list[dict], dict]:
    """Token inputs per document, and the inputs all documents share."""
    whole = random_inputs(1, sum(lengths), sizes, seed)
    offsets = [0, *np.cumsum(lengths).tolist()]
    documents = [{name: whole[name][0, a:b] for name in TOKEN_INPUTS} for a, b in itertools.pairwise(offsets)]
    return documents, {name: whole[name] for name in SHARED_INPUTS if name in whole}


def run_documents(documents: list[dict], shared: dict, arrangement: Arrangement, sizes: Sizes, *, filler: float = 0.0) -> dict:
    """One `chain` over arranged documents, with `filler` in all memory no document owns.

    Returns the token results and token gradients of all documents, one after another in document order, and the loss and shared gradients.
    """
    layout = arrangement.layout
    lengths = [len(d["q"]) for d in documents]
    inputs = dict(shared)
    for name in TOKEN_INPUTS:
        parts = [d[name] for d in documents]
        inputs[name] = torch.full((*layout.positions.shape, *parts[0].shape[1:]), filler, dtype=parts[0].dtype)
        if name in CONSTANTS:
            inputs[name].nan_to_num_(nan=1.0)  # an upstream gradient or a weight on padding is a number, and is not to count
        for (row, first), part in zip(arrangement.places, parts):
            inputs[name][row, first : first + len(part)] = part
    results = chain(inputs, layout, sizes)

    def collect(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t[row, first : first + n] for (row, first), n in zip(arrangement.places, lengths)])

    collected = {name: collect(results[name]) for name in TOKEN_RESULTS if name in results}
    collected.update({f"d_{name}": collect(results[f"d_{name}"]) for name in TOKEN_INPUTS if name not in CONSTANTS})
    collected.update({name: results[name] for name in ("loss", *(f"d_{name}" for name in shared))})
    elsewhere = ~layout.valid
    for name in ("out", *(f"d_{name}" for name in TOKEN_INPUTS if name not in CONSTANTS)):
        assert not results[name][elsewhere].any(), f"{name} is not 0 on padding"
    assert not results["entries"][layout.entry_token < 0].any(), "spare entries are not 0"
    return collected


def run_alone(documents: list[dict], shared: dict, sizes: Sizes) -> dict:
    """Each document in a run of its own; results one after another, loss and shared gradients added up."""
    runs = []
    for document in documents:
        layout = Layout.batch(1, len(document["q"]), ratio=sizes.ratio, window=sizes.window)
        runs.append(run_documents([document], shared, Arrangement(layout, [(0, 0)]), sizes))
    added = ("loss", *(f"d_{name}" for name in shared))
    return {name: sum(r[name] for r in runs) if name in added else torch.cat([r[name] for r in runs]) for name in runs[0]}


# ---- other ways to the same numbers -----------------------------------------------------------------------------------


def plain_attention(q, kv, entries, sink, indices, layout, scale):
    """(out, lse, log_mass) by autograd over a mask of everything: an oracle of two lines for the tests below."""
    token = torch.arange(kv.shape[1])
    window = (token >= layout.window_start[..., None]) & (token <= torch.arange(q.shape[1])[:, None])
    chosen = (indices[..., None] == torch.arange(entries.shape[1])).any(-2)
    keys, mask = torch.cat([kv, entries], 1), torch.cat([window, chosen], -1) & layout.valid[..., None]
    logits = (scale * torch.einsum("bthd,bnd->bthn", q, keys)).masked_fill(~mask[:, :, None], -INF)
    lse = torch.cat([logits, sink.expand(*logits.shape[:3])[..., None]], -1).logsumexp(-1)
    p = (logits - lse[..., None]).exp()
    mass = (logits[..., kv.shape[1] :] - lse[..., None]).logsumexp(2)
    taken = torch.where(indices >= 0, mass.gather(-1, indices.clamp(min=0).long()), -INF)
    return torch.einsum("bthn,bnd->bthd", p, keys), lse, taken


def assert_token_split_equals_whole(inputs: dict, layout: Layout, sizes: Sizes, world: int) -> None:
    """Ranks that hold T / world queries, their halo of kv and all entries: results side by side and gradients added are the whole's."""
    whole = chain(inputs, layout, sizes)
    x = {name: t.detach().clone().requires_grad_(name not in CONSTANTS) for name, t in inputs.items()}
    entries = csakit.compress(x["values"], x["gates"], x["bias"], layout, overlap=sizes.overlap)
    k_index = csakit.compress(x["index_values"], x["index_gates"], x["index_bias"], layout, overlap=sizes.overlap)
    count = layout.positions.shape[1] // world
    per_rank: dict[str, list] = {name: [] for name in TOKEN_RESULTS}
    total = torch.zeros((), dtype=torch.float64)
    losses = torch.zeros((), dtype=torch.float64)
    for rank in range(world):
        part, first = layout.shard(rank, world), rank * count
        assert part.kv_offset == min(max(layout.window - 1, 0), first) and part.num_entries == layout.num_entries
        own, halo = slice(first, first + count), slice(first - part.kv_offset, first + count)
        index = x["q_index"][:, own], k_index, x["weights"][:, own]
        memory = x["q"][:, own], x["kv"][:, halo] if layout.window else None, entries
        rows = {"weight": x["weight"][:, own], "divisor": 7.0}
        if sizes.objective == "sparse":
            selection = csakit.select(*index, sizes.topk, part)
            attention = csakit.attend(*memory, part, indices=selection.indices, sink=x.get("sink"), teacher=True)
            result = csakit.distill(selection.scores, attention.log_mass, part, **rows)
            found = {"picked": relative(selection.indices, part), "scores": selection.scores, "log_mass": attention.log_mass}
        else:
            attention = csakit.attend(*memory, part, sink=x.get("sink"))
            result = csakit.distill_dense(*index, x["q"][:, own], entries, attention.lse, part, **rows)
            found = {}
        for name, t in dict(found, out=attention.out, lse=attention.lse, kl=result.kl).items():
            per_rank[name].append(t.detach())
        losses = losses + result.loss
        total = total + (x["d_out"][:, own] * attention.out).sum() + result.loss
    for name, parts in per_rank.items():
        if parts:
            assert_close(torch.cat(parts, 1), whole[name])
    assert_close(losses, whole["loss"])
    names = [name for name in x if name not in CONSTANTS]
    for name, g in zip(names, torch.autograd.grad(total, [x[n] for n in names], allow_unused=True, materialize_grads=True)):
        assert_close(g, whole[f"d_{name}"])
