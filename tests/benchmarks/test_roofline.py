"""The written prediction follows the counts."""

from pathlib import Path

import pytest

from unigrad_fast.benchmarks.counts.roofline import Design, Peaks, launches

ROOFLINE = Path(__file__).resolve().parents[2] / "benchmarks/ROOFLINE.md"
CARDS = {"H100": Peaks({"bf16": 798e12}, 3.0e12), "A100": Peaks({"bf16": 312e12}, 2.0e12)}
DESIGN = Design("bf16", "bf16", "bf16", 128)
NAMES = {
    "unit_embeddings": "unit embeddings",
    "update_correlation": "update",
    "correlation_product": "product",
    "embedding_gradient": "gradient",
    "backward": "backward",
}


def plain_torch(M: int, C: int) -> dict[str, tuple[int, int]]:
    """FLOPs and bytes of what plain torch's best way in bf16 does with C×C matrices, launch by launch.

    `addmm` reads and writes F in fp32 and computes all of it, the cast reads F and writes a bf16 copy, `mm` reads the
    copy. The passes over [M, C] arrays before, between and after are left out.
    """
    return {
        "addmm": (2 * M * C * C, 8 * C * C + 2 * M * C),
        "cast": (0, 6 * C * C),
        "mm": (2 * M * C * C, 2 * C * C + (2 + 4) * M * C),
    }


def table() -> dict[tuple[str, str], list[str]]:
    """Cells by (C and N, launch) of the table of expected times."""
    text = ROOFLINE.read_text(encoding="utf-8").partition("## Expected times")[2]
    rows, shape = {}, ""
    for line in text.splitlines():
        cells = [cell.strip().replace("*", "").replace(",", "") for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 9 and cells[1] != "launch" and "---" not in cells[1]:
            shape = cells[0] or shape
            rows[shape, cells[1]] = cells[2:]
    return rows


@pytest.mark.parametrize(("width", "images"), [(16384, 512), (16384, 128), (8192, 512), (2048, 512)])
def test_the_expected_times_are_those_of_the_counts(width, images):
    rows = table()
    total = rows[f"{width} {images}", "step"]
    for card, place in (("H100", 3), ("A100", 5)):
        assert float(total[place]) == pytest.approx(CARDS[card].least_seconds(DESIGN, images, width) * 1e6, abs=1)
    for kernel, rows_of_kernel in launches(images).items():
        cells = rows.get((f"{width} {images}", NAMES[kernel]))
        if cells is None:  # only totals are written for this shape
            continue
        flops, moved = DESIGN.flops(kernel, rows_of_kernel, width), DESIGN.bytes(kernel, rows_of_kernel, width)
        assert float(cells[0].replace("–", "0")) == pytest.approx(flops / 1e9, abs=0.6)
        assert float(cells[1]) == pytest.approx(moved / 1e6, abs=0.6)
        for card, place in (("H100", 3), ("A100", 5)):
            peaks = CARDS[card]
            least = max(flops / peaks.flops["bf16"], moved / peaks.copy) * 1e6
            assert float(cells[place]) == pytest.approx(least, abs=0.6)


def test_the_times_of_plain_torch_are_those_of_its_count():
    section = ROOFLINE.read_text(encoding="utf-8").partition("## The best of plain torch")[2].partition("\n## ")[0]
    rows = [
        [cell.strip(" *") for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"
    ]
    written = {
        row[0].partition(":")[0].strip("`"): [float(cell.replace(",", "")) for cell in row[3:]] for row in rows[2:]
    }
    peaks = CARDS["H100"]
    for place, (width, images) in enumerate([(16384, 512), (16384, 128), (8192, 512), (2048, 512)]):
        least = {
            name: max(flops / peaks.flops["bf16"], moved / peaks.copy) * 1e6
            for name, (flops, moved) in plain_torch(2 * images, width).items()
        }
        ours = {
            kernel: max(
                DESIGN.flops(kernel, M, width) / peaks.flops["bf16"], DESIGN.bytes(kernel, M, width) / peaks.copy
            )
            for kernel, M in launches(images).items()
        }
        both = (ours["update_correlation"] + ours["correlation_product"]) * 1e6
        assert {name: times[place] for name, times in written.items()} == pytest.approx(
            {**least, "sum": sum(least.values()), "ours": both}, abs=0.6
        )
