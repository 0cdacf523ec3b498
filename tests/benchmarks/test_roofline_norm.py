"""What is written of batch norm's kernels follows the counts, and the counts are what a step moves."""

from __future__ import annotations

from pathlib import Path

import pytest
from roofline_norm import (
    FUSIONS,
    VECTOR,
    Count,
    X,
    eager,
    elements,
    gradient,
    normalise,
    ours,
    settle_bytes,
    statistics,
    sums,
)
from thin import thin

from unigrad_fast.benchmarks.device_check.norm import CASES
from unigrad_fast.config import resolve
from unigrad_fast.dry_run.cards import Card
from unigrad_fast.dry_run.walking import walk

ROOFLINE = Path(__file__).resolve().parents[2] / "benchmarks/ROOFLINE.md"
LAYER = 256 * 256 * 56 * 56


def tables() -> list[list[list[str]]]:
    """Cells of the section's tables, row by row, without their headings."""
    section = ROOFLINE.read_text(encoding="utf-8").partition("## Batch norm's kernels")[2].partition("\n## ")[0]
    blocks = [block.splitlines()[2:] for block in section.split("\n\n") if block.startswith("|")]
    return [[[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in block] for block in blocks]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def test_the_rows_of_the_kernels_are_those_of_the_counts():
    written, kernel = {}, ""
    for name, follows, *cells in tables()[0]:
        kernel = name or kernel
        written[kernel, follows] = [number(cell) for cell in cells]
    counts: dict[tuple[str, str], Count] = {("statistics", "any"): statistics()}
    for function in (normalise, sums, gradient):
        found = {(function.__name__, name): function(fusion) for name, fusion in FUSIONS.items()}
        last = (function.__name__, list(FUSIONS)[-1])
        if found[last] == function(FUSIONS["add, ReLU"]):
            del found[last]  # the same with two branches
        counts |= found
    assert written.keys() == counts.keys()
    for key, count in counts.items():
        seconds = [1e6 * count.least_seconds(LAYER, card) for card in VECTOR]
        expected = [*count, count.intensity, count.bytes * LAYER / 1e6, *seconds]
        assert written[key][:2] == expected[:2], key
        assert written[key][2] == pytest.approx(expected[2], abs=0.006), key
        assert written[key][3:] == pytest.approx(expected[3:], abs=0.6), key
        for card, flops in VECTOR.items():
            assert count.intensity < flops / Card.of(card).memory
    assert f"{settle_bytes(8, 2, 256) / 1e3:.0f} kB for 8 ranks" in ROOFLINE.read_text(encoding="utf-8")


def test_the_check_of_a_gpu_takes_the_counts_for_what_its_kernels_move():
    for case, name in zip(CASES, ("add, ReLU", "add, ReLU, two branches", "ReLU, max-pool"), strict=True):
        fusion = FUSIONS[name]
        assert (case.twice, case.pool) == (fusion.twice, fusion.pool)
        forward = "pool_kernel" if case.pool else "normalise_kernel"
        counts = {forward: normalise(fusion), "sums_kernel": sums(fusion), "gradient_kernel": gradient(fusion)}
        counts["statistics_kernel"] = statistics()
        assert {kernel: X * tensors for kernel, tensors in case.moved.items()} == {
            kernel: count.bytes for kernel, count in counts.items()
        }


def test_the_sums_over_resnet50_are_those_of_the_counts():
    found = elements("resnet50", 224)
    rows = {row[0]: [number(cell) for cell in row[1:]] for row in tables()[1]}
    expected = {
        name: [found[fusion], eager(fusion)[0], ours(fusion)[0], eager(fusion)[1], ours(fusion)[1]]
        for name, fusion in FUSIONS.items()
    }
    expected = {name: [n / 1e6, *(n * each / 1e6 for each in per)] for name, (n, *per) in expected.items()}
    expected["sum"] = [sum(column) for column in zip(*expected.values(), strict=True)]
    assert rows.keys() == expected.keys()
    for name, cells in rows.items():
        assert cells == pytest.approx(expected[name], abs=0.06), name
    _, *totals = expected["sum"]
    forward, backward = totals[0] - totals[1], totals[2] - totals[3]
    text = ROOFLINE.read_text(encoding="utf-8")
    assert f"So {forward:.1f} MB less forward and {backward:.1f} MB less backward" in text
    assert forward >= 59.5 and backward >= 44


def test_a_step_moves_the_counted_bytes():
    """Once backward, and once forward per branch; what has one number per channel or row adds little."""
    images, size = 64, 128
    tree = {
        "output": "/nowhere",
        "data": {"train": "/nowhere", "batch_size": images, "image_size": size},
        "model": {"backbone": "resnet18", "projector": {"width": 64}},
        "engine": {"precision": "bf16"},
    }
    with thin():
        part = walk(resolve("imagenet_100ep", tree), 1, Card.of("h100")).parts["normalisation"]
        found = elements("resnet18", size)
    expected = 0.0
    for fusion, count in found.items():
        forward, backward = ours(fusion)
        # The target branch saves no mask.
        expected += 2 * images * count * (2 * forward - fusion.mask + backward)
    assert part.read + part.written == pytest.approx(expected, rel=0.01)
