"""Pretraining, top to bottom: start, run the steps, evaluate, save, report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unigrad_fast.config import Config
from unigrad_fast.evaluation.knn_probe import KNNProbe
from unigrad_fast.runtime.errors import DataError, Preempted, RunStopped
from unigrad_fast.runtime.file_errors import remedy
from unigrad_fast.runtime.preemption import ON_REQUEST, Preemption
from unigrad_fast.runtime.process_group import gather, on_first
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.wording import count
from unigrad_fast.training import checkpoint, needs, start
from unigrad_fast.training.telemetry import Telemetry
from unigrad_fast.training.telemetry.callbacks import Callbacks
from unigrad_fast.training.telemetry.introduction import show_end
from unigrad_fast.training.trainer import Trainer


def pretrain(
    config: Config,
    verbose: bool = False,
    fall_back: bool = False,
    numbered: bool = False,
    callbacks: Callbacks | None = None,
) -> Path:
    """Pretrain with a configuration; everything is written to `config.output`, which must be set.

    If the folder holds a checkpoint, the run resumes from it, with the same results as without the interruption.

    Args:
        fall_back: if the newest checkpoint is damaged, resume from the newest intact one.
        numbered: start a new run, in `config.output`-2, -3, ... if a folder of that name exists.
        callbacks: a caller's functions.

    Returns:
        The run's folder.

    Raises:
        UserError, DataError: input that cannot work, before anything is written.
        RunStopped: too many steps in a row had non-finite values, too many images cannot be used, or a checkpoint
            cannot be written.
        Preempted: SIGTERM, SIGUSR1, SIGHUP or Ctrl-C was received; the state is saved.
    """
    with start.join(config, numbered) as attempt:
        saved = start.open_run(config, attempt, fall_back)
        images = start.list_images(config, attempt, saved)
        with start.build(config, attempt, images, saved is not None, verbose) as trainer:  # noqa: SIM117  a stage a line
            with start.restore(trainer, attempt, images, saved, callbacks) as telemetry:
                run(trainer, telemetry, images.probe, attempt.preemption, attempt.at, attempt.tell_cores)
        return trainer.config.output


def run(
    trainer: Trainer,
    telemetry: Telemetry,
    probe: KNNProbe | None,
    preemption: Preemption,
    at: Callable[..., None] = lambda stage, alone=False: None,
    tell_cores: Callable[[Telemetry], None] = lambda telemetry: None,
) -> None:
    """Run all remaining steps, evaluating, saving and reporting along the way.

    Args:
        at: called with the stage that this rank has reached.
        tell_cores: called after every step; tells if other programs came to need the cores, or left them.
    """
    if trainer.steps_done == trainer.total_steps and RunFolder(trainer.config.output).summary.exists():
        telemetry.say("this run is complete; there is nothing left to do")
        return
    images, output = trainer.config.images_at_once(trainer.world.size), trainer.config.output
    batches = trainer.loader.iterate(
        start_step=trainer.steps_done * trainer.accumulation,
        stop_step=trainer.total_steps * trainer.accumulation,
    )
    evaluate(trainer, telemetry, probe, preemption)
    if trainer.world.device.type == "cuda" and trainer.steps_done < trainer.total_steps:
        with needs.step(images, output, trainer.steps_done):
            trainer.warm_up()
    while trainer.steps_done < trainer.total_steps:
        at(f"step {trainer.steps_done + 1}")
        try:
            with needs.step(images, output, trainer.steps_done):
                waited = trainer.step(trainer.steps_done, batches)
        except DataError as error:
            # No image could be read. Save only if no other rank is involved and F is not in the middle of a step.
            if trainer.world.size == trainer.accumulation == 1:
                tell_bad_images(trainer, telemetry)
                save(trainer, telemetry)
            raise RunStopped(str(error)) from None
        report(trainer, telemetry, before=trainer.steps_done - 1)  # one step late, when the device has finished it
        telemetry.advance(trainer.steps_done, trainer.config.data.batch_size, waited)
        tell_cores(telemetry)

        preempted, bad, lost = preemption.agreed(
            trainer.bad_images.waiting, ends=bool(trainer.lost), stops=bool(telemetry.stopped_by)
        )
        if preempted or lost or trainer.is_save_due() or (probe is not None and trainer.is_evaluation_due()):
            report(trainer, telemetry, before=trainer.steps_done)
            tell_bad_images(trainer, telemetry)
            save(trainer, telemetry)
        elif bad:
            tell_bad_images(trainer, telemetry)
        if lost:
            why = next(filter(None, gather(trainer.lost)))
            raise RunStopped(f"{why}. Saved after step {trainer.steps_done}; the same command resumes from there")
        done = f"saved after step {trainer.steps_done}; the same command resumes from there"
        if preempted and preemption.status == ON_REQUEST:
            telemetry.say(f"stopped by {telemetry.stopped_by}: {done}")
            break
        if preempted:
            raise Preempted(done, preemption.status)
        at(f"what follows step {trainer.steps_done}", alone=True)
        evaluate(trainer, telemetry, probe, preemption)
    conclude(trainer, telemetry, probe)


def report(trainer: Trainer, telemetry: Telemetry, before: int) -> None:
    """Pass the metrics of the steps before `before` to the telemetry, and stop a run that keeps dropping steps."""
    try:
        skipped = trainer.gate.check(before)
    except RunStopped:
        save(trainer, telemetry)
        raise
    for step, metrics in trainer.metrics(before):
        telemetry.log_train(step + 1, {**metrics, "skipped_steps": skipped})


def tell_bad_images(trainer: Trainer, telemetry: Telemetry) -> None:
    """Exchange bad images, and stop the run if there are too many; all ranks call this together."""
    try:
        messages = trainer.bad_images.exchange()
    except OSError as error:
        path = error.filename or trainer.bad_images.path
        raise RunStopped(f"{path} cannot be written: {error.strerror}; {remedy(error)}") from None
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
        folder = checkpoint.save(trainer, telemetry.progress_so_far())
    except OSError as error:
        if RunFolder(trainer.config.output).complete_checkpoints():
            left = f"earlier ones are unchanged: {remedy(error)}, and the same command resumes from the newest"
        else:
            left = f"there is no earlier one: the same command starts over, so {remedy(error)} first"
        raise RunStopped(
            f"{error.filename or trainer.config.output}: the checkpoint after step {trainer.steps_done} cannot be "
            f"written: {error.strerror}; {left}"
        ) from None
    telemetry.saved(trainer.steps_done, folder)


def evaluate(trainer: Trainer, telemetry: Telemetry, probe: KNNProbe | None, preemption: Preemption) -> None:
    """Evaluate the encoder if an evaluation is due; skip it if the run did it before it was resumed."""
    step = trainer.steps_done
    if probe is None or not trainer.is_evaluation_due() or on_first(lambda: telemetry.evaluated(step)):
        return
    saved = f"the checkpoint after step {step} is saved" if step else "no step was done yet"
    with telemetry.evaluation(), preemption.nothing_to_save(f"{saved}; the same command resumes from there"):
        try:
            with needs.evaluation(probe, trainer.config.output, step):
                result = probe(trainer.online.module.backbone, trainer.dtype)
        except DataError as error:
            raise RunStopped(str(error)) from None
        telemetry.log_knn(step, result)
        for line in result.left_out:
            telemetry.warn(line, step)


def conclude(trainer: Trainer, telemetry: Telemetry, probe: KNNProbe | None) -> None:
    """Draw the curves, and show the final table with the commands to type next.

    Raises:
        RunStopped: every step was dropped.
    """
    skipped = trainer.gate.check(trainer.total_steps)
    on_first(lambda: show_end(trainer, telemetry, probe, skipped))  # all ranks end with a finished folder
    if skipped == trainer.total_steps:
        raise RunStopped(
            f"all {count(skipped, 'step')} had NaN or infinite values and were dropped, so the encoder is untrained; "
            "lower optimizer.base_lr or objective.balance, or set optimizer.clip_norm"
        )
