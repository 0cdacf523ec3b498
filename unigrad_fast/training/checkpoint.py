"""The state a run needs to resume as if it had not been interrupted: collecting, saving and restoring it.

    online.*     weights, and batch norm's running buffers            momentum.*   SGD's and LARS's, per weight
    target.*     the same for the target branch                       objective.*  F and the number of its updates
    gate.*       counters of dropped steps                            exp_avg.*, exp_avg_sq.*, step.*  AdamW's
    loss_scale.* in fp16: the scale, and the steps since it changed

The step is saved too; it determines the schedules and the data of every later step. Weights and optimizer state come
from the fragments of the ZeRO stage, F from its placement; each rank writes a share of tensors that all ranks hold
alike. So a checkpoint can be read at any stage, placement and number of ranks, bit for bit. The one exception is an F
that was sharded and is now replicated: only its upper triangle is read, because shards are symmetric only to rounding.

Methods other than UniGrad keep other state, instead of F or in addition: a bank or queue, W_h, a predictor's running
statistics, DINO's centre and its teacher's head. Trained heads are among `online.*`. Without a momentum target there is
no `target.*`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unigrad_fast.checkpoints import files
from unigrad_fast.checkpoints.files import Damaged, Piece, Reader
from unigrad_fast.config import Config
from unigrad_fast.images import manifests
from unigrad_fast.objectives.correlation import MovingCorrelation
from unigrad_fast.objectives.sharded_correlation import ShardedCorrelation
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import World, on_all_ranks, on_first
from unigrad_fast.runtime.run_folder import NEW_RUN, RunFolder
from unigrad_fast.runtime.wording import count
from unigrad_fast.training.fragments import Fragment, whole
from unigrad_fast.training.same_run import contradictions
from unigrad_fast.training.target import refresh_
from unigrad_fast.training.trainer import Trainer

LEAST_SHARED = 1 << 16  # elements; ranks split the writing of replicated tensors from this size on


def save(trainer: Trainer, progress: dict[str, Any]) -> Path:
    """Write a checkpoint, then delete those that are not kept; all ranks call this together.

    Args:
        progress: the telemetry's state, as JSON values.

    Raises:
        OSError: on all ranks, if it cannot be written; earlier checkpoints are unchanged.
    """
    config, step = trainer.config, trainer.steps_done
    about = {
        "epoch": step / trainer.steps_per_epoch,
        "steps_per_epoch": trainer.steps_per_epoch,
        "total_steps": trainer.total_steps,
        "learning_rate": trainer.learning_rate(min(step, trainer.total_steps - 1)),
        "target_momentum": trainer.momentum(step),
        "zero_stage": config.engine.zero_stage,
        "images": trainer.images,
        "config": config.model_dump(mode="json"),
        "progress": progress,
    }
    world = trainer.world
    pieces = _shares(state(trainer), world)
    folder = files.write(config.output, step, pieces, about, rank=world.rank)
    if world.rank == 0:
        prune(folder, config.checkpoint.keep, config.checkpoint.keep_every * trainer.steps_per_epoch)
    return folder


def restore(trainer: Trainer, reader: Reader) -> None:
    """Restore a verified checkpoint; all ranks call this together.

    Raises:
        UserError: it does not match this run's state.
    """
    fragments = list(state(trainer))
    if "loss_scale.value" not in reader.names:  # engine.precision is auto, and so far the run was not in fp16
        fragments = [f for f in fragments if not f.name.startswith("loss_scale.")]
    on_all_ranks(lambda: _require_fit(fragments, reader))
    with torch.no_grad():
        for fragment in fragments:
            tensor = fragment.tensor
            if tensor.is_contiguous():
                reader.read(fragment.name, fragment.start, tensor.view(-1))
            else:
                tensor.copy_(reader.tensor(fragment.name))
    for module in trainer.objective.modules():
        if isinstance(module, MovingCorrelation):
            module.accept()
    trainer.fragments.refresh()
    refresh_(trainer.target_copies, trainer.target)
    trainer.steps_done = reader.about["step"]


def state(trainer: Trainer) -> Iterator[Fragment]:
    """All state that a step may change, as this rank holds it, under its names in a checkpoint."""
    kept = [(kind, trainer.fragments.kept(kind)) for kind in trainer.optimizer.kinds]
    for branch, fragments in (("online", trainer.fragments.parameters()), *kept):
        for f in fragments:
            yield Fragment(f"{branch}.{f.name}", f.shape, f.start, f.tensor, f.replicated)
    for name, buffer in trainer.online.module.named_buffers():
        yield whole(f"online.{name}", buffer)
    for name, tensor in trainer.target.state_dict().items():
        yield whole(f"target.{name}", tensor)
    yield from _of_objective(trainer.objective)
    yield whole("gate.in_a_row", trainer.gate.in_a_row)
    yield whole("gate.total", trainer.gate.total)
    if trainer.loss_scale is not None:
        yield whole("loss_scale.value", trainer.loss_scale.value)
        yield whole("loss_scale.good_steps", trainer.loss_scale.good_steps)


def size(trainer: Trainer) -> int:
    """Approximate size of a whole checkpoint in bytes: that of its tensors."""
    online, fp32 = trainer.online.module, 4
    copies = 1 + trainer.optimizer.copies
    weights_and_kept = copies * fp32 * sum(parameter.numel() for parameter in online.parameters())
    others = [*online.buffers(), *trainer.target.state_dict().values()]
    kept = sum(math.prod(f.shape) * f.tensor.element_size() for f in _of_objective(trainer.objective))
    return weights_and_kept + kept + sum(tensor.numel() * tensor.element_size() for tensor in others)


def _of_objective(objective: nn.Module) -> Iterator[Fragment]:
    shards = {name: module for name, module in objective.named_modules() if isinstance(module, ShardedCorrelation)}
    trained = {name for name, p in objective.named_parameters() if p.requires_grad}  # the engine trains and saves them
    for name, tensor in objective.state_dict().items():
        if name in trained:
            continue
        owner, _, kind = name.rpartition(".")
        if owner not in shards or kind == "updates":
            yield whole(f"objective.{name}", tensor)
        elif kind == "correlation":
            width = tensor.shape[1]
            start = shards[owner].first_row * width
            yield Fragment(f"objective.{name}", (width, width), start, tensor.view(-1), replicated=False)


def _shares(fragments: Iterator[Fragment], world: World) -> Iterator[Piece]:
    """This rank's pieces: its own fragments, and its share of replicated tensors."""
    for fragment in fragments:
        numel = fragment.tensor.numel()
        first, last = 0, numel
        if fragment.replicated and numel < LEAST_SHARED:
            last = numel if world.rank == zlib.crc32(fragment.name.encode()) % world.size else 0
        elif fragment.replicated:
            share = -(-numel // world.size)
            first, last = min(world.rank * share, numel), min((world.rank + 1) * share, numel)
        if first < last:
            values = fragment.tensor.reshape(-1)[first:last]
            yield Piece(fragment.name, fragment.shape, fragment.start + first, values)


def _require_fit(fragments: list[Fragment], reader: Reader) -> None:
    stored = set(reader.names)
    missing = [f.name for f in fragments if f.name not in stored]
    if missing:
        what = "was imported for evaluation and export only" if "images" not in reader.about else "is another model's"
        raise UserError(
            f"{reader.folder}: lacks {count(len(missing), 'tensor')} of this model, first {missing[0]}: it {what}; "
            f"{NEW_RUN}"
        )
    for f in fragments:
        if reader.shape(f.name) != f.shape:
            raise UserError(f"{reader.folder}: {f.name} is {reader.shape(f.name)} instead of {f.shape}; {NEW_RUN}")


def find(config: Config, world: World, fall_back: bool) -> tuple[Reader | None, list[str]]:
    """The verified checkpoint from which a run resumes, or None if it has none yet; and warnings.

    All ranks call this together; it changes nothing.

    Args:
        fall_back: if the newest checkpoint is damaged, take the newest intact one.

    Raises:
        UserError: on all ranks, if the checkpoint is damaged or the configuration contradicts it.
    """
    try:
        return _found(config, world, fall_back)
    except Damaged as error:
        raise UserError(f"{error}; {on_first(lambda: files.remedy(config.output, _resumes))}") from None


def _resumes(intact: Reader) -> str:
    return f"`pretrain --fall_back` resumes from the newest intact checkpoint, that of step {intact.about['step']}"


def _found(config: Config, world: World, fall_back: bool) -> tuple[Reader | None, list[str]]:
    """As `find`, but an error about a damaged checkpoint lacks the remedy."""
    run, damaged = config.output, []
    folders, ignored = on_first(lambda: _candidates(run, fall_back))
    for folder in folders:
        try:
            reader = on_all_ranks(lambda: _verified(folder, world))  # noqa: B023
        except UserError as error:
            if not fall_back:
                raise
            damaged.append(str(error))
            continue
        on_all_ranks(lambda: _require_same(config, reader))  # noqa: B023
        return reader, [f"{said}; ignored, resuming from step {reader.about['step']}" for said in ignored + damaged]
    if damaged:
        raise UserError("\n".join([*damaged, files.none_intact(run)]))
    return None, []


def _candidates(run: Path, fall_back: bool) -> tuple[list[Path], list[str]]:
    """Checkpoints to resume from, in order of preference; and what is wrong with the pointer to the newest one."""
    try:
        newest, ignored = files.latest(run), []
    except Damaged as error:
        if not fall_back:
            raise
        newest, ignored = None, [str(error)]
    if fall_back:
        return RunFolder(run).complete_checkpoints()[::-1], ignored
    return [] if newest is None else [newest], ignored


def _verified(folder: Path, world: World) -> Reader:
    reader = Reader(folder)
    reader.verify(world.rank, world.size)
    return reader


def _require_same(config: Config, reader: Reader) -> None:
    if differing := contradictions(config, reader.about["config"], f"the checkpoint in {config.output}"):
        raise UserError("\n".join([*differing, NEW_RUN]))


def require_same_images(reader: Reader, train: Manifest, config: Config) -> None:
    """Raises UserError if the training images differ from those that the checkpoint was made with."""
    remembered = reader.about.get("images")
    if remembered is not None and (differs := manifests.difference(remembered, train)):
        raise UserError(
            f"data.train = {config.data.train}: not the images that the run in {config.output} began with ({differs}); "
            f"use the same images; {NEW_RUN}"
        )


def prune(newest: Path, keep: int, keep_every: int) -> None:
    """Delete all but the last `keep` checkpoints and those of every `keep_every`-th step (0: none).

    Checkpoints behind `newest`, which was just written, are neither touched nor counted: they are damaged, and the run
    fell back to an earlier one.
    """
    behind = [folder for folder in RunFolder(newest.parents[1]).complete_checkpoints() if folder <= newest]
    for folder in behind[:-keep]:
        step = int(folder.name.removeprefix("step-"))
        if not keep_every or step % keep_every:
            files.remove(folder)
