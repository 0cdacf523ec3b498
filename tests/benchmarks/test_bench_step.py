"""The benchmark of the training step: its plain loop trains as ours does, and it measures every variant."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_bench_scaling import thin_process

from unigrad_fast import cli
from unigrad_fast.benchmarks.harness.turns import Turns
from unigrad_fast.benchmarks.measures import step as bench_step
from unigrad_fast.benchmarks.measures import step_blocks as step_measure
from unigrad_fast.benchmarks.measures.step_blocks import Block, Case, StepWorker, Subject, configure, subjects
from unigrad_fast.benchmarks.peers.authors import authors_loss
from unigrad_fast.benchmarks.peers.step import simsiam_augmentation
from unigrad_fast.images import drawing
from unigrad_fast.images.drawn_pictures import draw_pictures
from unigrad_fast.objectives import UniGrad
from unigrad_fast.pipelines import Manifest

ROOT = Path(__file__).resolve().parents[2]


def test_authors_loss_has_our_objectives_gradient():
    generator = torch.Generator().manual_seed(0)
    objective = UniGrad(width=24)
    correlation = None
    for _ in range(3):  # the first step sets F, later ones move it
        values = torch.randn(4, 16, 24, generator=generator)
        targets = list(values[2:])
        theirs = [z.clone().requires_grad_() for z in values[:2]]
        loss, correlation = authors_loss(theirs, targets, correlation, objective.balance, objective.decay)
        loss.backward()
        ours = [z.clone().requires_grad_() for z in values[:2]]
        out = objective(online=ours, target=targets)
        out.loss.backward()
        torch.testing.assert_close(loss, out.metrics["surrogate"], rtol=1e-5, atol=1e-5)
        # Means of 32 products that come to 1/24 or so, of rounded factors: 2·(32 + 4)·2⁻²⁴/24 is 2e-7.
        torch.testing.assert_close(correlation, objective.correlation, rtol=1e-5, atol=2e-7)
        for their, our in zip(theirs, ours, strict=True):
            assert torch.linalg.vector_norm(their.grad - our.grad) <= 1e-5 * torch.linalg.vector_norm(their.grad)


def test_augmentation_gives_normalised_views_that_differ():
    augment = simsiam_augmentation(32)
    image = Image.fromarray(draw_pictures(np.random.default_rng(0), "plain-star", 1, 64)[0])
    first, second = augment(image), augment(image)
    assert first.shape == (3, 32, 32) and first.dtype == torch.float32
    assert not torch.equal(first, second)


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    return drawing.draw(tmp_path / "drawn", train_per_class=1, val_per_class=1, size=48) / "train"


@pytest.mark.parametrize(("count", "images"), [(4, 4), (25, 10)])
def test_images_are_linked_evenly_or_repeatedly(count, images, drawn, tmp_path):
    found = Manifest.from_folder(drawn)
    linked = Manifest.from_folder(bench_step.link_tree(found, tmp_path / "linked", count))
    assert len(linked) == count
    assert len({Path(linked.path(i)).resolve() for i in range(count)}) == images


def test_every_variant_is_measured_and_recorded(drawn, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step_measure, "new_process", thin_process)
    monkeypatch.setitem(bench_step.CASES, "tiny", Case("resnet18", 32, 8))
    turns = Turns(repetitions=1, steps=1)
    bench_step.main("tiny", drawn, None, None, "bf16", turns, tmp_path / "results", neighbour=True)
    rows = [json.loads(line) for line in (tmp_path / "results/step.jsonl").read_text().splitlines()]
    variants = [row for row in rows if row["unit"] == "images/s"]
    *alone, beside = [row["what"] for row in variants]
    assert alone == [f"{who}, {precision}" for who in ("authors", "ours", "ceiling") for precision in ("fp32", "bf16")]
    threads = f"{torch.get_num_threads()} thread{'' if torch.get_num_threads() == 1 else 's'}"  # the tests set it
    assert beside in [f"ours, {precision}, beside: {threads}" for precision in ("fp32", "bf16")]
    for row in variants:
        assert 0 < row["least"] <= row["median"] <= row["most"]
        assert row["peak_gib"] > 0.1
    ratios = {row["what"]: row["median"] for row in rows if row["unit"] == "ratio"}
    speed = {row["what"]: row["median"] for row in variants}
    assert ratios["ours / ceiling, fp32"] == pytest.approx(speed["ours, fp32"] / speed["ceiling, fp32"])
    assert len(ratios) == 6 and ratios[f"alone / {beside}"] > 0
    settings = {"backbone": "resnet18", "image_size": 32, "batch_size": 8, "repetitions": 1, "steps": 1, "warmup": 1}
    for row in rows:
        assert row.items() >= settings.items()
        assert row["images"] == f"10 images of {drawn.name}"
        assert row.keys() >= {"commit", "processor", "torch", "threads"}
    shown = capsys.readouterr().out
    assert all(row["what"] in shown for row in rows)


def test_median_and_range_are_over_the_rounds():
    blocks = {
        subject: [Block(speed * factor, 1.0 + speed, {"ms_data": speed}) for speed in (1.0, 4.0, 2.0)]
        for factor, subject in enumerate(subjects(("fp32", "bf16")), start=1)
    }
    rows = {row["what"]: row for row in bench_step.rows_of(blocks, shipped="bf16")}
    assert [rows["authors, bf16"][key] for key in ("median", "least", "most")] == [4.0, 2.0, 8.0]
    assert rows["ours, fp32"]["phases"] == {"ms_data": statistics.median((1.0, 4.0, 2.0))}
    assert rows["ours as shipped (bf16) / authors, fp32"]["median"] == 4.0


def test_fp16_is_measured_besides_fp32_and_what_pretrain_chooses(drawn, tmp_path, monkeypatch):
    def speeds(case, images, turns, report, measured: list[Subject]) -> dict[Subject, list[Block]]:
        return {subject: [Block(float(number), 1.0, {})] for number, subject in enumerate(measured, start=1)}

    monkeypatch.setattr(bench_step, "measure", speeds)
    arguments = ["--case", "resnet18", "--photographs", str(drawn), "--output", str(tmp_path)]
    assert cli.main(["bench", "step", "--precision", "fp16", *arguments]) == 0
    rows = {row["what"]: row["median"] for row in map(json.loads, (tmp_path / "step.jsonl").read_text().splitlines())}
    assert rows["ours / authors, fp16"] == rows["ours, fp16"] / rows["authors, fp16"]
    assert any(what.startswith("ours as shipped") for what in rows)


def in_fp16(images: Path) -> dict[str, float]:
    """By variant that trains, the loss scale after a step."""
    scales = {}
    for who in ("authors", "ours"):
        worker = StepWorker(who, configure(Case("resnet18", 16, 2), images, "fp16", least_steps=1, threads=1))
        try:
            worker.variant.step()
            scaler = worker.variant.scaler if who == "authors" else worker.variant.trainer.loss_scale
            scales[who] = scaler.get_scale() if who == "authors" else scaler.value.item()
        finally:
            worker.close()
    return scales


def test_what_trains_in_fp16_scales_the_loss(drawn, tmp_path):
    images = bench_step.link_tree(Manifest.from_folder(drawn), tmp_path / "linked", 4)
    with thin_process() as pool:
        assert min(pool.submit(in_fp16, images).result().values()) > 1


def test_one_of_several_processes_is_refused(monkeypatch, capsys):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert cli.main(["bench", "step"]) == 2
    assert "run it without torchrun" in capsys.readouterr().err


def test_variant_ends_when_its_parent_is_killed():
    code = """
import os
from functools import partial
from unigrad_fast.benchmarks.harness.processes import in_processes
from unigrad_fast.benchmarks.measures.step_blocks import StepWorker, new_process
from unigrad_fast.config import resolve
with in_processes({"ceiling": partial(StepWorker, "ceiling", resolve("cifar_subset"))}, new_process):
    print("started", flush=True)
    os._exit(0)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            # Its end comes only when the variant, which holds it too, is gone.
            assert parent.communicate(timeout=120)[0] == b"started\n"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
