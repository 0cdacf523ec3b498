"""Pretraining, top to bottom: build the parts, walk through the steps, evaluate, save, report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from unigrad_fast import distributed
from unigrad_fast.config import Config
from unigrad_fast.distributed import World, gather, on_all_ranks
from unigrad_fast.errors import DataError, Preempted, RunStopped, UserError
from unigrad_fast.evaluation.probe import KNNProbe
from unigrad_fast.images import identity, read_manifests
from unigrad_fast.kernels.ops import use_triton
from unigrad_fast.model import build_encoder
from unigrad_fast.objectives import ObjectiveOutput, build
from unigrad_fast.pipelines import Batch, CutMix, Loader, Manifest
from unigrad_fast.precision import autocast_dtype
from unigrad_fast.training import checkpoint
from unigrad_fast.training.bad_images import BadImages
from unigrad_fast.training.curves import draw
from unigrad_fast.training.engine import build_engine
from unigrad_fast.training.fragments import build_fragments
from unigrad_fast.training.gate import StepGate
from unigrad_fast.training.host_copy import HostCopy
from unigrad_fast.training.optimizers import build_optimizer
from unigrad_fast.training.phases import PhaseClock
from unigrad_fast.training.preemption import Preemption
from unigrad_fast.training.run_folder import occupied, require_same_run
from unigrad_fast.training.schedules import learning_rate, target_momentum
from unigrad_fast.training.target import make_target, update_target_
from unigrad_fast.training.telemetry import Telemetry
from unigrad_fast.validation import count

REPORTED = ("objective", "positive_cosine", "negative_term", "feature_std", "gradient_norm", "effective_rank")


def pretrain(config: Config, verbose: bool = False, fall_back: bool = False) -> None:
    """Pretrain as the configuration says; everything is written to `config.output`, which must be set.

    A run whose folder holds a checkpoint goes on from it, and ends with the numbers it would have had.

    Args:
        fall_back: where the newest checkpoint is damaged, go on from the newest intact one.

    Raises:
        UserError, DataError: input that cannot work, before anything is written.
        RunStopped: too many steps in a row met non-finite values, an image cannot be decoded, or a checkpoint cannot
            be written.
        Preempted: SIGTERM or SIGUSR1 came, and the state is saved.
    """
    with distributed.session() as world, Preemption() as preemption:
        saved, warnings = checkpoint.find(config, world, fall_back)
        if saved is None:
            on_all_ranks(lambda: require_same_run(config))
        with preemption.nothing_to_save("the images were being listed; nothing was done"):
            train, val, said = read_manifests(config, world)
        if saved is not None:
            on_all_ranks(lambda: checkpoint.require_same_images(saved, train, config))
        trainer = Trainer(config, world, train, verbose)
        obstacle = KNNProbe.obstacle(train, val)
        probe = KNNProbe(config, world, train, val) if obstacle is None else None
        with occupied(config, world):
            progress = None
            if saved is not None:
                checkpoint.restore(trainer, saved)
                progress = saved.about["progress"]
            lengths = trainer.total_steps, trainer.steps_per_epoch
            with Telemetry(config.output, config, *lengths, world.rank, trainer.steps_done, progress) as telemetry:
                introduce(telemetry, trainer, train, obstacle)
                for warning in warnings + said:
                    telemetry.warn(warning)
                run(trainer, telemetry, probe, preemption)


def run(trainer: Trainer, telemetry: Telemetry, probe: KNNProbe | None, preemption: Preemption) -> None:
    """The loop over all steps that are left, with its evaluations, savings and reports."""
    if trainer.steps_done == trainer.total_steps and (trainer.config.output / "summary.json").exists():
        telemetry.say("this run is complete; there is nothing left to do")
        return
    batches = trainer.loader.iterate(
        start_step=trainer.steps_done * trainer.accumulation,
        stop_step=trainer.total_steps * trainer.accumulation,
    )
    evaluate(trainer, telemetry, probe, preemption)
    while trainer.steps_done < trainer.total_steps:
        try:
            waited = trainer.step(trainer.steps_done, batches)
        except DataError as error:
            # Other ranks know nothing of it, and after a first micro-batch F is between two steps.
            if trainer.world.size == trainer.accumulation == 1:
                tell_bad_images(trainer, telemetry)
                save(trainer, telemetry)
            raise RunStopped(str(error)) from None
        report(trainer, telemetry, before=trainer.steps_done - 1)  # one step late, when the device is done with it
        telemetry.advance(trainer.steps_done, trainer.config.data.batch_size, waited)

        preempted, bad = preemption.agreed(trainer.bad_images.waiting)
        if preempted or trainer.is_save_due() or (probe is not None and trainer.is_evaluation_due()):
            report(trainer, telemetry, before=trainer.steps_done)
            tell_bad_images(trainer, telemetry)
            save(trainer, telemetry)
        elif bad:
            tell_bad_images(trainer, telemetry)
        if preempted:
            raise Preempted(f"saved after step {trainer.steps_done}; the same command goes on from there")
        evaluate(trainer, telemetry, probe, preemption)
    conclude(trainer, telemetry, probe)


def report(trainer: Trainer, telemetry: Telemetry, before: int) -> None:
    """Hand the metrics of the steps before `before` to the telemetry, and stop a run that only drops steps."""
    try:
        skipped = trainer.gate.check(before)
    except RunStopped:
        save(trainer, telemetry)
        raise
    for step, metrics in trainer.metrics(before):
        telemetry.log_train(step + 1, {**metrics, "skipped_steps": skipped})


def tell_bad_images(trainer: Trainer, telemetry: Telemetry) -> None:
    """Exchange what was found to be bad, and stop a run in which that is too much; all ranks call this together."""
    try:
        messages = trainer.bad_images.exchange()
    except OSError as error:
        raise RunStopped(f"{error.filename or trainer.bad_images.path} cannot be written: {error.strerror}") from None
    trainer.loader.leave_out(trainer.bad_images.latest)
    for message in messages:
        telemetry.warn(message)
    try:
        trainer.bad_images.require_few()
    except RunStopped:
        save(trainer, telemetry)
        raise


def save(trainer: Trainer, telemetry: Telemetry) -> None:
    """Write a checkpoint, or stop the run."""
    try:
        checkpoint.save(trainer, telemetry.progress_so_far())
    except OSError as error:
        raise RunStopped(
            f"{error.filename or trainer.config.output}: the checkpoint after step {trainer.steps_done} cannot be "
            f"written: {error.strerror}; earlier ones are as they were, and the same command goes on from the newest"
        ) from None


def evaluate(trainer: Trainer, telemetry: Telemetry, probe: KNNProbe | None, preemption: Preemption) -> None:
    """Judge the encoder where that is due and was not done, as it may have been before the run was resumed."""
    step = trainer.steps_done
    if probe is None or not trainer.is_evaluation_due() or gather(telemetry.evaluated(step))[0]:
        return
    saved = f"the checkpoint after step {step} is saved" if step else "nothing was done yet"
    with telemetry.evaluation(), preemption.nothing_to_save(f"{saved}; the same command goes on from there"):
        try:
            result = probe(trainer.online.module.backbone, trainer.dtype)
        except DataError as error:
            raise RunStopped(str(error)) from None
        telemetry.log_knn(step, result)
        for line in result.left_out:
            telemetry.warn(line, step)


class Trainer:
    """The state of one run and the operations on it.

    Attributes:
        online: the DeepSpeed engine around the online encoder; target: its momentum copy; objective: with F.
        fragments: where the online branch's weights, gradients and momentum lie.
        loader: batches of one micro-step each.
        total_steps, steps_done: optimizer steps of the run, and those it has behind it.
        images: what the training images are known by.
    """

    def __init__(self, config: Config, world: World, train: Manifest, verbose: bool = False):
        self.config, self.world = config, world
        try:
            use_triton(world.device)
        except ValueError as error:
            raise UserError(str(error)) from None
        self.accumulation = config.engine.accumulation_steps
        self.dtype = autocast_dtype(config.engine.precision, world.device)
        self.bad_images = BadImages(config.output, train, config.data.max_bad_fraction, world)
        self.loader = build_loader(config, world, train, self.bad_images.known)
        self.steps_per_epoch = self.loader.steps_per_epoch // self.accumulation
        self.total_steps = self.steps_per_epoch * config.schedule.epochs
        self.steps_done = 0
        self.images = identity(train)

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
        self.fragments = build_fragments(self.online, self.optimizer)
        self.objective = build(
            config.objective.method,
            width=config.model.projector.width,
            balance=config.objective.balance,
            decay=config.objective.decay,
            correlation_source=config.objective.correlation_source,
        ).to(world.device)
        self.gate = StepGate([encoder, self.target], config.engine.max_skipped_steps, world.device)
        self.numbers = HostCopy()
        self.phases = PhaseClock(world.device)

    def step(self, step: int, batches: Iterator[Batch]) -> float:
        """One optimizer step; returns the seconds spent waiting for data."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.gate.open()
        self.optimizer.open()
        self.phases.start(step)
        waited = 0.0
        for _ in range(self.accumulation):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            self.bad_images.note(batch.failures)
            self.phases.mark("data")
            output = self.micro_step(batch)
        update_target_(self.target, self.online.module, self.momentum(step + 1), skip=self.optimizer.nonfinite)
        self.gate.close(step, skip=self.optimizer.nonfinite)
        self.phases.mark("target_update")
        self._send_numbers(step, output)
        self.steps_done = step + 1
        return waited

    def micro_step(self, batch: Batch) -> ObjectiveOutput:
        """Target branch, online branch, objective with its update of F, backward, and the engine's step."""
        views = [view.to(self.world.device, non_blocking=True) for view in batch.views]
        mix = None if batch.mix is None else batch.mix.to(self.world.device)
        with torch.no_grad(), self._autocast():
            target = self.target(views[:2])
        self.phases.mark("target")
        if mix is not None:  # the target has seen the views as they are
            views = [*mix.apply(views[:2]), *views[2:]]
        online = self.online(views)
        self.phases.mark("online")
        with self._autocast():  # on a GPU the objective multiplies in its dtype
            output = self.objective(online=online, target=target, mix=mix)
        torch.maximum(self.optimizer.nonfinite, output.nonfinite.float(), out=self.optimizer.nonfinite)
        self.phases.mark("objective")
        self.online.backward(output.loss)  # reduces gradients after the last micro-batch
        self.phases.mark("backward")
        if self.online.is_gradient_accumulation_boundary():
            self.optimizer.measure(self.fragments.gradients(), self.fragments.sharded)
        self.online.step()  # moves the weights after the last micro-batch
        self.phases.mark("step")
        return output

    def is_save_due(self) -> bool:
        """Whether the run saves after the steps done."""
        every = max(1, round(self.config.checkpoint.every * self.steps_per_epoch))
        return self.steps_done % every == 0 or self.steps_done == self.total_steps

    def is_evaluation_due(self) -> bool:
        """Whether the encoder is judged after the steps done: before the first, after the last, every so often."""
        every = self.config.evaluation.every * self.steps_per_epoch
        return self.steps_done in (0, self.total_steps) or bool(every and self.steps_done % every == 0)

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
                    **self.phases.read(step + 1),
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
        measured = {
            **output.metrics,
            "feature_std": output.feature_std(),
            "gradient_norm": self.optimizer.gradient_norm,
            "effective_rank": rank,
        }
        numbers = torch.stack([measured[name].detach().float() for name in REPORTED])
        dist.all_reduce(numbers)
        self.numbers.send(step, numbers / self.world.size)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, self.dtype, enabled=self.dtype is not None)


def build_loader(config: Config, world: World, manifest: Manifest, known: Mapping[tuple[int, int], str]) -> Loader:
    if config.data.decode == "gpu" and world.device.type != "cuda":
        raise UserError("data.decode = gpu: this machine has no usable GPU; use auto or cpu")
    return Loader(
        manifest,
        recipe=config.data.views(),
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
        hw_decoder_load=config.data.hw_decoder_load,
        timeout=config.data.read_timeout,
        known=known,
    )


def introduce(telemetry: Telemetry, trainer: Trainer, train: Manifest, obstacle: str | None) -> None:
    """Say what is going to happen, in a few lines, and warn of what costs accuracy."""
    config, world = trainer.config, trainer.world
    projector = config.model.projector
    classes = f" in {count(len(train.classes), 'class')}" if train.has_labels else ""
    parameters = sum(p.numel() for p in trainer.online.module.parameters()) / 1e6
    telemetry.say(
        f"{config.model.backbone}, projector {projector.depth} x {projector.width}, {parameters:.1f} M parameters; "
        f"{trainer.dtype or torch.float32} on {world.size} x {world.device.type}".replace("torch.", "")
    )
    telemetry.say(
        f"{len(train):,} images{classes}, "
        f"{count(config.schedule.epochs, 'epoch')} of {count(trainer.steps_per_epoch, 'step')}, "
        f"batch {config.data.batch_size}, {described(config)}, seed {config.seed}; run folder {config.output}"
    )
    if 0 < trainer.steps_done < trainer.total_steps:
        telemetry.resumed()
    if said := trainer.bad_images.told_at_start():
        telemetry.warn(said)
    if obstacle is not None and config.data.val is None:
        telemetry.say(f"evaluation is off: {obstacle}")
    elif obstacle is not None:
        telemetry.warn(f"evaluation is off although data.val is given: {obstacle}")
    if world.size > 1 and not config.model.sync_batch_norm:
        telemetry.warn("model.sync_batch_norm is off: batch statistics of single ranks cost points of accuracy")


def described(config: Config) -> str:
    """The views of a run and what is done to them, in a few words."""
    sizes = [view.size for view in config.data.views()]
    views = " + ".join(f"{sizes.count(size)} x {size}" for size in dict.fromkeys(sizes)) + " px"
    if config.data.growth():
        views += f" from {config.data.progressive.start_size} px in {config.data.progressive.epochs} epochs"
    return views + (", CutMix" if config.data.cutmix.probability else "")


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
    telemetry.finish(
        {"skipped_steps": trainer.gate.check(trainer.total_steps), "bad_images": trainer.bad_images.total},
        commands,
    )
