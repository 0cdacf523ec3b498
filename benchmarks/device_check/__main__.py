"""Checks and times kernels and data path on a GPU, on a machine with torch, Triton, NumPy, pytest and this checkout.

    python -m unigrad_fast.benchmarks.device_check [--only kernels|step|data] [--seconds 170] [--images PHOTOGRAPHS]
        [--output FOLDER] [--cpu]

The kernels: `kernels`; then `measures.objective` for as many shapes as the seconds allow, the most informative first.
The step: `step` and `graph`, which need torchvision and pydantic.
The data path: `data`, which takes about two minutes and needs DALI. A short table comes last; rows are appended to
OUTPUT/objective.jsonl, OUTPUT/device_step.jsonl and OUTPUT/device_data.jsonl with card, versions and commit.

With `--cpu`, everything that the interpreter and DALI's CPU backend support runs at small sizes; nothing is recorded.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from unigrad_fast.benchmarks.device_check import kernels
from unigrad_fast.benchmarks.device_check.finding import Finding
from unigrad_fast.benchmarks.harness.record import OUTPUT, make_folder


def shown(found: Iterator[Finding]) -> list[Finding]:
    """Print each finding as soon as it is available, and return all."""
    findings = []
    for finding in found:
        print(finding, flush=True)
        findings.append(finding)
    return findings


def main() -> int:
    program = "python -m unigrad_fast.benchmarks.device_check"
    parser = argparse.ArgumentParser(prog=program, description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="run in the interpreter, at small sizes; record nothing")
    parser.add_argument(
        "--seconds",
        type=float,
        default=170.0,
        help="seconds after which no further shape starts (one takes up to a minute)",
    )
    parser.add_argument("--only", choices=("kernels", "step", "data"), help="run only these checks")
    parser.add_argument(
        "--images", type=Path, help="photographs for the data path, in any form that Manifest.open takes"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the rows")
    options = parser.parse_args()
    options.output = options.output.expanduser()
    end = time.monotonic() + options.seconds
    if options.cpu:
        os.environ |= {"TRITON_INTERPRET": "1", "UNIGRAD_KERNELS": "triton"}  # before Triton is imported
    elif not torch.cuda.is_available():
        parser.error("no GPU; use --cpu to run the checks that the interpreter supports")
    device = torch.device("cpu" if options.cpu else "cuda")

    from unigrad_fast.benchmarks.device_check import data, graph, step
    from unigrad_fast.benchmarks.measures import objective
    from unigrad_fast.runtime.errors import DataError, UserError

    output = None if options.cpu else options.output
    try:
        if output is not None:
            make_folder(output)
    except UserError as error:
        parser.error(str(error))
    findings, rows = [], []
    if options.only in (None, "kernels"):
        findings += shown(kernels.check(device))
        if options.cpu:
            os.environ["UNIGRAD_KERNELS"] = "torch"  # times of the interpreter are meaningless
        rows = objective.bench(
            device,
            ((40, 4),) if options.cpu else kernels.SHAPES,
            repetitions=2 if options.cpu else 11,
            block_seconds=0.0 if options.cpu else 0.1,
            most_seconds=15.0,
            compiled=not options.cpu,
            output=output,
            end=end,
        )
    if options.only in (None, "step"):
        if options.cpu:
            os.environ["UNIGRAD_KERNELS"] = "torch"
        findings += shown(step.check(device, output))
        findings += shown(graph.check(device, output))
    if options.only in (None, "data"):
        try:
            findings += shown(data.check(device, options.images, output))
        except DataError as error:
            parser.error(str(error))
    print(f"\n{'interpreter' if options.cpu else torch.cuda.get_device_name()}, torch {torch.__version__}")
    for finding in findings:
        print(finding)
    for row in rows:
        if row["unit"] == "ratio" and not options.cpu:
            print(f"      C {row['width']:5}, N {row['images']:3}  {row['median']:5.2f}  {row['what']}")
    return 0 if all(finding.good for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
