"""The main job from the command line: real JPEG files, DALI, DeepSpeed, torchrun; what it writes and says."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from command_process import CommandProcess, command, command_on_two_ranks
from drawn_images import draw_tree

from unigrad_fast.checkpoints.files import Reader, latest

SMALL = """
recipe: cifar_subset
data: {batch_size: 32, image_size: 16, threads: 1}
model: {projector: {width: 32}}
schedule: {epochs: 2}
evaluation: {every: 1}
telemetry: {every: 1, effective_rank_every: 1, tensorboard: false}
engine: {precision: fp32}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """train (96 images), val (32), flat (40 without labels)."""
    root = tmp_path_factory.mktemp("data")
    draw_tree(root / "train", per_class=48)
    draw_tree(root / "val", per_class=16)
    (root / "flat").mkdir()
    for number, file in enumerate(sorted((root / "train").rglob("*.jpg"))[:40]):
        shutil.copy(file, root / "flat" / f"{number}.jpg")
    (root / "small.yaml").write_text(SMALL)
    return root


def pretrain(data: Path, output: Path, *arguments, launcher=None, is_thin: bool = True) -> subprocess.CompletedProcess:
    given = ("--recipe", data / "small.yaml", "--output", output, "--data.train", data / "train", *arguments)
    return command("pretrain", *given, launcher=launcher, is_thin=is_thin)


def events(run: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    run = tmp_path_factory.mktemp("runs") / "run"
    given = ("--data.val", data / "val", "--telemetry.tensorboard", "true")
    return run, pretrain(data, run, *given, launcher=(), is_thin=False)


def test_a_run_ends_well_and_writes_its_files(finished):
    run, result = finished
    assert result.returncode == 0, result.stdout + result.stderr
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "metrics.jsonl", "checkpoints", "curves.png", "curves.svg", "tensorboard", "summary.json",
        "log.txt", ".lock"
    }  # fmt: skip
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_says_what_it_does_and_nothing_else(finished):
    _, result = finished
    assert result.stderr == ""
    assert "resnet18, projector 3 x 32" in result.stdout
    assert "Pretraining finished" in result.stdout
    assert "unigrad-fast evaluate knn" in result.stdout
    assert "DeepSpeed" not in result.stdout


def test_every_reported_metric_is_in_the_file(finished):
    run, _ = finished
    train = events(run, "train")
    assert [event["step"] for event in train] == list(range(1, 7))
    names = [
        "loss",
        "positive_cosine",
        "negative_cosine",
        "negative_term",
        "feature_std",
        "effective_rank",
        "gradient_norm",
        "lr",
        "target_momentum",
    ]
    for event in train:
        assert all(isinstance(event[name], float) for name in names)
        assert event["skipped_steps"] == 0 and event["memory_gib"] > 0
    assert all(event["images_per_second"] > 0 and 0 <= event["data_wait_share"] <= 1 for event in train[2:])
    assert train[-1]["lr"] == pytest.approx(1e-3 * max(event["lr"] for event in train), rel=0.01)
    assert train[-1]["target_momentum"] == 1.0


def test_the_encoder_is_judged_before_during_and_after(finished):
    run, _ = finished
    assert [(event["step"], event["epoch"]) for event in events(run, "knn")] == [(0, 0.0), (3, 1.0), (6, 2.0)]
    assert all(
        e["k"] == 20 and e["temperature"] == 0.1 and e["branch"] == "online backbone" for e in events(run, "knn")
    )


def test_evaluate_reproduces_the_accuracy_of_the_run_and_of_its_untrained_encoder(finished):
    run, _ = finished
    result = command("evaluate", "knn", run, "--baselines", "true")
    assert result.returncode == 0, result.stderr
    accuracy = json.loads((run / "evaluation/knn-epoch2.json").read_text())["accuracy"]
    during = [event["accuracy"] for event in events(run, "knn")]
    assert accuracy["untrained encoder"] == during[0]
    assert accuracy["trained encoder"] == during[-1]
    components = json.loads((run / "evaluation/knn-epoch2.json").read_text())["principal_components"]
    assert [components[f"{name} encoder"] for name in ("untrained", "trained")] == [
        event["principal_components"] for event in (events(run, "knn")[0], events(run, "knn")[-1])
    ]
    assert {"raw pixels", "colour histogram"} < accuracy.keys()
    for name, value in accuracy.items():
        assert name in result.stdout and f"{value:.2f}" in result.stdout
    assert "epoch 2" in result.stdout and "online backbone" in result.stdout


def test_the_saved_configuration_repeats_the_run(finished, tmp_path):
    run, _ = finished
    again = command("pretrain", "--recipe", run / "config.yaml", "--output", tmp_path / "again")
    assert again.returncode == 0, again.stderr
    one, other = (Reader(latest(folder)) for folder in (run, tmp_path / "again"))
    assert one.about["step"] == other.about["step"] == 6 and one.about["epoch"] == 2
    assert one.names == other.names
    assert {name.split(".")[0] for name in one.names} == {"online", "momentum", "target", "objective", "gate"}
    for name in one.names:
        assert torch.equal(one.tensor(name), other.tensor(name)), name


def test_two_ranks_under_torchrun(data, tmp_path):
    launcher = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--module")
    given = ("--data.val", data / "val", "--schedule.epochs", "1")
    result = pretrain(data, tmp_path / "run", *given, launcher=launcher)
    assert result.returncode == 0, result.stderr
    assert "float32 on 2 x cpu" in result.stdout
    assert result.stdout.count("Pretraining finished") == 1
    assert len(events(tmp_path / "run", "train")) == 3
    # Reported metrics are means over ranks, so the first step reports what one rank would.
    alone = pretrain(data, tmp_path / "alone", *given)
    assert alone.returncode == 0, alone.stderr
    first, expected = events(tmp_path / "run", "train")[0], events(tmp_path / "alone", "train")[0]
    assert first["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert first["positive_cosine"] == pytest.approx(expected["positive_cosine"], abs=1e-5)
    assert first["effective_rank"] == pytest.approx(expected["effective_rank"], rel=1e-4)


def test_two_ranks_refuse_a_folder_together_and_evaluate_together(data, finished, tmp_path):
    (tmp_path / "empty").mkdir()
    given = ("--recipe", data / "small.yaml", "--output", tmp_path / "run", "--data.train", tmp_path / "empty")
    refused = command_on_two_ranks("pretrain", *given)
    assert refused.returncode == 2
    for rank in ("error", "error on rank 1"):
        assert f"{rank}: {tmp_path / 'empty'} holds no files" in refused.stderr
    assert "Traceback" not in refused.stderr
    run, _ = finished
    alone = [event["accuracy"] for event in events(run, "knn")]
    result = command_on_two_ranks("evaluate", "knn", run)
    assert result.returncode == 0, result.stderr
    assert json.loads((run / "evaluation/knn-epoch2.json").read_text())["accuracy"]["trained encoder"] == alone[-1]


@pytest.mark.parametrize(
    ("train", "val", "said"),
    [
        ("flat", "val", "data.train = {}/flat: the training images have no labels; label them ("),
        ("train", "flat", "data.val = {}/flat: the validation images have no labels; label them ("),
        (
            "",
            "val",
            "data.val = {}/val: training and validation images have different classes (training flat, train, val; "
            "validation class0, ",
        ),
    ],
    ids=["no labels in training", "no labels in validation", "other classes"],
)
def test_validation_images_that_cannot_be_used_are_refused_before_the_start(data, tmp_path, train, val, said):
    images = ("--data.train", data / train, "--data.val", data / val)
    refused = command("pretrain", "--recipe", data / "small.yaml", "--output", tmp_path / "run", *images)
    assert refused.returncode == 2 and f"error: {said.format(data)}" in refused.stderr
    assert refused.stderr.endswith(", or train without evaluation with --data.val null\n")
    assert not (tmp_path / "run").exists()


def test_without_labels_or_validation_images_a_run_works_and_says_so(data, tmp_path):
    short = ("--schedule.epochs", "1", "--schedule.warmup_epochs", "0")
    result = pretrain(data, tmp_path / "run", "--data.train", data / "flat", "--data.val", "null", *short)
    assert result.returncode == 0, result.stderr
    assert "evaluation is off: no validation images" in result.stdout
    assert events(tmp_path / "run", "knn") == []
    assert "evaluate knn" not in result.stdout
    refused = command("evaluate", "knn", tmp_path / "run", is_thin=True)
    assert refused.returncode == 2
    assert "error: kNN cannot evaluate this run: data.val = null: no validation images; give " in refused.stderr


def test_validation_that_lacks_a_class_is_judged_during_training(data, tmp_path):
    images = sorted((data / "train").rglob("*.jpg"))
    for name, lacking in (("train", None), ("val", "class1")):  # the largest label
        lines = [f"{file}\t{file.parent.name[-1]}\n" for file in images if file.parent.name != lacking]
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    given = ("--data.train", tmp_path / "train.txt", "--data.val", tmp_path / "val.txt", "--schedule.epochs", "1")
    given = ("--recipe", data / "small.yaml", "--output", tmp_path / "run", *given, "--schedule.warmup_epochs", "0")
    result = CommandProcess("pretrain", *given, is_thin=True).end()
    assert result.returncode == 0, result.stderr
    (warning,) = events(tmp_path / "run", "warning")
    assert warning["message"].startswith("1 of 2 classes in training have no validation images (1)")
    assert [event["step"] for event in events(tmp_path / "run", "knn")] == [0, 3]


def test_collapse_is_warned_of(data, tmp_path):
    """Without the negative term, targets that follow at once and a high rate collapse within a few steps."""
    result = pretrain(
        data, tmp_path / "run", "--objective.balance", "0", "--optimizer.base_lr", "4", "--schedule.epochs", "12",
        "--target.momentum", "0.5", "--schedule.warmup_epochs", "0", "--checkpoint.every", "99",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (warning,) = events(tmp_path / "run", "warning")
    assert "collapsing" in warning["message"] and "WARNING" in result.stdout


def empty(folder: Path) -> None:
    pass


def one_image(folder: Path) -> None:
    (folder / "a").mkdir()
    draw_tree(folder / "tree", per_class=1, classes=1)
    shutil.move(folder / "tree/class0/000.jpg", folder / "a/0.jpg")
    shutil.rmtree(folder / "tree")


def fewer_than_a_batch(folder: Path) -> None:
    shutil.rmtree(folder)
    draw_tree(folder, per_class=10)


def text_files(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "readme.txt").write_text("no image")


def text_named_jpg(folder: Path) -> None:
    (folder / "notes").mkdir()
    for number in range(40):
        (folder / "notes" / f"{number}.jpg").write_text("no image")


@pytest.mark.parametrize("fill", [empty, one_image, fewer_than_a_batch, text_files, text_named_jpg])
def test_a_folder_that_cannot_be_trained_on_is_refused(data, tmp_path, fill):
    folder = tmp_path / "images"
    folder.mkdir()
    fill(folder)
    result = pretrain(data, tmp_path / "run", "--data.train", folder)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr and str(folder) in result.stderr
    assert not (tmp_path / "run").exists()


def cut(data: Path, copy: Path, share: float) -> Path:
    """A damaged file in a copy of the training images: what is left when the rest of it was lost."""
    shutil.copytree(data / "train", copy)
    broken = copy / "class1/007.jpg"
    content = broken.read_bytes()
    broken.write_bytes(content[: int(share * len(content))])
    return broken


def test_a_file_with_a_damaged_header_is_refused_before_the_run(data, tmp_path):
    broken = cut(data, tmp_path / "train", share=0.02)
    result = pretrain(data, tmp_path / "run", "--data.train", tmp_path / "train", "--data.max_bad_fraction", "0")
    assert result.returncode == 2
    assert str(broken) in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_file_that_cannot_be_decoded_stops_the_run_with_its_path_and_a_checkpoint(data, tmp_path):
    broken = cut(data, tmp_path / "train", share=0.6)
    result = pretrain(data, tmp_path / "run", "--data.train", tmp_path / "train", "--data.max_bad_fraction", "0")
    assert result.returncode == 3
    assert str(broken) in result.stderr and "Traceback" not in result.stderr
    assert latest(tmp_path / "run")


def test_non_finite_values_stop_the_run_with_status_3(data, tmp_path):
    result = pretrain(
        data, tmp_path / "run", "--optimizer.base_lr", "1e30", "--engine.max_skipped_steps", "2",
        "--schedule.epochs", "4", "--schedule.warmup_epochs", "0",
    )  # fmt: skip
    assert result.returncode == 3, result.stdout + result.stderr
    assert "2 steps in a row had NaN or infinite values" in result.stderr and "Traceback" not in result.stderr
    assert latest(tmp_path / "run")


def test_a_run_that_drops_every_step_says_so_and_does_not_end_well(data, tmp_path):
    given = ("--recipe", data / "small.yaml", "--output", tmp_path / "run", "--data.train", data / "train")
    given += (
        "--data.val",
        "null",
        "--objective.balance",
        "1e38",
        "--schedule.epochs",
        "1",
        "--schedule.warmup_epochs",
        "0",
    )
    result = CommandProcess("pretrain", *given, is_thin=True).end()
    assert result.returncode == 3, result.stderr
    assert "stopped: all 3 steps had NaN or infinite values and were dropped" in result.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["skipped_steps"] == 3
