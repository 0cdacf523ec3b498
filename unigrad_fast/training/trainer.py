"""The state of a run and one training step, stage by stage in the order of the data flow."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.config import Config
from unigrad_fast.images.manifests import identity
from unigrad_fast.kernels.dispatch import use_triton
from unigrad_fast.networks.encoder import build_encoder, joined
from unigrad_fast.objectives import ObjectiveOutput, UniGrad, build
from unigrad_fast.objectives.metrics import names_of
from unigrad_fast.objectives.originals.original import OriginalLoss
from unigrad_fast.objectives.placement import choose
from unigrad_fast.optimization.loss_scale import LossScale
from unigrad_fast.optimization.schedules import learning_rate, target_momentum
from unigrad_fast.pipelines import Batch, CutMix, Loader, Manifest
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.precision import autocast_dtype
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training import needs, step_graph
from unigrad_fast.training.bad_images import BadImages
from unigrad_fast.training.branches import MomentumBranch, WithHeads, build_branch, heads_of
from unigrad_fast.training.engine import build_engine
from unigrad_fast.training.fragments import build_fragments
from unigrad_fast.training.gate import StepGate
from unigrad_fast.training.host_copy import HostCopy
from unigrad_fast.training.optimizers import build_optimizer
from unigrad_fast.training.rates import Rates
from unigrad_fast.training.reduction import backward, build_reduction
from unigrad_fast.training.step_graph import StepGraph
from unigrad_fast.training.target_stream import TargetStream
from unigrad_fast.training.telemetry.phases import PhaseClock

FEWEST_ROWS = 50  # of metrics, for curves


class Trainer:
    """The state of one run and the operations on it.

    Args:
        verbose: show DeepSpeed's output.
        goes_on: the run is resumed, so images that it could not use earlier count.

    Attributes:
        online: the DeepSpeed engine around the online encoder and the objective's heads, if it has any.
        objective: the objective, including F.
        branch: the source of targets; target: its momentum copy of the encoder, an empty module if it keeps none.
        in_lockstep: the branches run layer by layer, so that their norms share their collectives.
        target_copies: the target's weights in autocast's dtype, read by its forward pass.
        loss_scale: what the loss is multiplied by before backward in fp16; else None.
        fragments: where the online branch's weights, gradients and optimizer state are in memory.
        loader: yields one micro-batch at a time.
        compute: the device's part of a step, launched operator by operator or as a graph.
        total_steps, steps_done: optimizer steps of the run, and those completed.
        images: identifies the training images in a checkpoint.
        lost: why this rank cannot read any more images; empty while it can.
    """

    def __init__(
        self, config: Config, world: World, train: Manifest, verbose: bool = False, goes_on: bool = True
    ) -> None:
        self.config, self.world = config, world
        try:
            use_triton(world.device)
        except ValueError as error:
            raise UserError(str(error)) from None
        if config.engine.compile:
            require_compiler(config, world.size)
        captures = step_graph.wanted(config, world)
        self.accumulation = config.engine.accumulation_steps
        self.dtype = autocast_dtype(config.engine.precision, world.device)
        self.target_stream = TargetStream(config.engine, config.model, world)
        self.bad_images = BadImages(config.output, train, config.data.max_bad_fraction, goes_on)
        self.loader = build_loader(config, world, train, self.bad_images.known)
        self.steps_per_epoch = self.loader.steps_per_epoch // self.accumulation
        self.total_steps = self.steps_per_epoch * config.schedule.epochs
        self.steps_done, self.lost = 0, ""
        self.images = identity(train)

        with needs.network(config.model):
            encoder = build_encoder(config.model, config.seed, world.device)
        # Copied now: the seed makes it equal on all ranks, and DeepSpeed will add hooks to the module it is given.
        self.branch = build_branch(config, encoder, self.dtype)
        self.target, self.target_copies = self.branch.module, self.branch.copies
        shares = world.size > 1 and config.model.sync_batch_norm
        self.in_lockstep = shares and isinstance(self.branch, MomentumBranch)
        if config.engine.recompute_projector:
            encoder.recompute_projector()
        self.objective = build_objective(config, world)
        heads = heads_of(self.objective)
        online = WithHeads(encoder, heads) if heads else encoder
        constant = config.objective.takes("predictor_rate") and config.objective.predictor_rate == "constant"
        self.optimizer = build_optimizer(online, config.optimizer, heads["predictor"] if constant else None)
        self.loss_scale = LossScale(world.device) if self.dtype == torch.float16 else None
        self.optimizer.loss_scale = self.loss_scale
        with needs.optimizer(online, self.optimizer):
            self.online = build_engine(
                online,
                self.optimizer,
                settings=config.engine,
                micro_batch_size=config.images_at_once(world.size),
                dtype=self.dtype,
                verbose=verbose,
            )
            self.fragments = build_fragments(self.online, self.optimizer)
        self.reduction = build_reduction(self.online, divide_first=self.loss_scale is not None)
        self.rates = Rates(self.optimizer, world.device)
        if config.engine.compile:
            # In place: names stay the same, and the backbone, which is evaluated on its own, stays uncompiled.
            self.online.module.compile()
            self.target.compile()
        if {p for p in self.objective.parameters() if p.requires_grad} - set(online.parameters()):
            name = type(self.objective).__name__
            raise TypeError(f"{name} has parameters that no optimizer trains; put them into a module of its own")
        if isinstance(self.objective, OriginalLoss):
            self.objective.epoch = self.rates.epoch
        is_sharded = isinstance(self.objective, UniGrad) and self.objective.placement == "sharded"
        self.begins_update = is_sharded  # early, so that its communication overlaps the online branch
        self.reported = [*names_of(config.objective), "gradient_norm"]
        self.reported += [] if self.loss_scale is None else ["loss_scale"]
        self.gate = StepGate([encoder, self.target, *heads.values()], config.engine.max_skipped_steps, world.device)
        self.numbers = HostCopy()
        self.phases = PhaseClock(world.device)
        self.compute: step_graph.Compute = self.on_device
        if captures:
            self.compute = StepGraph(self.on_device, self.online, self.objective, self.phases, world.device)

    def step(self, step: int, batches: Iterator[Batch]) -> float:
        """One optimizer step; returns the seconds spent waiting for data."""
        epoch = step / self.steps_per_epoch
        self.rates.send(self.learning_rate(step), self.peak_rate, self.momentum(step + 1), epoch)
        self.phases.start(step)
        self._waited = 0.0
        # A graph computes in every step what it computed when it was captured.
        self.objective.measures = isinstance(self.compute, StepGraph) or self.reports(step)[0]
        output = self.compute(self._taken(batches))
        self.gate.send(step)
        self.phases.mark("target_update")
        self._send_numbers(step, output)
        self.steps_done = step + 1
        return self._waited

    def on_device(self, batches: Iterable[Batch]) -> ObjectiveOutput:
        """The device's part of a step: micro-batches, then the target's update; no effect if the step is dropped."""
        self.gate.open()
        self.optimizer.open()
        for batch in batches:
            output = self.micro_step(batch)
        skip = self.optimizer.nonfinite
        self.branch.update_(self.rates.target_momentum, skip)
        self.fragments.take(self.objective.after_step(self.rates.target_momentum, skip))
        self.gate.close(skip, None if self.loss_scale is None else self.loss_scale.update(skip))
        return output

    def micro_step(self, batch: Batch) -> ObjectiveOutput:
        """Run target branch, online branch, objective with its update of F, backward, and the engine's step."""
        views = [view.to(self.world.device, non_blocking=True) for view in batch.views]
        mix = None if batch.mix is None else batch.mix.to(self.world.device)
        if self.branch.encoder.one_pass:  # both branches take the global views in one tensor
            with self._autocast():
                views[:2] = joined(views[:2]).chunk(2)
        # Only the online branch sees mixed views.
        mixed = views if mix is None else [*mix.apply(views[:2]), *views[2:]]
        if self.in_lockstep:
            self.phases.mark("target")
            target, online = self.online(mixed, partial(self.branch.embed_beside, views=views[:2]))
        else:
            target, online = self._embed_in_turn(views[:2], mixed)
        self.phases.mark("online")
        with self._autocast():  # on a GPU the objective multiplies in its dtype
            output = self.objective(online=online, target=target, mix=mix)
        torch.maximum(self.optimizer.nonfinite, output.nonfinite.float(), out=self.optimizer.nonfinite)
        self.phases.mark("objective")
        loss = output.loss if self.loss_scale is None else output.loss * self.loss_scale.value
        backward(self.online, loss, self.reduction)
        self.phases.mark("backward")
        if self.online.is_gradient_accumulation_boundary():
            self.optimizer.measure(self.fragments.gradients(), self.fragments.sharded)
        self.online.step()  # moves the weights after the last micro-batch
        self.phases.mark("step")
        return output

    def _embed_in_turn(self, views: list[Tensor], mixed: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The target's embeddings of the unmixed global views, then the online branch's of all views."""
        with torch.no_grad(), self._autocast(), self.target_stream.beside(views):
            target = self.branch.embed(views, is_mixed=mixed[0] is not views[0])
        if target is not None and self.begins_update:
            self.target_stream.join()
            with self._autocast():
                self.objective.begin_update(target)
        self.phases.mark("target")
        online = self.online(mixed)
        self.target_stream.join()
        return online[:2] if target is None else target, online  # without a target branch they are the targets

    def warm_up(self) -> None:
        """Run both branches forward and backward over views of zeros, without changing any state.

        This way GPU libraries do their one-time work per shape, above all cuDNN's algorithm search, before the first
        step. All ranks call this together.
        """
        images = self.config.images_at_once(self.world.size)
        sizes = [view.size for view in self.loader.views_in(self.steps_done // self.steps_per_epoch)]
        views = [
            torch.zeros(images, 3, size, size, device=self.world.device).contiguous(memory_format=torch.channels_last)
            for size in sizes
        ]
        online = self.online.module  # bypass the engine, whose hooks would take this for a step
        self.gate.open()
        with self._autocast():
            with torch.no_grad():
                self.branch.embed(views[:2], is_mixed=bool(self.config.data.cutmix.probability))
            embeddings = online(views)
        parameters = list(self.branch.encoder.parameters())
        torch.autograd.grad(embeddings, parameters, [torch.zeros_like(each) for each in embeddings])
        self.gate.undo()

    def is_save_due(self) -> bool:
        """Whether the run saves a checkpoint now, after `steps_done` steps."""
        every = max(1, round(self.config.checkpoint.every * self.steps_per_epoch))
        return self.steps_done % every == 0 or self.steps_done == self.total_steps

    def is_evaluation_due(self) -> bool:
        """Whether the encoder is evaluated now: before the first step, after the last, and regularly in between."""
        if self.steps_done == 0:
            return self.config.evaluation.at_start
        every = self.config.evaluation.every * self.steps_per_epoch
        return self.steps_done == self.total_steps or bool(every and self.steps_done % every == 0)

    @property
    def peak_rate(self) -> float:
        """The learning rate after the warm-up."""
        return self.config.optimizer.base_lr * self.config.data.batch_size / 256

    def learning_rate(self, step: int) -> float:
        schedule = self.config.schedule
        return learning_rate(
            step,
            self.total_steps,
            peak=self.peak_rate,
            warmup_steps=round(schedule.warmup_epochs * self.steps_per_epoch),
            kind=schedule.kind,
            min_fraction=schedule.min_lr_fraction,
        )

    def momentum(self, step: int) -> float:
        settings = self.config.target
        return target_momentum(step, self.total_steps, initial=settings.momentum, final=settings.final_momentum)

    def metrics(self, before: int) -> Iterator[tuple[int, dict[str, float]]]:
        """Metrics of reported steps before `before` that were not returned yet, averaged over ranks."""
        for step, numbers in self.numbers.receive(before):
            named = dict(zip(self.reported, numbers, strict=True))
            if math.isnan(named.get("effective_rank", 0.0)):  # not computed in this step
                del named["effective_rank"]
            has_momentum = self.config.objective.target == "momentum"
            yield (
                step,
                {
                    "loss": named.pop("objective"),
                    **named,
                    **self.phases.read(step + 1),
                    "lr": self.learning_rate(step),
                    **({"target_momentum": self.momentum(step + 1)} if has_momentum else {}),
                },
            )

    def reports(self, step: int) -> tuple[bool, bool]:
        """Whether the metrics of a step are reported, and whether the effective rank is among them."""
        given, is_end = self.config.telemetry, step in (0, self.total_steps - 1)
        every = given.every or usual_interval(10, self.total_steps)
        ranked_every = given.effective_rank_every or usual_interval(100, self.total_steps)
        return is_end or (step + 1) % every == 0, is_end or (step + 1) % ranked_every < every

    def _taken(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The micro-batches of a step; records how long the step waited for them."""
        for _ in range(self.accumulation):
            asked = time.perf_counter()
            batch = next(batches)
            self._waited += time.perf_counter() - asked
            self.bad_images.note(batch.failures)
            self.lost = self.lost or batch.lost
            self.phases.mark("data")
            yield batch

    def _send_numbers(self, step: int, output: ObjectiveOutput) -> None:
        is_due, ranked = self.reports(step)
        if not is_due:
            return
        rank = torch.full_like(output.loss, torch.nan)
        if ranked and "effective_rank" in self.reported:
            rank = self.objective.average.effective_rank(self.objective.process_group)
        measured = {
            **output.metrics,
            **output.figures(),
            "effective_rank": rank,
            "gradient_norm": self.optimizer.gradient_norm,
            **({} if self.loss_scale is None else {"loss_scale": self.loss_scale.value}),
        }
        numbers = torch.stack([measured[name].detach().float() for name in self.reported])
        dist.all_reduce(numbers)
        self.numbers.send(step, numbers / self.world.size)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, self.dtype, enabled=self.dtype is not None)


def usual_interval(most: int, total_steps: int) -> int:
    """Steps between two reports: `most`, or fewer where a whole run would report less than FEWEST_ROWS times."""
    return max(1, min(most, total_steps // FEWEST_ROWS))


def require_compiler(config: Config, ranks: int) -> None:
    """Raises UserError if the networks cannot be compiled."""
    config.check_world(ranks)
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise UserError(
            f"engine.compile = true: C++ compiler {compiler} not found; install one, name yours in CXX, or omit "
            "engine.compile"
        )


def build_objective(config: Config, world: World) -> nn.Module:
    """The objective of a configuration; its heads are initialised from the seed."""
    width, images = config.model.projector.width, config.images_at_once(world.size)
    arguments = config.objective.arguments()
    placement = "replicated"
    if config.objective.method == "unigrad":
        placement = arguments["placement"] = choose_placement(config, world)
    with needs.objective(config, world.size if placement == "sharded" else 1), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return build(width=width, most_images=images, **arguments).to(world.device)


def choose_placement(config: Config, world: World) -> str:
    """The placement of F: "replicated" or "sharded"."""
    placement, width = config.objective.placement, config.model.projector.width
    if placement == "auto":
        return choose(width, config.images_at_once(world.size), len(config.data.views()), world.size)
    if placement == "sharded" and width < world.size:
        raise UserError(f"objective.placement = sharded: {world.size} ranks cannot share {width} rows; use replicated")
    return placement


def build_loader(config: Config, world: World, manifest: Manifest, known: Mapping[tuple[int, int], str]) -> Loader:
    if config.data.decode == "gpu" and world.device.type != "cuda":
        raise UserError("data.decode = gpu: this machine has no usable GPU; use auto or cpu")
    return Loader(
        manifest,
        preset=config.data.views(),
        batch_size=config.data.batch_size,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
        device=world.device if config.data.decode != "cpu" else "cpu",
        accumulation_steps=config.engine.accumulation_steps,
        threads=config.data.threads,
        cutmix=CutMix(**dict(config.data.cutmix)) if config.data.cutmix.probability else None,
        photometric=config.data.photometric,
        growth=config.data.growth(),
        hw_decoder_load=0.0 if config.engine.deterministic else config.data.hw_decoder_load,
        timeout=config.data.read_timeout,
        outlasts=True,
        read_threads=config.data.read_threads,
        read_ahead=config.data.read_ahead * 2**20,
        pinned=world.device.type == "cuda",
        known=known,
    )
