"""`evaluate` and `export` of any checkpoint: no result replaces another, and the checkpoint says what it is of."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from drawn_images import draw_tree
from PIL import Image
from safetensors.torch import load_file
from thin import thin

import unigrad_fast
from unigrad_fast import cli
from unigrad_fast.checkpoints import files as files_of_checkpoints
from unigrad_fast.checkpoints.files import write_weights
from unigrad_fast.config import resolve, to_yaml
from unigrad_fast.evaluation import features, linear_training
from unigrad_fast.evaluation.passes import DAY, Keeper
from unigrad_fast.evaluation.unfinished import Unfinished
from unigrad_fast.networks.encoder import build_encoder
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.preemption import Preemption

PAPER = ("--protocol", "paper", "--batch_size", "12", "--base_lr", "10")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """train: 24 images of three classes; val: 9 of them; lacking: the same without one class, and with another."""
    root = tmp_path_factory.mktemp("images")
    draw_tree(root / "train", per_class=8, classes=3)
    draw_tree(root / "val", per_class=3, classes=3)
    shutil.copytree(root / "val", root / "lacking")
    shutil.move(root / "lacking/class1", root / "lacking/novel")
    return root


@pytest.fixture(scope="module")
def made(images, tmp_path_factory) -> Path:
    """A run of random weights, others after 10 and after 20 steps."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    data = {"train": images / "train", "val": images / "val", "image_size": 16, "threads": 1}
    evaluation, model = {"batch_size": 12, "knn": {"k": 3}}, {"projector": {"depth": 1, "width": 4}}
    given = {"data": data, "evaluation": evaluation, "model": model, "output": folder, "engine": {"precision": "fp32"}}
    config = resolve("cifar_subset", given)
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    with thin():
        for step in (10, 20):
            encoder = build_encoder(config.model, step, torch.device("cpu"))
            tensors = {f"online.{name}": tensor for name, tensor in encoder.state_dict().items()}
            write_weights(folder, tensors, step, step / 10, config.model_dump(mode="json"))
    return folder


@pytest.fixture
def run(made, tmp_path) -> Iterator[Path]:
    shutil.copytree(made, tmp_path / "run")
    with thin():
        yield tmp_path / "run"


def said(capsys: pytest.CaptureFixture, *arguments: object, status: int = 0) -> str:
    capsys.readouterr()
    assert cli.main([str(word) for word in arguments]) == status
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return printed.out if status == 0 else printed.err


def result(run: Path, name: str) -> dict:
    return json.loads((run / "evaluation" / f"{name}.json").read_text())


def files(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "evaluation").iterdir())


def test_no_evaluation_replaces_what_another_has_written(run, images, capsys):
    said(capsys, "evaluate", "knn", run, "--baselines", "true")
    first = result(run, "knn-epoch2")
    assert (first["step"], first["epoch"], first["k"], first["temperature"]) == (20, 2.0, 3, 0.1)
    assert list(first["accuracy"]) == ["raw pixels", "colour histogram", "untrained encoder", "trained encoder"]

    again = said(capsys, "evaluate", "knn", run)
    assert "which keeps raw pixels, colour histogram, untrained encoder from an earlier call" in again
    assert result(run, "knn-epoch2") == first

    other = said(capsys, "evaluate", "knn", run, "--k", 5, "--temperature", 0.2)
    assert f"written to {run}/evaluation/knn-epoch2-2.json; knn-epoch2.json has k = 3 and was kept" in other
    assert (result(run, "knn-epoch2-2")["k"], result(run, "knn-epoch2-2")["temperature"]) == (5, 0.2)
    said(capsys, "evaluate", "knn", run, "--data.val", images / "train", "--data.train", images / "val")
    assert result(run, "knn-epoch2-3")["queries"] == 24
    said(capsys, "evaluate", "knn", run, "--k", 5, "--temperature", 0.2)
    assert result(run, "knn-epoch2") == first
    refused = said(capsys, "evaluate", "knn", run, "--k", 25, status=2)
    assert refused == "error: k = 25: exceeds the 24 training images; give at most 24, or auto\n"

    said(capsys, "evaluate", "linear", run, *PAPER, "--epochs", 2)
    paper = result(run, "linear-paper-epoch2"), (run / "evaluation/linear-paper-epoch2.safetensors").read_bytes()
    assert (paper[0]["epochs"], paper[0]["batch_size"], paper[0]["images"]) == (2, 12, 9)
    said(capsys, "evaluate", "linear", run)
    said(capsys, "evaluate", "linear", run, *PAPER, "--epochs", 1)
    assert result(run, "linear-paper-epoch2-2")["epochs"] == 1
    assert paper == (
        result(run, "linear-paper-epoch2"),
        (run / "evaluation/linear-paper-epoch2.safetensors").read_bytes(),
    )
    knn = ["knn-epoch2-2.json", "knn-epoch2-3.json", "knn-epoch2.json"]
    linear = [
        f"linear-{name}.{e}"
        for name in ("paper-epoch2-2", "paper-epoch2", "quick-epoch2")
        for e in ("json", "safetensors")
    ]
    assert files(run) == ["features", *knn, *linear]


def test_other_contents_or_labels_under_the_same_names_are_other_images(run, images, tmp_path, capsys):
    copy = tmp_path / "images"
    shutil.copytree(images, copy)
    given = ("--data.train", copy / "train", "--data.val", copy / "val")
    said(capsys, "evaluate", "knn", run, "--baselines", "true")
    first = result(run, "knn-epoch2")
    said(capsys, "evaluate", "knn", run, *given)  # the same files elsewhere
    assert result(run, "knn-epoch2")["accuracy"] == first["accuracy"]
    first = result(run, "knn-epoch2")
    for path in (copy / "val").rglob("*.jpg"):
        with Image.open(path) as image:
            image.save(path, quality=5)
    other = said(capsys, "evaluate", "knn", run, *given)
    assert "knn-epoch2.json has val_images = " in other and "from an earlier call" not in other
    assert result(run, "knn-epoch2") == first and list(result(run, "knn-epoch2-2")["accuracy"]) == ["trained encoder"]


def test_a_training_is_not_continued_on_other_labels(run, images, tmp_path, capsys, monkeypatch):
    def listed(part: str, shift: int) -> Path:
        paths = sorted((images / part).rglob("*.jpg"))
        file = tmp_path / f"{part}{shift}.txt"
        file.write_text("".join(f"{path}\tclass{(int(path.parent.name[-1]) + shift) % 3}\n" for path in paths))
        return file

    def kill(training: linear_training.Training, end_epoch=linear_training.Training.end_epoch) -> None:
        if training.steps_done == 4:
            raise KeyboardInterrupt
        end_epoch(training)

    first, other = (
        (
            "evaluate",
            "linear",
            run,
            *PAPER,
            "--epochs",
            2,
            "--data.train",
            listed("train", n),
            "--data.val",
            listed("val", n),
        )
        for n in (0, 1)
    )
    with monkeypatch.context() as patch:
        patch.setattr(linear_training.Training, "end_epoch", kill)
        assert cli.main([str(word) for word in first]) == 130
    assert "continuing" not in said(capsys, *other)
    assert "continuing" in said(capsys, *first)
    assert {"linear-paper-epoch2.json", "linear-paper-epoch2-2.json"} < set(files(run))


def test_a_result_says_how_it_came_about(run, images, capsys):
    for protocol in ("knn", "linear"):
        said(capsys, "evaluate", protocol, run, "--data.val", images / "lacking")
    found = [result(run, f"{name}-epoch2") for name in ("knn", "linear-quick")]
    for each in found:
        assert each["branch"] == "online backbone" and each["seed"] == 0 and each["precision"] == "float32"
        assert each["transform"] == {
            "resize": 16,
            "crop": 16,
            "interpolation": "bilinear, antialiased",
            "mean": [0.485, 0.456, 0.406],
            "deviation": [0.229, 0.224, 0.225],
        }
        assert each["labels"]["classes"] == 3 and each["labels"]["digest"].startswith("sha256-")
        assert each["counts"] == {
            "training": {"used": 24, "left_out": 0},
            "validation": {"used": 6, "left_out": 3},  # of a class without training images
        }
        assert each["versions"].keys() == {"unigrad_fast", "torch", "dali"}
    assert found[0]["labels"] == found[1]["labels"]
    table = said(capsys, "evaluate", "list", run)
    assert "weighted kNN" in table and "linear, quick" in table


def test_a_file_of_results_that_cannot_be_read_is_left_alone(run, capsys):
    (run / "evaluation").mkdir()
    (run / "evaluation/knn-epoch2.json").write_text("my notes")
    assert "knn-epoch2.json was kept" in said(capsys, "evaluate", "knn", run)
    assert (run / "evaluation/knn-epoch2.json").read_text() == "my notes"
    assert result(run, "knn-epoch2-2")["queries"] == 9
    shutil.rmtree(run / "evaluation")
    (run / "evaluation").write_text("my notes")
    assert "is not a folder, but results are written there" in said(capsys, "evaluate", "knn", run, status=2)


def test_any_checkpoint_is_evaluated_and_exported_with_its_own_probe(run, capsys):
    assert f"checkpoint = 7: no checkpoint of that step in {run}; available: 10, 20" in said(
        capsys, "evaluate", "knn", run, "--checkpoint", 7, status=2
    )
    assert "available: 10, 20" in said(capsys, "export", run, "--checkpoint", 15, status=2)
    early = said(capsys, "evaluate", "knn", run, "--checkpoint", 10)
    assert "trained encoder, epoch 1" in early and result(run, "knn-epoch1")["step"] == 10

    said(capsys, "evaluate", "linear", run)
    wrong = said(capsys, "export", run, "--checkpoint", 10, "--with_linear", "true", status=2)
    assert "weights of step 20, but the export is of step 10" in wrong
    assert f"unigrad-fast evaluate linear {run} --checkpoint 10" in wrong
    said(capsys, "evaluate", "linear", run, "--checkpoint", 10)
    said(capsys, "evaluate", "linear", run, *PAPER, "--epochs", 1)
    for step, name in ((10, "quick-epoch1"), (20, "paper-epoch2")):  # paper's before quick
        probe = run / f"evaluation/linear-{name}.safetensors"
        lines = said(capsys, "export", run, "--checkpoint", step, "--with_linear", "true")
        assert f"linear probe of 3 classes from {probe}" in lines
        (exported,) = (run / "export").glob(f"*epoch{step // 10}-linear.safetensors")
        assert torch.equal(load_file(exported)["fc.weight"], load_file(probe)["weight"])
    quick = run / "evaluation/linear-quick-epoch2.safetensors"
    chosen = said(capsys, "export", run, "--with_linear", "true", "--probe", quick, "--output", run.parent / "a.pth")
    assert f"linear probe of 3 classes from {quick}" in chosen
    assert "applies only with --with_linear true" in said(capsys, "export", run, "--probe", quick, status=2)


def test_a_probe_of_a_run_that_began_again_is_not_exported(run, capsys):
    said(capsys, "evaluate", "linear", run)
    shutil.copytree(run / "checkpoints/step-00000010", run / "moved")
    config = json.loads((run / "checkpoints/step-00000020/checkpoint.json").read_text())["config"]
    encoder = build_encoder(resolve(run / "config.yaml").model, 5, torch.device("cpu"))
    tensors = {f"online.{name}": tensor for name, tensor in encoder.state_dict().items()}
    write_weights(run, tensors, 20, 2.0, config)
    assert "before the run began again" in said(capsys, "export", run, "--with_linear", "true", status=2)
    assert "was kept" in said(capsys, "evaluate", "linear", run)
    assert "linear-quick-epoch2-2.safetensors" in said(capsys, "export", run, "--with_linear", "true")


@pytest.mark.parametrize(
    ("command", "edit", "line"),
    [
        ("evaluate knn", lambda text: "", "is empty"),
        ("export", lambda text: "", "is empty"),
        ("export", lambda text: "model: [", "is damaged"),
        ("export", lambda text: "a: &a {b: *a}", "is damaged"),
        ("export", lambda text: f"{text}\nsubject: 010", "is damaged (not valid YAML in line "),
        ("export", lambda text: "hi", "is not a tree of keys and values"),
        ("export", lambda text: text.replace("threads: 1", "threads: many"), "has data.threads = many: must be"),
        ("export", lambda text: text.replace("resnet18", "resnet50"), "has model.backbone = resnet50 instead of"),
        ("evaluate linear", lambda text: text.replace("resnet18", "resnet50"), "has model.backbone = resnet50 instead"),
        ("evaluate knn", lambda text: re.sub(" val: .*", " val: /elsewhere", text), "has data.val = /elsewhere inst"),
    ],
)
def test_an_edited_configuration_gives_way_to_the_checkpoints(run, command, edit, line, capsys):
    path = run / "config.yaml"
    path.write_text(edit(path.read_text()))
    printed = said(capsys, *command.split(), run)
    assert f"warning: {path}: {line}" in printed
    assert f"; using the configuration in {run}/checkpoints/step-00000020\n" in printed


def test_a_run_that_cannot_be_written_to_is_evaluated_into_another_folder(run, tmp_path, capsys, monkeypatch):
    whole, make = sorted(run.rglob("*")), os.mkdir

    def mkdir(path, *arguments):  # tests may run as root, who may write everywhere
        if Path(path).is_relative_to(run):
            raise OSError(errno.EROFS, "Read-only file system")
        make(path, *arguments)

    monkeypatch.setattr(os, "mkdir", mkdir)
    refused = said(capsys, "evaluate", "knn", run, status=2)
    assert f"{run} is not writable (Read-only file system); give another folder with --output" in refused
    given = ("--output", tmp_path / "new/results")
    assert f"written to {tmp_path}/new/results/knn-epoch2.json" in said(capsys, "evaluate", "knn", run, *given)
    said(capsys, "evaluate", "linear", run, *PAPER, "--epochs", 1, *given)
    assert sorted(file.name for file in (tmp_path / "new/results").iterdir()) == [
        "features",
        "knn-epoch2.json",
        "linear-paper-epoch2.json",
        "linear-paper-epoch2.safetensors",
    ]
    assert sorted(run.rglob("*")) == whole
    assert "is inside the run in " in said(capsys, "evaluate", "knn", run, "--output", run / "checkpoints", status=2)


def test_another_machine_may_need_other_threads_and_says_nothing(run, capsys):
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("threads: 1", "threads: 2").replace("batch_size: 12", "batch_size: 5"))
    assert "using the configuration" not in said(capsys, "evaluate", "knn", run)


def test_images_that_were_moved_are_named_with_the_options_that_give_their_place(run, images, capsys):
    (images / "val").rename(images / "moved")
    try:
        message = said(capsys, "evaluate", "knn", run, status=2)
    finally:
        (images / "moved").rename(images / "val")
    assert message.startswith(f"error: {images}/val does not exist; ")
    assert message.endswith("; if this run's images were moved, add --data.val PATH\n")
    assert "moved" not in said(capsys, "evaluate", "knn", run, "--data.val", images / "typo", status=2)


def test_classes_that_one_side_lacks_and_equal_images_are_said(run, images, capsys):
    for protocol in ("knn", "linear"):
        printed = said(capsys, "evaluate", protocol, run, "--data.val", images / "lacking")
        assert "warning: 1 of 3 classes in training have no validation images (class1);" in printed
        assert (
            "warning: 3 of 9 validation images are left out because no training image has their classes (novel)"
            in printed
        )
    assert result(run, "knn-epoch2")["queries"] == result(run, "linear-quick-epoch2")["images"] == 6
    (images / "link").symlink_to(images / "train")
    for protocol, k, so in (
        ("knn", ("--k", 1), "every image finds itself"),
        ("linear", (), "the classifier is fitted"),
    ):
        printed = said(capsys, "evaluate", protocol, run, "--data.val", images / "link", *k)
        assert f"warning: data.val = {images}/link: is the same as data.train, so {so}" in printed
    (images / "link").unlink()
    assert list(result(run, "knn-epoch2-2")["accuracy"].values()) == [100.0]


def test_images_without_labels_are_named_with_the_remedy(run, images, capsys):
    for key, kind in (("train", "training"), ("val", "validation")):
        flat = images / "val/class0"
        refused = said(capsys, "evaluate", "knn", run, f"--data.{key}", flat, status=2)
        assert refused.startswith(
            f"error: kNN cannot evaluate this run: data.{key} = {flat}: the {kind} images have no labels; label them ("
        )


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """Collects the number of images of each pass of an encoder over plain images."""
    made: list[int] = []

    def extract(backbone, loader, *arguments):
        made.append(len(loader.manifest))
        return features.extract(backbone, loader, *arguments)

    monkeypatch.setattr("unigrad_fast.evaluation.passes.extract", extract)
    return made


def figures(run: Path, name: str) -> dict:
    return {key: value for key, value in result(run, name).items() if key != "versions"}


def test_a_second_evaluation_makes_no_second_pass_and_has_the_numbers_of_a_fresh_one(run, capsys, passes):
    for protocol, name in (("knn", "knn-epoch2"), ("linear", "linear-quick-epoch2")):
        shutil.rmtree(run / "evaluation", ignore_errors=True)
        printed = said(capsys, "evaluate", protocol, run, "--keep_features", "false")
        assert "images are kept" not in printed and not (run / "evaluation/features").exists()
        fresh = figures(run, name)
        shutil.rmtree(run / "evaluation")
        printed = said(capsys, "evaluate", protocol, run)
        assert f"features of 33 images are kept in {run}/evaluation/features (" in printed
        assert passes == [24, 9] * 2 and figures(run, name) == fresh
        for file in (run / "evaluation").glob(f"{name}.*"):
            file.unlink()
        printed = said(capsys, "evaluate", protocol, run)
        assert f"features of 33 images were read from {run}/evaluation/features\n" in printed
        assert passes == [24, 9] * 2 and figures(run, name) == fresh
        passes.clear()
    said(capsys, "evaluate", "knn", run, "--k", 5)
    assert passes == []


def test_features_that_no_longer_fit_are_made_anew_and_replace_the_older_ones(run, images, tmp_path, capsys, passes):
    folder = run / "evaluation/features"
    shutil.copytree(images, tmp_path / "images")
    given = ("--data.train", tmp_path / "images/train", "--data.val", tmp_path / "images/val")
    said(capsys, "evaluate", "knn", run, *given)
    first = sorted(path.name for path in folder.iterdir())
    assert [name.partition("-")[0] for name in first] == ["training", "validation"]
    passes.clear()
    os.utime(tmp_path / "images/val/class0/000.jpg", (1, 1))
    said(capsys, "evaluate", "knn", run, *given)
    assert passes == [9]
    said(capsys, "evaluate", "knn", run, *given, "--checkpoint", 10)
    assert passes == [9, 24, 9]
    assert len(list(folder.iterdir())) == 2 and not set(first) & set(os.listdir(folder))
    (part,) = folder.glob("training-*/rank-00000.npy")
    part.write_bytes(part.read_bytes()[:-100])
    said(capsys, "evaluate", "knn", run, *given, "--checkpoint", 10)
    assert passes == [9, 24, 9, 24]
    said(capsys, "evaluate", "knn", run, *given, "--data.val", tmp_path / "images/train")  # the same images twice
    assert passes == [9, 24, 9, 24, 24]


def damage(folder: Path, how: str) -> None:
    """Spoils the kept features in a folder."""
    file, about = folder / "rank-00000.npy", folder / "about.json"
    said, rows = json.loads(about.read_text()), np.load(file)
    if how == "empty":
        file.write_bytes(b"")
    elif how == "bit":
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
    elif how in ("flat", "narrow", "wide type", "by column"):
        changed = {"flat": rows.ravel()[:24], "narrow": rows[:, 1:], "wide type": rows.astype(np.float32)}
        np.save(file, changed.get(how, np.asfortranarray(rows)))
    else:
        said |= {"no ranks": {"ranks": 0}, "failures": {"failures": [[0, 99, "a", "b"]]}, "list": {"failures": 7}}[how]
        about.write_text(json.dumps(said))


@pytest.mark.parametrize(
    "how", ["empty", "bit", "flat", "narrow", "wide type", "by column", "no ranks", "failures", "list"]
)
def test_damaged_features_are_made_anew(run, capsys, passes, how):
    said(capsys, "evaluate", "knn", run)
    before = figures(run, "knn-epoch2")
    (folder,) = (run / "evaluation/features").glob("training-*")
    damage(folder, how)
    passes.clear()
    said(capsys, "evaluate", "knn", run)
    assert passes == [24] and figures(run, "knn-epoch2") == before
    said(capsys, "evaluate", "knn", run)
    assert passes == [24]


def test_features_that_lack_an_image_which_the_storage_did_not_give_are_not_kept(run, capsys, monkeypatch, passes):
    def read(manifest: Manifest, index: int, read=Manifest.read) -> bytes:
        if manifest.path(index).endswith("train/class1/003.jpg"):
            raise OSError(errno.EIO, "Input/output error")
        return read(manifest, index)

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "read", read)
        printed = said(capsys, "evaluate", "knn", run)
        assert "features [23, 128]" in said(capsys, "evaluate", "features", run)
    assert result(run, "knn-epoch2")["counts"]["training"] == {"used": 23, "left_out": 1}
    assert (
        "features of the training images are not kept: 1 image could not be read, which may pass "
        "(the file cannot be opened: input/output error)\n" in printed
    )
    assert [path.name.partition("-")[0] for path in (run / "evaluation/features").iterdir()] == ["validation"]
    said(capsys, "evaluate", "knn", run)
    assert result(run, "knn-epoch2-2")["counts"]["training"] == {"used": 24, "left_out": 0}


def test_what_another_evaluation_is_writing_is_left_alone_for_a_day(run, capsys):
    folder = run / "evaluation/features"
    young, old, busy = (folder / f".training-{name}.unfinished-1" for name in ("young", "old", "busy"))
    for each in (young, old, busy):
        each.mkdir(parents=True)
        (each / "rank-00000.npy").touch()
    for path in (old / "rank-00000.npy", old, busy):
        os.utime(path, (path.stat().st_mtime - DAY - 60,) * 2)
    said(capsys, "evaluate", "knn", run)
    assert young.exists() and busy.exists() and not old.exists()
    assert len(list(folder.glob("training-*"))) == 1


def test_features_without_room_are_not_kept_and_that_is_said(run, capsys, monkeypatch, passes):
    said(capsys, "evaluate", "knn", run, "--keep_features", "false")
    before = figures(run, "knn-epoch2")
    usage = shutil.disk_usage(run)._replace(free=9_000)
    with monkeypatch.context() as patch:
        patch.setattr("unigrad_fast.evaluation.passes.shutil.disk_usage", lambda path: usage)
        printed = said(capsys, "evaluate", "knn", run)
    (line,) = (line for line in printed.splitlines() if "not kept" in line)
    assert line.startswith("features of the training images are not kept: they take ")
    assert line.endswith(f" are free in {run}/evaluation/features; free some, or add --keep_features false")

    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert printed.count("not kept") == 1 and "not kept: " in said(capsys, "evaluate", "knn", run)
    assert not [path for path in (run / "evaluation/features").iterdir() if not path.name.startswith("validation")]
    assert figures(run, "knn-epoch2") == before

    shutil.rmtree(run / "evaluation/features")
    with monkeypatch.context() as patch:  # another evaluation has removed what this one is writing
        patch.setattr(
            Keeper, "_complete", lambda keeper, unfinished, *others: os.rename(unfinished / "gone", run / "gone")
        )
        printed = said(capsys, "evaluate", "knn", run)
    assert printed.count(" are not kept: ") == 2 and "No such file or directory" in printed
    assert figures(run, "knn-epoch2") == before


def test_a_file_of_weights_is_judged_as_the_run_that_it_comes_from(run, images, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("unigrad_fast.runtime.precision.has_fast_bf16", lambda device: False)  # the run is in fp32
    said(capsys, "evaluate", "knn", run)
    said(capsys, "evaluate", "linear", run)
    file = tmp_path / "weights.safetensors"
    said(capsys, "export", run, "--output", file)
    of_file = ("--weights", file, "--backbone", "resnet18")
    given = (*of_file, "--data.train", images / "train", "--data.val", images / "val")
    folder = tmp_path / "weights.safetensors-evaluation"

    printed = said(capsys, "evaluate", "knn", *given, "--k", 3)
    assert f"{file}: resnet18 under no prefix\n" in printed and "trained encoder, weights.safetensors" in printed
    said(capsys, "evaluate", "linear", *given)
    for name in ("knn", "linear-quick"):
        ours, theirs = json.loads((folder / f"{name}-epoch2.json").read_text()), result(run, f"{name}-epoch2")
        assert ours.pop("weights") != theirs.pop("weights")
        assert ours.pop("file") == str(file)
        assert ours == theirs  # with the size of the images, which the export describes

    moved = tmp_path / "moved.pth"  # without a description
    torch.save({"state_dict": {f"module.encoder_q.{k}": v for k, v in load_file(file).items()}, "epoch": 3}, moved)
    given = ("--weights", moved, *given[2:], "--image_size", 16, "--k", 3, "--output", tmp_path / "results")
    printed = said(capsys, "evaluate", "knn", *given)
    assert f"{moved}: resnet18 under the prefix module.encoder_q.; left out: epoch\n" in printed
    found = json.loads((tmp_path / "results/knn.json").read_text())
    assert (found["branch"], found["epoch"], found["image_size"]) == ("backbone module.encoder_q.", None, 16)
    assert found["accuracy"] == result(run, "knn-epoch2")["accuracy"]

    text, odd = tmp_path / "text.pth", tmp_path / "odd.safetensors"
    for path in (text, odd):
        path.write_text("no weights")
    for options, message in (
        (of_file, "weights: come without images; give --data.train IMAGES and --data.val IMAGES"),
        ((run, "--image_size", 32), "image_size = 32: applies only with --weights; leave it out"),
        ((*given, "--checkpoint", 20), "checkpoint = 20: applies only to a run; leave it out"),
        (("--weights", tmp_path / "gone"), f"weights = {tmp_path}/gone: no such file; check the path"),
        (("--weights", run), f"weights = {run}: is a folder; give a file in it"),
        (
            (*given, "--weights", text),
            f"{text}: not a file written by torch.save, or damaged; copy or download it again",
        ),
        ((*given, "--weights", odd), f"{odd}: not a safetensors file, or damaged ("),
        (("--weights", file), "backbone = null: --weights needs it; give one of resnet18, resnet34, "),
        ((*given, "--backbone", "resnet50"), f"{moved}: does not fit resnet50: module.encoder_q.layer1.0.conv1.weight"),
    ):
        (line,) = said(capsys, "evaluate", "knn", *options, status=2).splitlines()
        assert line.startswith(f"error: {message}")


def test_the_papers_protocol_goes_on_after_any_interruption_bit_for_bit(run, capsys, monkeypatch):
    arguments = ("evaluate", "linear", run, *PAPER, "--epochs", 3)
    undisturbed = said(capsys, *arguments)
    expected = load_file(run / "evaluation/linear-paper-epoch2.safetensors")
    shutil.rmtree(run / "evaluation")

    def kill(training: linear_training.Training, end_epoch=linear_training.Training.end_epoch) -> None:
        if training.steps_done == 4:
            raise KeyboardInterrupt
        end_epoch(training)

    with monkeypatch.context() as patch:  # in the second epoch
        patch.setattr(linear_training.Training, "end_epoch", kill)
        assert cli.main([str(word) for word in arguments]) == 130
    (kept,) = (run / "evaluation").iterdir()
    assert kept.name.startswith("linear-paper-epoch2-") and kept.name.endswith(".unfinished.pt")

    before = kept.read_bytes()
    said(capsys, *arguments[:-1], 1)  # other settings
    assert kept.read_bytes() == before and result(run, "linear-paper-epoch2")["epochs"] == 1

    steps = iter(range(1, 100))

    def ask(preemption: Preemption, news: bool = False, agreed=Preemption.agreed) -> tuple[bool, bool]:
        if next(steps) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            while preemption.asked is None:
                pass
        return agreed(preemption, news)

    with monkeypatch.context() as patch:  # in the third, of two steps each
        patch.setattr(Preemption, "agreed", ask)
        preempted = said(capsys, *arguments, status=75)
    assert preempted == "preempted: saved after step 5 of 6 of the classifier; repeat the command to continue\n"
    last = said(capsys, *arguments)
    assert (
        "continuing an interrupted call after epoch 2.5 of 3" in last
        and last.count("epoch 3/3") == 1
        and "epoch 2/3" not in last
    )
    assert next(line for line in undisturbed.splitlines() if "epoch 3/3" in line) in last
    assert not kept.exists()
    found = load_file(run / "evaluation/linear-paper-epoch2-2.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_state_is_found_by_the_same_settings_alone_and_a_damaged_one_is_said(tmp_path):
    said: list[str] = []
    one, same, other = (Unfinished(tmp_path, "a", {"epochs": n}, said.append) for n in (1, 1, 2))
    state = {"weight": torch.randn(3), "failures": [(1, 2, "/images/\udcff.jpg", "cut off")]}
    one.save(state)
    assert torch.equal(same.load()["weight"], state["weight"]) and same.load()["failures"] == state["failures"]
    assert other.load() is None and said == []
    one.path.rename(other.path)
    assert other.load() is None and same.load() is None
    other.path.write_bytes(b"damaged")
    assert other.load() is None and said == [f"{other.path}: damaged; the training starts again"]


def test_a_run_that_is_still_writing_is_judged_by_its_newest_whole_checkpoint(run, capsys, monkeypatch):
    begun = run / "checkpoints/.unfinished-step-00000030-0a1b2c3d"
    begun.mkdir()
    (begun / "rank-00000.pt").write_bytes(b"half")
    said(capsys, "evaluate", "knn", run)
    assert result(run, "knn-epoch2")["step"] == 20 and os.listdir(begun) == ["rank-00000.pt"]

    def verify(reader: files_of_checkpoints.Reader, kept=files_of_checkpoints.Reader.verify) -> None:
        if reader.about["step"] == 20:  # which the run removes in this moment
            files_of_checkpoints.remove(reader.folder)
        kept(reader)

    before = (run / "evaluation/knn-epoch2.json").read_bytes()
    monkeypatch.setattr(files_of_checkpoints.Reader, "verify", verify)
    (line,) = said(capsys, "evaluate", "knn", run, status=2).splitlines()
    assert "rank-00000.pt: no such file; " in line and line.endswith("--checkpoint 10 takes the newest intact one")
    assert (run / "evaluation/knn-epoch2.json").read_bytes() == before


def test_a_run_without_a_checkpoint_and_one_of_another_version_are_refused_with_the_remedy(run, capsys, monkeypatch):
    monkeypatch.setattr(files_of_checkpoints, "FORMAT", files_of_checkpoints.FORMAT + 1)
    (line,) = said(capsys, "evaluate", "knn", run, status=2).splitlines()
    assert line == (
        f"error: {run}/checkpoints/step-00000020/checkpoint.json: has format 1, but this version reads format 2; use "
        f"unigrad-fast {unigrad_fast.__version__}, which wrote it"
    )
    shutil.rmtree(run / "checkpoints")
    (line,) = said(capsys, "evaluate", "knn", run, status=2).splitlines()
    assert line.startswith(f"error: {run}: no checkpoint there; the run has not saved one yet, or ")
    assert not (run / "evaluation").exists()


def test_what_cannot_be_judged_is_refused_in_one_line_and_loses_nothing(run, images, tmp_path, capsys):
    said(capsys, "evaluate", "knn", run)
    weights = tmp_path / "weights.pth"
    torch.save(torchvision.models.resnet18().state_dict(), weights)
    absent, partial = tmp_path / "absent.txt", tmp_path / "partial.txt"
    absent.write_text("class0/000.jpg\nclass0/999.jpg\n")
    partial.write_text("class0/000.jpg\nclass2/001.jpg\n")
    given = ("--data.train", images / "train", "--data.val", images / "val")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for words, message in (
        (("finetune", run, "--fraction", 0.1), "fraction = 0.1: 2 labels of 24 images for 3 classes; give at least "),
        (("finetune", run, "--fraction", 0), "fraction = 0: must be a number above 0 to 1 or null"),
        (("finetune", run, "--fraction", 2), "fraction = 2: must be a number above 0 to 1 or null"),
        (("finetune", run, "--subset", absent), f"subset = {absent}: 1 of 2 names is not of a training image, first "),
        (("finetune", run, "--subset", partial), f"subset = {partial}: has no image of 1 of 3 classes, first class1; "),
        (("knn", run, "--k", 25), "k = 25: exceeds the 24 training images; give at most 24, or auto"),
        (("retrieve", run, images / "val/class0/000.jpg", "--k", 25), "k = 25: exceeds the 24 images in "),
        (("knn", "--weights", weights, "--backbone", "resnet50", *given), f"{weights}: does not fit resnet50: layer1."),
    ):
        (line,) = said(capsys, "evaluate", *words, status=2).splitlines()
        assert line.startswith(f"error: {message}")
    for protocol in ("paper", "sweep"):
        words = ("evaluate", "linear", run, "--protocol", protocol, "--batch_size", 25)
        assert cli.main([str(word) for word in words]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("error: batch_size = 25: there are only 24 training images; give --batch_size 24")
        assert "steps" not in printed.out and printed.err.count("\n") == 1
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
