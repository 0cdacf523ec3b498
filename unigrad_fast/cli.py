"""The command `unigrad-fast`: one options class and one function per sub-command.

Exit status: 0 done, 1 a bug (with a traceback), 2 the user's input, 3 the run stopped itself,
75 preempted after saving, 130 Ctrl-C.
torch, DeepSpeed and DALI are imported inside the functions that need them, so that `--help` answers at once.
"""

from __future__ import annotations

import difflib
import errno
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro
from pydantic import Field

import unigrad_fast
from unigrad_fast.config import (
    Config,
    LocalViewChanges,
    ViewChanges,
    fresh_output,
    holds_run,
    parse_arguments,
    recipe_names,
    resolve,
    to_yaml,
)
from unigrad_fast.errors import DataError, Preempted, RunStopped, UserError
from unigrad_fast.validation import AbsolutePath, Node, validate


class Pretrain(Config):
    """Pretrain an encoder on a folder of images."""

    print_config: bool = False
    """Print the resolved configuration as YAML, which --recipe accepts, and do nothing else."""
    verbose: bool = False
    """Show what DeepSpeed and the other libraries say."""
    fresh: bool = False
    """Refuse an output folder that holds a run, instead of going on with it."""
    fall_back: bool = False
    """Where the newest checkpoint is damaged, go on from the newest intact one."""


def pretrain(options: Pretrain) -> None:
    config = Config(**{key: getattr(options, key) for key in Config.model_fields})
    if options.print_config:
        print(to_yaml(config), end="")
        return
    if config.output is None:
        require_named_output(os.environ)
        # All ranks find the same free name, because rank 0 creates the folder only after all have met.
        config = config.model_copy(update={"output": fresh_output(config.recipe)})
    config.check_folders(options.fresh)
    require_dali()
    from unigrad_fast.distributed import launch_environment

    config.check_world(launch_environment(os.environ).size)
    from unigrad_fast.training import trainer

    trainer.pretrain(config, verbose=options.verbose, fall_back=options.fall_back)


def require_named_output(environ: Mapping[str, str]) -> None:
    """Raises UserError where a launcher starts a command again, which then must find the run it began."""
    for variable, whose in (("TORCHELASTIC_MAX_RESTARTS", "torchrun"), ("SLURM_RESTART_COUNT", "SLURM")):
        if int(environ.get(variable, "0")) > 0:
            raise UserError(
                f"output = null: {whose} starts this command again ({variable} is {environ[variable]}), and a free "
                "folder would be another one each time; give --output FOLDER"
            )


class EvaluateKNN(Node):
    """Weighted nearest-neighbour accuracy of a run's online backbone."""

    run: AbsolutePath
    """Folder of the run."""
    baselines: bool = False
    """Judge raw pixels, colour histograms and the untrained encoder beside it."""


def evaluate_knn(options: EvaluateKNN) -> None:
    require_run(options.run)
    require_dali()
    from unigrad_fast.evaluation import command

    command.evaluate_knn(options.run, options.baselines)


class EvaluateLinear(Node):
    """Linear classifier on the frozen features of a run's online backbone."""

    run: AbsolutePath
    """Folder of the run."""
    protocol: Literal["quick", "paper"] = "quick"
    """quick is a logistic regression on cached features, paper trains on random crops with LARS for 90 epochs."""
    epochs: int | None = Field(default=None, ge=1)
    """Epochs of the paper's protocol; null is its 90."""
    batch_size: int | None = Field(default=None, ge=1)
    """Images per step of the paper's protocol, over all ranks; null is its 4096."""
    base_lr: float | None = Field(default=None, gt=0)
    """Learning rate per 256 images of the paper's protocol; null is its 0.02."""


def evaluate_linear(options: EvaluateLinear) -> None:
    require_run(options.run)
    changes = {
        key: value for key in ("epochs", "batch_size", "base_lr") if (value := getattr(options, key)) is not None
    }
    if changes and options.protocol == "quick":
        key, value = next(iter(changes.items()))
        raise UserError(f"{key} = {value}: belongs to --protocol paper; leave it out, or add that")
    require_dali()
    from unigrad_fast.evaluation import command

    command.evaluate_linear(options.run, options.protocol, changes)


class Export(Node):
    """Write a run's backbone for torchvision, with a description of it."""

    run: AbsolutePath
    """Folder of the run."""
    format: Literal["torchvision", "safetensors"] | None = None
    """torch.save or safetensors of the same names; null goes by the ending of the output, else safetensors."""
    branch: Literal["online", "target"] = "online"
    """Branch whose backbone is written."""
    with_linear: bool = False
    """Add the linear probe of `evaluate linear` as the layer fc."""
    output: AbsolutePath | None = None
    """File to write; null is RUN/export/BACKBONE-BRANCH-epochE.ENDING."""


def export(options: Export) -> None:
    require_run(options.run)
    from unigrad_fast.evaluation import export

    export.export(**dict(options))


class ImportData(Node):
    train: AbsolutePath | None = None
    """Training images that the run is evaluated with: a folder, list or shards."""
    val: AbsolutePath | None = None
    """Validation images that the run is evaluated with: a folder, list or shards."""


class Import(Node):
    """Turn a checkpoint of the authors' code into a run to evaluate and export."""

    file: AbsolutePath
    """File that the authors' code saved, or a safetensors file with the same names."""
    run: AbsolutePath
    """New folder of the run."""
    data: ImportData = ImportData()
    """Images."""


def import_weights(options: Import) -> None:
    from unigrad_fast import authors_weights

    authors_weights.import_run(options.file, options.run, options.data.train, options.data.val)


class DataSynth(Node):
    """Draw the built-in labelled JPEG images, with the folders train and val."""

    folder: AbsolutePath
    """New folder for the images."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the drawing; the same seed draws the same files."""


def data_synth(options: DataSynth) -> None:
    from unigrad_fast import synthetic

    folder = synthetic.draw(options.folder, options.seed)
    print(f"{len(synthetic.CLASSES)} classes of drawn images in {folder}/train and {folder}/val")


class DataScan(Node):
    """Decode every image once, and list what training cannot use and what is odd."""

    path: AbsolutePath
    """Images, as `--data.train` takes them."""
    output: AbsolutePath | None = None
    """Folder for the lists; null is scan-NAME in the current folder. An interrupted scan goes on there."""
    threads: int | None = Field(default=None, ge=1)
    """Images decoded at once; null is one per core. More of them hide the latency of network storage."""


def data_scan(options: DataScan) -> None:
    require_dali()
    from unigrad_fast import scan

    scan.scan(**dict(options))


class DataShard(Node):
    """Pack images into tar shards, which network storage reads faster and a start lists at once."""

    source: AbsolutePath
    """Images, as `--data.train` takes them."""
    folder: AbsolutePath
    """New folder for the shards, or one in which the same command was interrupted."""
    images_per_shard: int = Field(default=10_000, ge=1)
    """Images per shard."""
    short_side: int | None = Field(default=None, ge=16)
    """Pixels to which longer short sides are reduced; null copies all images as they are."""
    quality: int = Field(default=90, ge=1, le=100)
    """JPEG quality of the images that are reduced."""
    shuffle_seed: int | None = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the order in the shards, which mixes the classes for other readers; null keeps the given order."""
    threads: int | None = Field(default=None, ge=1)
    """Threads that decode, resize and encode; null is the cores."""
    verify: bool = False
    """Read all shards back and compare them with their digests; of finished shards, do only this."""


def data_shard(options: DataShard) -> None:
    from unigrad_fast import shard
    from unigrad_fast.pipelines.packing import Packing

    packing = Packing(**{key: getattr(options, key) for key in Packing.__dataclass_fields__})
    shard.shard(options.source, options.folder, packing, options.threads, options.verify)


class DataRecipes(Node):
    """Show the augmentation presets, their sources, and how to change them."""

    markdown: bool = False
    """Print them as a table for Markdown."""


def data_recipes(options: DataRecipes) -> None:
    from unigrad_fast import augmentation

    augmentation.show(options.markdown)


class DataPreview(Node):
    """Draw the crops and the views that an augmentation makes of a few images."""

    path: AbsolutePath
    """Images, as `--data.train` takes them."""
    recipe: str = "multicrop"
    """Augmentation preset, one of those of `data recipes`."""
    images: int = Field(default=4, ge=1, le=64)
    """How many images: the first ones of the epoch."""
    output: AbsolutePath = Path("preview.png")
    """PNG file to write."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of order and augmentations, as of the run."""
    epoch: int = Field(default=0, ge=0, le=2**32 - 1)
    """Epoch of the run, from 0."""
    cutmix: bool = False
    """Add the global views after CutMix."""
    image_size: int | None = Field(default=None, ge=16, le=1024)
    """Height and width of the global views in pixels; null is the preset's."""
    local_crops: int | None = Field(default=None, ge=0, le=32)
    """Number of local views; null is the preset's."""
    global_views: ViewChanges = ViewChanges()
    """What differs from the preset in both global views."""
    second_view: ViewChanges = ViewChanges()
    """What differs besides in the second of them."""
    local_views: LocalViewChanges = LocalViewChanges()
    """What differs in the local views."""
    photometric: Literal["dali", "torch"] = "dali"
    """Colour operations, as `--data.photometric` of a run."""


def data_preview(options: DataPreview) -> None:
    require_dali()
    from unigrad_fast import preview

    changed = {key: getattr(options, key).given() for key in ("global_views", "second_view", "local_views")}
    preview.preview(**{**dict(options), **changed})


class Doctor(Node):
    """Say what the machine has, what a run will use and what is missing, and try each part."""

    smoke: bool = True
    """Try each part of a training step and time it."""
    verbose: bool = False
    """Show the tracebacks of parts that fail, and what the libraries say."""


def doctor(options: Doctor) -> None:
    from unigrad_fast import doctor

    doctor.run(options.smoke, options.verbose)


class BenchStep(Node):
    """Measure images/s and memory of a training step, against a plain loop."""

    case: Literal["resnet50", "resnet18", "all"] = "all"
    """ResNet-50 at 224 pixels and 16 images per step, ResNet-18 at 96 pixels and 64, or one after the other."""
    images: AbsolutePath | None = None
    """Folder of images, photographs for figures that mean something; null draws some."""
    batch_size: int | None = Field(default=None, ge=2)
    """Images per step; null is the case's."""
    image_size: int | None = Field(default=None, ge=16, le=1024)
    """Height and width of the views in pixels; null is the case's."""
    repetitions: int = Field(default=3, ge=1)
    """Rounds in which each variant has its turn."""
    steps: int = Field(default=2, ge=1)
    """Measured steps per turn."""
    warmup: int = Field(default=1, ge=1)
    """Steps before them."""


def bench_step(options: BenchStep) -> None:
    require_dali()
    from unigrad_fast.benchmarks import bench_step

    bench_step.main(**dict(options))


class BenchLoader(Node):
    """Measure images/s and processor time of decoding and augmentation, against torchvision and decoding alone."""

    images: AbsolutePath | None = None
    """Folder of images or what else data.train takes, or a tar of one; null draws some."""
    recipe: str | None = None
    """Augmentation recipe; null is simsiam and multicrop, one after the other."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Where ours decodes and augments."""
    batch_size: int = Field(default=64, ge=1)
    """Images per batch."""
    image_size: int | None = Field(default=None, ge=1)
    """Side of the global views in pixels; null is the recipe's."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of ours, and worker processes of torchvision; null is the cores."""
    rounds: int = Field(default=3, ge=1)
    """Rounds in which each variant has its turn."""
    steps: int = Field(default=8, ge=1)
    """Measured batches per turn, rounded up to equally many per thread."""
    epochs: int = Field(default=5, ge=2)
    """Epochs of a small manifest after which memory is read."""


def bench_loader(options: BenchLoader) -> None:
    require_dali()
    from unigrad_fast.benchmarks import bench_loader

    bench_loader.main(**dict(options))


class BenchKernels(Node):
    """Measure the objective alone against plain torch, or report what the compiler makes of its kernels."""

    width: int | None = Field(default=None, ge=1)
    """C, the embedding width; null is 1024, 2048, 4096, 8192 and 16384, one after the other."""
    images: int | None = Field(default=None, ge=1)
    """N, the images per view; null is 128 and 512."""
    repetitions: int = Field(default=11, ge=1)
    """Rounds, at most, in which each variant has its turn."""
    block_seconds: float = Field(default=0.2, ge=0)
    """What a turn takes at least, in whole steps; seconds."""
    most_seconds: float = Field(default=20.0, ge=0)
    """What the rounds of one width and number of images may take before they become fewer, down to 3; seconds."""
    compiled: bool = True
    """Measure what torch.compile makes of plain torch too."""
    compile_only: bool = False
    """Compile every kernel at every tile shape for all architectures, which needs no GPU, and measure nothing."""
    tune: bool = False
    """Search this GPU's fastest tiles on scratch data, write them into the kernels' table, and measure nothing else."""
    output: AbsolutePath | None = None
    """File that the rows are appended to as JSON lines, or that holds --compile_only's as CSV; null writes none."""


def bench_kernels(options: BenchKernels) -> None:
    if options.compile_only and options.tune:
        raise UserError("compile_only needs no GPU and tune does; give one of them")
    if options.tune:
        from unigrad_fast.benchmarks import tune_kernels

        tune_kernels.main()
        return
    if options.compile_only:
        require_triton()
        from unigrad_fast.benchmarks import compile_report

        compile_report.main(options.output)
        return
    from unigrad_fast.benchmarks import bench_objective

    bench_objective.main(**{key: value for key, value in options if key not in ("compile_only", "tune")})


def require_run(folder: Path) -> None:
    """Raises UserError unless a folder holds a run."""
    if not holds_run(folder):
        raise UserError(f"run = {folder}: no run there (no config.yaml); give a folder that pretrain wrote")


class CheckpointShow(Node):
    """Say what a checkpoint holds."""

    path: AbsolutePath
    """A run folder, whose newest checkpoint is shown, or the folder of one checkpoint."""


def checkpoint_show(options: CheckpointShow) -> None:
    from unigrad_fast import checkpoint_report

    checkpoint_report.show(options.path)


class CheckpointVerify(Node):
    """Compare a checkpoint's files with their digests."""

    path: AbsolutePath
    """A run folder, all of whose checkpoints are verified, or the folder of one checkpoint."""


def checkpoint_verify(options: CheckpointVerify) -> None:
    from unigrad_fast import checkpoint_report

    checkpoint_report.verify(options.path)


def require_dali() -> None:
    """Raises UserError when DALI, which the user chooses by CUDA version, is not installed."""
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        raise UserError(
            "DALI, which decodes the images, is not installed; type `pip install nvidia-dali-cuda130`, or "
            "`nvidia-dali-cuda120` beside a torch for CUDA 12 (without a GPU either will do)"
        )


def require_triton() -> None:
    """Raises UserError when Triton, which torch brings along on Linux only, is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise UserError("Triton, which compiles the kernels, is not installed; type `pip install triton`")


COMMANDS: dict[str, tuple[type[Node], Callable[[Any], None]]] = {
    "pretrain": (Pretrain, pretrain),
    "evaluate knn": (EvaluateKNN, evaluate_knn),
    "evaluate linear": (EvaluateLinear, evaluate_linear),
    "export": (Export, export),
    "import": (Import, import_weights),
    "data synth": (DataSynth, data_synth),
    "data scan": (DataScan, data_scan),
    "data shard": (DataShard, data_shard),
    "data recipes": (DataRecipes, data_recipes),
    "data preview": (DataPreview, data_preview),
    "checkpoint show": (CheckpointShow, checkpoint_show),
    "checkpoint verify": (CheckpointVerify, checkpoint_verify),
    "bench step": (BenchStep, bench_step),
    "bench loader": (BenchLoader, bench_loader),
    "bench kernels": (BenchKernels, bench_kernels),
    "doctor": (Doctor, doctor),
}


def overview() -> str:
    """Text of `unigrad-fast --help`."""
    rows = "\n".join(f"  {usage(name):32}{options.__doc__}" for name, (options, _) in COMMANDS.items())
    return f"""usage: unigrad-fast COMMAND [--key value ...]

{unigrad_fast.__doc__}

commands:
{rows}

`unigrad-fast COMMAND --help` lists the keys of a command. Recipes: {", ".join(recipe_names())}."""


def positionals(options: type[Node]) -> list[str]:
    """Arguments that are written without their key: the required ones."""
    return [name for name, field in options.model_fields.items() if field.is_required()]


def usage(name: str) -> str:
    """A command's name with its positional arguments."""
    return " ".join([name, *(argument.upper() for argument in positionals(COMMANDS[name][0]))])


def split_command(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The command that the words begin with, and the words behind it."""
    for name in COMMANDS:
        length = len(name.split())
        if list(words[:length]) == name.split():
            return name, words[length:]
    given = " ".join(itertools.takewhile(lambda word: not word.startswith("-"), words)) or words[0]
    close = difflib.get_close_matches(given, COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"commands are {', '.join(COMMANDS)}"
    raise UserError(f"{given}: unknown command; {hint}")


def show_help(name: str, tree: Mapping[str, Any]) -> None:
    """Prints a command's keys and their defaults, for pretrain those of the recipe beside --help."""
    options, _ = COMMANDS[name]
    defaults = {"default": resolve(tree.get("recipe"), model=options)} if issubclass(options, Config) else {}
    tyro.cli(
        options,
        prog=f"unigrad-fast {name}",
        args=["--help"],
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff, tyro.conf.PositionalRequiredArgs),
        **defaults,
    )


def run(words: Sequence[str]) -> None:
    """Finds the command, checks its arguments and calls it."""
    if words[0] == "--version":
        print(f"unigrad-fast {unigrad_fast.__version__}")
        return
    groups = {name.split()[0] for name in COMMANDS}
    wants_help = "-h" in words or "--help" in words
    words = [word for word in words if word not in ("-h", "--help")]
    if not words or (wants_help and len(words) == 1 and words[0] in groups - COMMANDS.keys()):
        print(overview())
        return
    name, arguments = split_command(words)
    options, command = COMMANDS[name]
    tree = parse_arguments(arguments, positionals(options))
    if wants_help:
        show_help(name, tree)
    elif issubclass(options, Config):
        command(resolve(overrides=tree, model=options))
    else:
        command(validate(options, tree))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    # The deepspeed launcher adds this; LOCAL_RANK says the same.
    words = [word for word in words if not word.startswith("--local_rank=")]
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    prefix = "error" if rank == "0" else f"error on rank {rank}"
    try:
        run(words or ["--help"])
    except (UserError, DataError) as error:
        print(*(f"{prefix}: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return 2
    except Preempted as error:
        print(f"preempted: {error}", file=sys.stderr)
        return 75
    except RunStopped as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 3
    except OSError as error:
        wrong_paths = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ELOOP)
        if error.filename and error.errno in wrong_paths:
            print(f"{prefix}: {os.fsdecode(error.filename)}: {error.strerror}; give another path", file=sys.stderr)
            return 2
        if error.filename and error.errno == errno.EIO:
            print(f"stopped: {os.fsdecode(error.filename)}: {error.strerror}", file=sys.stderr)
            return 3
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        print(f"stopped: {error.filename or 'a file'} cannot be written: {error.strerror}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
