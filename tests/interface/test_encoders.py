"""`load_encoder`: which weights it takes, how it prepares images, and what it refuses."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import v2

from unigrad_fast import UserError, evaluate, export, load_encoder
from unigrad_fast.checkpoints.weights import load_branch, open_checkpoint
from unigrad_fast.pipelines import EvaluationLoader, Manifest
from unigrad_fast.pipelines.presets import DEVIATION, MEAN

SIZE = 16


@pytest.fixture(scope="module")
def encoder(finished):
    return finished.encoder(device="cpu")


@pytest.fixture(scope="module")
def pictures(images) -> list[Image.Image]:
    return [Image.open(file) for file in sorted((images / "val").rglob("*.jpg"))]


def test_features_are_those_of_the_backbone_over_normalised_images(encoder):
    images = torch.rand(4, 3, SIZE, SIZE)
    normalised = (images - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]
    features = encoder(images)
    assert features.shape == (4, encoder.width) and features.dtype == torch.float32 and not features.requires_grad
    torch.testing.assert_close(features, encoder.network(normalised))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_bytes_and_every_floating_point_are_the_same_image(encoder, dtype):
    images = torch.randint(0, 2, (2, 3, SIZE, SIZE), dtype=torch.uint8)  # 0 and 1 are exact in every dtype
    expected = encoder(images.float())
    assert torch.equal(encoder(images.to(dtype)), expected) and torch.equal(encoder(images * 255), expected)


def test_pictures_are_cropped_as_for_an_evaluation(finished, pictures, tmp_path):
    encoder = load_encoder(finished, image_size=151, device="cpu")
    for number, picture in enumerate(pictures):  # as PNG, which everybody decodes alike
        picture.resize((200 + number, 300)).save(tmp_path / f"{number:03}.png")
    pictures = [Image.open(file) for file in sorted(tmp_path.iterdir())]
    ((loaded, index),) = EvaluationLoader(Manifest.from_folder(tmp_path), 151, 1.0, threads=1)
    assert index.tolist() == list(range(len(pictures)))
    levels = 255 * (loaded * torch.tensor(DEVIATION)[:, None, None] + torch.tensor(MEAN)[:, None, None])
    apart = (encoder.cropped(pictures) - levels).abs()
    assert apart.mean() < 0.3 and (apart <= 1.01).float().mean() >= 0.99  # tests/pipelines/test_evaluation_loader.py
    assert torch.equal(encoder(pictures), encoder(encoder.cropped(pictures)))


def test_features_of_pictures_are_those_that_evaluate_writes(finished, encoder, pictures, images, tmp_path):
    written = np.load(evaluate.features(finished, images / "val", output=tmp_path / "features.npz"))
    given = torch.from_numpy(written["feature"])
    cosine = torch.cosine_similarity(encoder(pictures), given)
    # A level of 255 more or less in some pixels, and rows in half precision.
    assert cosine.min() > 0.999
    assert torch.cosine_similarity(encoder(pictures)[:1], given[1:]).min() < cosine.min()


def test_one_picture_of_any_mode_is_a_batch_of_one(encoder):
    gray = Image.fromarray(np.full((40, 60), 128, np.uint8))
    assert torch.equal(encoder(gray), encoder([gray.convert("RGB")]))
    assert encoder(gray.convert("RGBA")).shape == (1, encoder.width)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (torch.rand(2, 3, 8, 8) * 255, ValueError, "give them from 0 to 1: divide by 255"),
        (torch.rand(2, 3, 8, 8) - 0.5, ValueError, "give them from 0 to 1: leave out any normalisation"),
        (torch.full((2, 3, 8, 8), torch.nan), ValueError, "values from nan to nan"),
        (
            torch.rand(2, 8, 8, 3),
            ValueError,
            "give [N, 3, H, W], as images.permute(0, 3, 1, 2) is",
        ),
        (torch.rand(2, 1, 8, 8), ValueError, "shape [2, 1, 8, 8]; give [N, 3, H, W]"),
        (torch.rand(3, 8, 8), ValueError, "one image as images[None]"),
        (torch.rand(0, 3, 8, 8), ValueError, "images: there are none"),
        ([], ValueError, "images: there are none"),
        (torch.ones(2, 3, 8, 8, dtype=torch.int64), TypeError, "images: are int64; give uint8, or floating point"),
        ([np.zeros((8, 8, 3))], TypeError, "images: has a ndarray"),
    ],
)
def test_images_that_cannot_be_meant_are_refused(encoder, given, error, said):
    with pytest.raises(error, match=re.escape(said)):
        encoder(given)


def test_embeddings_come_through_the_projector(finished, encoder):
    images = torch.rand(3, 3, SIZE, SIZE)
    embedding = finished.encoder("embedding", device="cpu")
    assert embedding.width == 32
    state = load_branch(open_checkpoint(finished.path), "online.projector")
    assert torch.equal(embedding.network[1].state_dict()["0.weight"], state["0.weight"])
    torch.testing.assert_close(embedding(images), embedding.network[1](encoder(images)))


def test_an_older_checkpoint_can_be_taken(finished, encoder):
    first, *_ = finished.checkpoints
    images = torch.rand(2, 3, SIZE, SIZE)
    assert not torch.equal(load_encoder(finished, checkpoint=first, device="cpu")(images), encoder(images))


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_an_export_is_the_same_encoder(finished, encoder, tmp_path, ending):
    exported = export(finished, output=tmp_path / f"weights.{ending}")
    assert exported.path.is_file() and exported.settings["backbone"] == "resnet18" and exported.accuracy is None
    loaded = load_encoder(exported, device="cpu")
    images = torch.rand(2, 3, SIZE, SIZE)
    assert loaded.image_size == SIZE and torch.equal(loaded(images), encoder(images))


def test_weights_of_anybody_need_the_name_of_their_backbone(encoder, tmp_path):
    file = tmp_path / "weights.pth"
    torch.save({"state_dict": {f"module.{name}": value for name, value in encoder.network.state_dict().items()}}, file)
    images = torch.rand(2, 3, 32, 32)
    loaded = load_encoder(str(file), backbone="resnet18", device="cpu")
    assert loaded.image_size == 224 and torch.equal(loaded(images), encoder(images))
    assert load_encoder(file, backbone="resnet18", image_size=64).image_size == 64
    with pytest.raises(UserError, match=r"backbone = null: .*weights.pth needs one of resnet18, "):
        load_encoder(file)
    with pytest.raises(UserError, match=r"backbone = vgg: "):
        load_encoder(file, backbone="vgg")
    with pytest.raises(UserError, match=r"output = embedding: .* has no projector"):
        load_encoder(file, backbone="resnet18", output="embedding")


def test_what_is_no_encoder_is_refused(finished, tmp_path):
    for wrong, said in (
        ({"source": tmp_path}, "no run there"),
        ({"source": tmp_path / "none"}, "no such file or folder"),
        ({"source": finished, "backbone": "resnet18"}, "backbone = resnet18: applies only to a file"),
        ({"source": finished, "checkpoint": 99}, "checkpoint = 99: no checkpoint of that step"),
        ({"source": finished, "output": "logits"}, "output = logits: must be one of backbone, embedding"),
    ):
        with pytest.raises(UserError, match=said):
            load_encoder(wrong.pop("source"), **wrong)


def test_an_encoder_can_be_trained_further(encoder, finished):
    trained = finished.encoder(device="cpu").requires_grad_(True).train()
    head = nn.Linear(trained.width, 2)
    head(trained(torch.rand(4, 3, SIZE, SIZE))).sum().backward()
    assert all(weight.grad is not None for weight in trained.parameters())
    assert not encoder.training


def test_the_preparation_is_the_one_that_export_prints(encoder):
    shown = v2.Compose([v2.Resize(SIZE), v2.CenterCrop(SIZE)])
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 31, 3), np.uint8))
    assert torch.equal(encoder.cropped(picture)[0], v2.functional.pil_to_tensor(shown(picture)))


def test_a_run_that_was_moved_is_found_where_it_is(finished, encoder, tmp_path):
    moved = Path(shutil.copytree(finished.path, tmp_path / "moved"))
    images = torch.rand(2, 3, SIZE, SIZE)
    assert torch.equal(load_encoder(os.fspath(moved), device="cpu")(images), encoder(images))
