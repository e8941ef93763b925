"""A run killed with SIGKILL at many moments has the numbers of an unbroken one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import micro
import pytest

from csakit.train import checkpoint


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, which this platform has not")
def test_a_run_killed_again_and_again_also_inside_checkpoints_and_between_stages_has_the_numbers_of_an_unbroken_one(tmp_path):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("kills.py")), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.splitlines()[-1])
    assert ends.pop("unbroken") == ends.pop("to the end") == 0
    assert len(ends) == 14 and set(ends.values()) == {signal.SIGKILL}, ends
    assert micro.metrics(tmp_path / "killed") == micro.metrics(tmp_path / "unbroken")
    last = checkpoint.newest(tmp_path / "killed" / "checkpoints")
    for name in ("weights.safetensors", "random.safetensors"):
        assert (last / name).read_bytes() == (tmp_path / "unbroken" / "checkpoints" / last.name / name).read_bytes()
    assert not list(last.parent.glob(f"*{checkpoint.UNFINISHED}"))
