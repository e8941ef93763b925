"""Peak memory of one provider at one case, in a fresh process: `python -m csakit.bench.memory` reads a request and prints the answer.

The process makes the inputs, runs the operation once at a tiny size (libraries load, pools fill), then once at full size and reports how
far the memory grew: results and everything in between, not the inputs.
"""

from __future__ import annotations

import ctypes
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from .shapes import Case, Shape

MIB = 1 << 20


class Memory(NamedTuple):
    """MiB beyond the inputs: the peak, and how much of it the results are (outputs, statistics and gradients)."""

    peak: float
    results: float


def measure(provider: str, case: Case, *, device: str, threads: int, megatron: str | None = None) -> Memory:
    """The peak of a provider, by name, in a process of its own.

    Raises:
        RuntimeError: that process failed; with its last words.
    """
    request = {"provider": provider, "case": asdict(case), "device": device, "threads": threads, "megatron": megatron, "path": sys.path}
    child = subprocess.run([sys.executable, "-m", __spec__.name], input=json.dumps(request), capture_output=True, text=True, check=False)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise RuntimeError(f"memory of {provider} was not measured: {last}")
    return Memory(**json.loads(child.stdout.splitlines()[-1]))


def main() -> None:
    """The fresh process."""
    request = json.loads(sys.stdin.read())
    sys.path[:] = request["path"]
    import torch

    from . import problem as problems
    from . import providers

    torch.set_num_threads(request["threads"])
    case = Case(**request["case"] | {"shape": Shape(**request["case"]["shape"])})
    device = request["device"]
    provider = providers.find(request["provider"], megatron=request["megatron"])
    shape = case.shape
    tiny = replace(case, shape=replace(shape, tokens=min(shape.tokens, 4 * shape.ratio), topk=min(shape.topk, 2)))
    problem = problems.make(case, device=device)
    provider.prepare(problems.make(tiny, device=device))()
    print(json.dumps(_growth(provider.prepare(problem), device)._asdict()))


def _growth(run: Callable[[], Any], device: str) -> Memory:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        results = run()
        torch.cuda.synchronize(device)
        return Memory((torch.cuda.max_memory_allocated(device) - before) / MIB, _size(results))
    _trim()
    before = _resident("VmRSS")
    forgotten = _forget_peak()
    results = run()
    peak = _resident("VmHWM") if forgotten else _most_resident()
    return Memory(max(0, peak - before) / MIB, _size(results))


def _size(results: dict[str, Any]) -> float:
    """MiB of the memory behind the results, each once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in results.values()}
    return sum(storages.values()) / MIB


def _trim() -> None:
    """Gives freed memory back, so that using it again shows as growth (glibc; elsewhere nothing)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return


def _forget_peak() -> bool:
    """Sets the peak of this process back to what it holds now; False where the system has no such switch."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident(field: str) -> int:
    """Bytes of a line of /proc/self/status; elsewhere the greatest size so far."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return _most_resident()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(f"{field}:"))


def _most_resident() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


if __name__ == "__main__":
    main()
