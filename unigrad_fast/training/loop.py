"""Pretraining, top to bottom: start, walk through the steps, evaluate, save, report."""

from __future__ import annotations

from collections.abc import Callable

from unigrad_fast.config import Config
from unigrad_fast.evaluation.knn_probe import KNNProbe
from unigrad_fast.runtime.errors import DataError, Preempted, RunStopped
from unigrad_fast.runtime.preemption import Preemption
from unigrad_fast.runtime.process_group import gather, on_first
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.wording import count
from unigrad_fast.training import checkpoint, needs, start
from unigrad_fast.training.telemetry import Telemetry
from unigrad_fast.training.telemetry.introduction import show_end
from unigrad_fast.training.trainer import Trainer


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
    with start.join(config, numbered) as attempt:
        saved = start.open_run(config, attempt, fall_back)
        images = start.list_images(config, attempt, saved)
        with start.build(config, attempt, images, saved is not None, verbose) as trainer:  # noqa: SIM117  a stage a line
            with start.restore(trainer, attempt, images, saved) as telemetry:
                run(trainer, telemetry, images.probe, attempt.preemption, attempt.at)


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
        if RunFolder(trainer.config.output).complete_checkpoints():
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
    if probe is None or not trainer.is_evaluation_due() or on_first(lambda: telemetry.evaluated(step)):
        return
    saved = f"the checkpoint after step {step} is saved" if step else "nothing was done yet"
    with telemetry.evaluation(), preemption.nothing_to_save(f"{saved}; the same command goes on from there"):
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
    if trainer.world.rank == 0:
        show_end(trainer, telemetry, probe, skipped)
    if skipped == trainer.total_steps:
        raise RunStopped(
            f"all {count(skipped, 'step')} met NaN or infinite values and were dropped, so the encoder is as it began; "
            "lower optimizer.base_lr or objective.balance, or set optimizer.clip_norm"
        )
