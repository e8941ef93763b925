"""Draws the bug this library exists for: python examples/teacher_picture.py docs/teacher.svg  (needs csakit[plot]).

Two heads look at the same eight compressed entries. One spends its attention on the window and leaves the entries little, the other
reads the entries. The attention's own distribution over entries is what the second head says. A teacher made from the compressed keys
alone gives both heads an equal say.
"""

from __future__ import annotations

import sys

import matplotlib
import torch

import csakit
from csakit import Layout, metrics

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "csakit"  # the same file on every run

from matplotlib import pyplot as plt  # noqa: E402


def main(path: str) -> None:
    layout = Layout.batch(1, 32, ratio=4, window=4)
    query = 31  # the last token sees all eight entries
    wanted = torch.tensor([[4.0, 3.4, 2.6, 1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0, 2.6, 3.4, 4.0]])
    # keys are unit vectors, so a query's channels are its logits: 8 for the entries, 4 for the window
    keys = torch.eye(12)
    entries, kv = keys[None, :8], keys[8:].repeat(8, 1)[None]
    logits = torch.cat([wanted, torch.tensor([[5.5] * 4, [-2.0] * 4])], 1)
    q = logits.expand(1, 32, 2, 12)
    sink = torch.zeros(2)

    every = torch.arange(8, dtype=torch.int32).expand(1, 32, 8)
    every = torch.where(every < layout.entry_stop[..., None], every, -1)
    attention = csakit.attend(q, kv, entries, layout, indices=every, sink=sink, scale=1.0, teacher=True)
    teacher = attention.log_mass[0, query].softmax(-1)
    compressed_only = wanted.softmax(-1).mean(0)
    shares = metrics.branch_shares(q, kv, entries, attention.lse, layout, indices=every, sink=sink, scale=1.0)

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.2), width_ratios=(1, 2), layout="constrained")
    below = torch.zeros(2)
    for part, name, colour in zip(shares, ("window", "entries", "sink"), ("#9aa5b1", "#1f6feb", "#d8dee4")):
        share = part[0, query]
        left.bar(("head 0", "head 1"), share, bottom=below, color=colour, label=name, width=0.6)
        below += share
    left.set(title="where each head looks", ylabel="attention probability")
    left.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, columnspacing=1.0, handlelength=1.0)
    place = torch.arange(8)
    right.bar(place - 0.2, teacher, 0.4, color="#1f6feb", label="the attention's own distribution (csakit)")
    right.bar(place + 0.2, compressed_only, 0.4, color="#cf222e", label="from compressed keys alone")
    right.set(title="the teacher over eight compressed entries", xlabel="entry", xticks=place)
    right.legend(frameon=False, loc="upper left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    divergence = (teacher * (teacher / compressed_only).log()).sum()
    print(f"KL(right, compressed-only) = {divergence:.3f} nats; entries get {shares.entries[0, query].tolist()} of the two heads")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "teacher.svg")
