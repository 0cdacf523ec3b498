"""`unigrad-fast import`: turns a checkpoint of the authors' code into a run that can be evaluated and exported.

Their model has four parts: `encoder`, `projector`, and the momentum copies of both, under DDP's prefix `module.`.
An encoder is a Sequential of the children of torchvision's ResNet, so that numbers stand for their names; a projector
is a Sequential of Sequentials of linear, batch norm and ReLU.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Size, Tensor

from unigrad_fast.checkpoints.foreign import CHILDREN, listed, load
from unigrad_fast.checkpoints.weights import write_run
from unigrad_fast.config import Model, Projector, resolve
from unigrad_fast.networks.backbones import build_backbone
from unigrad_fast.networks.encoder import build_projector
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.files import dangling_link, unwritable
from unigrad_fast.runtime.outputs import within_images
from unigrad_fast.runtime.shell import own
from unigrad_fast.runtime.validation import validate

RECIPE = "imagenet_100ep"  # the paper's run, from which their published files come
BRANCHES = {"online": ("encoder", "projector"), "target": ("momentum_encoder", "momentum_projector")}

State = dict[str, Tensor]


def import_run(file: Path, run: Path, train: Path | None = None, val: Path | None = None) -> None:
    """Write the weights of a file to a new run folder, and print what was imported and what was left out.

    The backbones of both branches are imported, and the projectors if they have our layout.

    Args:
        file: a state dict saved by torch.save, alone or under `model` or `state_dict`; or a safetensors file.
        run: new folder.
        train, val: image folders for evaluating the run.

    Raises:
        UserError: the folder exists, the file cannot be read, lacks a backbone, or has unknown keys.
    """
    _require_places(run, {"data.train": train, "data.val": val})
    state, step, epoch, rest = _read(file)
    parts = _split(file, state)
    backbone = _backbone_of(file, parts)
    tensors = {f"{branch}.backbone.{name}": t for branch in BRANCHES for name, t in parts[BRANCHES[branch][0]].items()}
    model: dict[str, Any] = {"backbone": backbone, "stem": "imagenet"}
    projector = _projector_of(backbone, parts)
    if isinstance(projector, str):
        rest.append(f"the projector ({projector})")
    else:
        settings, projectors = projector
        tensors |= projectors
        model["projector"] = settings.model_dump()
    config = resolve(RECIPE, {"output": run, "data": {"train": train, "val": val}, "model": model})
    tensors = {name: (t.float() if t.is_floating_point() else t).contiguous() for name, t in tensors.items()}
    write_run(run, config, tensors, step or 0, epoch or 0)

    width = "" if isinstance(projector, str) else f", projector {settings.depth} x {settings.width}"
    when = f"epoch {epoch}, step {step or 0}" if epoch is not None else "epoch unknown (recorded as 0)"
    print(f"{backbone}{width}, {when}, both branches, from {file} to {run}")
    if rest:
        print(f"Left out: {', '.join(rest)}")
    missing = ["--data.train FOLDER --data.val FOLDER"] if train is None or val is None else []
    print("Evaluate it:", own("evaluate", "knn", run), *missing)
    print("Export it:", own("export", run))


def _require_places(run: Path, folders: Mapping[str, Path | None]) -> None:
    problems = [
        f"{key} = {folder}: no such file or folder; correct it, or leave it out"
        for key, folder in folders.items()
        if folder is not None and not os.path.exists(folder)
    ]
    if problem := dangling_link(run) or within_images(run, folders):
        problems.append(f"run = {run}: {problem}")
    elif os.path.lexists(run):
        problems.append(f"run = {run}: exists already; give a new folder")
    elif problem := unwritable(run):
        problems.append(f"run = {run}: {problem}")
    if problems:
        raise UserError("\n".join(problems))


def _read(file: Path) -> tuple[State, int | None, int | None, list[str]]:
    """The state dict of a file, steps and epochs done (None if unknown), and the other keys of the file."""
    content = load(file)
    key = next((key for key in ("model", "state_dict") if isinstance(content.get(key), Mapping)), None)
    state = content if key is None else content[key]
    wrong = [str(name) for name, value in state.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if wrong or not state:
        raise UserError(
            f"{file}: holds {listed(wrong) or 'nothing'} where names and tensors are expected; save a state dict "
            "alone, or under the key model or state_dict"
        )
    if key is None:
        return state, None, None, []
    numbers = (content.get(name) for name in ("step", "epoch"))
    step, epoch = (number if type(number) is int and number >= 0 else None for number in numbers)
    if key == "model" and epoch is not None:
        epoch += 1  # the authors' code counts from 0 and saves after the epoch
    return state, step, epoch, [name for name in content if name not in (key, "step", "epoch")]


def _split(file: Path, state: Mapping[str, Tensor]) -> dict[str, State]:
    """The tensors of each part; those of the encoders under torchvision's names."""
    parts: dict[str, State] = {part: {} for branch in BRANCHES.values() for part in branch}
    unknown = []
    for key, tensor in state.items():
        part, _, name = key.removeprefix("module.").partition(".")
        if part.endswith("encoder"):
            child, dot, leaf = name.partition(".")
            name = CHILDREN.get(child, child) + dot + leaf
        if part not in parts or name in parts[part]:
            unknown.append(key)
        else:
            parts[part][name] = tensor
    if unknown:
        raise UserError(
            f"{file}: {len(unknown)} unknown keys, {listed(unknown)}; expected encoder.*, projector.*, "
            "momentum_encoder.* and momentum_projector.*, with or without the prefix module."
        )
    return parts


def _backbone_of(file: Path, parts: Mapping[str, State]) -> str:
    """Name of the backbone that matches the names and shapes of both encoders."""
    online, target = (_shapes(parts[encoder]) for encoder, _ in BRANCHES.values())
    expected = _backbones()
    nearest = min(expected, key=lambda name: len(expected[name].items() ^ online.items()))
    problems = []
    for (encoder, _), found in zip(BRANCHES.values(), (online, target), strict=True):
        wanted = expected[nearest]
        missing, unknown = [n for n in wanted if n not in found], [n for n in found if n not in wanted]
        misshaped = [f"{n} {list(found[n])}" for n in wanted if n in found and found[n] != wanted[n]]
        for names, what in ((missing, "missing"), (unknown, "unknown"), (misshaped, "with another shape")):
            if names:
                problems.append(f"{file}: {encoder}: {len(names)} keys {what}, {listed(names)}")
    if problems:
        said = f"{file}: matches none of {', '.join(expected)}; the closest is {nearest}:"
        raise UserError("\n".join([said, *problems]))
    return nearest


@functools.cache
def _backbones() -> dict[str, dict[str, tuple[int, ...]]]:
    """Names and shapes of the weights of every backbone; cached, because it takes seconds."""
    with torch.device("meta"):
        names = get_args(Model.model_fields["backbone"].annotation)
        return {name: _shapes(build_backbone(name).state_dict()) for name in names}


def _projector_of(backbone: str, parts: Mapping[str, State]) -> tuple[Projector, State] | str:
    """Settings of the projector and its tensors under our names, or why it cannot be imported."""
    theirs = {branch: parts[projector] for branch, (_, projector) in BRANCHES.items()}
    weights = [tensor for tensor in _in_order(theirs["online"]).values() if tensor.dim() == 2]
    if not weights:
        return "the file has none"
    try:
        settings = validate(Projector, {"depth": len(weights), "width": len(weights[-1])})
    except UserError as error:
        return str(error)
    with torch.device("meta"):
        ours = _in_order(build_projector(build_backbone(backbone).feature_dim, settings).state_dict())
    tensors: State = {}
    for branch, state in theirs.items():
        state = _in_order(state)
        if _layout(state) != _layout(ours):
            return f"its layers are not {settings.depth} x {settings.width} with a bias only in the last linear layer"
        tensors |= {f"{branch}.projector.{name}": t for name, t in zip(ours, state.values(), strict=True)}
    return settings, tensors


def _in_order(state: Mapping[str, Tensor]) -> State:
    """The tensors in the order of the layers, at any nesting depth; safetensors files have another order."""
    return {
        name: state[name] for name in sorted(state, key=lambda name: [part.rjust(9, "0") for part in name.split(".")])
    }


def _layout(state: Mapping[str, Tensor]) -> list[tuple[str, Size]]:
    return [(name.rpartition(".")[2], tensor.shape) for name, tensor in state.items()]


def _shapes(state: Mapping[str, Tensor]) -> dict[str, Size]:
    return {name: tensor.shape for name, tensor in state.items()}
