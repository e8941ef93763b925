"""A process of its own for one provider at one case: agreement, times, peak memory and profile, one line of JSON each.

A fresh process shows how far the memory grows, and a layer that needs more than there is takes nobody else down with it. The parent holds
several of them and asks in turns, so that their repeats are interleaved like those of functions in one process.

Before anything is measured the operation runs once at a tiny size: libraries load, pools fill. Memory is what one call adds to what the
process holds: results and everything in between, not the inputs.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
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


class Worker:
    """The process of a provider, by name, at a case. Its methods raise RuntimeError, with its last words, when it has failed.

    Args:
        check: whether it compares its results before it is measured.
    """

    def __init__(self, provider: str, case: Case, *, device: str, megatron: str | None = None, check: bool = True) -> None:
        self._what = f"{provider} at {case}"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        request = {"provider": provider, "case": asdict(case), "device": device, "megatron": megatron, "check": check, "path": sys.path}
        self._tell(request)

    def verdict(self) -> dict[str, Any]:
        """Status, note, error and version, as in the rows: the first answer. Processes begun together prepare side by side."""
        return self._answer()

    def run(self) -> tuple[Any, Memory]:
        """The `measurement.Sample` and the memory of one call."""
        from .measurement import Sample

        reply = self._ask("run")
        return Sample(*reply["sample"]), Memory(*reply["memory"])

    def parts(self) -> dict[str, float]:
        """Milliseconds of one call by part (see profile.py)."""
        return self._ask("parts")

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            file.close()

    def _ask(self, request: Any) -> dict[str, Any]:
        self._tell(request)
        return self._answer()

    def _tell(self, request: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone; its answer says why

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            last = (self._errors.read().strip().splitlines() or [f"exit code {code}"])[-1]
            raise RuntimeError(f"{self._what}: {last}")
        return json.loads(line)


def measure(provider: str, case: Case, *, device: str, megatron: str | None = None) -> Memory:
    """The peak memory of one call in a fresh process.

    Raises:
        RuntimeError: that process failed; with its last words.
    """
    worker = Worker(provider, case, device=device, megatron=megatron, check=False)
    try:
        worker.verdict()
        return worker.run()[1]
    finally:
        worker.close()


def main() -> None:
    """The fresh process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    request = json.loads(sys.stdin.readline())
    sys.path[:] = request["path"]

    def answer(reply: Any) -> None:
        print(json.dumps(reply), file=answers, flush=True)

    import torch

    from . import profile

    case = Case(**request["case"] | {"shape": Shape(**request["case"]["shape"])})
    torch.set_num_threads(case.threads)
    verdict, run = _prepare(request, case)
    answer(verdict)
    for line in sys.stdin:
        assert run is not None
        answer(profile.parts(run) if json.loads(line) == "parts" else _call(run, request["device"]))


def _prepare(request: dict[str, Any], case: Case) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """The verdict and, where it is good, the function to call."""
    from . import problem as problems
    from . import providers
    from .agreement import judge

    device = request["device"]
    provider = providers.find(request["provider"], megatron=request["megatron"])
    whole = problems.make(case, device=device)
    if request["check"]:
        verdict, run = judge(provider, whole)
    else:
        verdict, run = {"status": "ok", "note": "", "error": None, "version": provider.version}, provider.prepare(whole)
    shape = case.shape
    if run is not None and case.operation != "step":
        tiny = replace(case, shape=replace(shape, tokens=min(shape.tokens, 4 * shape.ratio), topk=min(shape.topk, 2)))
        provider.prepare(problems.make(tiny, device=device))()
    return verdict, run


def _call(run: Callable[[], Any], device: str) -> dict[str, Any]:
    import torch

    from .measurement import once

    kept: list[Any] = []
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        sample = once(lambda: kept.append(run()), device)
        peak = torch.cuda.max_memory_allocated(device)
    else:
        _trim()
        before = _resident("VmRSS")
        forgotten = _forget_peak()
        sample = once(lambda: kept.append(run()), device)
        peak = _resident("VmHWM") if forgotten else _most_resident()
    return {"sample": sample, "memory": Memory(max(0, peak - before) / MIB, _size(kept[0]))}


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
