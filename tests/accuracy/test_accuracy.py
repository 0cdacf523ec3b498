"""What the encoder learns, measured by kNN on real runs of the shipped recipes; minutes each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unigrad_fast.checkpoints.files import write_weights
from unigrad_fast.config import Config
from unigrad_fast.networks.encoder import build_encoder
from unigrad_fast.runtime import strict_yaml
from unigrad_fast.runtime.validation import validate

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


def unigrad_fast(*arguments) -> str:
    """Standard output of the command, which must end with status 0; it computes with the threads a user's would."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    result = subprocess.run(
        [sys.executable, "-m", "unigrad_fast", *map(str, arguments)],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def train_and_judge(recipe: str, data: Path, run: Path, record, *arguments) -> dict[str, float]:
    """kNN accuracy in percent of raw pixels, colour histogram, untrained and trained encoder."""
    folders = ("--data.train", data / "train", "--data.val", data / "val", "--output", run)
    unigrad_fast("pretrain", "--recipe", recipe, *folders, *arguments)
    unigrad_fast("evaluate", "knn", run, "--baselines", "true")
    (result,) = (run / "evaluation").glob("knn-*.json")
    accuracy = json.loads(result.read_text())["accuracy"]
    summary = json.loads((run / "summary.json").read_text())
    for name, value in accuracy.items():
        record(f"{name}, kNN %", round(value, 2))
    record("minutes", round(summary["wall_seconds"] / 60, 1))
    record("images/s", round(summary["images_per_second"]))
    record("threads", len(os.sched_getaffinity(0)))
    if summary.get("effective_rank") is not None:  # of methods that keep F
        record("effective rank", round(summary["effective_rank"], 1))
    record("feature std", round(summary["feature_std"], 3))
    return accuracy


def warnings(run: Path) -> list[str]:
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [event["message"] for event in events if event["event"] == "warning"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("accuracy")


def draw_images(folder: Path, seed: int) -> Path:
    """The built-in images of a seed; drawn once."""
    unigrad_fast("data", "synth", folder / f"images-{seed}", "--seed", seed)
    return folder / f"images-{seed}"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_beats_all_baselines_by_20_points(folder, seed, record_property):
    run = folder / f"run-{seed}"
    accuracy = train_and_judge("quickstart", draw_images(folder, seed), run, record_property)
    trained = accuracy.pop("trained encoder")
    assert accuracy.keys() == {"raw pixels", "colour histogram", "untrained encoder"}
    assert trained >= max(accuracy.values()) + 20
    assert warnings(run) == []


def test_the_run_of_the_quickstart_is_judged_by_every_command(folder, record_property):
    """By each far above chance, 10 %; the run is that of seed 0 above."""
    run, images = folder / "run-0", draw_images(folder, 0)
    if not (run / "summary.json").exists():
        train_and_judge("quickstart", images, run, lambda name, value: None)
    query = next((images / "val").rglob("*.jpg"))
    for words in (
        ("knn", run, "--grid", "true", "--choose", "train"),
        ("linear", run),
        ("linear", run, "--protocol", "sweep", "--batch_size", "32", "--base_lr", "3", "--choose", "train"),
        ("finetune", run, "--fraction", "0.01", "--batch_size", "16", "--seeds", "3"),
        ("finetune", run, "--fraction", "0.1", "--batch_size", "32", "--seeds", "3"),
        ("features", run),
        ("confusion", run),
        ("map", run),
        ("retrieve", run, query),
    ):
        unigrad_fast("evaluate", *words)
    for name in ("knn-grid", "linear-quick", "linear-sweep", "finetune-twist-0.01", "finetune-twist-0.1"):
        result = json.loads((run / f"evaluation/{name}-epoch12.json").read_text())
        record_property(f"{name}, %", round(result["accuracy"], 2))
        assert result["accuracy"] > 25
    for name in ("confusion", "map", "retrieve"):
        assert list((run / "evaluation").glob(f"{name}*.png"))
    assert "fine-tuning, twist" in unigrad_fast("evaluate", "list", run)


def test_without_the_negative_term_the_quickstart_collapses(folder, record_property):
    """It warns, and stays far below what the same run reaches with the term (the test above)."""
    run = folder / "run-collapsed"
    images = draw_images(folder, 0)
    accuracy = train_and_judge("quickstart", images, run, record_property, "--objective.balance", "0")
    trained = accuracy.pop("trained encoder")
    (warning,) = warnings(run)
    assert "collapsing" in warning
    assert trained < max(accuracy.values()) + 10


def test_the_cifar_subset_beats_pixels_by_4_and_the_untrained_encoder_by_10_points(
    cifar_subset, folder, record_property
):
    rows = []
    for seed in (0, 1, 2):

        def record(name, value, seed=seed):
            record_property(f"seed {seed}: {name}", value)

        rows.append(train_and_judge("cifar_subset", cifar_subset, folder / f"cifar-{seed}", record, "--seed", seed))
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    record_property("mean of the trained encoders, kNN %", round(mean["trained encoder"], 2))
    assert mean["trained encoder"] >= mean["untrained encoder"] + 10
    assert mean["trained encoder"] >= mean["raw pixels"] + 4


def test_fine_tuned_on_few_labels_of_the_cifar_subset_the_encoder_beats_random_weights(
    cifar_subset, folder, record_property
):
    """With 80 and with 800 labels, over three seeds; the run is that of seed 0 above."""
    run, untrained = folder / "cifar-0", folder / "cifar-untrained"
    if not (run / "summary.json").exists():
        train_and_judge("cifar_subset", cifar_subset, run, lambda name, value: None)
    config = validate(Config, strict_yaml.read((run / "config.yaml").read_text()))
    untrained.mkdir()
    shutil.copy(run / "config.yaml", untrained)
    encoder = build_encoder(config.model, config.seed, torch.device("cpu"))
    tensors = {f"online.{name}": tensor for name, tensor in encoder.state_dict().items()}
    write_weights(untrained, tensors, 0, 0.0, config.model_dump(mode="json"))
    for fraction in ("0.01", "0.1"):
        found = {}
        for name, weights in (("trained", run), ("random", untrained)):
            options = ("--fraction", fraction, "--batch_size", "32", "--seeds", "3")
            unigrad_fast("evaluate", "finetune", weights, *options)
            (result,) = (weights / "evaluation").glob(f"finetune-twist-{fraction}-*.json")
            found[name] = json.loads(result.read_text())
            record_property(f"{fraction} of the labels, {name} weights, %", round(found[name]["accuracy"], 2))
            record_property(f"{fraction}, {name}, deviation", round(found[name]["deviation"]["accuracy"], 2))
        for trained, random in zip(*(found[name]["results"] for name in ("trained", "random")), strict=True):
            assert trained["accuracy"] > random["accuracy"]
