"""Weights from a file, with the description that lies beside it."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from unigrad_fast.evaluation.sources import of_file
from unigrad_fast.networks.backbones import build_backbone
from unigrad_fast.runtime.errors import UserError

WHOLE = {"branch": "target", "step": 20, "epoch": 2.0, "image_size": 32, "crop_fraction": 0.5}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    torch.save(build_backbone("resnet18").state_dict(), path)
    return path


def described(weights, about: dict):
    """The source of the weights with a description."""
    about = about | {"sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
    weights.with_name("weights.pth.json").write_text(json.dumps(about))
    return of_file(weights, "resnet18", None)


@pytest.mark.parametrize("null", [False, True])
def test_what_a_description_lacks_is_as_without_one(weights, null):
    absent = {"branch": "backbone", "step": None, "epoch": None, "image_size": 224, "crop_fraction": 0.875}
    for gone in WHOLE:
        source = described(weights, WHOLE | {gone: None} if null else {k: v for k, v in WHOLE.items() if k != gone})
        config = source.config
        found = {**source.about, "image_size": config.data.image_size}
        found["crop_fraction"] = config.evaluation.crop_fraction
        assert found == WHOLE | {"branch": "target backbone"} | {gone: absent[gone]}


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"epoch": "12"}, "epoch = 12"),
        ({"step": 1.5}, "step = 1.5"),
        ({"branch": ["online"]}, 'branch = ["online"]'),
        ({"image_size": True}, "image_size = true"),
        ({"crop_fraction": {}}, "crop_fraction = {}"),
    ],
)
def test_odd_values_of_a_description_are_refused(weights, odd, said):
    with pytest.raises(UserError) as caught:
        described(weights, WHOLE | odd)
    path = weights.with_name("weights.pth.json")
    assert str(caught.value) == f"{path}: {said}: not as `export` writes it; correct or remove the file"
