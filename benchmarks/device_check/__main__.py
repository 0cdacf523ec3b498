"""Checks and times training step, kernels and data path on a GPU.

    python -m unigrad_fast.benchmarks.device_check [--only SECTION ...] [--seconds 480] [--images PHOTOGRAPHS]
        [--output FOLDER] [--cpu]

It needs this checkout, torch, torchvision, Triton, NumPy, Pillow, PyYAML, Rich, safetensors and pydantic. A thin engine
takes DeepSpeed's place where that is missing, and only the section `data` needs DALI. Onto a machine without network,
carry pydantic as wheels, which `wheels.txt` names:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux2014_x86_64
        --dest FOLDER -r benchmarks/device_check/wheels.txt    # here
    pip install --no-index --no-deps --target SITE FOLDER/*.whl    # there; then PYTHONPATH=SITE

First the kernels are compiled, in a process per core. Then the sections (`sections.SECTIONS`) run, the most telling
first. With `--seconds`, one that would not end in time does not begin; where a command may take ten minutes, 480 leave
enough for compiling. What was not checked is not ok. A table comes last; rows are appended to OUTPUT/device_step.jsonl,
OUTPUT/objective.jsonl and OUTPUT/device_data.jsonl with card, versions and commit.

With `--cpu` everything that the interpreter and DALI's CPU backend support runs at small sizes; nothing is recorded.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from unigrad_fast.benchmarks.device_check.finding import Finding
from unigrad_fast.benchmarks.harness.record import OUTPUT, make_folder
from unigrad_fast.runtime.errors import DataError, UserError


def shown(finding: Finding) -> Finding:
    print(finding, flush=True)
    return finding


def compiled(clock: Callable[[], float]) -> Finding:
    """Compile the kernels for this GPU."""
    from unigrad_fast.benchmarks.device_check import compiling

    what, begin, (major, minor) = "kernels compiled ahead", clock(), torch.cuda.get_device_capability()
    try:
        count, errors = compiling.fill(10 * major + minor, len(os.sched_getaffinity(0)))
    except Exception as error:  # the checks then compile one by one
        return Finding(what, compiling.shown("not at all", error), False)
    said = f"{count} launches in {clock() - begin:.0f} s"
    return Finding(what, "; ".join([said, *errors[:3]]), not errors)


def main(clock: Callable[[], float] = time.monotonic) -> int:
    program = "python -m unigrad_fast.benchmarks.device_check"
    parser = argparse.ArgumentParser(prog=program, description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="run in the interpreter, at small sizes; record nothing")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="time for all sections, from the end of compiling"
    )
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="run only these sections, in this order")
    parser.add_argument(
        "--images", type=Path, help="photographs for the data path, in any form that Manifest.open takes"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the rows")
    options = parser.parse_args()
    if options.cpu:
        os.environ |= {"TRITON_INTERPRET": "1", "UNIGRAD_KERNELS": "torch"}  # before Triton is imported
    elif not torch.cuda.is_available():
        parser.error("no GPU; use --cpu to run the checks that the interpreter supports")

    from unigrad_fast.benchmarks.device_check import sections

    names = options.only or sections.default_names()
    if unknown := [name for name in names if name not in sections.SECTIONS]:
        parser.error(f"--only {' '.join(unknown)}: unknown; choose from {', '.join(sections.SECTIONS)}")
    output = None if options.cpu else options.output.expanduser()
    found = []
    try:
        if output is not None:
            make_folder(output)
            found.append(shown(compiled(clock)))
        device = torch.device("cpu" if options.cpu else "cuda")
        place = sections.Place(device, options.images, output, clock, clock() + options.seconds)
        for name in names:
            print(f"\n== {name}: {sections.SECTIONS[name].shows}", flush=True)
            found += [shown(finding) for finding in sections.run(name, place)]
    except (DataError, UserError) as error:
        parser.error(str(error))
    print(f"\n{'interpreter' if options.cpu else torch.cuda.get_device_name()}, torch {torch.__version__}")
    for finding in found:
        print(finding)
    for name in sections.SECTIONS.keys() - names:
        print(f"      {name} was left out" + ("" if options.only else ": DALI is not installed"))
    return 0 if all(finding.good for finding in found) else 1


if __name__ == "__main__":
    sys.exit(main())
