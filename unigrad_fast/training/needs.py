"""Memory that the parts of a run need, and the keys that reduce it, for the message when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

from unigrad_fast import config
from unigrad_fast.checkpoints.files import latest
from unigrad_fast.config import Config
from unigrad_fast.evaluation.knn_probe import KNNProbe
from unigrad_fast.networks.encoder import Encoder
from unigrad_fast.optimization.gated import Gated
from unigrad_fast.runtime.errors import RunStopped, UserError
from unigrad_fast.runtime.out_of_memory import memory_for

SMALLER_NETWORK = "a smaller model.projector.width or model.backbone needs less"


def network(model: config.Model) -> AbstractContextManager[None]:
    def expected() -> int:
        with torch.device("meta"):
            return bytes_of(Encoder(model))

    return memory_for(f"{model.backbone} and its projector of {model.projector.width}", expected, SMALLER_NETWORK)


def target(encoder: nn.Module, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    expected = bytes_of(encoder)
    if dtype is not None:
        expected += dtype.itemsize * sum(parameter.numel() for parameter in encoder.parameters())
    return memory_for("the target branch, a copy of the network", expected, SMALLER_NETWORK)


def optimizer(encoder: nn.Module, optimizer: Gated) -> AbstractContextManager[None]:
    remedy = f"engine.zero_stage 1 or 2 shares it among the ranks; {SMALLER_NETWORK}"
    return memory_for("gradients and the optimizer's state", (1 + optimizer.copies) * bytes_of(encoder), remedy)


def objective(config: Config, shards: int) -> AbstractContextManager[None]:
    """The state a method keeps between steps: F, possibly with W_h made from its eigenvectors, or a bank."""
    width, remedy = config.model.projector.width, "a smaller model.projector.width needs less"
    if config.objective.takes("bank_size"):
        keys = config.objective.bank_size
        less = f"a smaller objective.bank_size needs less; {remedy}"
        return memory_for(f"the bank, [{keys}, {width}]", 4 * keys * width, less)
    if config.objective.takes("prototypes"):
        count = config.objective.prototypes
        less = f"a smaller objective.prototypes needs less; {remedy}"
        return memory_for(f"prototypes, [{count}, {width}]", 4 * count * width, less)
    if not config.objective.takes("decay"):
        return memory_for("the objective", None, remedy)
    if config.objective.takes("eigen_every"):
        return memory_for(f"F and W_h, [{width}, {width}] each", 8 * width**2, remedy)
    if shards > 1:
        return memory_for(f"1/{shards} of F, [{width}, {width}]", 4 * width**2 // shards, remedy)
    return memory_for(
        f"F, [{width}, {width}]", 4 * width**2, f"on several ranks objective.placement sharded, or {remedy}"
    )


def step(images: int, run: Path | None, done: int) -> AbstractContextManager[None]:
    """The activations, gradients and momentum of a step with so many images, after `done` steps."""
    what = f"step {done + 1}, with {images} images at once on each rank"
    remedy = (
        "a smaller data.batch_size, a larger engine.accumulation_steps or a smaller model.projector.width needs less, "
        "and engine.zero_stage 1 or 2 shares the optimizer's state among the ranks"
    )
    return memory_for(what, None, remedy, *_loss(run, done))


def evaluation(probe: KNNProbe, run: Path | None, done: int) -> AbstractContextManager[None]:
    images = len(probe.train) + len(probe.val)
    what = f"the features of {images:,} images for the evaluation, {probe.settings.batch_size} at a time"
    remedy = "a smaller evaluation.batch_size needs less; evaluation.every 0 and evaluation.at_start false skip it"
    return memory_for(what, None, remedy, *_loss(run, done))


def _loss(run: Path | None, done: int) -> tuple[type[Exception], Callable[[], str]]:
    """The kind of error to raise after so many steps, and a function that says what is saved of them."""

    def kept() -> str:
        try:
            newest = None if run is None else latest(run)
        except (OSError, UserError) as error:
            return str(error)
        return "there is no checkpoint yet" if newest is None else f"the newest checkpoint is {newest}"

    return (RunStopped, kept) if done else (UserError, str)


def bytes_of(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
