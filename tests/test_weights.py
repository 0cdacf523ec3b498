"""The weights file: whole or not at all."""

import errno

import pytest
import torch
from torch import nn

from unigrad_fast import weights
from unigrad_fast.errors import UserError
from unigrad_fast.weights import FILE_NAME, load_branch, load_encoder, save_weights


def branches(value: float) -> dict[str, nn.Module]:
    online = nn.ModuleDict({"backbone": nn.Linear(2, 3), "projector": nn.Linear(3, 4)})
    nn.init.constant_(online["backbone"].weight, value)
    return {"online": online}


def test_a_branch_is_read_back_with_its_metadata(tmp_path):
    saved = branches(2.0)
    save_weights(tmp_path, saved, step=7, epoch=1.75)
    backbone = nn.Linear(2, 3)
    assert load_encoder(tmp_path, backbone) == {"step": "7", "epoch": "1.75"}
    assert torch.equal(backbone.weight, saved["online"]["backbone"].weight)
    state, _ = load_branch(tmp_path, "online.projector")
    assert sorted(state) == ["bias", "weight"]


def test_a_full_disk_leaves_the_previous_file(tmp_path, monkeypatch):
    save_weights(tmp_path, branches(1.0), step=1, epoch=1)

    def full(tensors, path, metadata):
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_weights(tmp_path, branches(2.0), step=2, epoch=2)
    assert load_branch(tmp_path, "online.backbone")[1]["step"] == "1"
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_missing_damaged_and_misfitting_files_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"weights\.safetensors: no such file"):
        load_encoder(tmp_path, nn.Linear(2, 3))
    save_weights(tmp_path, branches(1.0), step=1, epoch=1)
    with pytest.raises(UserError, match="does not fit"):
        load_encoder(tmp_path, nn.Linear(2, 4))
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="damaged"):
        load_encoder(tmp_path, nn.Linear(2, 3))
