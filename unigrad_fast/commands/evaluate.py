"""`unigrad-fast evaluate ...`: judges an encoder, writes its features, and draws what they show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from unigrad_fast.commands.requirements import (
    refuse_unused,
    require_dali,
    require_given_file,
    require_run,
    require_umap,
)
from unigrad_fast.evaluation import finetune_protocols
from unigrad_fast.recipes.backbones import BACKBONES
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.outputs import Written
from unigrad_fast.runtime.validation import AbsolutePath, ImageSource, Node


class EvaluationData(Node):
    train: ImageSource | None = None
    """Training images; null is the run's."""
    val: ImageSource | None = None
    """Validation images; null is the run's."""


class Keeping(Node):
    """For what needs features of plain images."""

    keep_features: bool = True
    """Keep features of plain images beside the results, so that the next evaluation of the same weights reads them."""


class Encoder(Node):
    """An encoder: of a run, or of a file of weights."""

    positional: ClassVar[tuple[str, ...]] = ("run",)

    run: AbsolutePath | None = None
    """Folder of the run; null needs weights."""
    weights: AbsolutePath | None = None
    """File of weights in place of a run: torchvision's, an export, or a published checkpoint as it comes."""
    backbone: Literal[BACKBONES] | None = None  # type: ignore[valid-type]
    """Name of the backbone in the file of weights."""
    image_size: int | None = Field(default=None, ge=16, le=1024)
    """Side in pixels of the images for weights; null is that of an export's description, or else 224."""
    checkpoint: int | None = Field(default=None, ge=0)
    """Step of the run's checkpoint; null is the newest."""

    def asked(self, output: Path | None) -> dict[str, Any]:
        """Arguments of `runs.Asked`. Raises UserError unless there is one encoder, with the options that fit it.

        Args:
            output: folder of the results; None is the usual one.
        """
        if self.weights is None:
            if self.run is None:
                raise UserError("run: missing; give the folder of a run, or --weights FILE --backbone NAME")
            refuse_unused(self, ("backbone", "image_size"), "applies only with --weights")
            require_run(self.run)
        else:
            if self.run is not None:
                remedy = f"; images are given as --images {self.run}" if "images" in self.positional else ""
                raise UserError(
                    f"weights = {self.weights}: takes the place of run = {self.run}; give one of them{remedy}"
                )
            refuse_unused(self, ("checkpoint",), "applies only to a run")
            require_given_file("weights", self.weights)
            if self.backbone is None:
                raise UserError(f"backbone = null: --weights needs it; give one of {', '.join(BACKBONES)}")
            output = output or Path(f"{self.weights}-evaluation")
        given = {"checkpoint", "weights", "backbone", "image_size", "keep_features"} & type(self).model_fields.keys()
        return {"output": output, **{key: getattr(self, key) for key in given}}

    def require_images(self, images: Mapping[str, Path | None]) -> None:
        """Raises UserError if weights, which come without images, lack those of a key."""
        if self.weights is not None and None in images.values():
            raise UserError(f"weights: come without images; give {' and '.join(f'--{key} IMAGES' for key in images)}")


class Evaluation(Encoder):
    """What every evaluation takes: an encoder, images and a place for the results."""

    data: EvaluationData = EvaluationData()
    """Images."""
    output: AbsolutePath | None = None
    """Folder of the results; null is RUN/evaluation, or WEIGHTS-evaluation beside the file."""

    def judged(self) -> dict[str, Any]:
        """Arguments of `runs.Asked`, with the images."""
        asked = self.asked(self.output)
        self.require_images({"data.train": self.data.train, "data.val": self.data.val})
        return {**asked, "train": self.data.train, "val": self.data.val}


class EvaluateKNN(Keeping, Evaluation):
    """Measure the weighted nearest-neighbour accuracy of an encoder."""

    baselines: bool = False
    """Also evaluate raw pixels, colour histograms and the untrained encoder."""
    k: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Neighbours that vote, at most the training images; like evaluation.knn.k of a run; null is the run's."""
    temperature: float | None = Field(default=None, gt=0)
    """Temperature of the votes, like evaluation.knn.temperature of a run; null is the run's."""
    grid: bool = False
    """Evaluate k 10, 20, 100, 200 with T 0.05, 0.07, 0.1 from one search, and choose the best."""
    choose: Literal["val", "train"] | None = None
    """Images on which the grid chooses: val, or train for a held-out tenth of the training images; null is val."""


def evaluate_knn(options: EvaluateKNN) -> Written:
    asked = options.judged()
    if options.grid:
        refuse_unused(options, ("k", "temperature", "baselines"), "the grid does not use it")
    else:
        refuse_unused(options, ("choose",), "applies only with --grid true")
    require_dali()
    from unigrad_fast.evaluation import knn_grid, knn_run, runs

    if options.grid:
        return knn_grid.evaluate_knn_grid(options.run, options.choose or "val", runs.Asked(**asked))
    given = runs.Asked(**asked, k=options.k, temperature=options.temperature)
    return knn_run.evaluate_knn(options.run, options.baselines, given)


class EvaluateLinear(Keeping, Evaluation):
    """Train and evaluate a linear classifier on the frozen features of an encoder."""

    protocol: Literal["quick", "paper", "sweep"] = "quick"
    """quick fits a logistic regression to cached features; paper trains on random crops with LARS for 90 epochs; sweep
    trains 26 classifiers of different rates and stages in one pass, as DINOv2's evaluation does, and takes the best."""
    epochs: int | None = Field(default=None, ge=1)
    """Epochs of paper and sweep; null is 90 and 10."""
    batch_size: int | None = Field(default=None, ge=1)
    """Images per step of paper and sweep, over all ranks; null is 4096 and 1024."""
    base_lr: float | None = Field(default=None, gt=0, le=1e6)
    """Learning rate per 256 images, of sweep the largest; null is 0.02 for paper and 0.1 for sweep."""
    keep_features: bool = True
    """Of quick: keep features of plain images beside the results, so that the next evaluation of the same weights reads
    them; paper and sweep train on random crops and keep none."""
    choose: Literal["val", "train"] | None = None
    """Images on which sweep chooses: val, or train for a held-out tenth of the training images; null is val."""


def evaluate_linear(options: EvaluateLinear) -> Written:
    asked = options.judged()
    changes = {
        key: value for key in ("epochs", "batch_size", "base_lr") if (value := getattr(options, key)) is not None
    }
    if changes and options.protocol == "quick":
        key, value = next(iter(changes.items()))
        raise UserError(f"{key} = {value}: applies only to --protocol paper and sweep; leave it out, or add one")
    if options.choose and options.protocol != "sweep":
        raise UserError(f"choose = {options.choose}: applies only to --protocol sweep; leave it out, or add that")
    if options.protocol != "quick":
        refuse_unused(options, ("keep_features",), f"--protocol {options.protocol} keeps no features")
    require_dali()
    from unigrad_fast.evaluation import linear_run, runs

    return linear_run.evaluate_linear(
        options.run, options.protocol, changes, options.choose or "val", runs.Asked(**asked)
    )


class EvaluateFinetune(Evaluation):
    """Fine-tune an encoder with a classifier on few labels, and evaluate it."""

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


def evaluate_finetune(options: EvaluateFinetune) -> Written:
    asked = options.judged()
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
    return finetune_run.evaluate_finetune(options.run, few, runs.Asked(**asked))


class EvaluateFeatures(Keeping, Encoder):
    """Write file, label and feature of each image to a file."""

    positional: ClassVar[tuple[str, ...]] = ("run", "images")

    images: ImageSource | None = None
    """Images: a folder, list or shards; null is the run's training images."""
    output: AbsolutePath | None = None
    """File to write, ending in .npz, .npy or .parquet; null is RUN/export/features-epochE.npz."""
    overwrite: bool = False
    """Replace an existing file and its description."""


def evaluate_features(options: EvaluateFeatures) -> Written:
    asked = options.asked(None)
    options.require_images({"images": options.images})
    require_dali()
    from unigrad_fast.evaluation import feature_files, runs

    return feature_files.write_features(
        options.run, options.images, options.output, options.overwrite, runs.Asked(**asked)
    )


class EvaluateRetrieve(Keeping, Encoder):
    """Draw images with their nearest neighbours among others."""

    positional: ClassVar[tuple[str, ...]] = ("run", "images")

    images: tuple[AbsolutePath, ...] = ()
    """Image files whose neighbours are drawn."""
    among: ImageSource | None = None
    """Images to search: a folder, list or shards; null is the run's training images."""
    k: int = Field(default=8, ge=1, le=100)
    """Neighbours of each image."""
    output: AbsolutePath | None = None
    """Folder of the results; null is RUN/evaluation, or WEIGHTS-evaluation beside the file."""


def evaluate_retrieve(options: EvaluateRetrieve) -> Written:
    if options.weights is not None and options.run is not None:  # the first word is an image, too
        options = options.model_copy(update={"run": None, "images": (options.run, *options.images)})
    asked = options.asked(options.output)
    if not options.images:
        raise UserError("images: missing; give the files whose neighbours are to be drawn")
    for image in options.images:
        require_given_file("images", image)
    options.require_images({"among": options.among})
    require_dali()
    from unigrad_fast.evaluation import retrieval, runs

    return retrieval.retrieve(options.run, options.images, options.among, options.k, runs.Asked(**asked))


class EvaluateConfusion(Keeping, Evaluation):
    """Draw which classes are taken for which, ordered so that groups of similar classes show."""

    of: Literal["knn", "linear"] = "knn"
    """Classifier: nearest neighbours, or the newest linear classifier of these weights that `evaluate linear` wrote."""
    k: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Neighbours that vote, at most the training images; like evaluation.knn.k of a run; null is the run's."""
    temperature: float | None = Field(default=None, gt=0)
    """Temperature of the votes, like evaluation.knn.temperature of a run; null is the run's."""


def evaluate_confusion(options: EvaluateConfusion) -> Written:
    asked = options.judged()
    if options.of == "linear":
        refuse_unused(options, ("k", "temperature"), "applies only to --of knn")
    require_dali()
    from unigrad_fast.evaluation import confusion, runs

    given = runs.Asked(**asked, k=options.k, temperature=options.temperature)
    return confusion.evaluate_confusion(options.run, options.of, given)


class EvaluateMap(Keeping, Encoder):
    """Draw the features of images as points in a plane, coloured by class."""

    positional: ClassVar[tuple[str, ...]] = ("run", "images")

    images: ImageSource | None = None
    """Labelled images: a folder, list or shards; null is the run's validation images."""
    method: Literal["pca", "umap"] = "pca"
    """pca shows the plane of largest variance, always the same; umap shows neighbourhoods, and needs umap-learn."""
    output: AbsolutePath | None = None
    """Folder of the results; null is RUN/evaluation, or WEIGHTS-evaluation beside the file."""


def evaluate_map(options: EvaluateMap) -> Written:
    asked = options.asked(options.output)
    options.require_images({"images": options.images})
    if options.method == "umap":
        require_umap()
    require_dali()
    from unigrad_fast.evaluation import maps, runs

    return maps.evaluate_map(options.run, options.images, options.method, runs.Asked(**asked))


class EvaluateList(Node):
    """Show all results of an encoder in one table."""

    run: AbsolutePath
    """Folder of the run, or of the results that were written elsewhere."""


def evaluate_list(options: EvaluateList) -> list[dict[str, str]]:
    from unigrad_fast.evaluation import listing

    return listing.show(options.run)
