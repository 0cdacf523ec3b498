"""Runs the tests of the Triton kernels in a process of their own, with Triton's interpreter in place of a GPU."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = FOLDER.parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_keep_their_promises_in_the_interpreter(tmp_path, record_property):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "UNIGRAD_KERNELS": "triton"}
    cache = ["-o", f"cache_dir={tmp_path}/cache", "--basetemp", tmp_path / "tests"]
    command = [sys.executable, "-m", "pytest", FOLDER, "-q", "--tb=short", "--color=no", "-rfE", *cache]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    passed = re.search(r"(\d+) passed", child.stdout)
    if child.returncode or not passed:
        pytest.fail(f"exit status {child.returncode}\n{child.stdout[-20_000:]}\n{child.stderr[-5_000:]}", pytrace=False)
    record_property("passed", int(passed[1]))
