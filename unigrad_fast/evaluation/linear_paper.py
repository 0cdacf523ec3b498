"""The paper's protocol (appendix "Implementation Details", linear evaluation): random-resized crops and flips, LARS.

It saves its progress at the end of each epoch and when it is preempted, and continues from there, on any number of
ranks.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unigrad_fast.evaluation.features import count_left_out, non_finite
from unigrad_fast.evaluation.linear import FrozenEncoder
from unigrad_fast.optimization.lars import LARS
from unigrad_fast.optimization.schedules import learning_rate
from unigrad_fast.pipelines import Batch, Failure, Loader
from unigrad_fast.runtime.errors import Preempted, RunStopped, UserError
from unigrad_fast.runtime.files import write_whole
from unigrad_fast.runtime.preemption import Preemption
from unigrad_fast.runtime.process_group import gather, on_all_ranks, on_first
from unigrad_fast.runtime.wording import count


@dataclass(frozen=True)
class ProbeSchedule:
    """Settings of the paper's protocol: epochs, images per step over all ranks, learning rate per 256 images."""

    epochs: int = 90
    batch_size: int = 4096
    base_lr: float = 0.02


def paper(
    encoder: FrozenEncoder,
    schedule: ProbeSchedule,
    unfinished: Unfinished | None = None,
    preemption: Preemption | None = None,
) -> nn.Linear:
    """Trains a classifier on random crops, new ones in each epoch.

    Args:
        unfinished: file of an interrupted training, and of the progress of this one; None saves nothing.
        preemption: tells when to stop.

    Raises:
        UserError: the batch is larger than the number of images.
        DataError: the batch does not divide over the ranks, there are fewer images than one batch, or too many
            in a row cannot be read.
        RunStopped: a feature or the loss is not finite, or too many images cannot be used.
        Preempted: after saving.
    """
    data, world = encoder.config.data, encoder.world
    if schedule.batch_size > len(encoder.train):
        largest = len(encoder.train) // world.size * world.size
        smaller = " or less" if largest > world.size else ""
        raise UserError(
            f"batch_size = {schedule.batch_size}: there are only {count(len(encoder.train), 'training image')}; "
            + (
                f"give --batch_size {largest}{smaller}"
                if largest
                else f"use at most {count(len(encoder.train), 'rank')}"
            )
        )
    parts = micro_batches(schedule.batch_size, world.size, encoder.config.evaluation.batch_size)
    loader = Loader(
        encoder.train,
        preset="linear",
        image_size=data.image_size,
        batch_size=schedule.batch_size,
        seed=encoder.config.seed,
        rank=world.rank,
        world_size=world.size,
        device=world.device if data.decode != "cpu" else "cpu",
        accumulation_steps=parts,
        threads=data.threads,
        timeout=data.read_timeout,
        read_threads=data.read_threads,
        read_ahead=data.read_ahead * 2**20,
    )
    steps_per_epoch = loader.steps_per_epoch // parts
    training = _Training(encoder, schedule, steps_per_epoch)
    if unfinished is not None and (saved := unfinished.load()) is not None:
        training.restore(saved)
        loader.leave_out({(training.steps_done * parts, image): f.reason for image, f in training.failures.items()})
        epochs = training.steps_done / steps_per_epoch
        encoder.say(f"continuing an interrupted call after epoch {epochs:g} of {schedule.epochs}")
    with closing(loader.iterate(training.steps_done * parts, training.steps * parts)) as batches:
        while training.steps_done < training.steps:
            for _ in range(parts):
                training.add(on_all_ranks(lambda: next(batches)))
            training.step()
            is_epoch_done = training.steps_done % steps_per_epoch == 0
            if is_epoch_done:
                training.end_epoch()
            preempted = preemption is not None and preemption.agreed()[0]
            if unfinished is not None and (is_epoch_done or preempted):
                unfinished.save(training.state())
            if preempted:
                raise Preempted(
                    f"saved after step {training.steps_done} of {training.steps} of the classifier; repeat the command "
                    "to continue",
                    preemption.status,
                )
    return training.classifier


class _Training:
    """The classifier and everything that changes during its training.

    Attributes:
        steps, steps_done: optimizer steps in all, and done.
        failures: images that could not be used, by position: this rank's, and those of an interrupted call.
    """

    def __init__(self, encoder: FrozenEncoder, schedule: ProbeSchedule, steps_per_epoch: int) -> None:
        self.encoder, self.schedule, self.steps_per_epoch = encoder, schedule, steps_per_epoch
        self.steps, self.steps_done = steps_per_epoch * schedule.epochs, 0
        self.peak = schedule.base_lr * schedule.batch_size / 256
        device, size = encoder.world.device, encoder.config.data.image_size
        width = encoder.features(torch.zeros(1, 3, size, size)).shape[1]
        self.classifier = new_classifier(width, len(encoder.train.classes), encoder.config.seed).to(device)
        self.optimizer = LARS(self.classifier.parameters(), lr=self.peak, momentum=0.9)
        self.gradient = flat_gradient(self.classifier)
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # of this epoch: loss, number of hits
        self.odd = torch.tensor(len(encoder.train), device=device)  # the first image with a non-finite feature
        self.failures: dict[int, Failure] = {}
        self.replaced = 0  # images that the user was told about

    def add(self, batch: Batch) -> None:
        """Add a micro-batch to the gradient."""
        device = self.encoder.world.device
        self.failures |= {failure.image: failure for failure in batch.failures}
        features, labels = self.encoder.features(batch.views[0]), batch.label.to(device)
        logits = self.classifier(features)
        loss = cross_entropy(logits, labels, reduction="sum") / self.schedule.batch_size
        loss.backward()
        self.sums += torch.stack([loss.detach(), (logits.argmax(dim=1) == labels).sum()])
        index = batch.index.to(device)
        self.odd = torch.where(features.isfinite().all(dim=1), self.odd, index).amin().minimum(self.odd)

    def step(self) -> None:
        dist.all_reduce(self.gradient)
        self.optimizer.param_groups[0]["lr"] = learning_rate(
            self.steps_done, self.steps, peak=self.peak, warmup_steps=0, kind="official", min_fraction=0.0
        )
        self.optimizer.step()
        self.gradient.zero_()
        self.steps_done += 1

    def end_epoch(self) -> None:
        """Print the figures of the epoch. Raises RunStopped if the training cannot go on."""
        encoder, schedule, epoch = self.encoder, self.schedule, self.steps_done // self.steps_per_epoch
        dist.all_reduce(self.odd, dist.ReduceOp.MIN)
        if self.odd < len(encoder.train):
            raise non_finite(encoder.train, int(self.odd))
        bad = count_left_out(self.failures.values(), len(encoder.train), encoder.config.data.max_bad_fraction)
        if bad.count > self.replaced:
            self.replaced = bad.count
            encoder.tell(bad.told("training", "replaced by others"))
        dist.all_reduce(self.sums)
        loss, right = (self.sums / self.steps_per_epoch).tolist()
        if not math.isfinite(loss):
            raise RunStopped(f"the loss is not finite in epoch {epoch}; lower base_lr = {schedule.base_lr:g}")
        accuracy, lr = 100 * right / schedule.batch_size, self.optimizer.param_groups[0]["lr"]
        encoder.say(
            f"epoch {epoch}/{schedule.epochs}  loss {loss:.4f}  accuracy on its crops {accuracy:.2f} %  lr {lr:.2e}"
        )
        self.sums.zero_()

    def state(self) -> dict[str, Any]:
        """The state, the same on all ranks, which call this together: numbers, texts, tuples and tensors on the CPU."""
        sums, odd = self.sums.clone(), self.odd.clone()
        dist.all_reduce(sums)
        dist.all_reduce(odd, dist.ReduceOp.MIN)
        failures = {image: failure for part in gather(self.failures) for image, failure in part.items()}
        return {
            "steps_done": self.steps_done,
            "sums": sums.cpu(),
            "odd": int(odd),
            "replaced": self.replaced,
            "failures": [(int(f.step), int(image), f.path, f.reason) for image, f in failures.items()],
            **{name: weight.detach().cpu() for name, weight in self.classifier.named_parameters()},
            **{f"{name}.momentum": buffer.cpu() for name, buffer in self._momentum()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state; the sums of the epoch go to one rank only, because they will be added up."""
        with torch.no_grad():
            for name, weight in self.classifier.named_parameters():
                weight.copy_(state[name])
            for name, buffer in self._momentum():
                buffer.copy_(state[f"{name}.momentum"])
        if self.encoder.world.rank == 0:
            self.sums.copy_(state["sums"])
        self.odd.fill_(state["odd"])
        self.steps_done, self.replaced = state["steps_done"], state["replaced"]
        self.failures = {image: Failure(step, image, *said) for step, image, *said in state["failures"]}

    def _momentum(self) -> list[tuple[str, Tensor]]:
        named = self.classifier.named_parameters()
        return [(name, self.optimizer.state_of(weight)["momentum"]) for name, weight in named]


class Unfinished:
    """The file with the progress of one training; each set of settings has its own.

    Args:
        folder: folder of the file.
        stem: start of its name.
        settings: JSON values that determine the result.
        say: prints a line for the user.
    """

    def __init__(self, folder: Path, stem: str, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self.settings = json.dumps(settings, sort_keys=True)
        digest = hashlib.sha256(self.settings.encode()).hexdigest()[:8]
        self.path, self.say = folder / f"{stem}-{digest}.unfinished.pt", say

    def load(self) -> dict[str, Any] | None:
        """The last saved state, with tensors on the CPU; None if there is none, or it cannot be used.

        All ranks call this and `save` together.
        """
        return on_first(self._load)

    def save(self, state: dict[str, Any]) -> None:
        """Saves a state. Raises OSError on all ranks if the file cannot be written; the previous one is kept then."""
        on_first(lambda: self._save(state))

    def delete(self) -> None:
        """Call on one rank."""
        self.path.unlink(missing_ok=True)

    def _load(self) -> dict[str, Any] | None:
        if not self.path.is_file():
            return None
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            settings, state = content["settings"], content["state"]
        except Exception:  # arbitrary bytes read as a pickle can raise anything
            self.say(f"{self.path}: damaged; the training starts again")
            return None
        return state if settings == self.settings else None

    def _save(self, state: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        torch.save({"settings": self.settings, "state": state}, content)
        write_whole(self.path, content.getvalue())


def micro_batches(batch_size: int, ranks: int, most: int) -> int:
    """The smallest number of equal parts such that a rank has at most `most` images at a time.

    1 for a batch that does not divide over the ranks, which the loader refuses.
    """
    share = batch_size // ranks
    if batch_size % ranks:
        return 1
    return next(parts for parts in range(1, share + 1) if share % parts == 0 and share // parts <= most)


def flat_gradient(module: nn.Module) -> Tensor:
    """A vector of zeros; the gradient of each parameter becomes a view of it."""
    parameters = list(module.parameters())
    flat = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def new_classifier(features: int, classes: int, seed: int) -> nn.Linear:
    """A classifier with weights from a normal distribution with deviation 0.01, and biases 0."""
    classifier = nn.Linear(features, classes)
    with torch.no_grad():
        classifier.weight.normal_(0, 0.01, generator=torch.Generator().manual_seed(seed))
        classifier.bias.zero_()
    return classifier
