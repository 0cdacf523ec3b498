"""Checkpoints in the form of the authors' code: what is taken from them, and what is refused."""

import functools
import itertools
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from unigrad_fast import cli
from unigrad_fast.checkpoints.weights import load_backbone, load_branch, open_checkpoint
from unigrad_fast.config import Model, resolve
from unigrad_fast.networks.backbones import build_backbone
from unigrad_fast.networks.encoder import Encoder, build_encoder

ONLINE, TARGET = 0, 1  # seeds of the branches
PROJECTOR = {"depth": 3, "width": 24}


@pytest.fixture(autouse=True)
def _emptied(tmp_path: Path) -> Iterator[None]:
    """Weights fill a disk when the folders of many tests are kept."""
    yield
    shutil.rmtree(tmp_path)


@functools.cache
def encoder(backbone: str, seed: int) -> Encoder:
    settings = Model(backbone=backbone, sync_batch_norm=False, projector=PROJECTOR)
    made = build_encoder(settings, seed, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in made.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5, generator=generator)
    return made


def numbered(backbone: nn.Module) -> nn.Module:
    """The children of a ResNet under numbers, without its last layer."""
    return nn.Sequential(*list(backbone.children())[:-1], nn.Flatten())


def nested(projector: nn.Sequential) -> nn.Module:
    """The layers of a projector by threes: linear, batch norm, ReLU."""
    layers = list(projector)
    return nn.Sequential(*(nn.Sequential(*layers[start : start + 3]) for start in range(0, len(layers), 3)))


def state_of(backbone: str = "resnet18", name_encoder=numbered, name_projector=nested) -> dict[str, torch.Tensor]:
    """The state dict of both branches, without DDP's prefix."""
    parts = {}
    for prefix, seed in (("", ONLINE), ("momentum_", TARGET)):
        made = encoder(backbone, seed)
        parts[f"{prefix}encoder"] = name_encoder(made.backbone)
        parts[f"{prefix}projector"] = name_projector(made.projector)
    return dict(nn.ModuleDict(parts).state_dict())


def checkpoint_of(state: dict[str, torch.Tensor]) -> dict:
    """All that the authors' code saves after the last of 100 epochs; its learning rate is a NumPy number."""
    return {
        "model": {f"module.{name}": tensor for name, tensor in state.items()},
        "optimizer": {"state": {}, "param_groups": [{"lr": np.float64(0.05), "momentum": 0.9, "params": [0]}]},
        "scaler": {"scale": 65536.0},
        "step": 125100,
        "epoch": 99,
        "F": torch.eye(24),
    }


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return state_of()


def imported(file: Path, run: Path, *further: str) -> None:
    assert cli.main(["import", str(file), str(run), *further]) == 0


def refused(capsys: pytest.CaptureFixture, file: Path, run: Path, *further: str) -> str:
    assert cli.main(["import", str(file), str(run), *further]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    assert not [entry for entry in run.parent.glob("*run*") if not entry.is_file()]
    return error


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_imported_backbones_compute_what_the_originals_compute(name, tmp_path):
    torch.save(checkpoint_of(state_of(name)), tmp_path / "checkpoint_99.pth.tar")
    imported(tmp_path / "checkpoint_99.pth.tar", tmp_path / "run")
    config = resolve(tmp_path / "run/config.yaml")
    assert (config.model.backbone, config.model.stem, config.recipe) == (name, "imagenet", "imagenet_100ep")
    assert config.model.projector.model_dump() == PROJECTOR
    images = torch.randn(2, 3, 32, 32)
    for branch, seed in (("online", ONLINE), ("target", TARGET)):
        original, taken = encoder(name, seed).eval(), build_encoder(config.model, 7, torch.device("cpu")).eval()
        reader = open_checkpoint(tmp_path / "run")
        weights = load_branch(reader, branch)
        taken.load_state_dict(weights)
        assert (reader.about["step"], reader.about["epoch"]) == (125100, 100)
        with torch.no_grad():
            assert torch.equal(taken.backbone(images), original.backbone(images))
            assert torch.equal(taken([images])[0], original([images])[0])


@pytest.mark.parametrize(
    ("prefix", "wrapping", "suffix", "layout"),
    [
        ("module.", "model", ".pth.tar", "numbers"),
        ("", "model", ".pth", "names"),
        ("module.", "state_dict", ".pth", "names"),
        ("", None, ".pth", "numbers"),
        ("module.", None, ".safetensors", "numbers"),
        ("", None, ".safetensors", "names"),
    ],
)
def test_every_form_of_the_file_gives_the_same_weights(prefix, wrapping, suffix, layout, state, tmp_path):
    if layout == "names":
        state = state_of(name_encoder=lambda backbone: backbone, name_projector=lambda projector: projector)
    content = {prefix + name: tensor for name, tensor in state.items()}
    file = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(content, file)
    else:
        torch.save({wrapping: content, "epoch": 3} if wrapping else content, file)
    imported(file, tmp_path / "run")
    for branch, seed in (("online", ONLINE), ("target", TARGET)):
        reader = open_checkpoint(tmp_path / "run")
        found = load_branch(reader, branch)
        expected = encoder("resnet18", seed).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert reader.about["epoch"] == {"model": 4, "state_dict": 3, None: 0}[wrapping]


@pytest.mark.parametrize(
    "case", ["bias in a hidden layer", "wider hidden layers", "six layers", "branches differ", "none"]
)
def test_a_projector_of_another_layout_is_left_out_and_said(case, state, tmp_path, capsys):
    state = dict(state)
    projectors = [name for name in state if "projector." in name]
    if case == "bias in a hidden layer":
        state |= {f"{part}.0.0.bias": torch.zeros(24) for part in ("projector", "momentum_projector")}
    elif case == "branches differ":
        state["momentum_projector.2.0.weight"] = torch.zeros(12, 24)
    else:
        for name in projectors:
            del state[name]
    widths = {"wider hidden layers": [512, 48, 48, 24], "six layers": [512] + [24] * 6}.get(case, [])
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        state |= {f"{p}.{number}.0.weight": torch.zeros(outputs, inputs) for p in ("projector", "momentum_projector")}
    torch.save(state, tmp_path / "weights.pth")
    imported(tmp_path / "weights.pth", tmp_path / "run")
    assert "Left out: the projector (" in capsys.readouterr().out
    for branch, seed in (("online", ONLINE), ("target", TARGET)):
        assert load_branch(open_checkpoint(tmp_path / "run"), f"{branch}.projector") == {}
        backbone = load_branch(open_checkpoint(tmp_path / "run"), f"{branch}.backbone")
        assert torch.equal(backbone["conv1.weight"], encoder("resnet18", seed).backbone.conv1.weight)
    load_backbone(open_checkpoint(tmp_path / "run"), build_backbone("resnet18"))


def test_a_run_without_images_says_where_to_name_them(state, tmp_path, capsys):
    torch.save(state, tmp_path / "weights.pth")
    imported(tmp_path / "weights.pth", tmp_path / "run")
    said = capsys.readouterr().out
    assert "epoch unknown" in said and f"evaluate knn {tmp_path}/run --data.train FOLDER" in said


def test_half_precision_becomes_fp32(state, tmp_path):
    torch.save({name: t.half() if t.is_floating_point() else t for name, t in state.items()}, tmp_path / "weights.pth")
    imported(tmp_path / "weights.pth", tmp_path / "run")
    backbone = load_branch(open_checkpoint(tmp_path / "run"), "online.backbone")
    assert {tensor.dtype for tensor in backbone.values()} == {torch.float32, torch.int64}


@pytest.mark.parametrize("protocol", ["knn", "linear"])
def test_an_imported_run_without_images_says_where_to_name_them(protocol, state, tmp_path, capsys):
    torch.save(state, tmp_path / "weights.pth")
    imported(tmp_path / "weights.pth", tmp_path / "run")
    capsys.readouterr()
    assert cli.main(["evaluate", protocol, str(tmp_path / "run")]) == 2
    assert "no training images; give their folder with --data.train FOLDER" in capsys.readouterr().err


def test_an_imported_run_is_evaluated_and_exported(state, tmp_path, capsys):
    for split in ("train", "val"):
        for number, colour in enumerate([(230, 30, 30), (30, 230, 30)]):
            folder = tmp_path / f"images/{split}/{number}"
            folder.mkdir(parents=True)
            for copy in range(2):
                Image.new("RGB", (40 + copy, 40), colour).save(folder / f"{copy}.jpg")
    torch.save(checkpoint_of(state), tmp_path / "weights.pth")
    images = [f"--data.{split}={tmp_path}/images/{split}" for split in ("train", "val")]
    imported(tmp_path / "weights.pth", tmp_path / "run", *images)
    said = capsys.readouterr().out
    assert "Left out: optimizer, scaler, F\n" in said and f"unigrad-fast evaluate knn {tmp_path}/run" in said
    assert cli.main(["evaluate", "knn", str(tmp_path / "run")]) == 0
    assert "trained encoder, epoch 100" in capsys.readouterr().out
    assert cli.main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "encoder.pth")]) == 0
    exported = torch.load(tmp_path / "encoder.pth", weights_only=True)
    expected = encoder("resnet18", ONLINE).backbone.state_dict()
    assert all(torch.equal(exported[name], expected[name]) for name in expected | exported)
    assert cli.main(["evaluate", "linear", str(tmp_path / "run")]) == 0
    linear = ["--with_linear", "true", "--output", str(tmp_path / "classifier.pth")]
    assert cli.main(["export", str(tmp_path / "run"), *linear]) == 0
    classifier = torchvision.models.resnet18(num_classes=2)
    classifier.load_state_dict(torch.load(tmp_path / "classifier.pth", weights_only=True))
    about = json.loads((tmp_path / "classifier.pth.json").read_text())["linear"]
    measured = json.loads((tmp_path / "run/evaluation/linear-quick-epoch100.json").read_text())
    assert about["classes"] == ["0", "1"]
    assert (about["protocol"], about["accuracy"]) == (measured["protocol"], measured["accuracy"])


class Planted:
    """An object that makes a file when it is unpickled without restraint."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize(
    "save", [torch.save, lambda content, file: file.write_bytes(pickle.dumps(content, protocol=2))]
)
def test_a_file_that_holds_more_than_tensors_is_refused_unread(save, state, tmp_path, capsys):
    file = tmp_path / "weights.pth"
    save({"model": {}, "args": Planted(tmp_path / "planted")}, file)
    error = refused(capsys, file, tmp_path / "run")
    assert "mkdir" in error and "run code" in error and "torch.save(" in error
    assert not (tmp_path / "planted").exists()


def test_the_way_to_save_again_that_the_message_gives_works(state, tmp_path, capsys, monkeypatch):
    torch.save({"model": state, "args": Planted(tmp_path / "planted")}, tmp_path / "weights.pth")
    error = refused(capsys, tmp_path / "weights.pth", tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    exec(error[error.index("import torch") :], {})
    imported(tmp_path / "elsewhere/weights.pth", tmp_path / "run")


def test_files_that_are_no_checkpoint_are_refused(tmp_path, capsys):
    run = tmp_path / "run"
    assert "cannot be read" in refused(capsys, tmp_path / "absent.pth", run)
    assert "cannot be read" in refused(capsys, tmp_path, run)
    for name, content in {
        "text.pth": b"hello world\n" * 9,
        "empty.pth": b"",
        "zip.pth": b"PK\x03\x04 and no more",
        "text.safetensors": b"hello world\n" * 9,
    }.items():
        (tmp_path / name).write_bytes(content)
        error = refused(capsys, tmp_path / name, run)
        assert name in error and "damaged" in error
    torch.save(torch.ones(3), tmp_path / "tensor.pth")
    assert "holds a Tensor" in refused(capsys, tmp_path / "tensor.pth", run)
    torch.save({"weights": [1, 2], "epoch": 3}, tmp_path / "numbers.pth")
    assert "holds weights, epoch" in refused(capsys, tmp_path / "numbers.pth", run)
    torch.save({"model": {}}, tmp_path / "nothing.pth")
    assert "holds nothing" in refused(capsys, tmp_path / "nothing.pth", run)


def test_a_truncated_checkpoint_is_refused(state, tmp_path, capsys):
    file = tmp_path / "weights.pth"
    torch.save(state, file)
    file.write_bytes(file.read_bytes()[:-100_000])
    assert "damaged" in refused(capsys, file, tmp_path / "run")


def test_missing_unknown_and_misshaped_keys_are_listed(state, tmp_path, capsys):
    def error_of(changed: dict) -> str:
        torch.save(changed, tmp_path / "weights.pth")
        return refused(capsys, tmp_path / "weights.pth", tmp_path / "run")

    without = {name: tensor for name, tensor in state.items() if not name.startswith("encoder.4.0.bn1.")}
    assert "encoder: 5 keys missing, layer1.0.bn1.weight, layer1.0.bn1.bias" in error_of(without)
    online_alone = {name: tensor for name, tensor in state.items() if not name.startswith("momentum_")}
    assert "momentum_encoder: 126 keys missing, conv1.weight" in error_of(online_alone)
    assert "1 unknown keys, predictor.0.weight" in error_of(state | {"predictor.0.weight": torch.ones(2)})
    assert "encoder: 1 keys unknown, fc.weight" in error_of(state | {"encoder.fc.weight": torch.ones(2)})
    assert "1 unknown keys, module.encoder.conv1.weight" in error_of(
        state | {"module.encoder.conv1.weight": state["encoder.0.weight"]}
    )
    misshaped = state | {"encoder.0.weight": torch.ones(64, 3, 3, 3)}
    assert "closest is resnet18" in error_of(misshaped)
    assert "with another shape, conv1.weight [64, 3, 3, 3]" in error_of(misshaped)


def test_another_architecture_is_refused(state, tmp_path, capsys):
    transformer = nn.TransformerEncoderLayer(8, 2).state_dict()
    content = {
        f"module.{part}.{name}": t for part in ("encoder", "momentum_encoder") for name, t in transformer.items()
    }
    torch.save({"state_dict": content}, tmp_path / "weights.pth")
    assert "matches none of resnet18, resnet34" in refused(capsys, tmp_path / "weights.pth", tmp_path / "run")
    torch.save(build_backbone("resnet18").state_dict(), tmp_path / "plain.pth")
    assert "126 unknown keys, conv1.weight" in refused(capsys, tmp_path / "plain.pth", tmp_path / "run")


def test_folders_are_checked_first(tmp_path, capsys):
    file = tmp_path / "absent.pth"
    (tmp_path / "file").write_text("")
    assert "exists already" in refused(capsys, file, tmp_path / "file")
    assert f"{tmp_path}/file is a file; give a folder" in refused(capsys, file, tmp_path / "file/below/it")
    error = refused(capsys, file, tmp_path / "run", "--data.train", str(tmp_path / "images"))
    assert f"data.train = {tmp_path}/images: no such file or folder" in error


def test_a_failure_leaves_no_half_run(state, tmp_path, monkeypatch):
    torch.save(state, tmp_path / "weights.pth")
    monkeypatch.setattr("unigrad_fast.checkpoints.files.write_weights", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["import", str(tmp_path / "weights.pth"), str(tmp_path / "run")])
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.pth"]
