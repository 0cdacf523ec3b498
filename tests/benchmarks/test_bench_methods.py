"""The benchmark of methods: plain torch computes what ours does, every objective is measured, counts are true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import roofline_methods
import torch
from torch.utils.flop_counter import FlopCounterMode

from unigrad_fast import cli
from unigrad_fast.benchmarks.harness.timed import Timed
from unigrad_fast.benchmarks.measures import methods as bench_methods
from unigrad_fast.benchmarks.measures.methods import GROUPS, objectives
from unigrad_fast.benchmarks.measures.objective import draw_embeddings
from unigrad_fast.benchmarks.peers.objective import release

CPU = torch.device("cpu")
ROOFLINE = Path(__file__).resolve().parents[2] / "benchmarks/ROOFLINE.md"
# Ours that have the very gradient of their plain torch; the others have a simplified one, or other weights.
EXACT = {
    "moco",
    "moco, original",
    "row b",
    "simclr, original",
    "byol, original",
    "simsiam, original",
    "byol_directpred, original",
    "unigrad",
    "row f",
    "barlow_twins, original",
    "row g",
    "barlow_twins",
    "vicreg, original",
    "vicreg",
}


def gradient(objective: torch.nn.Module, online: list, target: list) -> torch.Tensor:
    release(online)
    found = objective(online=online, target=target)
    (found if isinstance(found, torch.Tensor) else found.loss).backward()
    return torch.cat([z.grad for z in online])


@pytest.mark.parametrize("group", GROUPS)
def test_plain_torch_has_the_gradient_of_ours(group):
    width, images = 12, 8
    made = objectives(group, width, 40, CPU)
    if group == "byol":  # with the same predictor
        first, norm, _, last = made["plain byol"].predictor
        for objective in list(made.values())[1:]:
            weights = {"inner": first, "norm": norm, "outer": last}
            kept = {"norm.running_mean": torch.zeros(3), "norm.running_var": torch.ones(3)}
            named = {f"{key}.{name}": p for key, layer in weights.items() for name, p in layer.named_parameters()}
            objective.predictor.load_state_dict({**named, **kept})
    dtype = torch.float32 if group == "unigrad" else torch.float64  # the authors' F is fp32
    plain, *ours = [objective.to(dtype) for objective in made.values()]
    near = {torch.float32: {"rtol": 1e-4, "atol": 1e-6}, torch.float64: {"rtol": 1e-7, "atol": 1e-10}}[dtype]
    for _ in range(2):  # what is kept has moved in the second
        online, target = draw_embeddings(images, width, CPU, dtype)
        expected = gradient(plain, online, target)
        for name, objective in zip(GROUPS[group], ours, strict=True):
            if name in EXACT:
                found = gradient(objective, online, target)
                torch.testing.assert_close(found, expected, **near, msg=lambda text, name=name: f"{name}: {text}")


def in_place_flops(_, left: tuple[int, int], right: tuple[int, int], **__: object) -> int:
    """Of `addmm_`, which torch does not count by itself; of the shapes of its arguments."""
    return 2 * left[0] * left[1] * right[1]


def counted(objective: torch.nn.Module, online: list, target: list) -> int:
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place_flops}) as counter:
        gradient(objective, online, target)
    return counter.get_total_flops()


@pytest.mark.parametrize(("images", "width"), [(8, 32), (64, 32)])
@pytest.mark.parametrize("group", GROUPS)
def test_flops_are_those_that_torch_counts(group, images, width):
    """But for what operators of ours do, which torch cannot look into: the update of F, and the product with it."""
    keys, block = 48, 128
    online, target = draw_embeddings(images, width, CPU, torch.float32)
    plain, *ours = objectives(group, width, keys, CPU).values()
    assert counted(plain, online, target) == roofline_methods.plain_flops(group, images, width, keys)
    rows = 2 * images
    for name, objective in zip(GROUPS[group], ours, strict=True):
        hidden = {"byol_directpred": rows * width * (width + block)}.get(group, 0)
        if group == "unigrad":
            hidden = rows * width * (width + block) + 2 * rows * width**2
        expected = roofline_methods.flops(group, "original" in name, images, width, keys, block)
        assert counted(objective, online, target) + hidden == expected, name


def test_the_written_counts_are_these():
    section = ROOFLINE.read_text(encoding="utf-8").partition("## Every method's objective")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    written = {first.strip(" `"): [float(cell.replace(",", "")) for cell in cells] for first, _, *cells in lines}
    names = {group: next(iter(named)) for group, named in GROUPS.items() if group != "byol"}
    assert written.keys() == set(names.values())
    for group, name in names.items():
        shape = (512, 2048, 65536)
        plain, ours = roofline_methods.plain_flops(group, *shape), roofline_methods.flops(group, False, *shape, 128)
        between = [roofline_methods.plain_between(group, *shape), roofline_methods.between(group, *shape)]
        if group in ("byol_directpred", "unigrad"):
            between[1] = 0
        expected = [plain / 1e9, ours / 1e9, *(4 * numbers / 2**20 for numbers in between)]
        assert written[name] == pytest.approx(expected, abs=0.06), name


def test_the_chosen_methods_are_measured_against_plain_torch_and_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    words = "--width 32 --images 4 --bank 64 --repetitions 2 --block_seconds 0 --most_seconds 0"
    command = ["bench", "methods", "--methods", "moco,barlow_twins", *words.split(), "--output", str(tmp_path)]
    assert cli.main(command) == 0
    rows = [json.loads(line) for line in (tmp_path / "methods.jsonl").read_text().splitlines()]
    shown = capsys.readouterr().out
    chosen = {group: GROUPS[group] for group in ("moco", "barlow_twins", "row g", "row h")}
    measured = {row["what"]: row for row in rows if row["unit"] == "ms"}
    assert set(measured) == {f"plain {group}" for group in chosen} | {name for each in chosen.values() for name in each}
    assert {row["what"] for row in rows if row["unit"] == "ratio"} == {
        f"{name} / plain {group}" for group, each in chosen.items() for name in each
    }
    for row in rows:
        assert row.items() >= {"width": 32, "images": 4, "rounds": 2, "precision": "fp32"}.items()
        assert 0 < row["least"] <= row["median"] <= row["most"] and row.keys() >= {"commit", "processor", "threads"}
        assert (row["method"], row["bank"]) in (("moco", 64), ("barlow_twins", None))
    gradients = 2 * 4 * 32 * 4 / 2**20
    assert all(row["memory_mib"] >= gradients for row in measured.values())
    assert all(name in shown for name in measured)


def test_a_ratio_is_above_one_where_ours_is_faster_and_takes_less():
    plain, ours = (Timed(name, lambda: None, lambda: None, CPU) for name in ("plain", "ours"))
    plain.milliseconds, ours.milliseconds, plain.memory, ours.memory = [30.0, 8.0], [10.0, 4.0], 2**22, 2**21
    *_, ratio = bench_methods.rows_of([plain, ours])
    assert ratio.items() >= {"least": 2.0, "most": 3.0, "memory_ratio": 2.0}.items()


def test_what_memory_cannot_hold_is_refused_before_it_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_methods, "free_bytes", lambda: 2**30)
    command = ["bench", "methods", "--methods", "moco", "--width", "8192", "--output", str(tmp_path / "new")]
    assert cli.main(command) == 2
    message = capsys.readouterr().err
    assert (
        "moco at width = 8192, images = 128, bank = 65536 takes about" in message and "give smaller values" in message
    )
    assert not (tmp_path / "new").exists()
