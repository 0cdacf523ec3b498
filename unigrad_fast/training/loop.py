"""Pretraining, top to bottom: build the parts, walk through the steps, evaluate, save, report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from unigrad_fast.checkpoints.files import Reader, complete_checkpoints
from unigrad_fast.config import Config
from unigrad_fast.evaluation.classes import match
from unigrad_fast.evaluation.knn_probe import KNNProbe
from unigrad_fast.images.manifests import read_manifests
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime import process_group, processors
from unigrad_fast.runtime.attendance import attended
from unigrad_fast.runtime.errors import DataError, Preempted, RunStopped
from unigrad_fast.runtime.precision import deterministic, fastest_convolutions, tensor_float32
from unigrad_fast.runtime.preemption import Preemption
from unigrad_fast.runtime.process_group import World, gather, on_all_ranks
from unigrad_fast.runtime.shell import own, program, typed
from unigrad_fast.runtime.whole_file import naming
from unigrad_fast.runtime.wording import count
from unigrad_fast.training import checkpoint, ending, needs, run_folder
from unigrad_fast.training.same_run import require_same_everywhere, require_same_run
from unigrad_fast.training.step_graph import own_stream
from unigrad_fast.training.telemetry import Telemetry
from unigrad_fast.training.telemetry.curves import draw
from unigrad_fast.training.trainer import Trainer

ENOUGH_IMAGES = 96  # on a GPU at once; ours, from the counts of the dry run


def pretrain(config: Config, verbose: bool = False, fall_back: bool = False, numbered: bool = False) -> None:
    """Pretrain as the configuration says; everything is written to `config.output`, which must be set.

    A run whose folder holds a checkpoint goes on from it, and ends with the numbers it would have had.

    Args:
        fall_back: where the newest checkpoint is damaged, go on from the newest intact one.
        numbered: a new run, which takes `config.output`-2, -3, ... where there is a folder of that name.

    Raises:
        UserError, DataError: input that cannot work, before anything is written.
        RunStopped: too many steps in a row met non-finite values, an image cannot be decoded, or a checkpoint cannot
            be written.
        Preempted: SIGTERM, SIGUSR1, SIGHUP or Ctrl-C came, and the state is saved.
    """
    watch = processors.Watch()
    occupied: Path | None = None

    def note_loss(said: str) -> None:
        if occupied is not None and world.rank == 0:
            ending.log_loss(occupied, said)

    with ExitStack() as stack:
        preemption = stack.enter_context(Preemption())
        if not numbered:
            preemption.note = partial(ending.note_preemption, config.output)
        with preemption.nothing_to_save("stopped before ranks connected"):
            timeout = timedelta(minutes=config.engine.timeout)
            world = stack.enter_context(process_group.session(config.engine.device, timeout))
        at = stack.enter_context(attended(world, timeout, note_loss))
        stack.push(preemption.settle)
        require_same_everywhere(config, world)
        if not numbered:
            on_all_ranks(lambda: ending.begin_anew(config.output, os.environ) if world.rank == 0 else None)
        saved, warnings = (None, []) if numbered else checkpoint.find(config, world, fall_back)
        if saved is None and not numbered:
            on_all_ranks(lambda: require_same_run(config))
        listing = "the images were being listed; nothing was done"
        with preemption.nothing_to_save(listing), process_group.patient(timeout):
            train, val, said = read_manifests(config, world)
        if saved is not None:
            on_all_ranks(lambda: checkpoint.require_same_images(saved, train, config))
        stack.enter_context(tensor_float32(config.engine.tf32))
        stack.enter_context(deterministic(config.engine.deterministic))
        stack.enter_context(fastest_convolutions(world.device))
        stack.enter_context(own_stream(config, world.device))
        with run_folder.occupied(config, world, numbered) as config, ending.noted(config.output, world):
            occupied = config.output
            preemption.note = partial(ending.note_preemption, occupied)
            trainer = Trainer(config, world, train, verbose, goes_on=saved is not None)
            queries = match(train, val)
            probe = KNNProbe(config, world, train, queries.val) if queries.val is not None else None
            warnings += [*said, *queries.told]
            if world.device.type != "cuda":
                warnings += filter(None, [watch.crowded()])
            try:
                with begun(trainer, saved, train, queries.obstacle, warnings) as telemetry:
                    run(trainer, telemetry, probe, preemption, at)
            except Preempted as error:
                if not numbered:
                    raise
                raise Preempted(f"{error}, with {typed('--output', config.output)}", error.status) from None


@contextmanager
def begun(
    trainer: Trainer, saved: Reader | None, train: Manifest, obstacle: str | None, warnings: list[str]
) -> Iterator[Telemetry]:
    """The run's folder made ready, its saved state restored, and its first lines said; inside it tells what happens."""
    config, world = trainer.config, trainer.world
    begins_again = run_folder.begin(config, world, goes_on=saved is not None)
    progress = None
    if saved is not None:
        checkpoint.restore(trainer, saved)
        progress = saved.about["progress"]
    size = checkpoint.size(trainer)
    if world.rank == 0 and (space := run_folder.little_space(config.output, size, config.checkpoint.keep)):
        warnings = [*warnings, space]
    lengths = trainer.total_steps, trainer.steps_per_epoch
    with Telemetry(config.output, config, *lengths, world.rank, trainer.steps_done, progress) as telemetry:
        introduce(telemetry, trainer, train, obstacle)
        if begins_again:
            telemetry.say("begins again: the attempt before it in this folder has saved no checkpoint")
        for warning in warnings:
            telemetry.warn(warning)
        yield telemetry


def run(
    trainer: Trainer,
    telemetry: Telemetry,
    probe: KNNProbe | None,
    preemption: Preemption,
    at: Callable[[str], None] = lambda stage: None,
) -> None:
    """The loop over all steps that are left, with its evaluations, savings and reports.

    Args:
        at: is told the stage that this rank is at.
    """
    if trainer.steps_done == trainer.total_steps and (trainer.config.output / "summary.json").exists():
        telemetry.say("this run is complete; there is nothing left to do")
        return
    batches = trainer.loader.iterate(
        start_step=trainer.steps_done * trainer.accumulation,
        stop_step=trainer.total_steps * trainer.accumulation,
    )
    evaluate(trainer, telemetry, probe, preemption)
    if trainer.world.device.type == "cuda" and trainer.steps_done < trainer.total_steps:
        with needs.step(trainer.config, trainer.world, trainer.steps_done):
            trainer.warm_up()
    while trainer.steps_done < trainer.total_steps:
        at(f"step {trainer.steps_done + 1}")
        try:
            with needs.step(trainer.config, trainer.world, trainer.steps_done):
                waited = trainer.step(trainer.steps_done, batches)
        except DataError as error:
            # Not one image was read. Other ranks know nothing of it, and after a micro-batch F is between two steps.
            if trainer.world.size == trainer.accumulation == 1:
                tell_bad_images(trainer, telemetry)
                save(trainer, telemetry)
            raise RunStopped(str(error)) from None
        report(trainer, telemetry, before=trainer.steps_done - 1)  # one step late, when the device is done with it
        telemetry.advance(trainer.steps_done, trainer.config.data.batch_size, waited)

        preempted, bad, lost = preemption.agreed(trainer.bad_images.waiting, ends=bool(trainer.lost))
        if preempted or lost or trainer.is_save_due() or (probe is not None and trainer.is_evaluation_due()):
            report(trainer, telemetry, before=trainer.steps_done)
            tell_bad_images(trainer, telemetry)
            save(trainer, telemetry)
        elif bad:
            tell_bad_images(trainer, telemetry)
        if lost:
            why = next(filter(None, gather(trainer.lost)))
            raise RunStopped(f"{why}. Saved after step {trainer.steps_done}; the same command goes on from there")
        if preempted:
            done = f"saved after step {trainer.steps_done}; the same command goes on from there"
            raise Preempted(done, preemption.status)
        at(f"what follows step {trainer.steps_done}")
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
        if complete_checkpoints(trainer.config.output):
            left = "earlier ones are as they were, and the same command goes on from the newest"
        else:
            left = "there is no earlier one: the same command begins again, so free disk space first"
        raise RunStopped(
            f"{error.filename or trainer.config.output}: the checkpoint after step {trainer.steps_done} cannot be "
            f"written: {error.strerror}; {left}"
        ) from None


def evaluate(trainer: Trainer, telemetry: Telemetry, probe: KNNProbe | None, preemption: Preemption) -> None:
    """Judge the encoder where that is due and was not done, as it may have been before the run was resumed."""
    step = trainer.steps_done
    if probe is None or not trainer.is_evaluation_due() or gather(telemetry.evaluated(step))[0]:
        return
    saved = f"the checkpoint after step {step} is saved" if step else "nothing was done yet"
    with telemetry.evaluation(), preemption.nothing_to_save(f"{saved}; the same command goes on from there"):
        try:
            with needs.evaluation(trainer.config, probe, step):
                result = probe(trainer.online.module.backbone, trainer.dtype)
        except DataError as error:
            raise RunStopped(str(error)) from None
        telemetry.log_knn(step, result)
        for line in result.left_out:
            telemetry.warn(line, step)


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
    if said := method_of(config):
        telemetry.say(said)
    if 0 < trainer.steps_done < trainer.total_steps:
        telemetry.resumed()
    if said := trainer.bad_images.told_at_start():
        telemetry.warn(said)
    if obstacle is not None and config.data.val is None:
        telemetry.say(f"evaluation is off: {obstacle}")
    elif obstacle is not None:
        telemetry.warn(f"evaluation is off although data.val is given: {obstacle}")
    for said in filter(None, (few_images(config, world), short_timeout(config, world))):
        telemetry.warn(said)
    if world.size > 1 and not config.model.sync_batch_norm:
        telemetry.warn("model.sync_batch_norm is off: batch statistics of single ranks cost points of accuracy")


def few_images(config: Config, world: World) -> str | None:
    """What is said where more GPUs than the batch is worth work on it."""
    images = config.images_at_once(world.size)
    if world.device.type != "cuda" or world.size == 1 or images >= ENOUGH_IMAGES:
        return None
    return (
        f"data.batch_size = {config.data.batch_size}: {count(images, 'image')} at once on each of {world.size} GPUs; "
        f"below {ENOUGH_IMAGES} the step is bound by latency; use fewer GPUs, or a larger data.batch_size"
        + (", or a smaller engine.accumulation_steps" if config.engine.accumulation_steps > 1 else "")
    )


def short_timeout(config: Config, world: World) -> str | None:
    """What is said where ranks would give up one of them that only waits for its storage."""
    patience = 4 * config.data.read_timeout
    if world.size == 1 or 60 * config.engine.timeout >= patience:
        return None
    return (
        f"engine.timeout = {config.engine.timeout:g} minutes: shorter than a rank may wait for silent files "
        f"({patience:g} s by data.read_timeout = {config.data.read_timeout:g}), which the others would take for lost; "
        f"use {patience / 60:.3g}, or a smaller data.read_timeout"
    )


def described(config: Config) -> str:
    """The views of a run and what is done to them, in a few words."""
    sizes = [view.size for view in config.data.views()]
    views = " + ".join(f"{sizes.count(size)} x {size}" for size in dict.fromkeys(sizes)) + " px"
    if config.data.growth():
        views += f" from {config.data.progressive.start_size} px in {config.data.progressive.epochs} epochs"
    return views + (", CutMix" if config.data.cutmix.probability else "")


def method_of(config: Config) -> str | None:
    """What a run minimises, in a few words, where it is not UniGrad with a momentum target."""
    objective = config.objective
    if (objective.method, objective.row, objective.target) == ("unigrad", None, "momentum"):
        return None
    branch = "the momentum branch" if objective.target == "momentum" else "the online branch"
    row = f", row ({objective.row})" if objective.row else ""
    return f"{objective.method}{row}, {objective.form} form; targets from {branch} ({objective.target})"


def conclude(trainer: Trainer, telemetry: Telemetry, probe: KNNProbe | None) -> None:
    """Draw the curves, and show the final table with the commands to type next.

    Raises:
        RunStopped: every step was dropped.
    """
    skipped = trainer.gate.check(trainer.total_steps)
    if trainer.world.rank == 0:
        show_end(trainer, telemetry, probe, skipped)
    if skipped == trainer.total_steps:
        raise RunStopped(
            f"all {count(skipped, 'step')} met NaN or infinite values and were dropped, so the encoder is as it began; "
            "lower optimizer.base_lr or objective.balance, or set optimizer.clip_norm"
        )


def show_end(trainer: Trainer, telemetry: Telemetry, probe: KNNProbe | None, skipped: int) -> None:
    """The curves, and the final table."""
    run = trainer.config.output
    if run.is_relative_to(Path.cwd()) and not str(run.relative_to(Path.cwd())).startswith("-"):
        run = run.relative_to(Path.cwd())
    with naming(trainer.config.output / "curves.png"):
        draw(trainer.config.output)
    board = program("tensorboard", "tensorboard.main")
    commands = [typed(*board, "--logdir", run / "tensorboard")] if trainer.config.telemetry.tensorboard else []
    if probe is not None:
        commands.insert(0, own("evaluate", "knn", run, "--baselines", "true"))
    telemetry.finish(
        {"skipped_steps": skipped, "bad_images": trainer.bad_images.total},
        commands,
    )
