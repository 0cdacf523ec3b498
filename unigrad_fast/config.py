"""The configuration tree: every field with its meaning, unit, allowed range and the source of its default.

The defaults are the paper's 100-epoch ImageNet run (its appendix on pretraining). A recipe is a YAML file that lists
the differences; the command line overrides both. Whatever its source, a value is checked once, by `validation`.
"Authors' code" is the code published with the paper. A field's type includes its scope; that of a group holds for all
keys below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Flag, auto
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, SerializeAsAny, model_validator

from unigrad_fast.objectives.catalogue import FORMS, Objective
from unigrad_fast.pipelines.presets import GLOBALS, Growth, View, preset_views, short_side
from unigrad_fast.recipes import DEFAULT_RECIPE, current_names, exchanged, load_recipe, recipe_names, title
from unigrad_fast.recipes.backbones import BACKBONES
from unigrad_fast.runtime.errors import DataError, UserError
from unigrad_fast.runtime.older_names import renamed
from unigrad_fast.runtime.trees import BARE, merge, nested, parse_arguments
from unigrad_fast.runtime.validation import AbsolutePath, ImageSource, Node, group, leaves, shown, validate
from unigrad_fast.runtime.wording import count


class Scope(Flag):
    """What a key affects. A key without a scope decides the result and is the same on all ranks."""

    RESULT = 0
    MACHINE = auto()
    """Decides where and how fast a run computes, or what it reports: it may change when a run is resumed."""
    RANK = auto()
    """Each rank may have its own value."""
    JUDGMENT = auto()
    """Decides the outcome of an evaluation: the network, the images, the accuracy."""
    LOCAL = auto()
    """Evaluating or exporting a run on another machine may need another value: it may be changed in RUN/config.yaml."""


MOST_THREADS = 1024
Pair = tuple[float, float]
Probability = Annotated[float, Field(ge=0, le=1)]
MACHINE, JUDGMENT = Scope.MACHINE, Scope.JUDGMENT
RANK = MACHINE | Scope.RANK
LOCAL = MACHINE | Scope.LOCAL
LOCAL_RANK = LOCAL | RANK


class CutMixSettings(Node):
    probability: float = Field(default=0.0, ge=0, le=1)
    """Share of images whose global view gets a box from another image; 0 turns CutMix off."""
    alpha: float = Field(default=1.0, gt=0, le=100)
    """The share of the area that is kept is drawn from Beta(alpha, alpha) (CutMix paper: 1)."""
    group: int = Field(default=16, ge=2)
    """Images that are mixed among each other; must divide the images per rank and micro-batch."""


class ViewChanges(Node):
    scale: Pair | None = None
    """Range of the crop's area as a share of the image's; null keeps the preset's value, as in this whole group."""
    ratio: Pair | None = None
    """Range of the crop's width / height."""
    interpolation: Literal["bilinear", "bicubic"] | None = None
    """Resizing of the crop, with antialiasing."""
    jitter: tuple[float, float, float, float] | None = None
    """Largest change of brightness, contrast, saturation and hue (hue in full turns)."""
    jitter_probability: Probability | None = None
    """Share of the views whose colours are jittered."""
    gray_probability: Probability | None = None
    """Share of the views that are converted to grayscale."""
    blur_probability: Probability | None = None
    """Share of the views that are blurred."""
    blur_sigma: Pair | None = None
    """Range of the Gaussian blur's standard deviation, in pixels of the view."""
    solarize_probability: Probability | None = None
    """Share of the views that are solarized: pixel values of 128 and above are inverted."""
    flip_probability: Probability | None = None
    """Share of the views that are flipped horizontally."""

    def given(self) -> dict[str, Any]:
        """The values that differ from the preset."""
        return {key: value for key, value in self if value is not None}


class LocalViewChanges(ViewChanges):
    size: int | None = Field(default=None, ge=16, le=1024)
    """Height and width in pixels."""


class Progressive(Node):
    start_size: int | None = Field(default=None, ge=16, le=1024)
    """Height and width of the global views in the first epoch, in pixels; null means data.image_size throughout."""
    epochs: int = Field(default=60, ge=1)
    """Epochs over which they grow to data.image_size, and local views in proportion (60: ours)."""


class Data(Node):
    train: Annotated[ImageSource | None, RANK | JUDGMENT] = None
    """Training images: a tree CLASS/*.jpg, a flat folder, a text file that lists them, .tar shards, a .parquet file,
    hf:FOLDER[:SPLIT[:IMAGES[:LABELS]]] of Hugging Face `datasets`, or parquet:FOLDER[:IMAGES[:LABELS]]."""
    val: Annotated[ImageSource | None, RANK | JUDGMENT] = None
    """Labelled validation images for kNN, given like data.train; null turns evaluation off."""
    preset: Literal["simsiam", "byol", "dino", "swav", "multicrop"] = "simsiam"
    """Augmentation preset, see `unigrad-fast data presets` (paper: as in SimSiam; multicrop adds local crops)."""
    batch_size: int = Field(default=1024, ge=2, le=2**24)
    """Images per optimizer step, over all ranks and accumulation steps (paper: 1024)."""
    image_size: Annotated[int, JUDGMENT] = Field(default=224, ge=16, le=1024)
    """Height and width of a global view in pixels (paper: 224)."""
    local_crops: int | None = Field(default=None, ge=0, le=32)
    """Local views per image; null keeps the preset's number (simsiam and byol 0, the others 6)."""
    global_views: ViewChanges = ViewChanges()
    """Changes to the preset in both global views."""
    second_view: ViewChanges = ViewChanges()
    """Further changes in the second global view only."""
    local_views: LocalViewChanges = LocalViewChanges()
    """Changes to the preset in the local views."""
    photometric: Literal["dali", "torch"] = "dali"
    """Colour operations: dali fuses them into one affine map; torch applies torchvision's, as for published numbers."""
    progressive: Progressive = Progressive()
    """Smaller views in the first epochs, for speed."""
    cutmix: CutMixSettings = CutMixSettings()
    """Mixing of the online branch's global views (paper, section "Application on Data Augmentations")."""
    decode: Annotated[Literal["auto", "cpu", "gpu"], LOCAL_RANK] = "auto"
    """Where images are decoded and augmented; auto uses the GPU if there is one."""
    hw_decoder_load: Annotated[float, RANK] = Field(default=0.65, ge=0, le=1)
    """Share of the images for the GPU's JPEG unit; its cores decode the rest (DALI's advice: try 0.5 to 0.9)."""
    threads: Annotated[int | None, LOCAL_RANK] = Field(default=None, ge=1, le=MOST_THREADS)
    """Decoding threads per rank; null uses one fewer than the cores per rank, at least one (DALI's advice)."""
    read_threads: Annotated[int, LOCAL_RANK] = Field(default=32, ge=1, le=MOST_THREADS)
    """Files that a rank reads in parallel, to hide the latency of network storage (32: ours)."""
    read_ahead: Annotated[int, LOCAL_RANK] = Field(default=128, ge=0, le=2**20)
    """MiB of encoded images that a rank prefetches, within 2 to 64 micro-batches (128: ours)."""
    read_timeout: Annotated[float, LOCAL_RANK] = Field(default=60.0, gt=0, le=86_400)
    """Seconds after which a file that cannot be read yet is replaced by another image."""
    max_bad_fraction: Annotated[float, LOCAL] = Field(default=0.01, ge=0, le=1)
    """Share of the images that may be unusable before the run stops; until then they are replaced. Unless it is 0,
    up to 5 images of a small set, but no more than a tenth, may always be unusable (0.01: ours)."""

    @model_validator(mode="before")
    @classmethod
    def _with_current_names(cls, given: Any) -> Any:
        """Accepts configurations saved by earlier versions."""
        return renamed(given, "recipe", "preset", "data.", quiet=True) if isinstance(given, Mapping) else given

    def views(self) -> tuple[View, ...]:
        """The views of an image, the two global ones first. Raises DataError if one is impossible."""
        return preset_views(
            self.preset,
            self.image_size,
            local_crops=self.local_crops,
            global_views=self.global_views.given(),
            second_view=self.second_view.given(),
            local_views=self.local_views.given(),
        )

    def growth(self) -> Growth | None:
        """How the views grow over the epochs; None if they do not."""
        start = self.progressive.start_size
        return None if start is None else Growth(start, self.progressive.epochs)


class Projector(Node):
    depth: int = Field(default=3, ge=1, le=5)
    """Number of linear layers (paper: 3)."""
    width: int = Field(default=2048, ge=1, le=2**17)
    """Width of every layer and of the embedding (paper: 2048)."""


class Model(Node):
    backbone: Literal[BACKBONES] = "resnet50"  # type: ignore[valid-type]
    """torchvision network without its classifier (paper: resnet50)."""
    stem: Literal["imagenet", "small"] = "imagenet"
    """First layers: imagenet is a 7x7 convolution and pooling; small is one 3x3 convolution, for tiny images."""
    projector: Projector = Projector()
    """Head between the backbone and the objective."""
    sync_batch_norm: bool = True
    """Whether ranks share batch statistics (paper: on; without it accuracy falls by several points)."""
    batch_statistics: Literal["auto", "per_view", "per_size"] = "auto"
    """Which images share batch statistics; auto: per global view, and local views by size (authors' code)."""


class Target(Node):
    momentum: float = Field(default=0.996, ge=0, le=1)
    """Share of the target's weights that is kept in the first step (paper: 0.996)."""
    final_momentum: float = Field(default=1.0, ge=0, le=1)
    """The same for the last step; in between it follows a cosine (paper: 1)."""


class Optimizer(Node):
    name: Literal["sgd", "lars", "adamw"] = "sgd"
    """Optimizer (paper: sgd for 100 epochs, lars for 800; adamw: ours, untried on ImageNet)."""
    base_lr: float = Field(default=0.05, gt=0)
    """Peak learning rate per 256 images: the rate is base_lr * data.batch_size / 256 (paper: 0.05)."""
    bias_base_lr: float | None = Field(default=None, gt=0)
    """The same for biases and batch norm; null uses base_lr (paper: sgd the same, lars 0.05 with base_lr 0.3)."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum; for adamw, the decay rate of the first moment (paper: 0.9)."""
    second_momentum: float = Field(default=0.999, ge=0, lt=1)
    """For adamw only: the decay rate of the second moment (Adam paper: 0.999)."""
    weight_decay: float = Field(default=1e-4, ge=0)
    """L2 penalty on the weights; for adamw, decoupled weight decay (paper: sgd 1e-4, lars 1e-6)."""
    exclude_bias_and_norm: bool = False
    """Biases and batch norm get no decay and no adaptation by lars (authors' code: sgd false; paper: lars true)."""
    trust_coefficient: float = Field(default=0.001, gt=0)
    """For lars only: ratio of an update's norm to its weight's norm at learning rate 1 (LARS paper: 0.001)."""
    clip_norm: float = Field(default=0.0, ge=0)
    """Largest norm of the whole gradient; larger ones are scaled down; 0 turns clipping off (authors' code)."""

    def problems(self) -> list[str]:
        """Messages about values that apply only to another optimizer."""
        found = []
        for key, owner in (("second_momentum", "adamw"), ("trust_coefficient", "lars")):
            value, unused = getattr(self, key), type(self).model_fields[key].default
            if self.name != owner and value != unused:
                found.append(
                    f"optimizer.{key} = {shown(value)}: applies only to {owner}, but optimizer.name is {self.name}; "
                    f"leave it out, or use optimizer.name {owner}"
                )
        return found


class Schedule(Node):
    epochs: int = Field(default=100, ge=1, le=10**6)
    """Passes over the training images (paper: 100)."""
    warmup_epochs: float = Field(default=5.0, ge=0)
    """Epochs of linear warm-up; fractions are allowed (paper: 5)."""
    kind: Literal["cosine", "official"] = "cosine"
    """Decay after warm-up: cosine ends at min_lr_fraction; official (authors' code) ends at 0.7 % of the peak."""
    min_lr_fraction: float = Field(default=0.001, ge=0, le=1)
    """Learning rate at the first and the last step, as a share of the peak (0.001: ours)."""


class Engine(Node):
    device: Annotated[Literal["auto", "cuda", "cpu"], LOCAL] = "auto"
    """Device of all ranks; auto uses GPUs, or the CPU if the machine has no NVIDIA GPU."""
    threads: Annotated[int | None, MACHINE] = Field(default=None, ge=1, le=MOST_THREADS)
    """Compute threads of a rank, which decide rounding; null fits a new run's to the free cores, and is kept in it."""
    timeout: Annotated[float, MACHINE] = Field(default=10.0, ge=0.01, le=1440)
    """Minutes that ranks wait for a slow or lost rank in a step before they stop and name it (10: NCCL's default)."""
    zero_stage: Annotated[int, LOCAL] = Field(default=0, ge=0, le=2)
    """DeepSpeed ZeRO stage: 0 replicates, 1 shards momentum and master weights over the ranks, 2 gradients too."""
    precision: Annotated[Literal["auto", "bf16", "fp16", "fp32"], JUDGMENT] = "auto"
    """Precision of the networks; auto is bf16 where the hardware has it, else fp16 on a GPU and fp32 on a CPU."""
    tf32: Annotated[bool, JUDGMENT] = False
    """Whether a GPU uses TF32, with 10 of 23 mantissa bits, for fp32 matrix products and convolutions."""
    compile: bool = False
    """Whether to torch.compile the networks; needs a C++ compiler, and one rank or model.sync_batch_norm false."""
    recompute_projector: Annotated[bool, MACHINE] = False
    """Whether backward recomputes the projector's norms and casts; saves no memory at width 2048 (docs/wide.md)."""
    deterministic: Annotated[bool, MACHINE] = False
    """Whether runs on a GPU repeat bit for bit: slower algorithms and no JPEG unit; not yet tried on a GPU."""
    accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches per optimizer step."""
    max_skipped_steps: Annotated[int, MACHINE] = Field(default=10, ge=1)
    """Consecutive steps with non-finite values after which the run stops (10: ours)."""
    target_stream: Annotated[bool, MACHINE] = False
    """Whether a GPU overlaps the target branch with the online one; needs one rank or model.sync_batch_norm false."""
    cuda_graph: Annotated[Literal["auto"] | bool, MACHINE] = "auto"
    """Whether a GPU replays steps as a CUDA graph; needs zero_stage 0; auto means false until a GPU has tried it."""


class Checkpoint(Node):
    every: float = Field(default=1.0, gt=0, le=1e6)
    """Epochs between two checkpoints; fractions are allowed (authors' code: 1)."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep (2: the newest may turn out damaged)."""
    keep_every: int = Field(default=0, ge=0)
    """Also keep, permanently, the checkpoint of every so many epochs; 0 keeps none."""


class KNN(Node):
    k: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Number of neighbours that vote; auto is 200 from 20,000 training images up (the usual protocol), 20 below. All
    images vote if there are fewer."""
    temperature: float = Field(default=0.1, ge=0.001, le=1000)
    """Temperature of the vote weights exp(similarity / temperature) (usual protocol: 0.1)."""


class Evaluation(Node):
    every: int = Field(default=10, ge=0)
    """Epochs between kNN evaluations, in addition to the one after the last step; 0 turns these off."""
    at_start: bool = True
    """Whether to evaluate the untrained encoder too, which takes as long as any later evaluation."""
    crop_fraction: Annotated[float, JUDGMENT] = Field(default=0.875, gt=0, le=1)
    """Share of the short side that the centre crop keeps (usual protocol: 224 of 256 pixels)."""
    batch_size: Annotated[int, LOCAL] = Field(default=256, ge=1, le=2**16)
    """Images per rank and forward pass."""
    knn: Annotated[KNN, JUDGMENT] = KNN()
    """The weighted nearest-neighbour classifier."""


class Telemetry(Node):
    every: int | None = Field(default=None, ge=1)
    """Optimizer steps between two rows of metrics; null: 10, or fewer for 50 rows in a short run; kept on resume."""
    tensorboard: bool = True
    """Whether to write TensorBoard event files into the run folder."""
    effective_rank_every: int | None = Field(default=None, ge=1)
    """Optimizer steps between two computations of F's effective rank; null: 100, or fewer, in the same way."""


class Config(Node):
    """Everything that decides a run."""

    seed: Annotated[int, JUDGMENT] = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of weights, order and augmentations."""
    output: Annotated[AbsolutePath | None, MACHINE] = None
    """Run folder; null uses the first free one of runs/NAME, runs/NAME-2, runs/NAME-3, ..., named after the recipe."""
    recipe: Annotated[str, MACHINE] = DEFAULT_RECIPE
    """Recipe to start from: a shipped one, or the path of a YAML file."""
    data: Data = Data()
    """Images and augmentation."""
    model: Annotated[Model, JUDGMENT] = Model()
    """Networks."""
    objective: SerializeAsAny[Annotated[Objective, {"placement": MACHINE}]] = FORMS["unigrad"].model_validate({})
    """Method and loss."""
    target: Target = Target()
    """The target branch, a momentum copy of the online branch."""
    optimizer: Optimizer = Optimizer()
    """Optimizer and learning rate."""
    schedule: Schedule = Schedule()
    """Length of the run and learning-rate schedule."""
    engine: Engine = Engine()
    """How a step is computed."""
    checkpoint: Annotated[Checkpoint, MACHINE] = Checkpoint()
    """When checkpoints are saved and which are kept."""
    evaluation: Annotated[Evaluation, MACHINE] = Evaluation()
    """kNN evaluation of the encoder."""
    telemetry: Annotated[Telemetry, MACHINE] = Telemetry()
    """Metrics and logs."""

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        """Refuses combinations that are wrong for any number of ranks; reports all of them together."""
        problems = []
        if self.recipe not in recipe_names():
            problems.append(f"recipe = {self.recipe}: not a shipped recipe; use one of {', '.join(recipe_names())}")
        problems += self._view_problems()
        try:
            short_side(self.data.image_size, self.evaluation.crop_fraction)
        except DataError as error:
            problems.append(f"evaluation.crop_fraction = {shown(self.evaluation.crop_fraction)}: {error}")
        problems += self._objective_problems()
        if self.schedule.warmup_epochs > self.schedule.epochs:
            problems.append(
                f"schedule.warmup_epochs = {shown(self.schedule.warmup_epochs)}: more than schedule.epochs; "
                f"use 0 to {self.schedule.epochs}"
            )
        if self.target.final_momentum < self.target.momentum:
            problems.append(
                f"target.final_momentum = {shown(self.target.final_momentum)}: less than target.momentum; "
                f"use {shown(self.target.momentum)} to 1"
            )
        problems += self.optimizer.problems()
        problems += self._engine_problems()
        problems += self._batch_problems(world_size=1)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def unused(self) -> dict[str, str]:
        """Keys without an effect in this run: why, and what would use them."""
        objective, found = self.objective, {}
        if objective.target != "momentum":
            reason = f"with objective.target {objective.target} no branch has momentum"
            found = dict.fromkeys(("target.momentum", "target.final_momentum"), reason)
        if not self.data.cutmix.probability:
            reason = "data.cutmix.probability is 0"
            found |= dict.fromkeys(("data.cutmix.alpha", "data.cutmix.group"), reason)
        if self.data.progressive.start_size is None:
            found["data.progressive.epochs"] = "data.progressive.start_size is null"
        return found

    def _engine_problems(self) -> list[str]:
        engine, problems = self.engine, []
        if engine.compile and engine.recompute_projector:
            problems.append(
                "engine.recompute_projector = true: does not work with engine.compile true; leave one of them out"
            )
        if engine.cuda_graph is True:
            problems += [f"engine.cuda_graph = true: {reason}" for reason in self.graph_obstacles()]
        return problems

    def graph_obstacles(self) -> list[str]:
        """Why these settings' step cannot be captured as a CUDA graph, each with its remedy."""
        engine, reasons = self.engine, []
        if engine.zero_stage:
            stage = engine.zero_stage
            reasons.append(f"engine.zero_stage is {stage}, where DeepSpeed's step cannot be captured; use 0")
        if self.objective.takes("eigen_every"):
            reasons.append(
                f"objective.method is {self.objective.method}, whose eigenvectors the host reads; use another"
            )
        if engine.compile:
            reasons.append("engine.compile is on, and the two are untested together; leave one of them out")
        return reasons

    def _objective_problems(self) -> list[str]:
        try:
            views = len(self.data.views())
        except DataError:  # `_view_problems` reports it
            views = GLOBALS
        problems = list(self.objective.problems(self.data.cutmix.probability, has_local_crops=views > GLOBALS))
        if self.engine.target_stream and (target := self.objective.target) != "momentum":
            problems.append(
                f"engine.target_stream = true: with objective.target {target} there is no target branch to overlap "
                "with the online one; leave it out"
            )
        return problems

    def _view_problems(self) -> list[str]:
        data = self.data
        try:
            views = data.views()
            if growth := data.growth():
                growth.check(views)
        except DataError as error:
            return [f"data: {error}"]
        problems = []
        size = views[-1].size
        if size > data.image_size:
            problems.append(
                f"data.local_views.size = {size}: larger than the global views (data.image_size = {data.image_size}); "
                f"use about {max(16, round(data.image_size * 96 / 224))}"
            )
        if len(views) == GLOBALS and (given := data.local_views.given()):
            key, value = next(iter(given.items()))
            problems.append(
                f"data.local_views.{key} = {shown(value)}: {data.preset} has no local views; add data.local_crops"
            )
        if growth and data.progressive.epochs >= self.schedule.epochs:
            problems.append(
                f"data.progressive.epochs = {data.progressive.epochs}: the views would not reach data.image_size in "
                f"schedule.epochs = {self.schedule.epochs}; use about {max(1, round(0.6 * self.schedule.epochs))}"
            )
        return problems

    def _batch_problems(self, world_size: int) -> list[str]:
        batch, steps = self.data.batch_size, self.engine.accumulation_steps
        # Batch norm needs two values per channel: over all ranks if synchronised, otherwise on every rank.
        least = 2 * steps * (1 if self.model.sync_batch_norm else world_size)
        parts = world_size * steps
        if batch % parts == 0 and batch >= least:
            return []
        candidates = (batch // parts * parts, -(-max(batch, least) // parts) * parts)
        nearest = " or ".join(str(value) for value in dict.fromkeys(candidates) if value >= least)
        where = f"{count(world_size, 'rank')} x {count(steps, 'accumulation step')}"
        reason = f"does not divide over {where}" if batch % parts else f"is too small for {where}"
        return [f"data.batch_size = {batch}: {reason}; use {nearest}"]

    def images_at_once(self, world_size: int) -> int:
        """Images per rank and micro-batch."""
        return self.data.batch_size // (world_size * self.engine.accumulation_steps)

    def check_world(self, world_size: int) -> None:
        """Raises UserError if the run cannot be distributed over `world_size` ranks."""
        problems = self._batch_problems(world_size)
        if self.engine.compile and world_size > 1 and self.model.sync_batch_norm:
            problems.append(
                f"engine.compile = true: with {world_size} ranks batch norm exchanges statistics, which cannot be "
                "compiled; leave it out, or set model.sync_batch_norm false"
            )
        if problems:
            raise UserError("\n".join(problems))


def scope_of(key: str) -> Scope:
    """The scopes of a dotted key, including those of the groups around it.

    A group may also map keys in it to scopes, for fields that are declared elsewhere.
    """
    scope, declared = Scope.RESULT, dict[str, Scope]()
    owner: type[Node] | None = Config
    for part in key.split("."):
        scope |= declared.get(part, Scope.RESULT)
        if owner is None or part not in owner.model_fields:
            break
        said = owner.model_fields[part].metadata
        for each in said:
            scope |= each if isinstance(each, Scope) else Scope.RESULT
        declared = next((each for each in said if isinstance(each, dict)), {})
        owner = group(owner, part)
    return scope


def resolve(
    recipe: str | Path | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    model: type[Config] = Config,
) -> Config:
    """The checked tree: defaults, then the recipe, then the overrides.

    Args:
        recipe: shipped name or path of a YAML file; None takes the overrides' recipe, or else the model's default.
        overrides: mapping, nested or with dotted keys such as `{"model.projector.width": 4096}`; or command-line
            arguments such as `["--model.projector.width", "4096"]`.
        model: Config, or a subclass with more keys; if it has a key `name`, the recipe's name is its default.

    Raises:
        UserError: lists every unknown key, wrong value and impossible combination.
    """
    top = current_names(nested(overrides) if isinstance(overrides, Mapping) else parse_arguments(overrides))
    named = top.pop("recipe", None)
    if named is BARE or named == "":
        raise UserError(
            f"--recipe: a value is missing; give the path of a YAML file or one of {', '.join(recipe_names())}"
        )
    given = recipe or named or model.model_fields["recipe"].default
    tree = load_recipe(given)
    if "name" in model.model_fields:
        tree.setdefault("name", title(given))
    config = validate(model, merge(exchanged(tree, top), top))
    _refuse_unused(config)
    return config


def _refuse_unused(config: Config) -> None:
    """Raises UserError if a key that has no effect in this run has another value than its shipped recipe gives it."""
    shipped, given = dict(leaves(load_recipe(config.recipe))), dict(leaves(config))
    usual = {key: shipped.get(key, value) for key, value in leaves(Config())}
    problems = [
        f"{key} = {shown(given[key])}: has no effect, because {why}; leave it out"
        for key, why in config.unused().items()
        if given[key] != usual[key]
    ]
    if problems:
        raise UserError("\n".join(problems))


def to_yaml(config: Node) -> str:
    """The whole tree as YAML that `--recipe` accepts."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
