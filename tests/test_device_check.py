"""The check of a GPU machine, dry on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ABSENT = ("rich", "pydantic", "tyro", "yaml", "deepspeed", "torchvision", "matplotlib", "tensorboard", "safetensors")
CODE = """
import sys
sys.modules.update(dict.fromkeys({absent!r}))
from unigrad_fast.benchmarks import device_check
{change}
sys.argv = ["device_check", "--cpu"]
sys.exit(device_check.main())
"""


def dry_run(change: str = "") -> subprocess.CompletedProcess:
    """The check in the interpreter, where only torch, Triton and NumPy are installed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "UNIGRAD_K"))}
    code = CODE.format(absent=ABSENT, change=change)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_all_that_the_interpreter_can_do_is_good_without_any_further_package():
    done = dry_run()
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = done.stdout.split("\ninterpreter, torch ")[1].splitlines()[1:]
    words = ("dz, ieee", "dz, fp16", "bitwise equal", "LARS", "target update")
    for word in words:
        assert any(line.startswith("ok") and word in line for line in verdicts), word
    assert "ours, fp32" in done.stdout  # the benchmark ran too


GATES_OF_ZERO = "device_check.GATES = dict.fromkeys(device_check.GATES, 0.0)"
A_CHECK_THAT_RAISES = "device_check.CHECKS = (lambda scene: 1 / 0,)"


@pytest.mark.parametrize(("change", "word"), [(GATES_OF_ZERO, "dz"), (A_CHECK_THAT_RAISES, "ZeroDivisionError")])
def test_what_is_wrong_fails_and_is_shown(change, word):
    done = dry_run(change)
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(line.startswith("FAIL") and word in line for line in done.stdout.splitlines())
