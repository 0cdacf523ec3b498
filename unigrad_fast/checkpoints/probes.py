"""Finds the linear probe of a run that belongs to the exported weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from unigrad_fast.checkpoints.files import Reader
from unigrad_fast.checkpoints.weights import fingerprint
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.shell import own
from unigrad_fast.runtime.utf8_path import utf8_path

NEVER = -1e4  # a bias below every value of a trained output; half precision can hold it


def find_probe(run: Path, reader: Reader, branch: str, file: Path | None = None) -> tuple[Path, dict[str, Tensor]]:
    """File and tensors of a checkpoint's probe: prefers the paper's protocol to the quick one, then the newest.

    Args:
        file: the only probe to consider.

    Raises:
        UserError: there is none, or it is damaged or belongs to other weights.
    """
    there = RunFolder(run)
    again = f"run `{own('evaluate', 'linear', run, '--checkpoint', str(reader.about['step']))}`"
    files = [file] if file is not None else [*there.evaluation.glob("linear-*.safetensors"), there.first_probe]
    files = [path for path in files if file is not None or path.is_file()]
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
        else:
            fitting.append((about.get("protocol") == "paper", path.stat().st_mtime_ns, path))
    if not fitting:
        raise UserError(problems[0])
    path = max(fitting)[-1]
    with utf8_path(path) as name, safe_open(name, framework="pt") as content:
        return path, {name: content.get_tensor(name) for name in ("weight", "bias")}


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
    try:
        with utf8_path(path) as name, safe_open(name, framework="pt") as content:
            names, texts = set(content.keys()), content.metadata() or {}
    except FileNotFoundError:
        raise ValueError("no such file") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"damaged ({error})") from None
    if names != {"weight", "bias"} or "step" not in texts:
        raise ValueError("not a linear probe")
    about: dict[str, Any] = {}
    for key, text in texts.items():
        try:
            about[key] = json.loads(text)
        except ValueError:
            about[key] = text
    return about
