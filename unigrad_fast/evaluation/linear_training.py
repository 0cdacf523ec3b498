"""Training of linear classifiers on random crops and flips of the training images, new ones in each epoch.

It saves its progress at the end of each epoch and when it is preempted, and continues from there, on any number of
ranks. Several classifiers ("heads") may be trained side by side on one pass of features.

Shapes: N images, H heads, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unigrad_fast.evaluation.features import count_left_out, non_finite
from unigrad_fast.evaluation.linear import FrozenEncoder, of_heads
from unigrad_fast.evaluation.unfinished import Unfinished
from unigrad_fast.optimization.schedules import learning_rate
from unigrad_fast.pipelines import Batch, Failure, Loader
from unigrad_fast.runtime.errors import Preempted, RunStopped, UserError
from unigrad_fast.runtime.preemption import Preemption
from unigrad_fast.runtime.process_group import gather, on_all_ranks
from unigrad_fast.runtime.wording import count


@dataclass(frozen=True)
class ProbeSchedule:
    """Epochs, images per step over all ranks, and learning rate per 256 images; of several heads the largest rate."""

    epochs: int
    batch_size: int
    base_lr: float


@dataclass(frozen=True)
class Method:
    """What is trained, and how.

    Attributes:
        build: the classifier for a feature dimension, a number of classes and a seed; its logits are [N, K], or those
            of several heads, [N, H, K].
        optimizer: the optimizer for parameters and a learning rate, with momentum and without weight decay.
        kind: kind of the learning rate's schedule, without warm-up and down to 0; see `learning_rate`.
        shares: the learning rate of each head as a share of the schedule's. SGD is linear in the gradient, so each
            head's loss has its share as a factor.
    """

    build: Callable[[int, int, int], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter], float], Any]
    kind: str
    shares: tuple[float, ...] = (1.0,)


def train(
    encoder: FrozenEncoder,
    schedule: ProbeSchedule,
    method: Method,
    unfinished: Unfinished | None = None,
    preemption: Preemption | None = None,
) -> nn.Module:
    """A classifier, trained on random crops, new ones in each epoch.

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
    training = Training(encoder, schedule, method, steps_per_epoch)
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
    encoder.left_out["training"] = training.replaced
    return training.classifier


class Training:
    """The classifier and everything that changes during its training.

    Attributes:
        steps, steps_done: optimizer steps in all, and done.
        failures: images that could not be used, by position: this rank's, and those of an interrupted call.
    """

    def __init__(self, encoder: FrozenEncoder, schedule: ProbeSchedule, method: Method, steps_per_epoch: int) -> None:
        self.encoder, self.schedule, self.method, self.steps_per_epoch = encoder, schedule, method, steps_per_epoch
        self.steps, self.steps_done = steps_per_epoch * schedule.epochs, 0
        self.peak = schedule.base_lr * schedule.batch_size / 256
        device = encoder.world.device
        self.classifier = method.build(encoder.width(), len(encoder.train.classes), encoder.config.seed).to(device)
        self.optimizer = method.optimizer(self.classifier.parameters(), self.peak)
        self.gradient = flat_gradient(self.classifier)
        self.shares = torch.tensor(method.shares, device=device)
        # Of this epoch: each head's loss, then each one's number of hits.
        self.sums = torch.zeros(2 * len(method.shares), dtype=torch.float64, device=device)
        self.odd = torch.tensor(len(encoder.train), device=device)  # the first image with a non-finite feature
        self.failures: dict[int, Failure] = {}
        self.replaced = 0  # images that the user was told about

    def add(self, batch: Batch) -> None:
        """Add a micro-batch to the gradient."""
        device = self.encoder.world.device
        self.failures |= {failure.image: failure for failure in batch.failures}
        features, labels = self.encoder.features(batch.views[0]), batch.label.to(device)
        heads = of_heads(self.classifier(features)).unbind(1)
        losses = torch.stack([cross_entropy(logits, labels, reduction="sum") for logits in heads])
        losses /= self.schedule.batch_size
        (losses * self.shares).sum().backward()
        hits = torch.stack([(logits.argmax(dim=1) == labels).sum() for logits in heads])
        self.sums += torch.cat([losses.detach(), hits])
        index = batch.index.to(device)
        self.odd = torch.where(features.isfinite().all(dim=1), self.odd, index).amin().minimum(self.odd)

    def step(self) -> None:
        dist.all_reduce(self.gradient)
        self.optimizer.param_groups[0]["lr"] = learning_rate(
            self.steps_done, self.steps, peak=self.peak, warmup_steps=0, kind=self.method.kind, min_fraction=0.0
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
            encoder.leave_out("training", bad, "replaced by others")
        dist.all_reduce(self.sums)
        losses, hits = (self.sums / self.steps_per_epoch).chunk(2)
        best = int(torch.where(losses.isfinite(), hits, -1).argmax())
        loss, accuracy = losses[best].item(), 100 * hits[best].item() / schedule.batch_size
        if not math.isfinite(loss):
            raise RunStopped(f"the loss is not finite in epoch {epoch}; lower base_lr = {schedule.base_lr:g}")
        of_best = f"  (the best of {len(losses)} classifiers)" if len(losses) > 1 else ""
        lr = self.optimizer.param_groups[0]["lr"] * self.method.shares[best]
        encoder.say(
            f"epoch {epoch}/{schedule.epochs}  loss {loss:.4f}  accuracy on its crops {accuracy:.2f} %  lr {lr:.2e}"
            + of_best
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
