"""What a fresh process waits for: `import csakit` beyond torch, and the first call of a provider."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

from .figures import Figure, summary
from .shapes import Case

PROCESSES = 5
SCRIPT = """
import json, sys, time
request = json.loads(sys.stdin.read())
sys.path[:] = request["path"]
import torch
torch.set_num_threads(1)
begun = time.perf_counter()
import csakit
imported = time.perf_counter()
from csakit.bench import problem, providers
from csakit.bench.shapes import Case, Shape
case = Case(**request["case"] | {"shape": Shape(**request["case"]["shape"])})
run = providers.find(request["provider"]).prepare(problem.make(case))
ready = time.perf_counter()
run()
print(json.dumps([imported - begun, time.perf_counter() - ready]))
"""


def measure(provider: str, case: Case) -> dict[str, Figure]:
    """{"import": .., "first call": ..} in milliseconds of wall time, over a few processes.

    The native kernels are built by then; building them takes half a minute, once.

    Raises:
        RuntimeError: such a process failed; with its last words.
    """
    times = []
    for _ in range(PROCESSES):
        request = json.dumps({"provider": provider, "case": asdict(case), "path": sys.path})
        child = subprocess.run([sys.executable, "-c", SCRIPT], input=request, capture_output=True, text=True, check=False)
        if child.returncode:
            last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
            raise RuntimeError(f"the start of {provider} was not measured: {last}")
        times.append(json.loads(child.stdout.splitlines()[-1]))
    imports, firsts = zip(*times)
    return {"import": summary(imports).times(1e3), "first call": summary(firsts).times(1e3)}
