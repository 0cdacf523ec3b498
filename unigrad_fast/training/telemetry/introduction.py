"""What a run prints before its first step and after its last."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from unigrad_fast import config
from unigrad_fast.evaluation.knn_probe import KNNProbe
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.process_group import World
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.shell import own
from unigrad_fast.runtime.wording import count
from unigrad_fast.training.telemetry.telemetry import Telemetry
from unigrad_fast.training.trainer import Trainer

ENOUGH_IMAGES = 96  # per GPU and micro-batch; ours, from the counts of the dry run


def introduce(telemetry: Telemetry, trainer: Trainer, train: Manifest) -> None:
    """Describe the run in a few lines, and warn of settings that cost accuracy."""
    run, world = trainer.config, trainer.world
    projector, images = run.model.projector, run.images_at_once(world.size)
    classes = f" in {count(train.used_classes, 'class')}" if train.has_labels else ""
    parameters = sum(p.numel() for p in trainer.online.module.parameters()) / 1e6
    telemetry.say(
        f"{run.model.backbone}, projector {projector.depth} x {projector.width}, {parameters:.1f} M parameters; "
        f"{trainer.dtype or torch.float32} on {world.size} x {world.device.type}".replace("torch.", "")
    )
    telemetry.say(
        f"{len(train):,} images{classes}, "
        f"{count(run.schedule.epochs, 'epoch')} of {count(trainer.steps_per_epoch, 'step')}, "
        f"batch {run.data.batch_size}, {described(run.data)}, seed {run.seed}; run folder {run.output}"
    )
    if said := method_of(run):
        telemetry.say(said)
    if 0 < trainer.steps_done < trainer.total_steps:
        telemetry.resumed()
    if said := trainer.bad_images.told_at_start():
        telemetry.warn(said)
    if run.data.val is None:
        telemetry.say("evaluation is off: no validation images (data.val)")
    for said in filter(
        None, (few_images(run.data, run.engine, images, world), short_timeout(run.data, run.engine, world))
    ):
        telemetry.warn(said)
    if world.size > 1 and not run.model.sync_batch_norm:
        telemetry.warn("model.sync_batch_norm is off: batch statistics of single ranks cost points of accuracy")


def few_images(data: config.Data, engine: config.Engine, images: int, world: World) -> str | None:
    """A warning if the batch is too small for so many GPUs; None otherwise."""
    if world.device.type != "cuda" or world.size == 1 or images >= ENOUGH_IMAGES:
        return None
    return (
        f"data.batch_size = {data.batch_size}: {count(images, 'image')} at once on each of {world.size} GPUs; "
        f"below {ENOUGH_IMAGES} latency limits the step; use fewer GPUs, or a larger data.batch_size"
        + (", or a smaller engine.accumulation_steps" if engine.accumulation_steps > 1 else "")
    )


def short_timeout(data: config.Data, engine: config.Engine, world: World) -> str | None:
    """A warning if ranks would give up on one that is only waiting for its storage; None otherwise."""
    patience = 4 * data.read_timeout
    if world.size == 1 or 60 * engine.timeout >= patience:
        return None
    return (
        f"engine.timeout = {engine.timeout:g} minutes: shorter than a rank may wait for files "
        f"({patience:g} s by data.read_timeout = {data.read_timeout:g}), so the others would take it for lost; "
        f"use {patience / 60:.3g}, or a smaller data.read_timeout"
    )


def described(data: config.Data) -> str:
    """The views of a run and their augmentation, in a few words."""
    sizes = [view.size for view in data.views()]
    views = " + ".join(f"{sizes.count(size)} x {size}" for size in dict.fromkeys(sizes)) + " px"
    if data.growth():
        views += f" from {data.progressive.start_size} px in {data.progressive.epochs} epochs"
    return views + (", CutMix" if data.cutmix.probability else "")


def method_of(config: config.Config) -> str | None:
    """What a run minimises, in a few words; None for UniGrad with a momentum target."""
    objective = config.objective
    if (objective.method, objective.row, objective.target) == ("unigrad", None, "momentum"):
        return None
    branch = "the momentum branch" if objective.target == "momentum" else "the online branch"
    row = f", row ({objective.row})" if objective.row else ""
    return f"{objective.method}{row}, {objective.form} form; targets from {branch} ({objective.target})"


def show_end(trainer: Trainer, telemetry: Telemetry, probe: KNNProbe | None, skipped: int) -> None:
    """The curves, and the final table with the commands to type next."""
    run = RunFolder(trainer.config.output)
    with telemetry.spared(f"drawing {run.curves}"):
        from unigrad_fast.training.telemetry.curves import draw

        draw(run.path)
    with suppress(OSError):  # the working folder may be gone
        here = Path.cwd()
        if run.path.is_relative_to(here) and not str(run.path.relative_to(here)).startswith("-"):
            run = RunFolder(run.path.relative_to(here))
    commands = [] if probe is None else [own("evaluate", "knn", run.path, "--baselines", "true")]
    is_stopped = telemetry.stopped_by and trainer.steps_done < trainer.total_steps
    stopped = {"stopped_by": telemetry.stopped_by} if is_stopped else {}
    telemetry.finish(
        {"skipped_steps": skipped, "bad_images": trainer.bad_images.total, **stopped},
        [*commands, *telemetry.commands(run)],
    )
