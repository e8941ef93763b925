"""The study in one picture (needs matplotlib): where the teacher matters, how much, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .evaluate import CV_EDGES, bin_name
from .report import ENOUGH, PRIMARY_BITS, PRIMARY_CAPTURE, Results

COLOURS = ("#1f6feb", "#cf222e", "#0f7b53")


def draw(results: Results, path: Path) -> None:
    """Three panels: capture lost to the wrong teacher by how far heads differ, the primary capture, and bits per byte above dense."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "csakit"  # the same file on every run
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 3.9), width_ratios=(1.3, 1, 1), layout="constrained")
    _by_variation(left, results)
    _by_layer(middle, results)
    _by_selection(right, results)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _by_variation(axes: Any, results: Results) -> None:
    names = [bin_name(number) for number in range(len(CV_EDGES) - 1)]
    for layer, colour in zip(results.layers, COLOURS):
        found = [results.find(f"capture, {name}", "compressed-only", layer=layer, topk=PRIMARY_CAPTURE, against="full") for name in names]
        queries = [results.find(f"share, {name}", "queries", layer=layer) for name in names]
        points = [(place, x) for place, (x, own) in enumerate(zip(found, queries)) if x and own and own.mean >= ENOUGH]
        axes.plot([p for p, _ in points], [-x.mean for _, x in points], color=colour, label=f"layer {layer}")
        for place, x in points:
            axes.plot([place] * len(x.each), [-value for value in x.each], ".", color=colour, alpha=0.6)
    axes.axhline(0, color="#9aa5b1", linewidth=0.8)
    axes.set_xticks(range(len(names)), [name.removeprefix("CV ") for name in names])
    axes.set(title=f"captured at K = {PRIMARY_CAPTURE}, full - compressed-only", xlabel="CV over heads of the compressed share, per query")
    axes.legend(frameon=False)


def _by_layer(axes: Any, results: Results) -> None:
    labels = []
    for stage, label in (("frozen", ""), ("control", "\nraised")):
        for layer, colour in zip(results.layers, COLOURS):
            found = results.find("mass-weighted capture", "compressed-only", layer=layer, topk=PRIMARY_CAPTURE, stage=stage, against="full")
            if found is not None:
                axes.bar(len(labels), -found.mean, 0.6, color=colour, alpha=0.45)
                axes.plot([len(labels)] * len(found.each), [-value for value in found.each], ".", color=colour)
                labels.append(f"layer {layer}{label}")
    axes.axhline(0, color="#9aa5b1", linewidth=0.8)
    axes.set_xticks(range(len(labels)), labels)
    axes.set(title="mass-weighted, full - compressed-only", xlabel="raised: the control with raised sinks")


def _by_selection(axes: Any, results: Results) -> None:
    dense = results.find("bits per byte", "dense")
    labels = []
    for arm in ("random", "recent", "compressed-only", "full", "wrong oracle", "oracle"):
        found = results.find("bits per byte", arm, topk=PRIMARY_BITS)
        if found is not None and dense is not None:
            each = [value - base for value, base in zip(found.each, dense.each)]
            axes.barh(
                len(labels),
                sum(each) / len(each),
                0.6,
                color="#9aa5b1" if arm not in ("compressed-only", "full") else COLOURS[arm != "full"],
                alpha=0.6,
            )
            axes.plot(each, [len(labels)] * len(each), ".", color="#1b1f24")
            labels.append(arm)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(title=f"bits per byte above dense, K = {PRIMARY_BITS}")
