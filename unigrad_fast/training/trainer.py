"""Pretraining, top to bottom: build the parts, walk through the steps, evaluate, save, report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from unigrad_fast import distributed
from unigrad_fast.config import Config, to_yaml
from unigrad_fast.distributed import World
from unigrad_fast.errors import DataError, RunStopped, UserError
from unigrad_fast.evaluation.probe import KNNProbe
from unigrad_fast.images import read_manifests
from unigrad_fast.model import build_encoder
from unigrad_fast.objectives import ObjectiveOutput, build
from unigrad_fast.pipelines import Batch, Loader, Manifest, recipe
from unigrad_fast.precision import autocast_dtype
from unigrad_fast.training.curves import draw
from unigrad_fast.training.engine import build_engine
from unigrad_fast.training.gate import StepGate
from unigrad_fast.training.host_copy import HostCopy
from unigrad_fast.training.optimizers import build_optimizer
from unigrad_fast.training.schedules import learning_rate, target_momentum
from unigrad_fast.training.target import make_target, update_target_
from unigrad_fast.training.telemetry import Telemetry
from unigrad_fast.weights import save_weights

REPORTED = ("objective", "positive_cosine", "negative_term", "feature_std", "gradient_norm", "effective_rank")


def pretrain(config: Config, verbose: bool = False) -> None:
    """Pretrain as the configuration says; everything is written to `config.output`, which must be set.

    Raises:
        UserError, DataError: input that cannot work, before the run folder is made.
        RunStopped: too many steps in a row met non-finite values, or an image cannot be decoded; the weights of the
            last good step are saved.
    """
    with distributed.session() as world:
        train, val, said = read_manifests(config, world)
        trainer = Trainer(config, world, train, verbose)
        obstacle = KNNProbe.obstacle(train, val)
        probe = KNNProbe(config, world, train, val) if obstacle is None else None
        if world.rank == 0:
            config.output.mkdir(parents=True, exist_ok=True)
            (config.output / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        with Telemetry(config.output, config, trainer.total_steps, trainer.steps_per_epoch, world.rank) as telemetry:
            introduce(telemetry, trainer, train, obstacle)
            for warning in said:
                telemetry.warn(warning)
            run(trainer, telemetry, probe)


def run(trainer: Trainer, telemetry: Telemetry, probe: KNNProbe | None) -> None:
    """The loop over all steps, with its evaluations, savings and reports."""
    config, steps_per_epoch = trainer.config, trainer.steps_per_epoch
    batches = trainer.loader.iterate(stop_step=trainer.total_steps * trainer.accumulation)
    trainer.evaluate(probe, telemetry, step=0)
    for step in range(trainer.total_steps):
        try:
            waited = trainer.step(step, batches)
        except DataError as error:
            trainer.save(step)
            raise RunStopped(f"{error}; the weights after {step} steps are saved") from None
        trainer.report(telemetry, before=step)  # one step late, when the device is done with it
        telemetry.advance(step + 1, config.data.batch_size, waited)

        epoch, rest = divmod(step + 1, steps_per_epoch)
        last = step + 1 == trainer.total_steps
        if rest == 0 and (last or epoch % config.checkpoint.every == 0):
            trainer.report(telemetry, before=step + 1)
            trainer.save(step + 1)
        if rest == 0 and (last or (config.evaluation.every and epoch % config.evaluation.every == 0)):
            trainer.report(telemetry, before=step + 1)
            trainer.evaluate(probe, telemetry, step + 1)
    conclude(trainer, telemetry, probe)


class Trainer:
    """The state of one run and the operations on it.

    Attributes:
        online: the DeepSpeed engine around the online encoder; target: its momentum copy; objective: with F.
        loader: batches of one micro-step each; total_steps: optimizer steps of the run.
    """

    def __init__(self, config: Config, world: World, train: Manifest, verbose: bool = False):
        self.config, self.world = config, world
        self.accumulation = config.engine.accumulation_steps
        self.dtype = autocast_dtype(config.engine.precision, world.device)
        self.loader = build_loader(config, world, train)
        self.steps_per_epoch = self.loader.steps_per_epoch // self.accumulation
        self.total_steps = self.steps_per_epoch * config.schedule.epochs

        encoder = build_encoder(config.model, config.seed, world.device)
        # Copied now: the seed makes it equal on all ranks, and DeepSpeed leaves hooks in the module it is given.
        self.target = make_target(encoder).to(memory_format=torch.channels_last)
        self.optimizer = build_optimizer(encoder, config.optimizer)
        self.online = build_engine(
            encoder,
            self.optimizer,
            settings=config.engine,
            micro_batch_size=config.data.batch_size // (self.accumulation * world.size),
            dtype=self.dtype,
            verbose=verbose,
        )
        self.objective = build(
            config.objective.method,
            width=config.model.projector.width,
            balance=config.objective.balance,
            decay=config.objective.decay,
            correlation_source=config.objective.correlation_source,
        ).to(world.device)
        self.gate = StepGate([encoder, self.target], config.engine.max_skipped_steps, world.device)
        self.numbers = HostCopy()

    def step(self, step: int, batches: Iterator[Batch]) -> float:
        """One optimizer step; returns the seconds spent waiting for data."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.gate.open()
        self.optimizer.nonfinite.zero_()
        waited = 0.0
        for _ in range(self.accumulation):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            output = self.micro_step(batch)
        update_target_(self.target, self.online.module, self.momentum(step + 1), skip=self.optimizer.nonfinite)
        self.gate.close(step, skip=self.optimizer.nonfinite)
        self._send_numbers(step, output)
        return waited

    def micro_step(self, batch: Batch) -> ObjectiveOutput:
        """Target branch, online branch, objective with its update of F, backward, and the engine's step."""
        views = [view.to(self.world.device, non_blocking=True) for view in batch.views]
        with torch.no_grad(), self._autocast():
            target = self.target(views[:2])
        online = self.online(views)
        output = self.objective(online=online, target=target)
        torch.maximum(self.optimizer.nonfinite, output.nonfinite.float(), out=self.optimizer.nonfinite)
        self.online.backward(output.loss)
        self.online.step()  # reduces gradients and moves the weights after the last micro-batch
        return output

    def learning_rate(self, step: int) -> float:
        schedule = self.config.schedule
        return learning_rate(
            step,
            self.total_steps,
            peak=self.config.optimizer.base_lr * self.config.data.batch_size / 256,
            warmup_steps=round(schedule.warmup_epochs * self.steps_per_epoch),
            kind=schedule.kind,
            min_fraction=schedule.min_lr_fraction,
        )

    def momentum(self, step: int) -> float:
        settings = self.config.target
        return target_momentum(step, self.total_steps, initial=settings.momentum, final=settings.final_momentum)

    def metrics(self, before: int) -> Iterator[tuple[int, dict[str, float]]]:
        """Metrics of the reported steps before `before` that were not given out yet, averaged over ranks."""
        for step, numbers in self.numbers.receive(before):
            named = dict(zip(REPORTED, numbers, strict=True))
            if math.isnan(named["effective_rank"]):  # not computed in this step
                del named["effective_rank"]
            yield (
                step,
                {
                    "loss": named.pop("objective"),
                    **named,
                    "lr": self.learning_rate(step),
                    "target_momentum": self.momentum(step + 1),
                },
            )

    def _send_numbers(self, step: int, output: ObjectiveOutput) -> None:
        settings, last = self.config.telemetry, self.total_steps - 1
        if (step + 1) % settings.every != 0 and step not in (0, last):
            return
        ranked = (step + 1) % settings.effective_rank_every < settings.every or step in (0, last)
        rank = self.objective.effective_rank() if ranked else torch.full_like(output.loss, torch.nan)
        measured = {**output.metrics, "gradient_norm": self.optimizer.gradient_norm, "effective_rank": rank}
        numbers = torch.stack([measured[name].detach().float() for name in REPORTED])
        dist.all_reduce(numbers)
        self.numbers.send(step, numbers / self.world.size)

    def report(self, telemetry: Telemetry, before: int) -> None:
        """Hand the metrics of finished steps to the telemetry, and stop a run that only drops steps."""
        try:
            skipped = self.gate.check(before)
        except RunStopped:
            self.save(before)
            raise
        for step, metrics in self.metrics(before):
            telemetry.log_train(step + 1, {**metrics, "skipped_steps": skipped})

    def evaluate(self, probe: KNNProbe | None, telemetry: Telemetry, step: int) -> None:
        if probe is None:
            return
        with telemetry.evaluation():
            try:
                result = probe(self.online.module.backbone, self.dtype)
            except DataError as error:
                raise RunStopped(str(error)) from None
            telemetry.log_knn(step, result)

    def save(self, step: int) -> None:
        """Write the weights of both branches and F to the run folder."""
        if self.world.rank == 0:
            branches = {"online": self.online.module, "target": self.target, "objective": self.objective}
            save_weights(self.config.output, branches, step=step, epoch=step / self.steps_per_epoch)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, self.dtype, enabled=self.dtype is not None)


def build_loader(config: Config, world: World, manifest: Manifest) -> Loader:
    if config.data.decode == "gpu" and world.device.type != "cuda":
        raise UserError("data.decode = gpu: this machine has no usable GPU; use auto or cpu")
    overrides = {}
    if config.data.crop_min_scale is not None:
        overrides["scale"] = (config.data.crop_min_scale, 1.0)
    return Loader(
        manifest,
        recipe=recipe(config.data.recipe, config.data.image_size, **overrides),
        batch_size=config.data.batch_size,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
        device=world.device if config.data.decode != "cpu" else "cpu",
        accumulation_steps=config.engine.accumulation_steps,
        threads=config.data.threads,
    )


def introduce(telemetry: Telemetry, trainer: Trainer, train: Manifest, obstacle: str | None) -> None:
    """Say what is going to happen, in a few lines, and warn of what costs accuracy."""
    config, world = trainer.config, trainer.world
    projector = config.model.projector
    parameters = sum(p.numel() for p in trainer.online.module.parameters()) / 1e6
    telemetry.say(
        f"{config.model.backbone}, projector {projector.depth} x {projector.width}, {parameters:.1f} M parameters; "
        f"{trainer.dtype or torch.float32} on {world.size} x {world.device.type}".replace("torch.", "")
    )
    telemetry.say(
        f"{len(train):,} images, {config.schedule.epochs} epochs of {trainer.steps_per_epoch} steps, "
        f"batch {config.data.batch_size}, {config.data.image_size} px, seed {config.seed}; run folder {config.output}"
    )
    if obstacle is not None:
        telemetry.say(f"evaluation is off: {obstacle}")
    if world.size > 1 and not config.model.sync_batch_norm:
        telemetry.warn("model.sync_batch_norm is off: batch statistics of single ranks cost points of accuracy")


def conclude(trainer: Trainer, telemetry: Telemetry, probe: KNNProbe | None) -> None:
    """Draw the curves, and show the final table with the commands to type next."""
    if trainer.world.rank != 0:
        return
    run = trainer.config.output
    if run.is_relative_to(Path.cwd()):
        run = run.relative_to(Path.cwd())
    draw(trainer.config.output)
    commands = [f"tensorboard --logdir {run}/tensorboard"] if trainer.config.telemetry.tensorboard else []
    if probe is not None:
        commands.insert(0, f"unigrad-fast evaluate knn {run} --baselines true")
    telemetry.finish({"skipped_steps": trainer.gate.check(trainer.total_steps)}, commands)
