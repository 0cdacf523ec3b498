"""Backbones in files of other programs: torchvision's, published checkpoints, with keys as their codes write them."""

from __future__ import annotations

import argparse
import collections
import pathlib
import pickle
import sys
import types
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from unigrad_fast.checkpoints.foreign import backbone_in
from unigrad_fast.evaluation.sources import of_file
from unigrad_fast.networks.backbones import build_backbone
from unigrad_fast.runtime.errors import UserError

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def states() -> list[State]:
    """Two different backbones, each with a head `fc`."""
    return [dict(drawn(seed).state_dict()) for seed in (0, 1)]


def drawn(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return torchvision.models.resnet18()


def under(prefix: str, state: Mapping[str, Tensor], leave: str = "fc.") -> State:
    """A state dict below a prefix, without the names that begin with `leave`."""
    return {f"{prefix}{name}": tensor for name, tensor in state.items() if not name.startswith(leave or " ")}


def numbered(state: State) -> State:
    """The names that a Sequential of the children has."""
    numbers = {"conv1": "0", "bn1": "1", "layer1": "4", "layer2": "5", "layer3": "6", "layer4": "7"}
    parts = {name: name.partition(".") for name in under("", state)}
    return {f"{numbers[child]}.{leaf}": state[name] for name, (child, _, leaf) in parts.items()}


def head(prefix: str) -> State:
    return {f"{prefix}0.weight": torch.zeros(4, 4), f"{prefix}1.running_mean": torch.zeros(4)}


def training(**more: object) -> dict:
    """What stands beside the weights."""
    return {"epoch": 99, "optimizer": {"state": {0: {"momentum_buffer": torch.zeros(2)}}}, **more}


Build = Callable[[State, State], dict]
# By name: the content of a file with this backbone and another, the prefix, and what is left out.
FORMATS: dict[str, tuple[Build, str, list[str]]] = {
    "torchvision": (lambda own, other: own, "", ["fc"]),
    "a published backbone alone": (lambda own, other: under("", own), "", []),
    "the UniGrad authors": (
        lambda own, other: training(
            model=under("module.encoder.", numbered(own))
            | head("module.projector.")
            | under("module.momentum_encoder.", numbered(other)),
            lr=np.float64(0.1),
        ),
        "module.encoder.",
        ["optimizer", "module.projector", "module.momentum_encoder", "epoch", "lr"],
    ),
    "MoCo": (
        lambda own, other: training(
            state_dict=under("module.encoder_k.", other)
            | under("module.encoder_q.", own)
            | head("module.encoder_q.fc.")
            | {"module.queue": torch.zeros(4, 8)},
            arch="resnet50",
        ),
        "module.encoder_q.",
        ["optimizer", "module.encoder_k", "module.encoder_q.fc", "module.queue", "epoch", "arch"],
    ),
    "MoCo v3": (
        lambda own, other: training(
            state_dict=under("module.base_encoder.", own)
            | head("module.base_encoder.fc.")
            | under("module.momentum_encoder.", other)
            | head("module.predictor.")
        ),
        "module.base_encoder.",
        ["optimizer", "module.base_encoder.fc", "module.momentum_encoder", "module.predictor", "epoch"],
    ),
    "DINO": (
        lambda own, other: training(
            student=under("module.backbone.", other) | head("module.head."),
            teacher=under("backbone.", own) | head("head."),
            args=argparse.Namespace(arch="resnet50", output_dir=pathlib.PosixPath("/x")),
            dino_loss={"center": torch.zeros(1, 4)},
        ),
        "teacher.backbone.",
        ["optimizer", "student", "teacher.head", "dino_loss", "epoch", "args"],
    ),
    "DINO on several GPUs": (
        lambda own, other: {"student": under("module.backbone.", other), "teacher": under("module.backbone.", own)},
        "teacher.module.backbone.",
        ["student"],
    ),
    "SwAV": (
        lambda own, other: (
            under("module.", own) | head("module.projection_head.") | {"module.prototypes.weight": torch.zeros(3, 4)}
        ),
        "module.",
        ["module.projection_head", "module.prototypes"],
    ),
    "Barlow Twins, VICReg": (
        lambda own, other: training(model=under("module.backbone.", own) | head("module.projector.")),
        "module.backbone.",
        ["optimizer", "module.projector", "epoch"],
    ),
    "SimSiam": (
        lambda own, other: training(
            state_dict=under("module.encoder.", own) | head("module.encoder.fc.") | head("module.predictor.")
        ),
        "module.encoder.",
        ["optimizer", "module.encoder.fc", "module.predictor", "epoch"],
    ),
    "BYOL, chigur": (
        lambda own, other: {
            "online_backbone": under("module.", own),
            "target_backbone": under("module.", other),
            "online_projector": head("module."),
        },
        "online_backbone.module.",
        ["target_backbone", "online_projector"],
    ),
    "BYOL, yaox12": (
        lambda own, other: training(
            model=under("module.online_network.encoder.", numbered(own))
            | head("module.online_network.projetion.")
            | under("module.target_network.encoder.", numbered(other))
        ),
        "module.online_network.encoder.",
        ["optimizer", "module.online_network.projetion", "module.target_network", "epoch"],
    ),
    "BYOL, lucidrains": (
        lambda own, other: (
            under("net.", own, "")
            | under("online_encoder.net.", own, "")
            | under("target_encoder.net.", other, "")
            | head("online_predictor.net.")
        ),
        "online_encoder.net.",
        ["net", "online_encoder.net.fc", "target_encoder", "online_predictor"],
    ),
    "solo-learn": (
        lambda own, other: {
            "state_dict": under("backbone.", own) | under("momentum_backbone.", other) | head("projector."),
            "hyper_parameters": {"lr": 0.3},
        },
        "backbone.",
        ["momentum_backbone", "projector", "hyper_parameters"],
    ),
    "an unknown wrapper": (lambda own, other: under("trunk.body.", own) | head("neck."), "trunk.body.", ["neck"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_published_checkpoint_is_read_as_it_comes(name, states, tmp_path):
    build, prefix, left_out = FORMATS[name]
    torch.save(build(*states), tmp_path / "weights.pth")
    found = backbone_in(tmp_path / "weights.pth", "resnet18")
    assert (found.prefix, sorted(found.left_out), found.stem) == (prefix, sorted(left_out), "imagenet")
    assert {key for key, tensor in found.state.items() if torch.equal(tensor, states[0][key])} == set(found.state)
    build_backbone("resnet18").load_state_dict(found.state, strict=True)


def test_half_precision_old_counters_and_small_stems_are_taken(tmp_path):
    state = build_backbone("resnet18", "small").half().state_dict()
    file = tmp_path / "weights.safetensors"
    save_file({key: tensor for key, tensor in state.items() if "num_batches" not in key}, file)
    found = backbone_in(file, "resnet18")
    assert found.stem == "small" and found.state["conv1.weight"].dtype == torch.float32
    build_backbone("resnet18", "small").load_state_dict(found.state, strict=True)


def test_parameters_are_taken_as_plain_tensors(tmp_path):
    torch.save(build_backbone("resnet18").state_dict(keep_vars=True), tmp_path / "weights.pth")
    found = of_file(tmp_path / "weights.pth", "resnet18", None)
    assert not any(tensor.requires_grad for tensor in found.contents.values())
    assert found.digest().startswith("sha256-")


def refused(tmp_path, content: object, backbone: str = "resnet18") -> str:
    file = tmp_path / "weights.pth"
    torch.save(content, file)
    with pytest.raises(UserError) as error:
        backbone_in(file, backbone)
    (line,) = str(error.value).splitlines()
    return line.removeprefix(f"{file}: ")


def test_a_backbone_that_is_not_whole_is_refused_also_where_another_is(states, tmp_path):
    own, other = states
    moco = under("module.encoder_q.", own) | under("module.encoder_k.", other)
    del moco["module.encoder_q.layer3.0.conv2.weight"]
    assert refused(tmp_path, moco) == "does not fit resnet18: module.encoder_q.layer3.0.conv2.weight is missing"
    wide = own | {"layer1.0.conv1.weight": torch.zeros(7, 5, 3, 3)}
    shape = list(own["layer1.0.conv1.weight"].shape)
    assert f"layer1.0.conv1.weight has the shape [7, 5, 3, 3] instead of {shape}" in refused(tmp_path, wide)
    deep = own | {"layer1.2.conv1.weight": own["layer1.1.conv1.weight"]}
    assert refused(tmp_path, deep) == "does not fit resnet18: layer1.2.conv1.weight is not in a resnet18"
    said = refused(tmp_path, own, "resnet34")
    assert said.endswith(" more tensors; it is a resnet18, so give --backbone resnet18")


def test_a_file_without_a_backbone_or_with_several_unknown_ones_is_refused(states, tmp_path):
    assert refused(tmp_path, {"patch_embed.proj.weight": torch.zeros(8, 3, 16, 16)}) == (
        "holds no weights of a resnet18, whose first convolution is called conv1.weight (or 0.weight); it holds "
        "patch_embed.proj.weight"
    )
    assert "holds nothing" in refused(tmp_path, {})
    assert refused(tmp_path, [1, 2]) == "holds a list; expected a dictionary of weights; save a state_dict()"
    assert refused(tmp_path, under("left.", states[0]) | under("right.", states[1])).startswith(
        "holds several backbones, left., right.; "
    )


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8), "quantized"),
        (lambda tensor: tensor.to("meta"), "on the device meta, without values"),
        (lambda tensor: tensor.to_sparse(), "sparse"),
        (lambda tensor: tensor.to(torch.complex64), "of the dtype complex64"),
        (lambda tensor: tensor.to(torch.int8), "of the dtype int8"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_is_not_of_dense_floats_is_named(states, tmp_path, change, kind):
    odd = {key: change(tensor) if key == "layer1.0.bn1.weight" else tensor for key, tensor in states[0].items()}
    assert refused(tmp_path, under("module.", odd)) == (
        f"module.layer1.0.bn1.weight is {kind}; save the weights as dense tensors of floats"
    )
    torch.save({"state_dict": states[0], "queue": change(torch.ones(2))}, tmp_path / "weights.pth")
    assert backbone_in(tmp_path / "weights.pth", "resnet18").left_out == ["fc", "queue"]  # which is not read


def test_dictionaries_without_end_are_refused(states, tmp_path):
    endless = {"model": states[0]}
    endless["self"] = endless
    assert refused(tmp_path, endless).startswith("holds a dictionary within itself, or too many within one another")


def standing_for(module: str, name: str, base: type = object) -> type:
    """A class that pickles under a name of a library that is not installed."""
    made = type(name, (base,), {"__module__": module})
    for end in range(1, module.count(".") + 2):
        part = ".".join(module.split(".")[:end])
        sys.modules.setdefault(part, types.ModuleType(part))
    setattr(sys.modules[module], name, made)
    return made


def test_arguments_of_a_training_are_read_past_and_code_is_refused(states, tmp_path, monkeypatch):
    modules = dict(sys.modules)
    config = standing_for("omegaconf.dictconfig", "DictConfig")()
    node = standing_for("omegaconf.nodes", "AnyNode")()
    counts = collections.defaultdict(dict)
    counts["lr"] = {"a": 1}
    node.__dict__ |= {"_val": 3, "resolved": counts, "type": dict}
    config.__dict__ |= {"_content": {"lr": node}, "_metadata": argparse.Namespace(ref_type=int)}
    attributes = standing_for("lightning_fabric.utilities.data", "AttributeDict", dict)(lr=0.1)
    torch.save({"state_dict": states[0], "cfg": config, "hyper_parameters": attributes}, tmp_path / "weights.pth")
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]
    assert backbone_in(tmp_path / "weights.pth", "resnet18").left_out == ["fc", "cfg", "hyper_parameters"]

    class Runs:
        def __reduce__(self):
            return (pathlib.Path.touch, (tmp_path / "ran",))

    for pickled in ({"model": states[0], "args": Runs()}, {"model": Runs()}):
        assert "loading it could run code" in refused(tmp_path, pickled)
    torch.save({"model": states[0], "args": pickle.Pickler}, tmp_path / "weights.pth")
    with pytest.raises(UserError, match="could run code"):
        backbone_in(tmp_path / "weights.pth", "resnet18")
    assert not (tmp_path / "ran").exists()
