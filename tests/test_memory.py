"""Memory beyond inputs, results and gradients stays bounded: fresh processes, measured by the kernel.

The growth of a process is its peak after the work minus what it held just before; the results it still holds are subtracted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

MEASURE = """
    import json
    import torch
    import csakit
    from csakit import Layout
    torch.set_num_threads(1)

    def status(name):
        # VmRSS is what is held, VmHWM its peak; the peak of getrusage would start with that of the parent process
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    def held():
        return status("VmRSS")

    def peak():
        return status("VmHWM")

    def size(*tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    def spread(layout, topk):
        # topk entries over the visible ones, evenly; all of them where there are fewer
        count = (layout.entry_stop - layout.entry_start)[..., None]
        slot = torch.arange(topk, dtype=torch.int32)
        taken = torch.where(count >= topk, slot * count // topk, slot)
        return torch.where(taken < count, taken, -1).to(torch.int32)
"""


def measure(body: str) -> dict:
    """What the body prints as JSON, run in a process of its own with the helpers above."""
    script = textwrap.dedent(MEASURE) + textwrap.dedent(body)
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.parametrize("backend", ["cpu", "cpu-torch"])
def test_attention_with_teacher_and_its_backward_stay_under_64_mib_at_8192_tokens(backend: str) -> None:
    """T = 8192, H = 8, D = 128, K = 128, ratio 4, window 128: results and gradients are 73 MiB, the gathered keys alone would be 1 GiB."""
    found = measure(
        """
        def work(tokens, topk):
            layout = Layout.batch(1, tokens, ratio=4, window=128)
            x = [torch.randn(s) for s in ((1, tokens, 8, 128), (1, tokens, 128), (1, tokens // 4, 128), (8,))]
            d_out, indices = torch.randn(1, tokens, 8, 128), spread(layout, topk)
            before = held()
            q, kv, entries, sink = (t.requires_grad_() for t in x)
            attention = csakit.attend(q, kv, entries, layout, indices=indices, sink=sink, teacher=True)
            attention.out.backward(d_out)
            results = size(*attention, *(t.grad for t in x))
            return peak() - before - results, results
        with csakit.backend(@):
            work(256, 16)                                  # what a first call loads is no memory of the method
            extra, results = work(8192, 128)
        print(json.dumps(dict(extra=extra, results=results)))
    """.replace("@", repr(backend))
    )
    assert found["results"] > 60 * 2**20
    assert found["extra"] < 64 * 2**20, f"{found['extra'] / 2**20:.0f} MiB"


def test_every_visible_entry_and_the_dense_objective_stay_under_64_mib_at_8192_tokens() -> None:
    """The dense pass and the streamed objective: one T x E array in float32 would be 64 MiB for a single head."""
    found = measure("""
        def work(tokens):
            layout = Layout.batch(1, tokens, ratio=4, window=16)
            q, kv, entries = (torch.randn(s) for s in ((1, tokens, 4, 32), (1, tokens, 32), (1, tokens // 4, 32)))
            index = [torch.randn(s) for s in ((1, tokens, 4, 16), (1, tokens // 4, 16), (1, tokens, 4))]
            before = held()
            index = [t.requires_grad_() for t in index]
            attention = csakit.attend(q, kv, entries, layout)
            result = csakit.distill_dense(*index, q, entries, attention.lse, layout)
            result.loss.backward()
            results = size(attention.out, attention.lse, result.kl, *(t.grad for t in index))
            return peak() - before - results
        work(256)
        print(json.dumps(dict(extra=work(8192))))
    """)
    assert found["extra"] < 64 * 2**20, f"{found['extra'] / 2**20:.0f} MiB"


def test_the_scorer_never_holds_the_scores_of_all_heads() -> None:
    """4096 queries and keys, 64 index heads: all scores would be 4 GiB."""
    found = measure("""
        def work(tokens):
            layout = Layout.batch(1, tokens, ratio=1, window=1)
            q, k, weights = torch.randn(1, tokens, 64, 16), torch.randn(1, tokens, 16), torch.randn(1, tokens, 64)
            before = held()
            with torch.no_grad():
                selection = csakit.select(q, k, weights, 64, layout)
            return peak() - before - size(*selection)
        work(128)
        print(json.dumps(dict(extra=work(4096))))
    """)
    assert found["extra"] < 256 * 2**20, f"{found['extra'] / 2**20:.0f} MiB"


def test_training_the_scorer_holds_inputs_gradients_and_slots_only() -> None:
    found = measure("""
        def work(tokens, topk):
            layout = Layout.batch(1, tokens, ratio=1, window=1)
            x = [torch.randn(s) for s in ((1, tokens, 16, 32), (1, tokens, 32), (1, tokens, 16))]
            log_mass = torch.randn(1, tokens, topk)
            before = held()
            x = [t.requires_grad_() for t in x]
            selection = csakit.select(*x, topk, layout)
            result = csakit.distill(selection.scores, log_mass, layout)
            result.loss.backward()
            return peak() - before - size(*selection, result.kl, *(t.grad for t in x))
        work(128, 64)
        print(json.dumps(dict(extra=work(2048, 128))))
    """)
    assert found["extra"] < 64 * 2**20, f"{found['extra'] / 2**20:.0f} MiB"
