"""The check of a GPU machine, played on the CPU."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from forked import new_pool

from unigrad_fast.benchmarks.device_check import __main__, data, kernels, norm, sections
from unigrad_fast.benchmarks.device_check.finding import Finding
from unigrad_fast.benchmarks.device_check.sections import NO_TIME, SECTIONS, Place, Section
from unigrad_fast.pipelines import graph
from unigrad_fast.pipelines.reading import damage

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "benchmarks/device_check/wheels.txt"
CPU = torch.device("cpu")

# A machine that is lent by the quarter of an hour: a command ends after LIMIT seconds, and these packages are there.
LIMIT, COMPILING, SECONDS = 600, 100, 480
THERE = {
    "PIL", "_distutils_hack", "_yaml", "contourpy", "cuda", "cycler", "dateutil", "fsspec", "functorch", "google",
    "jinja2", "kiwisolver", "markdown_it", "markupsafe", "matplotlib", "mdurl", "mpmath", "networkx", "numpy",
    "packaging", "pkg_resources", "psutil", "pygments", "rich", "safetensors", "scipy", "setuptools", "six", "sympy",
    "tensorboard", "torch", "torchgen", "torchvision", "tqdm", "triton", "yaml",
}  # fmt: skip
ABSENT = ("deepspeed", "nvidia.dali")

PLAYED = """
import json, os, sys
sys.modules.update(dict.fromkeys({absent!r}))
sys.path[:0] = {paths!r}
os.environ |= {{"TRITON_INTERPRET": "1", "UNIGRAD_KERNELS": "torch"}}  # as --cpu does, before the imports below
from recorder import record
from thin import thin
from unigrad_fast.benchmarks.device_check import __main__, graph, kernels, sections, step
from unigrad_fast.benchmarks.measures import objective

time = [{begin}]


def in_its_time(section):
    def check(place):
        time[0] += section.seconds
        yield from section.check(place)

    return section._replace(check=check)


graph.RECORD, step.START = record, "fork"
kernels.CHECKS = kernels.CHECKS[2:]  # the others take seconds in the interpreter; tests/kernels/interpreted runs them
peaks = objective.measure_peaks
objective.measure_peaks = lambda precisions, device, *_: peaks(precisions, device, 64, 4096)
sections.SECTIONS.update({{name: in_its_time(each) for name, each in sections.SECTIONS.items()}})
sys.argv = ["device_check", "--cpu", "--seconds", "{seconds}"]
with thin(stages=1):
    status = __main__.main(lambda: time[0])
files = {{name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items() if module}}
imported = {{name.partition(".")[0] for name, file in files.items() if "site-packages" in file and name[:2] != "__"}}
print(json.dumps([time[0], sorted(imported)]))
sys.exit(status)
"""


def rows_of(output: str) -> dict[str, list[str]]:
    """The lines below each section's title."""
    parts = re.split(r"^== (\w+): .*$", output.split("\ninterpreter, torch ")[0], flags=re.MULTILINE)[1:]
    return {name: lines.strip().splitlines() for name, lines in zip(parts[::2], parts[1::2], strict=True)}


def test_the_whole_check_fits_a_machine_that_is_lent_for_minutes(tmp_path):
    """Without DeepSpeed and DALI, with few packages to carry, in each section's expected time."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "UNIGRAD_K"))}
    paths = [str(ROOT / "tests"), str(ROOT / "tests/training")]
    code = PLAYED.format(absent=ABSENT, paths=paths, begin=COMPILING, seconds=SECONDS)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    assert list(rows) == [name for name in SECTIONS if name != "data"]
    for name, lines in rows.items():
        assert any(line.startswith("ok ") for line in lines) and not any("FAIL" in line for line in lines), name
    assert "data was left out: DALI is not installed" in done.stdout
    norms = [f"batch norm + {case.name}, " for case in norm.CASES]
    for section, words in {
        "step": ("launched", "replayed", "ThinEngine", "training in fp16"),
        "norm": [*norms, "a product between norms"],
        "correctness": ("LARS", "target update", *(f"error of {each}float16" for each in norms), "repeated a product"),
        "replaying": ("0 of ", "0 and 0 a step on 2 ranks"),
        "nccl": ("gather", "reduce", "replayed steps with collectives", "against none", "training with collectives"),
        "shapes": ("ours, fp32",),
        "variants": ("ours, resnet18", "a pass for each view", "torch's norms", "networks alone"),
    }.items():
        assert all(word in "\n".join(rows[section]) for word in words), rows[section]

    time, imported = json.loads(done.stdout.splitlines()[-1])
    assert time <= LIMIT
    carried = {line.partition("==")[0].replace("-", "_") for line in WHEELS.read_text().splitlines() if "==" in line}
    assert set(imported) <= THERE | carried | {"dill", "optree"}  # torch imports them where they are installed
    assert carried <= set(imported)


def test_the_wheels_to_carry_are_those_of_the_tested_versions():
    tested = (ROOT / "constraints.txt").read_text().splitlines()
    assert {line for line in WHEELS.read_text().splitlines() if not line.startswith("#")} <= set(tested)


def found_by(check, seconds: float = 10.0, end: float = math.inf, clock=lambda: 0.0) -> list[Finding]:
    with mock.patch.dict(SECTIONS, {"step": Section(check, seconds, "")}):
        return list(sections.run("step", Place(CPU, clock=clock, end=end)))


def test_what_raises_or_finds_nothing_is_not_ok():
    assert found_by(lambda place: 1 / 0) == [Finding("step", "ZeroDivisionError: division by zero", False)]
    assert found_by(lambda place: iter(())) == [Finding("step", "nothing was checked", False)]


def test_a_section_without_enough_time_does_not_begin_and_a_slow_one_ends():
    good, now = Finding("what", "found", True), [0.0]

    def slow(place: Place) -> Iterator[Finding]:
        for _ in range(5):
            now[0] += 8
            yield good

    (found,) = found_by(slow, seconds=20, end=19)
    assert not found.good and found.found.startswith(NO_TIME.format(left=19))
    *before, last = found_by(slow, seconds=10, end=20, clock=lambda: now[0])
    assert before == [good] * 3 and last == Finding("step", "not finished: the time is up", False)


def compiled_ahead(folder: str) -> tuple[list[str], set[str]]:
    """What went wrong, and the kernels in Triton's cache."""
    from unigrad_fast.benchmarks.device_check import compiling

    os.environ["TRITON_CACHE_DIR"] = folder
    calls = compiling.calls_of(partial(compiling.layer, norm.POOL, norm.SMALL))
    taken = [call for call in calls if call.operator in ("batch_norm_settle", "batch_norm_pool")]
    errors = [error for call in taken if (error := compiling.compile_call(call, 90))]
    return errors, {path.stem for path in Path(folder).rglob("*.cubin")}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton's compiler")
def test_kernels_are_compiled_ahead_from_a_walk_without_content(tmp_path):
    with new_pool() as pool:
        errors, kernels = pool.submit(compiled_ahead, str(tmp_path)).result()
    assert errors == []
    assert kernels == {"settle_kernel", "pool_kernel"}


PARTS = (
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
    rows = list(data.check(CPU))
    assert all(finding.good for finding in rows), rows
    for part in PARTS:
        assert any(part in finding.what for finding in rows), part


def test_wrong_views_and_files_that_are_not_refused_fail(monkeypatch):
    monkeypatch.setattr(graph, "_SOLARIZED", list(range(256)))
    monkeypatch.setattr(damage, "defects", lambda images, *more: [None] * len(images))
    monkeypatch.setattr(data, "CHECKS", (data.operations, data.bad_files))
    wrong = {finding.what for finding in data.check(CPU) if not finding.good}
    assert {"solarize", "files refused"} <= wrong


def test_a_wrong_gradient_fails(monkeypatch):
    monkeypatch.setattr(kernels, "GATES", dict.fromkeys(kernels.GATES, 0.0))
    monkeypatch.setattr(
        kernels,
        "kernels_once",
        lambda z, arithmetic: (torch.zeros(len(z[0]) * (len(z) - 2), z[0].shape[1]), None, torch.eye(2)),
    )
    assert not any(finding.good for finding in kernels.correctness(CPU))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["data", "--images", "EMPTY"], "holds no files"), (["norms"], "unknown; choose from step, norm, ")],
)
def test_a_users_mistake_is_said_in_one_line(arguments, words, tmp_path, capsys, monkeypatch):
    arguments = [str(tmp_path) if each == "EMPTY" else each for each in arguments]
    monkeypatch.setattr(sys, "argv", ["device_check", "--cpu", "--only", *arguments])
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as stop:
        __main__.main()
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
