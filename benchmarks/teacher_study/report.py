"""The recorded numbers as tables in docs/teacher_study.md and as a picture. Everything here follows from the records alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from .evaluate import CV_EDGES, WRONG, bin_name
from .presets import ARMS, PRESETS, Preset
from .records import Record, read

SCALE = ("random", "recent", "compressed-only", "sink-only", "window-only", "full", "wrong oracle", "oracle")
PRIMARY_CAPTURE, PRIMARY_BITS = 16, 8
ENOUGH = 0.005  # share of the queries that a bin needs to be shown


class Spread(NamedTuple):
    """A number over language models: mean, standard deviation over them, each one's value, and the mean standard error over rows."""

    mean: float
    deviation: float
    each: tuple[float, ...]
    row_error: float

    def claimed(self) -> bool:
        """The protocol's rule: the same sign everywhere, and the mean beyond twice its standard error."""
        same = all(value > 0 for value in self.each) or all(value < 0 for value in self.each)
        return same and len(self.each) > 1 and abs(self.mean) > 2 * self.deviation / len(self.each) ** 0.5


class Results:
    """The records of one preset, looked up by what they are of."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)
        names = {record.preset for record in self.records}
        if len(names) != 1:
            raise ValueError(f"records must be of one preset; got {sorted(names) or 'none'}")
        (self.name,) = names
        self.preset: Preset = PRESETS[self.name]
        self.layers = [number for number, kind in enumerate(self.preset.layers) if kind == "csa"]

    def find(
        self,
        metric: str,
        arm: str,
        *,
        layer: int = -1,
        topk: int = 0,
        queries: str = "late",
        stage: str = "frozen",
        against: str = "",
        index_seed: int | None = None,
    ) -> Spread | None:
        """The number over language models, each the mean over its indexer seeds (or of one); None where nothing was recorded."""
        key = (metric, arm, layer, topk, queries, stage, against)
        seeds: dict[int, list[Record]] = {}
        for r in self.records:
            if (r.metric, r.arm, r.layer, r.topk, r.queries, r.stage, r.against) == key and index_seed in (None, r.index_seed):
                seeds.setdefault(r.language_seed, []).append(r)
        if not seeds:
            return None
        each = tuple(mean(r.value for r in seeds[seed]) for seed in sorted(seeds))
        error = mean(r.error for found in seeds.values() for r in found)
        return Spread(mean(each), stdev(each) if len(each) > 1 else float("nan"), each, error)

    def having(self, stage: str) -> Results:
        """The records of those language models alone that went through a stage."""
        seeds = {r.language_seed for r in self.records if r.stage == stage}
        return Results(r for r in self.records if r.language_seed in seeds) if seeds else self


def gather(folder: Path, name: str) -> list[Record]:
    """The records of every finished task of a preset."""
    return [record for path in sorted(folder.glob(f"{name}-*.csv")) for record in read(path)]


def fill(text: str, results: Results) -> str:
    """A page with the tables between its `<!-- table: name -->` and `<!-- end -->` marks made anew.

    Raises:
        ValueError: the page asks for a table that there is none of.
    """

    def table(found: re.Match[str]) -> str:
        if found[1] not in TABLES:
            raise ValueError(f"table must be one of {', '.join(TABLES)}; got {found[1]!r}")
        return f"<!-- table: {found[1]} -->\n{TABLES[found[1]](results)}\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w ]+) -->\n.*?<!-- end -->", table, text, flags=re.S)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _plain(found: Spread | None, digits: int = 4) -> str:
    return "-" if found is None else f"{found.mean:.{digits}f}"


def _difference(found: Spread | None, digits: int = 4, sign: int = 1) -> str:
    """mean (sd over models; each model; mean row error), bold where the protocol's rule claims it."""
    if found is None:
        return "-"
    text = f"{sign * found.mean:+.{digits}f}"
    if len(found.each) == 1:
        return f"{text} (one model; row se {found.row_error:.{digits}f})"
    each = " ".join(f"{sign * value:+.{digits}f}" for value in found.each)
    return f"{f'**{text}**' if found.claimed() else text} (sd {found.deviation:.{digits}f}; {each}; row se {found.row_error:.{digits}f})"


def _gates(results: Results) -> str:
    bits = "bits per byte"
    costs = {arm: results.find(bits, arm) for arm in ("dense", "without entries")}
    random, oracle = (results.find(bits, arm, topk=PRIMARY_BITS) for arm in ("random", "oracle"))
    rows = []
    for name, high, low, needed in (
        ("without entries - dense", costs["without entries"], costs["dense"], 0.05),
        (f"random - oracle, K = {PRIMARY_BITS}", random, oracle, 0.03),
    ):
        if high is None or low is None:
            continue
        each = [a - b for a, b in zip(high.each, low.each)]
        verdict = "met" if mean(each) >= needed else "**missed**"
        rows.append(
            [name, f"{low.mean:.4f}", f"{high.mean:.4f}", " ".join(f"{x:.4f}" for x in each), f"{mean(each):.4f}", f"{needed}", verdict]
        )
    return _table(["gate, bits per byte", "low", "high", "difference, each model", "mean", "needed", ""], rows)


def _heads(results: Results) -> str:
    rows = []
    for layer in results.layers:
        shares, sinks = (
            [results.find(metric, f"head {head}", layer=layer) for head in range(results.preset.heads)]
            for metric in ("compressed share", "sink share")
        )
        ordered = [sorted(found.each[seed] for found in shares if found) for seed in range(len(shares[0].each if shares[0] else ()))]
        wrong = [_plain(results.find("KL from the full teacher", arm, layer=layer)) for arm in WRONG]
        rows.append(
            [
                str(layer),
                "; ".join(" ".join(f"{share:.2f}" for share in model) for model in ordered),
                f"{max(found.mean for found in sinks if found):.3f}",
                _plain(results.find("CV of compressed share", "heads", layer=layer), 2),
                _plain(results.find("effective entries", "full", layer=layer), 0),
                *wrong,
            ]
        )
    head = ["layer", "compressed share of each head, sorted (one list per model)", "greatest sink share", "CV over heads", "entries in use"]
    return _table([*head, *(f"KL to {arm}, nats" for arm in WRONG)], rows)


def _by_arm(
    results: Results, metric: str, rows: list[tuple[str, int, int]], sign: int, digits: int = 4, arms: tuple[str, ...] = SCALE
) -> str:
    """Rows of (label, layer, K): the arms' means, and full against compressed-only."""
    lines = []
    for label, layer, topk in rows:
        values = [_plain(results.find(metric, arm, layer=layer, topk=topk), digits) for arm in arms]
        paired = results.find(metric, "compressed-only", layer=layer, topk=topk, against="full")
        lines.append([label, *values, _difference(paired, digits, sign)])
    name = "full - compressed-only" if sign < 0 else "compressed-only - full"
    return _table(["", *arms, name], lines)


def _capture(results: Results) -> str:
    rows = [(f"layer {layer}, K = {topk}", layer, topk) for layer in results.layers for topk in results.preset.capture_topks]
    return _by_arm(results, "mass-weighted capture", rows, -1)


def _recall(results: Results) -> str:
    rows = [(f"layer {layer}, K = {topk}", layer, topk) for layer in results.layers for topk in results.preset.capture_topks]
    return _by_arm(results, "recall", rows, -1, 3, tuple(arm for arm in SCALE if arm != "oracle"))


def _divergence(results: Results) -> str:
    return _by_arm(results, "KL to the true teacher", [(f"layer {layer}", layer, 0) for layer in results.layers], 1, 4, ARMS)


def _bits(results: Results) -> str:
    rows = [(f"K = {topk}", -1, topk) for topk in results.preset.bits_topks]
    return _by_arm(results, "bits per byte", rows, 1)


def _variation(results: Results) -> str:
    names = [bin_name(number) for number in range(len(CV_EDGES) - 1)]
    rows = []
    for layer in results.layers:
        share = {arm: [results.find(f"share, {name}", arm, layer=layer) for name in names] for arm in ("queries", "mass")}
        pairs = zip(share["queries"], share["mass"])
        rows.append([f"layer {layer}: share of queries / of mass", *(f"{_plain(own, 2)} / {_plain(mass, 2)}" for own, mass in pairs)])
        for arm, against in (("compressed-only", "full"), ("wrong oracle", "oracle")):
            found = [results.find(f"capture, {name}", arm, layer=layer, topk=PRIMARY_CAPTURE, against=against) for name in names]
            enough = [own is not None and own.mean >= ENOUGH for own in share["queries"]]
            cells = [f"{-x.mean:+.4f} ({x.deviation:.4f})" if x and there else "-" for x, there in zip(found, enough)]
            rows.append([f"layer {layer}: capture, {against} - {arm}", *cells])
    return _table([f"K = {PRIMARY_CAPTURE}, mean (sd over models)", *names], rows)


def _controls(results: Results) -> str:
    lone = [abs(r.value) for r in results.records if r.metric == "KL of its own two teachers" and r.stage == "frozen"]
    rows = [["one head: greatest KL between its two teachers, nats", f"{max(lone):.1e}", ""]] if lone else []
    both = results.having("control")
    for layer in results.layers:
        for label, find in _control_rows(layer).items():
            rows.append([f"layer {layer}: {label}", find(both, "frozen"), find(both, "control")])
        floor = _noise_floor(results, layer)
        if floor:
            rows.append([f"layer {layer}: capture at K = {PRIMARY_CAPTURE}, full, one indexer seed - the other", floor, ""])
    return _table(["", "as trained", "sinks of every second head raised"], rows)


def _control_rows(layer: int) -> dict[str, Callable[[Results, str], str]]:
    metric = "mass-weighted capture"

    def gap(results: Results, stage: str) -> str:
        right, wrong = (results.find(metric, arm, layer=layer, topk=PRIMARY_CAPTURE, stage=stage) for arm in ("oracle", "wrong oracle"))
        return "-" if right is None or wrong is None else f"{right.mean - wrong.mean:+.4f}"

    def trained(results: Results, stage: str) -> str:
        found = results.find(metric, "compressed-only", layer=layer, topk=PRIMARY_CAPTURE, stage=stage, against="full")
        return _difference(found, sign=-1)

    return {
        "CV over heads": lambda results, stage: _plain(results.find("CV of compressed share", "heads", layer=layer, stage=stage), 2),
        "KL of compressed-only from full": lambda results, stage: _plain(
            results.find("KL from the full teacher", "compressed-only", layer=layer, stage=stage)
        ),
        f"capture at K = {PRIMARY_CAPTURE}, oracle - wrong oracle": gap,
        f"capture at K = {PRIMARY_CAPTURE}, full - compressed-only": trained,
    }


def _noise_floor(results: Results, layer: int) -> str:
    own = {
        (r.language_seed, r.index_seed): r.value
        for r in results.records
        if (r.stage, r.metric, r.arm, r.layer, r.topk, r.against) == ("frozen", "mass-weighted capture", "full", layer, PRIMARY_CAPTURE, "")
    }
    pairs = [own[seed, 0] - own[seed, 1] for seed in results.preset.language_seeds if (seed, 0) in own and (seed, 1) in own]
    return " ".join(f"{pair:+.4f}" for pair in pairs)


def _sparse(results: Results) -> str:
    arms = ("full, dense", "full, attended", "full, visible", "compressed-only, dense", "compressed-only, attended")
    rows = []
    for layer in results.layers:
        for topk in results.preset.capture_topks:
            find = partial(results.find, "mass-weighted capture", layer=layer, topk=topk, stage="sparse objective")
            values = [_plain(find(arm)) for arm in arms]
            paired = find("compressed-only, attended", against="full, attended")
            rows.append([f"layer {layer}, K = {topk}", *values, _difference(paired, sign=-1)])
    return _table(["mass-weighted capture", *arms, "full, attended - compressed-only, attended"], rows)


def _joint(results: Results) -> str:
    topk, rows, results = results.preset.joint_topk, [], results.having("joint")
    for queries in ("all", "late"):
        for stage, label in (("frozen", "before"), ("joint", "after")):
            find = partial(results.find, "bits per byte", topk=topk, queries=queries, stage=stage, index_seed=0)
            values = [_plain(find(arm)) for arm in ("full", "compressed-only")]
            paired = find("compressed-only", against="full")
            rows.append([f"{label}, {queries} positions", *values, _difference(paired)])
    return _table([f"bits per byte at K = {topk}", "full", "compressed-only", "compressed-only - full"], rows)


def _growth(results: Results) -> str:
    found = sorted({int(r.arm.split()[-1]) for r in results.records if r.stage == "language"})
    rows = []
    for step in found:
        costs = [results.find("bits per byte", f"{arm}, step {step}", stage="language") for arm in ("dense", "without entries")]
        if costs[0] and costs[1]:
            gaps = " ".join(f"{off - on:.3f}" for on, off in zip(costs[0].each, costs[1].each))
            rows.append([str(step), f"{costs[0].mean:.3f} (sd {costs[0].deviation:.3f})", gaps])
    return _table(["step", "bits per byte, dense", "lost without entries, each model"], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "gates": _gates,
    "growth": _growth,
    "heads": _heads,
    "capture": _capture,
    "recall": _recall,
    "divergence": _divergence,
    "bits": _bits,
    "variation": _variation,
    "controls": _controls,
    "sparse": _sparse,
    "joint": _joint,
}
