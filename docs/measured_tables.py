"""The tables of measurements on the pages, generated from the rows that the comment above each table names.

    python docs/measured_tables.py    # rewrites every table from its rows

A table is between `<!-- measured: NAME FILE TIME ... -->` and `<!-- end -->`; the comment may name several files. FILE
is one of `benchmarks/results`, where TIME or the beginning of it selects the rows of one measurement, or
`tests/slow-results.md`, which has the newest row of each test. A test compares the tables of the pages with those
generated from the rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW = "tests/slow-results.md"
TABLE = re.compile(r"(<!-- measured: (\w+)((?: [^\s>]+)+) -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
Rows = list[dict]
Table = list[list[str]]


def made(name: str, source: list[str]) -> str:
    """The Markdown of a table, from the rows that its comment names."""
    head, *lines = TABLES[name](rows(source))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines]) + "\n"


def rows(source: list[str]) -> Rows:
    """The rows of `FILE TIME ...`, in this order; KeyError if a file has no rows of a time."""
    found, picked, file = [], [], ""
    for word in source:
        if "/" in word:
            file = word
            if file == SLOW:
                picked += slow_rows()
            else:
                found = [json.loads(line) for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
            continue
        of_this = [row for row in found if row["time"].startswith(word)]
        if not of_this:
            raise KeyError(f"{file} has no row of {word}")
        picked += of_this
    return picked


def slow_rows() -> Rows:
    """Each row as a dictionary of its columns; `noted` has the values that the test noted."""
    lines = [line for line in (ROOT / SLOW).read_text(encoding="utf-8").splitlines() if line.startswith("| tests/")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    keys = ("test", "result", "seconds", "noted", "time", "commit", "machine")
    found = [dict(zip(keys, each, strict=True)) for each in cells]
    # What is noted: "name: value, name: value"; a name may have a comma or a colon, a value has neither.
    return [row | {"noted": dict(re.findall(r"(?:^|, )(\D.*?): (-?[\d.]+)(?=,|$)", row["noted"]))} for row in found]


def one(found: Rows, **wanted) -> dict:
    """The row with these values."""
    (row,) = [row for row in found if all(row[key] == value for key, value in wanted.items())]
    return row


def groups(found: Rows, *keys: str) -> Iterator[Rows]:
    """Rows with the same values of these keys."""
    alike: dict[tuple, Rows] = {}
    for row in found:
        alike.setdefault(tuple(row[key] for key in keys), []).append(row)
    yield from alike.values()


def spread(row: dict) -> str:
    return f"{row['median']:.2f} ({row['least']:.2f} to {row['most']:.2f})"


def digits(value: float) -> str:
    """Milliseconds with three digits, or with all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def percent(value: str) -> str:
    """One digit after the decimal point, halves rounded up."""
    return str(Decimal(value).quantize(Decimal("0.1"), ROUND_HALF_UP))


FEATURES = ("raw pixels", "colour histogram", "untrained encoder", "trained encoder")


def accuracy(found: Rows) -> Table:
    tests = {row["test"].partition("::")[2]: row["noted"] for row in found}
    quick = "test_the_quickstart_beats_all_baselines_by_20_points"
    subset = tests["test_the_cifar_subset_beats_pixels_by_4_and_the_untrained_encoder_by_10_points"]
    of_seed = [
        {
            name.removeprefix(f"seed {seed}: "): value
            for name, value in subset.items()
            if name.startswith(f"seed {seed}:")
        }
        for seed in range(3)
    ]
    lines = [
        ("quickstart, images of seed 0", tests[f"{quick}[0]"]),
        (
            "quickstart, images of seed 0, without the negative term",
            tests["test_without_the_negative_term_the_quickstart_collapses"],
        ),
        ("quickstart, images of seed 1", tests[f"{quick}[1]"]),
        ("quickstart, images of seed 2", tests[f"{quick}[2]"]),
        ("CIFAR-10 subset (8,000 + 2,000 images), seed 0", of_seed[0]),
        ("CIFAR-10 subset, seed 1", of_seed[1]),
        ("CIFAR-10 subset, seed 2", of_seed[2]),
    ]
    table = [["run", "raw pixels", "colour histogram", "untrained", "trained", "minutes", "images/s"]]
    for name, noted in lines:
        shown = [percent(noted[f"{feature}, kNN %"]) for feature in FEATURES]
        bold = f"**{shown[3]}**" if "without" not in name else shown[3]
        table.append([name, *shown[:3], bold, noted["minutes"], noted["images/s"]])
    return table


def step(found: Rows) -> Table:
    """A column per setting."""
    settings = list(groups(found, "backbone", "image_size", "batch_size"))
    network = {"resnet50": "ResNet-50", "resnet18": "ResNet-18"}

    def line(name: str, cell: Callable[[Rows], str]) -> list[str]:
        return [name, *(cell(setting) for setting in settings)]

    def speed(what: str) -> Callable[[Rows], str]:
        return lambda setting: f"{one(setting, what=what)['median']:.1f}"

    def ratio(what: str) -> Callable[[Rows], str]:
        return lambda setting: spread(one(setting, what=what))

    def peaks(setting: Rows) -> str:
        return " / ".join(f"{one(setting, what=what)['peak_gib']:.2f}" for what in ("ours, bf16", "authors, fp32"))

    return [
        line(
            "",
            lambda setting: (
                f"{network[setting[0]['backbone']]}, {setting[0]['image_size']} px, batch {setting[0]['batch_size']}"
            ),
        ),
        line("authors, fp32 (as published)", speed("authors, fp32")),
        line("authors, bf16", speed("authors, bf16")),
        line("ours, fp32", speed("ours, fp32")),
        line("ours, bf16 (as shipped)", lambda setting: f"**{speed('ours, bf16')(setting)}**"),
        line("ours as shipped / authors as published", ratio("ours as shipped (bf16) / authors, fp32")),
        line("ours / authors, both bf16", ratio("ours / authors, bf16")),
        line("ours / authors, both fp32", ratio("ours / authors, fp32")),
        line("ours / ceiling, bf16", ratio("ours / ceiling, bf16")),
        line("peak memory, ours in bf16 / authors in fp32, GiB", peaks),
    ]


def beside(found: Rows) -> Table:
    """A step beside a program that keeps a core busy."""
    alone = one(found, what="ours, bf16")
    table = [["ResNet-18, 96 px, batch 64, bf16", "images/s", "times slower"], ["alone, 2 threads", spread(alone), ""]]
    for threads in ("1 thread", "2 threads"):
        here, ratio = (one(found, what=f"{what}ours, bf16, beside: {threads}") for what in ("", "alone / "))
        table.append([f"one core busy, {threads}", spread(here), spread(ratio)])
    return table


def loader(found: Rows) -> Table:
    """Two columns per set of views."""
    views = list(groups(found, "views"))
    table = [["", "two views of 224 px: images/s", "CPU ms", "2 × 224 + 6 × 96 px: images/s", "CPU ms"]]
    for what, name in (
        ("ours", "ours"),
        ("torchvision v1", "torchvision v1 (on Pillow)"),
        ("torchvision v2, Pillow", "torchvision v2 on Pillow"),
        ("torchvision v2, tensors", "torchvision v2 on tensors"),
        ("DALI, decoding alone", "decoding alone, DALI"),
        ("Pillow, decoding alone", "decoding alone, Pillow"),
    ):
        each = [one(setting, what=what) for setting in views]
        cells = [text for row in each for text in (f"{row['median']:,.0f}", f"{row['cpu_ms_median']:.1f}")]
        table.append([name, *(f"**{cell}**" if what == "ours" else cell for cell in cells)])
    best = [one(setting, what="images/s, ours / torchvision v1, its best") for setting in views]
    table.append(["images/s, ours / torchvision at its best", spread(best[0]), "", spread(best[1]), ""])
    return table


def sources(found: Rows) -> Table:
    """A row per source of images."""
    table = [["source", "batches: images/s", "over files", "bytes alone, µs per image", "time of files over its own"]]
    for what in ("files", "hf", "parquet", "dataset", "pixels"):
        ratios = ["", ""]
        if what != "files":
            ratios = [spread(one(found, what=f"images/s, {what} / files"))]
            ratios.append(spread(one(found, what=f"bytes alone, time of files / {what}")))
        speed, alone = one(found, what=what), one(found, what=f"{what}, bytes alone")
        table.append([f"`{what}`", f"{speed['median']:,.0f}", ratios[0], f"{alone['median']:,.0f}", ratios[1]])
    return table


def objective(found: Rows) -> Table:
    """A row per width and number of images."""
    table = [
        [
            *("C", "N", "authors, ms", "torch, ms", "ours, ms", "over authors", "over torch"),
            "memory: authors, torch, ours",
            "ours with u·F in bf16, ms (relative error of dz)",
        ]
    ]
    for rows_of in groups(found, "width", "images"):
        plain = [row for row in rows_of if row["what"].startswith("torch")]
        torch = min(plain, key=lambda row: row["median"])
        authors, ours, low = (one(rows_of, what=f"{what}") for what in ("authors, fp32", "ours, fp32", "ours, bf16"))
        over = [one(rows_of, what=f"ours, fp32 / {against['what']}") for against in (authors, torch)]
        table.append(
            [
                *(f"{rows_of[0]['width']:,}", str(rows_of[0]["images"])),
                *(digits(row["median"]) for row in (authors, torch)),
                f"**{digits(ours['median'])}**",
                *map(spread, over),
                ", ".join(f"{row['memory_nc']:.0f}" for row in (authors, torch, ours)),
                f"{digits(low['median'])} ({low['gradient_error']:.0e})",
            ]
        )
    return table


CONVOLUTIONS = {
    "512 channels, 1 x 1, 128 images": "512 channels, 1×1 pixels, 128 images",
    "512 channels, 2 x 2, 128 images": "512 channels, 2×2 pixels",
    "256 channels, 2 x 2, 128 images": "256 channels, 2×2 pixels",
    "256 channels, 4 x 4, 128 images": "256 channels, 4×4 pixels (torch's is used)",
    "ResNet-18 step, 128 images, 32 px": "step of ResNet-18, 128 images, 32 px, without data",
    "ResNet-18 step, 64 images, 48 px": "step of ResNet-18, 64 images, 48 px, without data",
}


def methods(found: Rows) -> Table:
    """Speed-up of each objective over plain torch; one column per width and number of images."""
    ratios = [row for row in found if row["unit"] == "ratio"]
    shapes = sorted({(row["width"], row["images"]) for row in ratios})
    head = ["objective", "plain torch", *(f"C {width:,}, N {images}" for width, images in shapes)]
    table = [head]
    for row in groups(ratios, "what"):
        ours, _, plain = row[0]["what"].partition(" / plain ")
        of_shape = {(each["width"], each["images"]): each for each in row}  # the newest of a shape
        table.append([ours, plain, *(spread(of_shape[shape]) for shape in shapes)])
    return table


def evaluate(found: Rows) -> Table:
    """Speed of evaluation, and its two ratios."""
    shown = [f"{digits(row['median'])} images/s" if row["unit"] == "images/s" else spread(row) for row in found]
    return [
        ["", found[0]["backbone"] + f", {found[0]['image_size']} px"],
        *map(list, zip((row["what"] for row in found), shown, strict=True)),
    ]


def every_method(found: Rows) -> Table:
    """kNN accuracy after six epochs, by method and form."""
    test = "tests/accuracy/test_every_method.py::test_six_epochs_bring_the_encoder_above_the_untrained_one"
    table = [["method", "form", "untrained", "trained", "minutes", "commit"]]
    for row in found:
        name, _, case = row["test"].partition("[")
        if name == test:
            form, _, method = case.rstrip("]").partition("-")
            before, after = (percent(row["noted"][f"{which} encoder, kNN %"]) for which in ("untrained", "trained"))
            table.append([f"`{method}`", form, before, f"**{after}**", row["noted"]["minutes"], row["commit"]])
    return table


def small_convolution(found: Rows) -> Table:
    head = ["forward and backward"]
    for dtype in ("bf16", "fp32"):
        head += [f"{dtype}: torch, ms", "ours, ms", "ratio"]
    table = [head]
    for what, name in CONVOLUTIONS.items():
        cells = []
        for dtype in ("bfloat16", "float32"):
            row = one(found, what=what, dtype=dtype)
            cells += [digits(row["torch_ms"]), digits(row["product_ms"]), f"{row['torch_ms'] / row['product_ms']:.1f}"]
        table.append([name, *cells])
    return table


def dry_step(found: Rows) -> Table:
    """Counted launches, traffic and memory of a step, and its expected time."""
    table = [
        [
            "GPUs, images on each",
            *("counted: launches", "counted: collectives", "counted: TFLOP per GPU", "counted: peak GiB"),
            *("expected: card, ms", "host, ms: launched, replayed", "expected: images/s (range)"),
        ]
    ]
    for row in found:
        parts = row["parts"].values()
        collectives = sum(kind["count"] for kind in row["collectives"].values())
        images = row["ranks"] * row["images_per_rank"]
        speed, slow, fast = (f"{round(images / each, -2):,.0f}" for each in (row["seconds"], *row["range"]))
        card, *host = (
            f"{1e3 * sum(row[key].values()):.1f}" for key in ("card_seconds", "host_seconds", "host_seconds_replayed")
        )
        multi_crop = ", multi-crop" if "multicrop" in row["recipe"] else ""
        table.append(
            [
                f"{row['ranks']} × {row['counted_for'].upper()}, {row['images_per_rank']}{multi_crop}",
                f"{sum(part['launches'] for part in parts) + collectives:,}",
                str(collectives),
                f"{sum(part['flops'] for part in parts) / 1e12:.2f}",
                f"{sum(row['peak'].values()) / 2**30:.1f}",
                card,
                ", ".join(host),
                f"{speed} ({slow} to {fast})",
            ]
        )
    return table


def starts(found: Rows) -> Table:
    """The time in which 1.3 million files are listed."""
    table = [["start with 1.3 million files", "seconds", "peak memory, GiB"]]
    tree = [row for row in found if row["images"] == 1_300_000]
    for what, name in (("tree, cold", "without a cached listing"), ("tree, cached", "with a cached listing")):
        each = [row for row in tree if row["what"] == what]
        seconds = sorted(row["seconds"] for row in each)
        shown = " to ".join(dict.fromkeys(f"{value:.1f}" for value in (seconds[0], seconds[-1])))
        table.append([name, shown, f"{max(row['peak_gib'] for row in each):.2f}"])
    return table


def wide(found: Rows) -> Table:
    """Memory of runs with wide projectors; the name of a test contains width, layers, stage and placement."""
    table = [["C", "layers", "stage", "F", "counted", "peak in a step", "more while saving"]]
    cases = [(re.search(r"wide_projector\[(.*)\]", row["test"]), row["noted"]) for row in found]
    for setting, noted in sorted((match[1].split("-"), noted) for match, noted in cases if match):
        table.append([*setting, noted["GiB of a rank, counted"], noted["in a step"], noted["more in a save"]])
    return sorted(table, key=lambda cells: (cells[0] != "C", len(cells[0]), cells))


def summary(found: Rows) -> Table:
    """Accuracy and speed for the README."""
    quick = [
        row["noted"] for row in found if "test_the_quickstart_beats_all_baselines_by_20_points" in row.get("test", "")
    ]
    trained, untrained = ([float(noted[f"{of} encoder, kNN %"]) for noted in quick] for of in ("trained", "untrained"))
    minutes = [float(noted["minutes"]) for noted in quick]
    steps = [row for row in found if row.get("backbone") == "resnet50"]
    speed = {row["what"]: row["median"] for row in steps}
    views = {row["what"]: row["median"] for row in found if row.get("views") == "2x224"}
    alone = {row["what"]: row["median"] for row in found if row.get("width") == 8192}
    card = dict(zip(*dry_step([row for row in found if "collectives" in row]), strict=True))
    return [
        ["", "what", "figure"],
        [
            "measured",
            "quickstart, images of 3 seeds: kNN accuracy after training (before); chance is 10 %",
            f"{min(trained):.0f} to {max(trained):.0f} % ({min(untrained):.0f} to {max(untrained):.0f} %), in "
            f"{min(minutes):.1f} to {max(minutes):.1f} minutes of training",
        ],
        [
            "measured",
            "a training step including its data, ResNet-50, 224 px, images/s",
            f"{speed['ours, bf16']:.1f} in bf16, as shipped, {speed['ours / ceiling, bf16']:.2f} of the ceiling; "
            f"authors' formulation {speed['authors, fp32']:.1f} in fp32, as published (ours is "
            f"{speed['ours as shipped (bf16) / authors, fp32']:.2f} times as fast), and {speed['authors, bf16']:.1f} "
            f"in bf16 ({speed['ours / authors, bf16']:.2f} times)",
        ],
        [
            "measured",
            "decoding and augmentation, two views of 224 px, images/s",
            f"{views['ours']:.0f}; torchvision at its best {views['torchvision v1']:.0f}",
        ],
        [
            "measured",
            "the objective alone, 512 embeddings of width 8192, fp32, ms",
            f"{alone['ours, fp32']:,.0f}; authors' formulation {alone['authors, fp32']:,.0f}, plain torch at its best "
            f"{min(alone['torch, fp32'], alone['torch compiled, fp32']):,.0f}",
        ],
        [
            "counted",
            "a step of ResNet-50 on 8 × H100, 128 images each, on tensors without content",
            f"{card['counted: launches']} launches, {card['counted: collectives']} collectives, "
            f"{card['counted: peak GiB']} GiB of memory per GPU; expected from these counts: "
            f"{card['expected: images/s (range)']} images/s",
        ],
        [
            "needs GPUs",
            "everything on a GPU, and on more than one machine: speed, memory, NCCL, GPU decoding, the Triton kernels",
            "not measured",
        ],
        ["needs GPUs", "ImageNet accuracy; the paper has 70.3 % (linear evaluation, 100 epochs)", "not reproduced"],
    ]


TABLES: dict[str, Callable[[Rows], Table]] = {
    "accuracy": accuracy,
    "step": step,
    "beside": beside,
    "loader": loader,
    "sources": sources,
    "objective": objective,
    "small_convolution": small_convolution,
    "dry_step": dry_step,
    "starts": starts,
    "summary": summary,
    "wide": wide,
    "methods": methods,
    "evaluate": evaluate,
    "every_method": every_method,
}


COMMON = ("time", "commit", "processor", "matrix_units", "cores", "card", "python", "torch")


def all_rows() -> str:
    """All rows of `benchmarks/results`, one table per measurement, with machine and commit."""
    parts = []
    for file in sorted((ROOT / "benchmarks/results").glob("*.jsonl")):
        parts.append(f"\n### {file.name}\n")
        found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for alike in groups(found, "time"):
            parts.append(f"\n{', '.join(f'{key} {alike[0][key]}' for key in COMMON)}:\n")
            keys = [key for key in dict.fromkeys(key for row in alike for key in row) if key not in COMMON]
            keys = [key for key in keys if not any(isinstance(row.get(key), dict) for row in alike)]
            lines = [keys, ["---"] * len(keys), *([_cell(row.get(key)) for key in keys] for row in alike)]
            parts += [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([*parts, "", "Accuracies and times of the [slow tests](../tests/slow-results.md).", ""])


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def written_anew(text: str) -> str:
    """The text of a page with every table generated from its rows."""
    return TABLE.sub(lambda match: match[1] + made(match[2], match[3].split()), text)


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := written_anew(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: written anew")


if __name__ == "__main__":
    main()
