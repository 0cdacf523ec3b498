"""`unigrad-fast evaluate knn`, `evaluate linear` and `evaluate finetune`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from unigrad_fast.commands.requirements import require_dali, require_run
from unigrad_fast.evaluation import finetune_protocols
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.validation import AbsolutePath, Node


class EvaluationData(Node):
    train: AbsolutePath | None = None
    """Training images; null is the run's."""
    val: AbsolutePath | None = None
    """Validation images; null is the run's."""


class EvaluateKNN(Node):
    """Measure the weighted nearest-neighbour accuracy of a run's online backbone."""

    run: AbsolutePath
    """Folder of the run."""
    baselines: bool = False
    """Also evaluate raw pixels, colour histograms and the untrained encoder."""
    checkpoint: int | None = Field(default=None, ge=0)
    """Step of the checkpoint; null is the newest."""
    k: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Neighbours that vote, at most the training images; like evaluation.knn.k of a run; null is the run's."""
    temperature: float | None = Field(default=None, gt=0)
    """Temperature of the votes, like evaluation.knn.temperature of a run; null is the run's."""
    data: EvaluationData = EvaluationData()
    """Images."""
    output: AbsolutePath | None = None
    """Folder of the results; null is RUN/evaluation."""


def evaluate_knn(options: EvaluateKNN) -> None:
    require_run(options.run)
    require_dali()
    from unigrad_fast.evaluation import runs

    asked = runs.Asked(
        options.checkpoint, options.data.train, options.data.val, options.k, options.temperature, options.output
    )
    runs.evaluate_knn(options.run, options.baselines, asked)


class EvaluateLinear(Node):
    """Train and evaluate a linear classifier on the frozen features of a run's online backbone."""

    run: AbsolutePath
    """Folder of the run."""
    protocol: Literal["quick", "paper", "sweep"] = "quick"
    """quick fits a logistic regression to cached features; paper trains on random crops with LARS for 90 epochs; sweep
    trains 26 classifiers of different rates and stages in one pass, as DINOv2's evaluation does, and takes the best."""
    epochs: int | None = Field(default=None, ge=1)
    """Epochs of paper and sweep; null is 90 and 10."""
    batch_size: int | None = Field(default=None, ge=1)
    """Images per step of paper and sweep, over all ranks; null is 4096 and 1024."""
    base_lr: float | None = Field(default=None, gt=0, le=1e6)
    """Learning rate per 256 images, of sweep the largest; null is 0.02 for paper and 0.1 for sweep."""
    choose: Literal["val", "train"] | None = None
    """Images on which sweep chooses: val, or train for a held-out tenth of the training images; null is val."""
    checkpoint: int | None = Field(default=None, ge=0)
    """Step of the checkpoint; null is the newest."""
    data: EvaluationData = EvaluationData()
    """Images."""
    output: AbsolutePath | None = None
    """Folder of the results; null is RUN/evaluation."""


def evaluate_linear(options: EvaluateLinear) -> None:
    require_run(options.run)
    changes = {
        key: value for key in ("epochs", "batch_size", "base_lr") if (value := getattr(options, key)) is not None
    }
    if changes and options.protocol == "quick":
        key, value = next(iter(changes.items()))
        raise UserError(f"{key} = {value}: applies only to --protocol paper and sweep; leave it out, or add one")
    if options.choose and options.protocol != "sweep":
        raise UserError(f"choose = {options.choose}: applies only to --protocol sweep; leave it out, or add that")
    require_dali()
    from unigrad_fast.evaluation import runs

    asked = runs.Asked(options.checkpoint, options.data.train, options.data.val, output=options.output)
    runs.evaluate_linear(options.run, options.protocol, changes, options.choose or "val", asked)


class EvaluateFinetune(Node):
    """Fine-tune a run's online backbone with a classifier on few labels, and evaluate it."""

    run: AbsolutePath
    """Folder of the run."""
    fraction: float | None = Field(default=None, gt=0, le=1)
    """Share of the training images whose labels are used, a balanced sample drawn with the run's seed, such as 0.01."""
    subset: AbsolutePath | None = None
    """File that lists these images in place of fraction: names of files, one per line, as SimCLR's lists have them."""
    protocol: Literal[finetune_protocols.NAMES] = "twist"  # type: ignore[valid-type]
    """Whose published settings are used; TWIST's are the likeliest source of the paper's numbers."""
    search: bool = False
    """Choose the rates from a grid, the pairs of rates that any of these sources has."""
    choose: Literal["train", "val"] | None = None
    """Images on which search chooses: train for a held-out tenth of the labelled images, or val; null is train."""
    seeds: int = Field(default=1, ge=1, le=100)
    """Trainings on the same images, with the run's seed and the next ones."""
    epochs: int | None = Field(default=None, ge=1)
    """Epochs; null is the protocol's."""
    batch_size: int | None = Field(default=None, ge=2)
    """Images per step, over all ranks; null is the protocol's."""
    backbone_lr: float | None = Field(default=None, gt=0, le=1e6)
    """Largest learning rate of the backbone, whatever the batch; null is the protocol's."""
    head_lr: float | None = Field(default=None, gt=0, le=1e6)
    """Largest learning rate of the classifier, whatever the batch; null is the protocol's."""
    checkpoint: int | None = Field(default=None, ge=0)
    """Step of the checkpoint; null is the newest."""
    data: EvaluationData = EvaluationData()
    """Images."""
    output: AbsolutePath | None = None
    """Folder of the results; null is RUN/evaluation."""


def evaluate_finetune(options: EvaluateFinetune) -> None:
    require_run(options.run)
    if (options.fraction is None) == (options.subset is None):
        given = "neither is" if options.fraction is None else "both are"
        raise UserError(f"fraction and subset: {given} given; give one, such as --fraction 0.01 or --subset FILE")
    if options.choose and not options.search:
        raise UserError(f"choose = {options.choose}: applies only to --search true; leave it out, or add that")
    keys = ("epochs", "batch_size", "backbone_lr", "head_lr")
    changes = {key: value for key in keys if (value := getattr(options, key)) is not None}
    if options.search and (rates := [key for key in keys[2:] if key in changes]):
        raise UserError(f"{rates[0]} = {changes[rates[0]]:g}: is chosen by --search true; leave out one of them")
    if options.fraction is not None:
        finetune_protocols.settings(options.protocol, options.fraction, changes, options.search)
    require_dali()
    from unigrad_fast.evaluation import finetune_run, runs

    few = finetune_run.FewLabels(
        options.protocol,
        options.fraction,
        options.subset,
        changes,
        options.search,
        options.choose or "train",
        options.seeds,
    )
    asked = runs.Asked(options.checkpoint, options.data.train, options.data.val, output=options.output)
    finetune_run.evaluate_finetune(options.run, few, asked)
