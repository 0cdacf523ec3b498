"""`unigrad-fast bench step`, `loader`, `kernels`, `methods`, `evaluate`, `width` and `scaling`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from unigrad_fast.benchmarks.harness.record import OUTPUT
from unigrad_fast.commands.requirements import refuse_unused, require_dali, require_folders, require_triton
from unigrad_fast.config import MOST_THREADS, Config
from unigrad_fast.dry_run.cards import CardName
from unigrad_fast.recipes import DEFAULT_RECIPE
from unigrad_fast.recipes.backbones import BACKBONES
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.older_names import renamed
from unigrad_fast.runtime.processors import compute_threads
from unigrad_fast.runtime.validation import AbsolutePath, ImageSource, Node

if TYPE_CHECKING:
    from unigrad_fast.benchmarks.harness.turns import Turns

Measured = Literal["moco", "simclr", "byol", "byol_directpred", "unigrad", "barlow_twins", "vicreg"]
# Options of several commands.
Steps = Annotated[int, Field(ge=1, description="Measured steps per turn.")]
Warmup = Annotated[int, Field(ge=1, description="Warm-up steps before them.")]
DryRun = Annotated[bool, Field(description="Count the work of a step on GPUs you need not have, and measure nothing.")]
CountedRanks = Annotated[int, Field(ge=1, le=4096, description="Number of GPUs in the dry run.")]
CountedImages = Annotated[int, Field(ge=1, le=2**16, description="Images per GPU in the dry run.")]
CountedCard = Annotated[CardName, Field(description="GPU type in the dry run.")]


class BenchStep(Node):
    """Measure images/s and memory of a training step, against a plain loop."""

    case: Literal["resnet50", "resnet18", "all"] = "all"
    """ResNet-50 at 224 pixels and 16 images per step, ResNet-18 at 96 pixels and 64, or one after the other."""
    photographs: ImageSource | None = None
    """Folder of images; use photographs for realistic figures; null draws some."""
    batch_size: int | None = Field(default=None, ge=2)
    """Images per step; null is the case's."""
    image_size: int | None = Field(default=None, ge=16, le=1024)
    """Height and width of the views in pixels; null is the case's."""
    precision: Literal["bf16", "fp16"] = "bf16"
    """Precision that is measured besides fp32 and the one that pretrain chooses here."""
    repetitions: int = Field(default=3, ge=1)
    """Rounds; in each, every variant is measured once."""
    steps: Steps = 2
    warmup: Warmup = 1
    neighbour: bool = False
    """Also measure ours on the CPU beside a program that keeps one core busy."""
    dry_run: DryRun = False
    ranks: CountedRanks = 8
    images: CountedImages = 128
    card: CountedCard = "h100"
    recipe: str = DEFAULT_RECIPE
    """Recipe of the dry run; its batch size is not used."""
    output: AbsolutePath = OUTPUT
    """Folder of step.jsonl (dry run: dry_step.jsonl), to which the rows are appended."""


COUNTED = ("ranks", "images", "card", "recipe")  # options of the dry run


def bench_step(options: BenchStep) -> None:
    measured = BenchStep.model_fields.keys() - {"dry_run", "output", *COUNTED}
    refuse_unused(options, measured if options.dry_run else COUNTED, _not_used(options))
    if options.dry_run:
        from unigrad_fast.benchmarks.counts import step

        step.main(**{key: getattr(options, key) for key in (*COUNTED, "output")})
        return
    require_dali()
    from unigrad_fast.benchmarks.measures import step

    images = options.photographs, options.batch_size, options.image_size
    with _fitting_threads():
        step.main(options.case, *images, options.precision, _turns(options), options.output, options.neighbour)


class BenchLoader(Node):
    """Measure images/s and processor time of decoding and augmentation, against torchvision and decoding alone."""

    photographs: ImageSource | None = None
    """Images, as `--data.train` takes them, or a tar of a folder; null draws some."""
    preset: str | None = None
    """Augmentation preset; null is simsiam and multicrop, one after the other."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Device that decodes and augments in our loader."""
    batch_size: int = Field(default=64, ge=1)
    """Images per batch."""
    image_size: int | None = Field(default=None, ge=1, le=1024)
    """Side of the global views in pixels; null is the preset's."""
    threads: int | None = Field(default=None, ge=1, le=MOST_THREADS)
    """Threads of our loader, and worker processes for torchvision; null is the number of cores."""
    rounds: int = Field(default=3, ge=1)
    """Rounds; in each, every variant is measured once."""
    steps: int = Field(default=8, ge=1)
    """Measured batches per turn, rounded up to a multiple of the threads."""
    epochs: int = Field(default=5, ge=2)
    """Epochs over a small manifest in the measurement of memory."""
    source: tuple[Literal["files", "hf", "parquet", "dataset", "pixels"], ...] | None = None
    """Sources of the same images to compare instead: files, tables (hf, parquet), and Datasets that open files
    (dataset) or hold pixels in memory (pixels); null compares with torchvision."""
    output: AbsolutePath = OUTPUT
    """Folder of loader.jsonl, to which the rows are appended."""

    @model_validator(mode="before")
    @classmethod
    def _with_current_names(cls, given: Any) -> Any:
        return renamed(given, "recipe", "preset")


def bench_loader(options: BenchLoader) -> None:
    require_dali()
    from unigrad_fast.benchmarks.measures import loader

    loader.main(**dict(options))


class BenchKernels(Node):
    """Measure the objective against plain torch, or report how its kernels compile."""

    width: int | None = Field(default=None, ge=1, le=2**17)
    """C, the embedding width; null is 1024, 2048, 4096, 8192 and 16384, one after the other."""
    images: int | None = Field(default=None, ge=1)
    """N, the images per view; null is 128 and 512."""
    repetitions: int = Field(default=11, ge=1)
    """Largest number of rounds; in each, every variant is measured once."""
    block_seconds: float = Field(default=0.2, ge=0)
    """Least duration of a turn in seconds, rounded up to whole steps."""
    most_seconds: float = Field(default=20.0, ge=0)
    """Time limit in seconds for one width and number of images; it reduces the rounds, down to 3."""
    compiled: bool = True
    """Also measure plain torch under torch.compile."""
    compile_only: bool = False
    """Only compile every kernel at every tile shape for all architectures; needs no GPU."""
    tune: bool = False
    """Only search the fastest tiles for this GPU, on scratch data, and write them into the package's table
    kernels/tiles.json."""
    output: AbsolutePath = OUTPUT
    """Folder of objective.jsonl, to which the rows are appended, or of compile_report.csv with --compile_only."""


def bench_kernels(options: BenchKernels) -> None:
    if options.compile_only and options.tune:
        raise UserError("compile_only and tune exclude each other; give one of them")
    others = BenchKernels.model_fields.keys() - {"compile_only", "tune"}
    if options.tune:
        refuse_unused(options, others, "tune does not use it")
        from unigrad_fast.benchmarks.measures import tiles

        tiles.main()
        return
    if options.compile_only:
        refuse_unused(options, others - {"output"}, "compile_only does not use it")
        require_triton()
        from unigrad_fast.benchmarks.counts import compiled

        compiled.main(options.output)
        return
    from unigrad_fast.benchmarks.measures import objective

    with _fitting_threads():
        objective.main(**{key: getattr(options, key) for key in others})


class BenchMethods(Node):
    """Measure the objectives of the paper's framework, in both forms, against plain torch with autograd."""

    methods: tuple[Measured, ...] | None = None
    """Methods to measure (SimSiam together with BYOL); null is all of them."""
    width: int | None = Field(default=None, ge=1, le=2**17)
    """C, the embedding width; null is 2048 and 8192."""
    images: int | None = Field(default=None, ge=2)
    """N, the images per view; null is 128 and 512."""
    bank: int = Field(default=65536, ge=1, le=2**24)
    """Keys of MoCo's bank."""
    repetitions: int = Field(default=11, ge=1)
    """Largest number of rounds; in each, every variant is measured once."""
    block_seconds: float = Field(default=0.2, ge=0)
    """Least duration of a turn in seconds, rounded up to whole steps."""
    most_seconds: float = Field(default=20.0, ge=0)
    """Time limit in seconds for one method, width and N; it reduces the rounds, down to 3."""
    output: AbsolutePath = OUTPUT
    """Folder of methods.jsonl, to which the rows are appended."""


def bench_methods(options: BenchMethods) -> None:
    from unigrad_fast.benchmarks.measures import methods

    with _fitting_threads():
        methods.main(**dict(options))


class BenchEvaluate(Node):
    """Measure the feature pass against the backbone alone, and a linear sweep against a single classifier."""

    backbone: Literal[BACKBONES] = "resnet50"
    """Backbone, with random weights."""
    image_size: int = Field(default=224, ge=16, le=1024)
    """Side of the centre crops in pixels."""
    batch_size: int = Field(default=128, ge=1)
    """Images per batch."""
    batches: int = Field(default=2, ge=1)
    """Batches per turn; the parts of the sweep's step, whose own batch is of 1024 images."""
    repetitions: int = Field(default=3, ge=1)
    """Rounds; in each, every variant is measured once."""
    photographs: ImageSource | None = None
    """Images, as `--data.train` takes them, or a tar of a folder; null draws some."""
    output: AbsolutePath = OUTPUT
    """Folder of evaluate.jsonl, to which the rows are appended."""


def bench_evaluate(options: BenchEvaluate) -> None:
    require_dali()
    from unigrad_fast.benchmarks.measures import evaluate

    with _fitting_threads():
        evaluate.main(**dict(options))


class BenchWidth(Config):
    """Measure a training step by projector width, and train short runs; takes the keys of pretrain."""

    recipe: str = "quickstart"
    """Recipe, as for pretrain; the quickstart's images are drawn if they do not exist."""
    widths: tuple[Annotated[int, Field(ge=1, le=2**17)], ...] | None = None
    """Projector widths; null is 512 to 8192 as memory permits, or 2048 to 65536 in a dry run."""
    repetitions: int = Field(default=3, ge=1)
    """Rounds; in each, every width is measured once."""
    steps: Steps = 2
    warmup: Warmup = 1
    train: bool = False
    """Also train a run of each width for schedule.epochs, and evaluate it by kNN."""
    dry_run: DryRun = False
    ranks: CountedRanks = 8
    images: CountedImages = 128
    card: CountedCard = "h100"
    output: AbsolutePath = OUTPUT
    """Folder of width.jsonl or dry_width.jsonl, to which the rows are appended, and of the runs, width-C."""


def bench_width(options: BenchWidth) -> None:
    only_counted, only_measured = {"ranks", "images", "card"}, {"repetitions", "steps", "warmup", "train"}
    refuse_unused(options, only_measured if options.dry_run else only_counted, _not_used(options))
    config = _configuration(options)
    if options.dry_run:
        from unigrad_fast.benchmarks.counts import width

        width.main(config, options.widths, options.ranks, options.images, options.card, options.output)
        return
    config = _with_openable_images(config, judged=options.train)
    from unigrad_fast.benchmarks.measures import width

    with _fitting_threads(config):
        width.main(config, options.widths, _turns(options), options.train, options.output)


class BenchScaling(Config):
    """Measure 1 to 4 ranks on this machine, with F replicated and sharded; takes the keys of pretrain."""

    recipe: str = "quickstart"
    """Recipe, as for pretrain; the quickstart's images are drawn if they do not exist."""
    ranks: tuple[Annotated[int, Field(ge=1, le=64)], ...] = (1, 2, 3, 4)
    """Numbers of ranks to measure; each rank is a process, and they share the cores."""
    images: int = Field(default=16, ge=1, le=2**16)
    """Images per rank; replaces data.batch_size."""
    repetitions: int = Field(default=3, ge=1)
    """Rounds; in each, both placements of F are measured once; objective.placement is not used."""
    steps: Steps = 2
    warmup: Warmup = 1
    output: AbsolutePath = OUTPUT
    """Folder of scaling.jsonl, to which the rows are appended."""


def bench_scaling(options: BenchScaling) -> None:
    config = _with_openable_images(_configuration(options), judged=False)
    from unigrad_fast.benchmarks.measures import scaling

    with _fitting_threads(config):
        scaling.main(config, options.ranks, options.images, _turns(options), options.output)


@contextmanager
def _fitting_threads(config: Config | None = None) -> Iterator[None]:
    """`compute_threads` of a measurement, which its processes share; prints what it says."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = compute_threads(device, config.engine.threads, key="engine.threads") if config else compute_threads(device)
    with chosen as threads:
        for line in filter(None, [threads.said, threads.warning]):
            print(line, flush=True)
        yield


def _not_used(options: BenchStep | BenchWidth) -> str:
    return f"not used with dry_run {str(options.dry_run).lower()}"


def _turns(options: BenchStep | BenchWidth | BenchScaling) -> Turns:
    from unigrad_fast.benchmarks.harness.turns import Turns

    return Turns(options.repetitions, options.steps, options.warmup)


def _configuration(options: Config) -> Config:
    """The configuration of a run without a folder."""
    return Config(**{key: getattr(options, key) for key in Config.model_fields if key != "output"})


def _with_openable_images(config: Config, judged: bool) -> Config:
    """The configuration, without validation images if nothing is evaluated.

    Raises:
        UserError: DALI is missing, images cannot be opened, or there are none to evaluate with.
    """
    require_dali()
    from unigrad_fast.benchmarks.harness.run_config import lacks_images

    if lacks_images(config):
        return config
    if judged and config.data.val is None:
        raise UserError(
            "train = true: kNN needs validation images, but data.val = null; give labelled ones with --data.val IMAGES"
        )
    if not judged:
        config = config.model_copy(update={"data": config.data.model_copy(update={"val": None})})
    require_folders(config)
    return config
