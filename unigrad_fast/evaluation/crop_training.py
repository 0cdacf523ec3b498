"""Training on random crops and flips of the training images, new ones in each epoch.

It saves its progress at the end of each epoch and when it is preempted, and continues from there, on any number of
ranks and at any ZeRO stage. What is trained, linear classifiers or a whole network, is a subclass of `CropTraining`.

Shapes: N images, H heads (classifiers that are trained side by side), K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unigrad_fast.evaluation.features import count_left_out
from unigrad_fast.evaluation.linear import FrozenEncoder, of_heads
from unigrad_fast.optimization.owners import Owners
from unigrad_fast.pipelines import Batch, Failure, Loader
from unigrad_fast.runtime.errors import Preempted, RunStopped
from unigrad_fast.runtime.preemption import Preemption
from unigrad_fast.runtime.process_group import gather, on_all_ranks
from unigrad_fast.runtime.wording import count

FEW_STEPS = 200  # fine-tuning takes 1,000 on 1 % of ImageNet, the other protocols more


class Saved(Protocol):
    """Where a training's progress is; all ranks call these together."""

    @property
    def error(self) -> OSError | None: ...  # of the last `save`

    def load(self) -> dict[str, Any] | None: ...

    def save(self, state: dict[str, Any]) -> None: ...


class CropTraining:
    """A network and everything that changes during its training.

    Args:
        network: on the device, in its final memory format.
        optimizer: of all its parameters.
        batch_size: images per step over all ranks.

    Attributes:
        name: of what is trained, for messages.
        shares: a factor of each head's loss.
        steps, steps_done: optimizer steps in all, and done.
        failures: images that could not be used, by position: this rank's, and those of an interrupted call.
    """

    name: ClassVar[str]

    def __init__(
        self,
        encoder: FrozenEncoder,
        network: nn.Module,
        optimizer: Any,
        batch_size: int,
        epochs: int,
        steps_per_epoch: int,
        shares: tuple[float, ...] = (1.0,),
    ) -> None:
        self.encoder, self.network, self.optimizer = encoder, network, optimizer
        self.batch_size, self.epochs, self.steps_per_epoch = batch_size, epochs, steps_per_epoch
        self.steps, self.steps_done = steps_per_epoch * epochs, 0
        device = encoder.world.device
        self.owners = Owners(list(network.parameters()), encoder.config.engine.zero_stage)
        self.shares = torch.tensor(shares, device=device)
        # Of this epoch: each head's loss, then each one's number of hits.
        self.sums = torch.zeros(2 * len(shares), dtype=torch.float64, device=device)
        self.failures: dict[int, Failure] = {}
        self.replaced = 0  # images that the user was told about

    def logits(self, batch: Batch) -> Tensor:
        """Logits of a micro-batch, fp32 [N, K], or [N, H, K] of several heads."""
        raise NotImplementedError

    def set_rates(self) -> None:
        """Give the optimizer the learning rates of the next step."""
        raise NotImplementedError

    def rates_shown(self, head: int) -> str:
        """The last step's learning rates of a head."""
        raise NotImplementedError

    @property
    def remedy(self) -> str:
        """What to do if the loss is not finite."""
        raise NotImplementedError

    def add(self, batch: Batch) -> None:
        """Add a micro-batch to the gradient."""
        self.failures |= {failure.image: failure for failure in batch.failures}
        labels = batch.label.to(self.encoder.world.device)
        heads = of_heads(self.logits(batch)).unbind(1)
        losses = torch.stack([cross_entropy(logits, labels, reduction="sum") for logits in heads])
        losses /= self.batch_size
        self.backward((losses * self.shares).sum())
        hits = torch.stack([(logits.argmax(dim=1) == labels).sum() for logits in heads])
        self.sums += torch.cat([losses.detach(), hits])

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.set_rates()
        self.owners.step(self.optimizer)
        self.steps_done += 1

    def end_epoch(self) -> None:
        """Print the figures of the epoch. Raises RunStopped if the training cannot go on."""
        encoder, epoch = self.encoder, self.steps_done // self.steps_per_epoch
        bad = count_left_out(self.failures.values(), len(encoder.train), encoder.config.data.max_bad_fraction)
        if bad.count > self.replaced:
            self.replaced = bad.count
            encoder.leave_out("training", bad, "replaced by others")
        dist.all_reduce(self.sums)
        losses, hits = (self.sums / self.steps_per_epoch).chunk(2)
        best = int(torch.where(losses.isfinite(), hits, -1).argmax())
        loss, accuracy = losses[best].item(), 100 * hits[best].item() / self.batch_size
        if not math.isfinite(loss):
            raise RunStopped(f"the loss is not finite in epoch {epoch}; {self.remedy}")
        of_best = f"  (the best of {len(losses)} classifiers)" if len(losses) > 1 else ""
        encoder.say(
            f"epoch {epoch}/{self.epochs}  loss {loss:.4f}  accuracy on its crops {accuracy:.2f} %  "
            f"lr {self.rates_shown(best)}{of_best}"
        )
        self.sums.zero_()

    def state(self) -> dict[str, Any]:
        """The state, on the first rank: numbers, texts, tuples and tensors on the CPU; all ranks call this together."""
        sums = self.sums.clone()
        dist.all_reduce(sums)
        failures = {image: failure for part in gather(self.failures) for image, failure in part.items()}
        state = {
            "steps_done": self.steps_done,
            "sums": sums.cpu(),
            "replaced": self.replaced,
            "failures": [(int(f.step), int(image), f.path, f.reason) for image, f in failures.items()],
        }
        own = dict(self._tensors())
        for name, weight in self.network.named_parameters():  # one after the other, for a device holds only its share
            momentum = own.get(f"{name}.momentum", torch.empty_like(weight))
            self.owners.send(momentum, weight)
            if self.encoder.world.rank == 0:
                own[f"{name}.momentum"] = momentum.cpu()
        return {**state, **{name: tensor.detach().cpu() for name, tensor in own.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state; the sums of the epoch go to one rank only, because they will be added up."""
        with torch.no_grad():
            for name, tensor in self._tensors():
                tensor.copy_(state[name])
        if self.encoder.world.rank == 0:
            self.sums.copy_(state["sums"])
        self.steps_done, self.replaced = state["steps_done"], state["replaced"]
        self.failures = {image: Failure(step, image, *said) for step, image, *said in state["failures"]}

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """What a step changes in place, as this rank keeps it: parameters, momentum of its own ones, and buffers."""
        weights = list(self.network.named_parameters())
        own = [(name, weight) for name, weight in weights if self.owners.has(weight)]
        momentum = [(f"{name}.momentum", self.optimizer.state_of(weight)["momentum"]) for name, weight in own]
        return [*weights, *momentum, *self.network.named_buffers()]


Trained = TypeVar("Trained", bound=CropTraining)


def run(
    encoder: FrozenEncoder,
    batch_size: int,
    parts: int,
    begin: Callable[[int], Trained],
    unfinished: Saved | None = None,
    preemption: Preemption | None = None,
) -> Trained:
    """A training that has ended.

    Args:
        batch_size: images per step over all ranks.
        parts: micro-batches of a step.
        begin: the training for a number of steps per epoch.
        unfinished: progress of an interrupted training, and of this one; None saves nothing.
        preemption: tells when to stop.

    Raises:
        DataError: the batch does not divide over the ranks, there are fewer images than one batch, or too many
            in a row cannot be read.
        RunStopped: the loss is not finite, or too many images cannot be used.
        Preempted: after saving.
        OSError: preempted, and the progress cannot be saved.
    """
    data, world = encoder.config.data, encoder.world
    loader = Loader(
        encoder.train,
        preset="linear",
        image_size=data.image_size,
        batch_size=batch_size,
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
    training = begin(steps_per_epoch)
    if unfinished is not None and (saved := unfinished.load()) is not None:
        training.restore(saved)
        loader.leave_out({(training.steps_done * parts, image): f.reason for image, f in training.failures.items()})
        epochs = training.steps_done / steps_per_epoch
        encoder.say(f"continuing an interrupted call after epoch {epochs:g} of {training.epochs}")
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
                if preempted and unfinished.error is not None:
                    raise unfinished.error
            if preempted:
                raise Preempted(
                    f"saved after step {training.steps_done} of {training.steps} of {training.name}; repeat the "
                    "command to continue",
                    preemption.status,
                )
    encoder.left_out["training"] = training.replaced
    return training


def few_steps(images: int, batch_size: int, epochs: int) -> list[str]:
    """A line for the user about a training of only a few steps; empty for others."""
    steps = images // batch_size * epochs
    if steps >= FEW_STEPS:
        return []
    return [f"these are only {count(steps, 'step')}; a smaller --batch_size makes more of them"]
