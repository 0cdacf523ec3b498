"""`unigrad-fast export`: writes a run's backbone with torchvision's names to a file, and a description of it."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

import unigrad_fast
from unigrad_fast.checkpoints.files import Reader
from unigrad_fast.checkpoints.weights import configuration, fill, fingerprint, load_branch, open_checkpoint
from unigrad_fast.config import Config
from unigrad_fast.networks.backbones import build_backbone
from unigrad_fast.pipelines.presets import DEVIATION, MEAN, short_side
from unigrad_fast.runtime import outputs
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.files import dangling_link, unwritable, utf8_path
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.shell import own

Format = Literal["torchvision", "safetensors"]
NEVER = -1e4  # a bias below every value of a trained output; half precision can hold it
ENDINGS: dict[str, Format] = {".safetensors": "safetensors", ".pth": "torchvision", ".pt": "torchvision"}


def export(
    run: Path,
    format: Format | None = None,
    branch: Literal["online", "target"] = "online",
    with_linear: bool = False,
    output: Path | None = None,
    overwrite: bool = False,
    checkpoint: int | None = None,
    probe: Path | None = None,
) -> outputs.Written:
    """Write the backbone to a file and a description to FILE.json; print what was written and how to load it.

    Args:
        run: the run folder.
        format: "torchvision" is torch.save of a state dict, "safetensors" the same names in a safetensors file; None
            is decided by the extension of `output`, else "safetensors".
        branch: branch of the backbone.
        with_linear: add the linear probe of these weights as `fc`.
        output: the file; None is RUN/export/BACKBONE-BRANCH-epochE.ENDING, with "-linear" before the extension if it
            includes the probe.
        overwrite: replace an existing file and its description.
        checkpoint: step of the checkpoint; None is the newest.
        probe: file of the linear probe; None prefers the paper's protocol to the quick one, then the newest.

    Returns:
        The file with its description.

    Raises:
        UserError: the run has no weights or no target branch of its own, torchvision lacks its stem, there is no linear
            probe of these weights, or the output cannot be written, exists or belongs to a run. Nothing is written.
    """
    if probe is not None and not with_linear:
        raise UserError(f"probe = {probe}: applies only with --with_linear true; leave it out, or add that")
    reader = open_checkpoint(run, checkpoint)
    config, told = configuration(run, reader)
    for line in told:
        print(f"warning: {line}")
    if branch == "target" and config.objective.target != "momentum":
        raise UserError(
            f"branch = target: with objective.target {config.objective.target} the run has no second encoder; "
            "export the online branch"
        )
    format = _format(format, output)
    if format == "torchvision" and config.model.stem != "imagenet":
        raise UserError(
            f"format = torchvision: this run has model.stem = {config.model.stem}, but no model of torchvision has a "
            "3x3 first convolution without pooling; use --format safetensors, and load it into "
            "unigrad_fast.networks.encoder.build_backbone"
        )
    folder = _writable_folder(run, output)
    for path in () if output is None else (output, _description(output)):
        outputs.require_file(path, run=run)
    linear, file, of_probe = {}, None, {}
    if with_linear:
        file, linear = find_probe(run, reader, branch, probe)
        of_probe = {"linear": describe_probe(file)}
        linear = numbered(linear, of_probe["linear"])
    state = load_branch(reader, f"{branch}.backbone") | {f"fc.{name}": tensor for name, tensor in linear.items()}
    head = tuple(linear["weight"].shape) if file else None
    _require_fit(run, state, config, head)
    about = describe(config, reader.about, branch) | of_probe
    ending = next(ending for ending, of in ENDINGS.items() if of == format)
    name = f"{config.model.backbone}-{branch}-epoch{about['epoch']:g}" + ("-linear" if with_linear else "")
    path = output or folder / f"{name}{ending}"
    content = _serialise(state, format, about)
    digest = {"file": path.name, "format": format, "sha256": hashlib.sha256(content).hexdigest()}
    described = json.dumps(about | digest, indent=2).encode() + b"\n"
    outputs.write_files({path: content, _description(path): described}, overwrite)
    added = f", linear probe of {head[0]} classes from {file}" if head else ""
    if "numbers" in of_probe.get("linear", {}):
        added += f" ({len(of_probe['linear']['numbers'])} of them had training images; the others are never chosen)"
    print(
        f"{config.model.backbone}, {branch} branch, epoch {about['epoch']:g}, step {about['step']}{added}: "
        f"{path} ({len(content) / 1e6:.1f} MB), described in {path.name}.json"
    )
    print("Load it with:", *loading_lines(path, format, config, head), sep="\n  ")
    preparing = "Prepare an RGB image as evaluate does, for model(transform(image)[None]), with:"
    print(preparing, *preparing_lines(about), sep="\n  ")
    return outputs.Written(path, about, digest)


def describe(config: Config, checkpoint: dict[str, Any], branch: str) -> dict[str, Any]:
    """The description of the exported weights, JSON values."""
    return {
        "recipe": config.recipe,
        **config.objective.names,
        "backbone": config.model.backbone,
        "stem": config.model.stem,
        "branch": branch,
        "epoch": float(checkpoint["epoch"]),
        "step": checkpoint["step"],
        "image_size": config.data.image_size,
        "crop_fraction": config.evaluation.crop_fraction,
        "mean": MEAN,
        "std": DEVIATION,
        "version": unigrad_fast.__version__,
        "commit": _commit(),
    }


def find_probe(run: Path, reader: Reader, branch: str, file: Path | None = None) -> tuple[Path, dict[str, Tensor]]:
    """File and tensors of a checkpoint's probe: prefers the paper's protocol to the quick one, then the newest.

    Args:
        file: the only probe to consider.

    Raises:
        UserError: there is none, or it is damaged or belongs to other weights.
    """
    there = RunFolder(run)
    again = f"run `{own('evaluate', 'linear', run, '--checkpoint', str(reader.about['step']))}`"
    written = *there.evaluation.glob("linear-*.safetensors"), there.first_probe
    files = [file] if file is not None else [path for path in written if path.is_file()]
    if not files:
        raise UserError(f"{there.evaluation}: no linear probe; {again} first")
    problems, fitting = [], []
    for path in files:
        try:
            about = describe_probe(path)
        except ValueError as error:
            problems.append(f"{path}: {error}; {again}")
            continue
        if about["step"] != reader.about["step"]:
            problems.append(
                f"{path}: was trained on the weights of step {about['step']}, but the export is of step "
                f"{reader.about['step']}; {again}"
            )
        elif about.get("weights", fingerprint(reader)) != fingerprint(reader):
            problems.append(
                f"{path}: was trained on other weights of that step, from before the run began again; {again}"
            )
        elif branch != (of := str(about.get("branch", "online")).split()[0]):
            problems.append(
                f"with_linear = true: the probe was trained on the {of} branch; export that, or leave it out"
            )
        elif (stages := about.get("chosen", {}).get("stages", 1)) > 1:
            problems.append(
                f"{path}: takes the features of the last {stages} stages, but fc only those of the last; {again} with "
                "--protocol quick or paper"
            )
        else:
            fitting.append((about.get("protocol") == "paper", path.stat().st_mtime_ns, path))
    if not fitting:
        raise UserError(problems[0])
    path = max(fitting)[-1]
    return path, probe_tensors(path)


def probe_tensors(path: Path) -> dict[str, Tensor]:
    """Weight [K, D] and bias [K] of a probe's file, on the CPU."""
    with utf8_path(path) as name, safe_open(name, framework="pt") as content:
        return {name: content.get_tensor(name) for name in ("weight", "bias")}


def numbered(linear: dict[str, Tensor], about: dict[str, Any]) -> dict[str, Tensor]:
    """A probe with an output for each class number: those without training images never have the largest value."""
    if "numbers" not in about:
        return linear
    outputs = int(about["outputs"])
    weight = linear["weight"].new_zeros(outputs, linear["weight"].shape[1])
    bias = linear["bias"].new_full((outputs,), NEVER)
    weight[about["numbers"]], bias[about["numbers"]] = linear["weight"], linear["bias"]
    return {"weight": weight, "bias": bias}


def describe_probe(path: Path) -> dict[str, Any]:
    """The metadata of a probe's file, texts and JSON values. Raises ValueError with a text if it is not a probe."""
    names, about = metadata(path)
    if names != {"weight", "bias"} or "step" not in about:
        raise ValueError("not a linear probe")
    return about


def metadata(path: Path) -> tuple[set[str], dict[str, Any]]:
    """Names of the tensors in a safetensors file, and its texts and JSON values. Raises ValueError if it is damaged."""
    try:
        with utf8_path(path) as name, safe_open(name, framework="pt") as content:
            names, texts = set(content.keys()), content.metadata() or {}
    except FileNotFoundError:
        raise ValueError("no such file") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"damaged ({error})") from None
    about: dict[str, Any] = {}
    for key, text in texts.items():
        try:
            about[key] = json.loads(text)
        except ValueError:
            about[key] = text
    return names, about


def loading_lines(path: Path, format: Format, config: Config, head: tuple[int, ...] | None) -> list[str]:
    """Three lines of Python that create `model`, in evaluation mode; `head` is the shape [classes, D] of the probe."""
    name, stem = config.model.backbone, config.model.stem
    if stem == "imagenet":
        package, classes = "torchvision", "" if head is None else f"num_classes={head[0]}"
        model = f"torchvision.models.{name}({classes})" + ("; model.fc = torch.nn.Identity()" if head is None else "")
    else:
        package = "unigrad_fast.networks.encoder"
        linear = "" if head is None else f"; model.fc = torch.nn.Linear({head[1]}, {head[0]})"
        model = f"unigrad_fast.networks.encoder.build_backbone({name!r}, {stem!r}){linear}"
    if format == "torchvision":
        packages, state = f"torch, {package}", f"torch.load({str(path)!r}, weights_only=True)"
    else:
        packages, state = f"safetensors.torch, torch, {package}", f"safetensors.torch.load_file({str(path)!r})"
    return [f"import {packages}", f"model = {model}", f"model.eval().load_state_dict({state})"]


def preparing_lines(about: Mapping[str, Any]) -> list[str]:
    """Lines of Python that create `transform`, from Pillow's RGB image to fp32 [3, S, S]; `about` is of `describe`."""
    size = about["image_size"]
    steps = (
        f"Resize({short_side(size, about['crop_fraction'])})",
        f"CenterCrop({size})",
        "ToTensor()",
        f"Normalize({about['mean']}, {about['std']})",
    )
    composed = ", ".join(f"transforms.{step}" for step in steps)
    return ["from torchvision import transforms", f"transform = transforms.Compose([{composed}])"]


def _format(format: Format | None, output: Path | None) -> Format:
    by_ending = ENDINGS.get(output.suffix.lower()) if output is not None else None
    if output is not None and by_ending is None and not os.path.isdir(output):
        raise UserError(f"output = {output}: give a name that ends in one of {', '.join(ENDINGS)}")
    if format and by_ending and format != by_ending:
        raise UserError(
            f"output = {output}: the extension means --format {by_ending}, but --format is {format}; change one of them"
        )
    return format or by_ending or "safetensors"


def _description(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _writable_folder(run: Path, output: Path | None) -> Path:
    exports = RunFolder(run).exports
    folder = exports if output is None else output.parent
    if problem := dangling_link(folder):
        raise UserError(f"output = {output or folder}: {problem}")
    if folder == exports:
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"{folder}: cannot be created ({error.strerror}); give a file with --output FILE") from None
    if output is not None and os.path.isdir(output):
        raise UserError(f"output = {output}: is a folder; give a file")
    if not os.path.isdir(folder):
        raise UserError(f"output = {output}: the folder {folder} does not exist; create it, or give another file")
    if problem := unwritable(folder):
        raise UserError(f"output = {output or folder}: {problem} with --output")
    return folder


def _require_fit(run: Path, state: dict[str, Tensor], config: Config, head: tuple[int, ...] | None) -> None:
    with torch.device("meta"):
        model = build_backbone(config.model.backbone, config.model.stem)
        if head is not None:
            model.fc = nn.Linear(model.feature_dim, head[0])
    fill(model, state, run, assign=True)


def _serialise(state: dict[str, Tensor], format: Format, about: dict[str, Any]) -> bytes:
    if format == "torchvision":
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return buffer.getvalue()
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}
    return _ordered(safetensors.torch.save(state, texts))


def _ordered(content: bytes) -> bytes:
    """A safetensors file with sorted metadata, which the library writes in random order."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def _commit() -> str:
    """The commit of the checkout that this package runs from; "unknown" if it was installed."""
    root = Path(unigrad_fast.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=root, capture_output=True, text=True)
    except OSError:  # no git here
        return "unknown"
    return found.stdout.strip() or "unknown"
