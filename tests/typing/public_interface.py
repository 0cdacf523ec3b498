"""The public interface as users call it: read by mypy in `make lint`, run by `test_public_interface.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

from unigrad_fast import (
    ImageEncoder,
    Preempted,
    Result,
    Run,
    StopRun,
    evaluate,
    export,
    load_encoder,
    pretrain,
)
from unigrad_fast.checkpoints.weights import load_branch, open_checkpoint, write_run
from unigrad_fast.config import Config, resolve
from unigrad_fast.kernels import unigrad_gradient, unit_embeddings, update_correlation_
from unigrad_fast.networks.encoder import Encoder, build_encoder
from unigrad_fast.objectives import ObjectiveOutput, Row, UniGrad, build
from unigrad_fast.pipelines import Batch, Loader, Manifest
from unigrad_fast.training.optimizers import LARS
from unigrad_fast.training.target import make_target, update_target_


def use_the_objective() -> None:
    objective = UniGrad(width=8, balance=100.0, decay=0.99, correlation_source="target")
    online = [torch.randn(4, 8, requires_grad=True) for _ in range(4)]
    target = [torch.randn(4, 8) for _ in range(2)]
    out: ObjectiveOutput = objective(online=online[:2], target=target)
    assert_type(out.loss, Tensor)
    out.loss.backward()
    assert_type(out.metrics["positive_cosine"], Tensor)
    assert_type(objective.correlation, Tensor)
    objective(online=online, target=target)
    build("unigrad", width=8, balance=50.0)
    build("simclr", width=8, temperature=0.2)(online=online, target=target)
    build("moco", width=8, form="original", bank_size=16)
    build(row="j", width=8, balance=20.0)
    build(row=Row("l2", "identity", 1.0, "own_batch", "batch", "two"), width=8)


def use_the_kernels() -> None:
    correlation = torch.zeros(8, 8)
    unit, inverse_norm = unit_embeddings([torch.randn(3, 8), torch.randn(3, 8)])
    assert_type(inverse_norm, Tensor)
    update_correlation_(correlation, unit, decay=0.99, count=6)
    gradient, terms = unigrad_gradient(unit, inverse_norm, unit, correlation, balance=100.0, scale=1 / 6)
    assert_type(gradient, Tensor)
    assert_type(terms, Tensor)


def use_the_optimizer() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = LARS([weight], lr=0.1, momentum=0.9, weight_decay=1e-4, trust_coefficient=0.001)
    weight.sum().backward()
    optimizer.step()


def use_the_loader(folder: Path) -> None:
    manifest = Manifest.from_folder(folder)
    assert_type(manifest, Manifest)
    loader = Loader(
        manifest, preset="simsiam", batch_size=4, seed=0, rank=0, world_size=1, device="cpu", image_size=16, threads=1
    )
    for batch in loader.iterate(start_step=1, stop_step=2):
        assert_type(batch, Batch)
        assert_type(batch.views[0], Tensor)
        assert_type(batch.index, Tensor)
        assert_type(batch.replaced, Tensor)


def use_the_commands(settings: dict[str, Any], folder: Path) -> None:
    def on_step(step: int, metrics: Mapping[str, Any]) -> None:
        if metrics["feature_std"] < 0:
            raise StopRun

    try:
        run = pretrain(**settings, output=folder / "run", on_step=on_step)
    except Preempted as error:
        assert_type(error.run, Path | None)
        raise
    assert_type(run, Run)
    assert_type(run.path, Path)
    assert_type(run.config.data.batch_size, int)
    assert_type(run.metrics["loss"], list[Any])
    assert_type(run.metrics[-1], Mapping[str, Any])
    assert_type(run.checkpoints, dict[int, Path])
    result = evaluate.knn(run, k=2, keep_features=False)
    assert_type(result.accuracy, float | None)
    assert_type(evaluate.list(run)["epoch"], list[Any])
    exported = export(run, format="safetensors")
    assert_type(exported, Result)
    encoder = load_encoder(exported)
    assert_type(encoder, ImageEncoder)
    assert_type(encoder(torch.rand(2, 3, 16, 16)), Tensor)
    run.resume().encoder(output="embedding")


def use_the_networks(folder: Path) -> None:
    config = resolve(overrides={"model": {"backbone": "resnet18", "projector": {"width": 8}}})
    encoder = build_encoder(config.model, seed=0, device=torch.device("cpu"))
    assert_type(encoder, Encoder)
    target = make_target(encoder)
    update_target_(target, encoder, 0.99, skip=torch.zeros(()))
    weights = {f"online.{name}": tensor for name, tensor in encoder.state_dict().items()}
    assert_type(write_run(folder / "run", config, weights, step=1, epoch=0.5), Path)
    assert_type(load_branch(open_checkpoint(folder / "run"), "online.backbone"), dict[str, Tensor])


def use_the_configuration() -> None:
    config = resolve("quickstart", ["--seed", "3"])
    assert_type(config, Config)
    assert_type(config.data.batch_size, int)
