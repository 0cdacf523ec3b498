"""The check of a GPU machine, dry on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("rich", "pydantic", "yaml", "deepspeed", "torchvision", "matplotlib", "tensorboard", "safetensors")
CODE = """
import sys
sys.modules.update(dict.fromkeys({absent!r}))
from unigrad_fast.benchmarks.device_check import __main__, kernels
{change}
sys.argv = ["device_check", "--cpu", "--only", {only!r}, *{options!r}]
sys.exit(__main__.main())
"""


def dry_run(
    change: str = "", only: str = "kernels", *options: str, absent: tuple[str, ...] = ABSENT
) -> subprocess.CompletedProcess:
    """The check in the interpreter, where only torch, Triton, NumPy, Pillow and DALI are installed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "UNIGRAD_K"))}
    code = CODE.format(absent=absent, change=change, only=only, options=options)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


def check_good(done: subprocess.CompletedProcess, words: tuple[str, ...]) -> None:
    """All is good, and lines with these words are in the table at the end."""
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = done.stdout.split("\ninterpreter, torch ")[1].splitlines()[1:]
    for word in words:
        assert any(line.startswith("ok") and word in line for line in verdicts), word


@pytest.mark.slow  # by default its checks run in tests/kernels/interpreted, and its first one below
def test_all_that_the_interpreter_can_do_is_good_without_any_further_package():
    done = dry_run()
    check_good(done, ("dz, ieee", "dz, fp16", "bitwise equal", "LARS", "target update", "batch norm, float16"))
    assert "ours, fp32" in done.stdout  # the benchmark ran too


@pytest.mark.slow
def test_a_step_on_two_ranks_and_its_variants_run_on_the_cpu(tmp_path):
    results = tmp_path / "results"
    done = dry_run("", "step", "--output", str(results), absent=("deepspeed", "nvidia.dali"))
    variants = ("ours, resnet18", "a pass for each view", "torch's norms", "networks alone")
    check_good(done, ("waits of the host, ours", *variants))
    assert "0 and 0 a step on 2 ranks" in done.stdout
    assert not results.exists()


def test_without_torchvision_the_step_is_not_checked_and_that_is_said():
    assert "not checked: pydantic is not installed" in dry_run("", "step").stdout


PARTS = (
    "photometric torch, byol",
    "repeated decodings",
    "crop, bicubic",
    "solarize",
    "views of multicrop",
    "views of swav, own decoder",
    "a loader, decoding on the CPU",
    "views that are read late",
    "files refused",
    "files replaced",
    "multicrop, hw_decoder_load",
    "growing",
)


def test_data_path_is_checked_on_the_cpu_and_nothing_is_recorded(tmp_path):
    results = tmp_path / "results"
    check_good(dry_run("", "data", "--output", str(results)), PARTS)
    assert not results.exists()


def test_without_dali_one_line_says_so_and_torchs_operations_are_checked():
    done = dry_run("sys.modules['nvidia.dali'] = None", "data")
    check_good(done, ("only torch's operations checked", "photometric torch, byol"))
    assert "decoding" not in done.stdout


DATA = "from unigrad_fast.benchmarks.device_check import data; from unigrad_fast.pipelines import "
NOTHING_SOLARIZED = DATA + "graph; graph._SOLARIZED = list(range(256)); data.CHECKS = (data.operations,)"
EVERY_FILE_IS_GOOD = (
    DATA.replace("pipelines import", "pipelines.reading import")
    + "damage; damage.defects = lambda images, *more: [None] * len(images); data.CHECKS = (data.bad_files,)"
)


@pytest.mark.parametrize(("change", "word"), [(NOTHING_SOLARIZED, "solarize"), (EVERY_FILE_IS_GOOD, "files refused")])
def test_wrong_views_and_files_that_are_not_refused_fail(change, word):
    done = dry_run(change, "data")
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(line.startswith("FAIL") and word in line for line in done.stdout.splitlines())


NOT_TIMED = "from unigrad_fast.benchmarks.measures import objective; objective.bench = lambda *_, **__: []; "
GATES_OF_ZERO = NOT_TIMED + "kernels.GATES = dict.fromkeys(kernels.GATES, 0.0); kernels.CHECKS = kernels.CHECKS[:1]"
A_CHECK_THAT_RAISES = NOT_TIMED + "kernels.CHECKS = (lambda device: 1 / 0,)"


@pytest.mark.parametrize(("change", "word"), [(GATES_OF_ZERO, "dz"), (A_CHECK_THAT_RAISES, "ZeroDivisionError")])
def test_what_is_wrong_fails_and_is_shown(change, word):
    done = dry_run(change)
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(line.startswith("FAIL") and word in line for line in done.stdout.splitlines())


def test_images_that_cannot_be_used_are_the_users_mistake(tmp_path):
    done = dry_run("", "data", "--images", str(tmp_path))
    assert done.returncode == 2
    assert f"{tmp_path} holds no files" in done.stderr
    assert "Traceback" not in done.stderr
