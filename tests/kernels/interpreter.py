"""Tests of the Triton kernels in a process of their own, with Triton's interpreter in place of a GPU."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = FOLDER.parents[2]
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
# Two processes take half each: what goes backward through the objective, and all the rest.
BACKWARD = [FOLDER / f"test_{name}.py" for name in ("gradient_kernel", "objective", "forms")]


def interpreted(folder: Path, *arguments: object) -> int:
    """How many tests passed; fails where one did not."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "UNIGRAD_KERNELS": "triton"}
    cache = ["-o", f"cache_dir={folder}/cache", "--basetemp", folder / "tests"]
    command = [sys.executable, "-m", "pytest", *arguments, "-q", "--tb=short", "--color=no", "-rfE", *cache]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    passed = re.search(r"(\d+) passed", child.stdout)
    if child.returncode or not passed:
        pytest.fail(f"exit status {child.returncode}\n{child.stdout[-20_000:]}\n{child.stderr[-5_000:]}", pytrace=False)
    return int(passed[1])
