"""Starting a run: ranks join, its folder is opened, images are listed, parts are built, its state is restored."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from unigrad_fast.checkpoints import files
from unigrad_fast.checkpoints.files import Reader
from unigrad_fast.config import Config, to_yaml
from unigrad_fast.evaluation.classes import match
from unigrad_fast.evaluation.knn_probe import FINDS_ITSELF, KNNProbe
from unigrad_fast.images.manifests import read_manifests, same_images
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime import process_group, processors
from unigrad_fast.runtime.attendance import attended
from unigrad_fast.runtime.errors import Preempted, UserError
from unigrad_fast.runtime.precision import deterministic, fastest_convolutions, tensor_float32
from unigrad_fast.runtime.preemption import Preemption
from unigrad_fast.runtime.process_group import World, on_all_ranks, on_first
from unigrad_fast.runtime.processors import ComputeThreads, compute_threads
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.shell import typed
from unigrad_fast.training import checkpoint
from unigrad_fast.training.same_run import require_same_everywhere, require_same_run
from unigrad_fast.training.step_graph import own_stream
from unigrad_fast.training.telemetry import Telemetry
from unigrad_fast.training.telemetry.callbacks import Callbacks
from unigrad_fast.training.telemetry.introduction import introduce
from unigrad_fast.training.trainer import Trainer


@dataclass
class Attempt:
    """This process as one of the ranks of a run, from joining until it exits.

    Attributes:
        numbered: the run is new and takes the first free folder of its name.
        at: call it with the stage that this rank has reached.
        folder: the run's folder, once it is locked.
        kept_threads: compute threads of the run so far, if it resumes with as many ranks.
        threads: its compute threads, once chosen.
        kept_intervals: the keys of `telemetry` that this command leaves open, with their values in the run so far.
        warnings: warnings to show when the run begins.
    """

    preemption: Preemption
    numbered: bool
    world: World = field(init=False)
    at: Callable[..., None] = field(init=False)
    folder: RunFolder | None = None
    kept_threads: int | None = None
    threads: ComputeThreads = field(default_factory=ComputeThreads)
    kept_intervals: dict[str, int | None] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def note_loss(self, said: str) -> None:
        """Record in the run's log that a rank was lost."""
        if self.folder is not None and self.world.rank == 0:
            self.folder.log_loss(said)

    def tell_cores(self, telemetry: Telemetry) -> None:
        """Warn, once, if other programs came to need the cores, and say, once, if those of the start have left."""
        if said := self.threads.newly_crowded(lambda fitting: self._with_threads("fewer", fitting)):
            telemetry.warn(said)
        if said := self.threads.newly_free(lambda fitting: self._with_threads("more", fitting)):
            telemetry.say(said)

    def _with_threads(self, change: str, threads: int) -> str:
        return f"press Ctrl-C, which saves, and continue with {change} threads: the same command with " + typed(
            "--output", self.folder.path, "--engine.threads", str(threads)
        )


@dataclass(frozen=True)
class Images:
    """The training images, and the kNN probe that uses them; None without validation images."""

    train: Manifest
    probe: KNNProbe | None


@contextmanager
def join(config: Config, numbered: bool) -> Iterator[Attempt]:
    """Connects the ranks; inside, they watch for signals and for lost ranks."""
    processors.begin()
    timeout = timedelta(minutes=config.engine.timeout)
    with ExitStack() as stack:
        preemption = stack.enter_context(Preemption())
        attempt = Attempt(preemption, numbered)
        if not numbered:
            preemption.note = RunFolder(config.output).note_preemption
        with preemption.nothing_to_save("stopped before ranks connected"):
            attempt.world = stack.enter_context(process_group.session(config.engine.device, timeout))
        attempt.at = stack.enter_context(attended(attempt.world, timeout, attempt.note_loss))
        stack.push(preemption.settle)
        require_same_everywhere(config, attempt.world)
        yield attempt


def open_run(config: Config, attempt: Attempt, fall_back: bool) -> Reader | None:
    """The verified checkpoint from which the run continues; None if the run is new.

    Changes nothing in the folder except that it removes notes on how the previous attempt ended.

    Raises:
        UserError: the configuration contradicts the run in that folder.
    """
    if attempt.numbered:
        return None
    on_first(lambda: RunFolder(config.output).clear_endings(os.environ))
    saved, warnings = checkpoint.find(config, attempt.world, fall_back)
    attempt.warnings += warnings
    if saved is None:
        on_all_ranks(lambda: require_same_run(config))
        return None
    before = saved.about["config"]
    if saved.about["ranks"] == attempt.world.size:
        attempt.kept_threads = before["engine"].get("threads")
    for key in ("every", "effective_rank_every"):
        if getattr(config.telemetry, key) is None:
            attempt.kept_intervals[key] = before["telemetry"].get(key)
    return saved


def list_images(config: Config, attempt: Attempt, saved: Reader | None) -> Images:
    """Lists the images; all ranks must find the same ones, and a resumed run those it began with.

    Raises:
        UserError: also if the validation images were given but cannot be used.
    """
    doing = "stopped while listing images; nothing was written"
    with attempt.preemption.nothing_to_save(doing):
        train, val, said = read_manifests(config.data, attempt.world)
    if saved is not None:
        on_all_ranks(lambda: checkpoint.require_same_images(saved, train, config))
    queries = match(train, val)
    if val is not None and queries.obstacle is not None:
        raise UserError(f"{queries.obstacle.told(config.data)}, or train without evaluation with --data.val null")
    attempt.warnings += [*said, *same_images(config.data, FINDS_ITSELF), *queries.told]
    probe = None
    if queries.val is not None:
        probe = KNNProbe(config.data, config.evaluation, attempt.world, train, queries.val)
        attempt.warnings += filter(None, [probe.few_images(len(train))])
    return Images(train, probe)


@contextmanager
def build(config: Config, attempt: Attempt, images: Images, goes_on: bool, verbose: bool) -> Iterator[Trainer]:
    """Locks the run's folder and builds everything a step needs; records in the folder how the attempt ends."""
    world, engine = attempt.world, config.engine
    attempt.at("setting up the training", alone=True)
    with ExitStack() as stack:
        attempt.threads = stack.enter_context(
            compute_threads(world.device, engine.threads, attempt.kept_threads, "engine.threads")
        )
        stack.enter_context(tensor_float32(engine.tf32))
        stack.enter_context(deterministic(engine.deterministic))
        stack.enter_context(fastest_convolutions(world.device))
        stack.enter_context(own_stream(config, world))
        attempt.folder = folder = stack.enter_context(RunFolder(config.output).occupied(attempt.numbered))
        stack.enter_context(folder.noted())
        attempt.preemption.note = folder.note_preemption
        if world.device.type == "cpu":  # the number decides bits
            engine = engine.model_copy(update={"threads": torch.get_num_threads()})
        telemetry = config.telemetry.model_copy(update=attempt.kept_intervals)
        config = config.model_copy(update={"output": folder.path, "engine": engine, "telemetry": telemetry})
        trainer = Trainer(config, world, images.train, verbose, goes_on)
        process_group.limit(process_group.UNLIMITED)  # also in DeepSpeed's own groups, which exist by now
        attempt.warnings += filter(None, [attempt.threads.warning])
        try:
            yield trainer
        except Preempted as error:
            said = f"{error}, with {typed('--output', folder.path)}" if attempt.numbered else str(error)
            raise Preempted(said, error.status, folder.path) from None


@contextmanager
def restore(
    trainer: Trainer, attempt: Attempt, images: Images, saved: Reader | None, callbacks: Callbacks | None = None
) -> Iterator[Telemetry]:
    """Prepares the folder, restores the saved state and introduces the run; yields its telemetry.

    Raises:
        UserError: another process has meanwhile saved a checkpoint in the folder of a new run.
    """
    config, folder, progress = trainer.config, attempt.folder, None
    begins_again = on_first(lambda: folder.begin(to_yaml(config), goes_on=saved is not None))
    on_first(lambda: files.remove_leftovers(folder.path))
    if saved is not None:
        checkpoint.restore(trainer, saved)
        progress = saved.about["progress"]
    size = checkpoint.size(trainer)
    if attempt.world.rank == 0:
        attempt.warnings += filter(None, [folder.little_space(size, config.checkpoint.keep)])
    lengths = trainer.total_steps, trainer.steps_per_epoch
    begun = attempt.world.rank, trainer.steps_done, progress
    with Telemetry(folder.path, config, *lengths, *begun, callbacks=callbacks) as telemetry:
        introduce(telemetry, trainer, images.train)
        if attempt.threads.said:
            telemetry.say(attempt.threads.said)
        if begins_again:
            telemetry.say("starting over: the previous attempt in this folder saved no checkpoint")
        for warning in attempt.warnings:
            telemetry.warn(warning)
        yield telemetry
