"""Exported weights: they load strictly where they should, say what they are, and are written whole or not at all."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torchvision
from drawn_images import draw_tree
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import unigrad_fast
from unigrad_fast import cli
from unigrad_fast.checkpoints import export
from unigrad_fast.checkpoints.files import Reader, write_weights
from unigrad_fast.checkpoints.weights import load_backbone, open_checkpoint
from unigrad_fast.config import Config, resolve, to_yaml
from unigrad_fast.networks.backbones import build_backbone
from unigrad_fast.pipelines import EvaluationLoader, Manifest
from unigrad_fast.pipelines.presets import DEVIATION
from unigrad_fast.runtime.run_folder import RunFolder

CLASSES = ["cat", "dog", "eel"]


@pytest.fixture(autouse=True)
def _emptied(tmp_path: Path) -> Iterator[None]:
    """Weights fill a disk when the folders of many tests are kept."""
    yield
    shutil.rmtree(tmp_path)


def make_run(
    folder: Path, backbone: str = "resnet18", stem: str = "imagenet", step: int = 30, **settings: dict
) -> Config:
    """A run of random weights, other ones in each branch."""
    model = {"backbone": backbone, "stem": stem, "projector": {"depth": 1, "width": 4}}
    config = resolve("quickstart", {"model": model, "output": folder, **settings})
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    tensors = {}
    for seed, branch in enumerate(("online", "target")):
        torch.manual_seed(seed)
        state = build_backbone(backbone, stem).state_dict()
        for name, tensor in state.items():
            if name.endswith(("running_mean", "running_var")):
                tensor.uniform_(0.5, 1.5)
            tensors[f"{branch}.backbone.{name}"] = tensor
    write_weights(folder, tensors, step, step / 20, config.model_dump(mode="json"))
    return config


def make_probe(run: Path, width: int = 128, **about: str) -> dict[str, torch.Tensor]:
    probe = {"weight": torch.randn(len(CLASSES), width), "bias": torch.randn(len(CLASSES))}
    known = {"step": "30", "classes": json.dumps(CLASSES), "protocol": "linear probe", "accuracy": "71.5"}
    save_file(probe, run / "linear.safetensors", known | about)
    return probe


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(tmp_path / "run")
    return tmp_path / "run"


def exported(capsys: pytest.CaptureFixture, *arguments) -> list[str]:
    """The lines of Python that a successful export prints to load the file."""
    return printed(capsys, *arguments)[0]


def printed(capsys: pytest.CaptureFixture, *arguments) -> tuple[list[str], list[str]]:
    """The lines of Python that a successful export prints to load the file, and to prepare images."""
    assert cli.main(["export", *map(str, arguments)]) == 0
    blocks = capsys.readouterr().out.partition("Load it with:\n")[2].split("Prepare an RGB image as evaluate does")
    loading, preparing = ([line[2:] for line in block.splitlines() if line.startswith("  ")] for block in blocks)
    return loading, preparing


def refused(capsys: pytest.CaptureFixture, *arguments) -> str:
    assert cli.main(["export", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    return error


def executed(lines: list[str]) -> torch.nn.Module:
    """The model that the printed lines make."""
    assert len(lines) == 3
    names: dict = {}
    exec("\n".join(lines), names)
    assert not names["model"].training
    return names["model"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("backbone", "format"), [("resnet18", "torchvision"), ("resnet18", "safetensors"), ("resnet50", "torchvision")]
)
def test_printed_lines_load_the_online_backbone_into_torchvision(backbone, format, tmp_path, capsys):
    config = make_run(tmp_path / "run", backbone)
    lines = exported(capsys, tmp_path / "run", "--format", format)
    model = executed(lines)
    assert type(model) is torchvision.models.ResNet and "unigrad" not in "".join(lines[:2])
    original = build_backbone(backbone, config.model.stem).eval()
    load_backbone(open_checkpoint(tmp_path / "run"), original)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(images), original(images))


@pytest.mark.parametrize(("size", "crop_fraction"), [(48, 0.875), (32, 0.8)])
def test_the_printed_lines_prepare_images_as_an_evaluation_does(size, crop_fraction, tmp_path, capsys):
    make_run(tmp_path / "run", data={"image_size": size}, evaluation={"crop_fraction": crop_fraction})
    _, lines = printed(capsys, tmp_path / "run")
    names: dict = {}
    exec("\n".join(lines), names)
    (tmp_path / "images").mkdir()
    for number, path in enumerate(sorted(draw_tree(tmp_path / "drawn", per_class=2, size=64).rglob("*.jpg"))):
        with Image.open(path) as image:  # wider ones, and without loss, because decoders of JPEG differ
            image.resize((64 + 9 * number, 64)).save(tmp_path / f"images/{number}.png")
    manifest = Manifest.from_folder(tmp_path / "images")
    ((ours, index),) = EvaluationLoader(manifest, size, crop_fraction, threads=1)
    levels = 255 * torch.tensor(DEVIATION)[:, None, None]
    for expected, i in zip(ours, index.tolist(), strict=True):
        with Image.open(manifest.path(i)) as image:
            found = names["transform"](image.convert("RGB"))
        # Pillow rounds to a level after each direction, we round once. A filter's weights add up to 1, so both are less
        # than 1.5 levels apart, that is 1 of whole levels. (At the edges of an image, which are not in these crops, the
        # filters differ.)
        assert (levels * (found - expected)).abs().max() < 1.01


@pytest.mark.parametrize("format", ["torchvision", "safetensors"])
def test_the_linear_probe_becomes_the_classifier(format, run, capsys):
    probe = make_probe(run)
    model = executed(exported(capsys, run, "--format", format, "--with_linear", "true"))
    backbone = build_backbone("resnet18").eval()
    load_backbone(open_checkpoint(run), backbone)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = torch.nn.functional.linear(backbone(images), probe["weight"], probe["bias"])
        assert torch.equal(model(images), expected)


def test_a_pth_file_is_a_plain_state_dict_of_torchvision_alone(run, capsys):
    exported(capsys, run, "--format", "torchvision")
    state = torch.load(run / "export/resnet18-online-epoch1.5.pth", weights_only=True)
    expected = torchvision.models.resnet18()
    expected.fc = torch.nn.Identity()
    assert type(state) is dict
    assert list(state) == list(expected.state_dict())


def test_a_run_without_a_momentum_target_has_no_target_branch_to_export(run, capsys, monkeypatch):
    config = resolve("quickstart", {"objective": {"target": "stop_gradient"}})
    monkeypatch.setattr(export, "configuration", lambda *_: (config, []))
    error = refused(capsys, run, "--branch", "target")
    assert "branch = target: with objective.target stop_gradient" in error and "export the online branch" in error


def test_the_target_branch_has_its_own_weights(run, capsys):
    exported(capsys, run)
    exported(capsys, run, "--branch", "target")
    online = load_file(run / "export/resnet18-online-epoch1.5.safetensors")
    target = load_file(run / "export/resnet18-target-epoch1.5.safetensors")
    torch.manual_seed(1)
    assert torch.equal(target["conv1.weight"], build_backbone("resnet18").conv1.weight)
    assert not torch.equal(online["conv1.weight"], target["conv1.weight"])


@pytest.mark.parametrize("with_linear", ["false", "true"])
def test_a_small_stem_is_no_torchvision_model_but_loads_here(with_linear, tmp_path, capsys):
    make_run(tmp_path / "run", stem="small")
    make_probe(tmp_path / "run")
    error = refused(capsys, tmp_path / "run", "--format", "torchvision")
    assert "model.stem = small" in error and "--format safetensors" in error
    assert not (tmp_path / "run/export").exists()
    model = executed(exported(capsys, tmp_path / "run", "--with_linear", with_linear))
    assert model(torch.randn(1, 3, 16, 16)).shape == (1, 3 if with_linear == "true" else 128)
    added = "-linear" if with_linear == "true" else ""
    with safe_open(tmp_path / f"run/export/resnet18-online-epoch1.5{added}.safetensors", "pt") as file:
        assert file.metadata()["stem"] == "small"


def test_the_description_says_what_the_file_is(run, capsys):
    make_probe(run)
    exported(capsys, run, "--with_linear", "true")
    path = run / "export/resnet18-online-epoch1.5-linear.safetensors"
    about = json.loads(path.with_name(f"{path.name}.json").read_text())
    commit = about.pop("commit")
    assert commit
    assert about == {
        "recipe": "quickstart",
        "method": "unigrad",
        "form": "gradient",
        "row": None,
        "backbone": "resnet18",
        "stem": "imagenet",
        "branch": "online",
        "epoch": 1.5,
        "step": 30,
        "image_size": 48,
        "crop_fraction": 1.0,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "version": unigrad_fast.__version__,
        "linear": {"step": 30, "classes": CLASSES, "protocol": "linear probe", "accuracy": 71.5},
        "file": path.name,
        "format": "safetensors",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    with safe_open(path, "pt") as file:
        inside = file.metadata()
    assert json.loads(inside["linear"]) == about["linear"]
    assert (inside["recipe"], inside["step"], json.loads(inside["mean"])) == ("quickstart", "30", about["mean"])


def test_the_commit_of_an_installed_package_is_unknown_even_inside_a_checkout(run, capsys, monkeypatch, tmp_path):
    (tmp_path / "site/unigrad_fast").mkdir(parents=True)
    commit = "git init -q && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m another"
    subprocess.run(commit, shell=True, cwd=tmp_path, check=True)
    monkeypatch.setattr(unigrad_fast, "__file__", str(tmp_path / "site/unigrad_fast/__init__.py"))
    exported(capsys, run)
    assert json.loads((run / "export/resnet18-online-epoch1.5.safetensors.json").read_text())["commit"] == "unknown"


def test_a_probe_that_is_missing_or_does_not_belong_to_the_weights_is_refused(run, capsys):
    arguments = (run, "--with_linear", "true")
    assert f"unigrad-fast evaluate linear {run}" in refused(capsys, *arguments)
    make_probe(run, step="20")
    error = refused(capsys, *arguments)
    assert "step 20" in error and "step 30" in error and f"unigrad-fast evaluate linear {run}" in error
    make_probe(run, width=2048)
    assert "size mismatch for fc.weight" in refused(capsys, *arguments)
    make_probe(run)
    assert "trained on the online branch" in refused(capsys, *arguments, "--branch", "target")
    (run / "linear.safetensors").write_bytes(b"damaged")
    assert "damaged" in refused(capsys, *arguments)
    assert not list((run / "export").iterdir())


@pytest.mark.parametrize("name", ["encoder.pth", "encoder.pt", "encoder.safetensors"])
def test_the_ending_of_the_output_chooses_the_format(name, run, capsys, tmp_path):
    exported(capsys, run, "--output", tmp_path / name)
    about = json.loads((tmp_path / f"{name}.json").read_text())
    assert about["format"] == ("safetensors" if name.endswith("safetensors") else "torchvision")
    assert not (run / "export").exists()


def test_an_ending_of_the_other_format_is_refused(run, capsys, tmp_path):
    error = refused(capsys, run, "--output", tmp_path / "encoder.pth", "--format", "safetensors")
    assert "--format torchvision" in error


def test_wrong_outputs_are_refused_before_any_work(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "load_branch", lambda *_: pytest.fail("worked"))
    assert "does not exist; create it" in refused(capsys, run, "--output", tmp_path / "absent/encoder.pth")
    assert "is a folder" in refused(capsys, run, "--output", tmp_path)
    (run / "export").write_text("a file in the way")
    assert "cannot be created" in refused(capsys, run)
    assert "/proc is not writable" in refused(capsys, run, "--output", "/proc/encoder.pth")


def test_nothing_that_is_there_is_replaced_unless_told_so(run, capsys, tmp_path):
    path = tmp_path / "encoder.pt"
    exported(capsys, run, "--output", path)
    exported(capsys, run, "--output", path)  # the same again
    for _ in range(3):
        exported(capsys, run)
    before = {entry: entry.read_bytes() for entry in tmp_path.rglob("*") if entry.is_file()}
    assert f"{path}: already exists; give another name, or --overwrite true" in refused(
        capsys, run, "--output", path, "--branch", "target"
    )
    described = tmp_path / "new.pt.json"
    described.write_text("mine")
    assert f"{described}: already exists" in refused(capsys, run, "--output", tmp_path / "new.pt")
    described.unlink()
    shard = next((run / "checkpoints").rglob("rank-00000.pt"))
    (tmp_path / "link.pt").symlink_to(shard)
    for output in (shard, run / "new.pt", tmp_path / "link.pt"):
        error = refused(capsys, run, "--output", output, "--overwrite", "true")
        assert f"is inside the run in {run}; give a file elsewhere, or in {run}/export" in error
    (tmp_path / "link.pt").unlink()
    exported(capsys, run, "--output", run / "export/mine.pt")
    after = {entry: entry.read_bytes() for entry in tmp_path.rglob("*") if entry.is_file()}
    assert {entry: after[entry] for entry in before} == before
    exported(capsys, run, "--output", path, "--branch", "target", "--overwrite", "true")
    assert path.read_bytes() != before[path]


@pytest.mark.parametrize("name", ["encoder.onnx", "encoder", "train.py", "config.yaml", "metrics.jsonl"])
def test_endings_that_are_not_written_are_refused(name, run, capsys):
    before = {entry: entry.read_bytes() for entry in run.rglob("*") if entry.is_file()}
    for more in ((), ("--format", "torchvision", "--overwrite", "true")):
        error = refused(capsys, run, "--output", run / name, *more)
        assert "give a name that ends in one of .safetensors, .pth, .pt" in error
    assert {entry: entry.read_bytes() for entry in run.rglob("*") if entry.is_file()} == before


def test_a_full_disk_leaves_the_file_that_was_there(run, capsys, tmp_path, monkeypatch):
    path = tmp_path / "encoder.safetensors"
    exported(capsys, run, "--output", path)
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir() if entry.is_file()}

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    again = (run, "--branch", "target", "--output", path, "--overwrite", "true")
    assert cli.main(["export", *map(str, again)]) == 3
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir() if entry.is_file()} == before
    monkeypatch.setattr(Path, "mkdir", full)
    assert cli.main(["export", str(run)]) == 3
    monkeypatch.undo()
    exported(capsys, *again)
    assert path.read_bytes() != before[path.name]


def test_a_folder_without_run_or_weights_is_refused(tmp_path, capsys):
    assert "no run there" in refused(capsys, tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    assert "no checkpoint there" in refused(capsys, tmp_path)


def test_weights_of_another_model_are_refused(run, capsys):
    config = resolve("quickstart", {"model": {"backbone": "resnet34"}})
    (reader,) = (Reader(folder) for folder in RunFolder(run).complete_checkpoints())
    tensors = {name: reader.tensor(name) for name in reader.names}
    write_weights(run, tensors, 40, 2.0, config.model_dump(mode="json"))
    error = refused(capsys, run)
    assert "do not fit the configuration" in error and len(error.splitlines()) == 1
