"""Linear probe: a linear classifier on the frozen features of a backbone.

Two protocols. `quick` caches the features of one centre crop per training image, each rank those of its own images,
and fits a multinomial logistic regression on them. `paper` is the paper's (appendix "Implementation Details", linear
evaluation): random-resized crops and flips, LARS for 90 epochs. Either judges on centre crops, every validation image
counted once, and the result depends on the number of ranks by rounding alone. Images that cannot be used are left out,
and in the paper's training replaced by others.

Shapes: N images, D feature dimension, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unigrad_fast.config import Config
from unigrad_fast.evaluation.features import count_left_out, evaluation_mode, features_of, non_finite
from unigrad_fast.optimization.lars import LARS
from unigrad_fast.optimization.schedules import learning_rate
from unigrad_fast.pipelines import EvaluationLoader, Failure, Loader, Manifest
from unigrad_fast.runtime.errors import RunStopped
from unigrad_fast.runtime.process_group import World, on_all_ranks

ROWS_AT_ONCE = 1 << 16  # of features that are on the device at a time
L2 = 1e-3  # penalty of the quick protocol on standardised features
MOST_ITERATIONS = 200


@dataclass(frozen=True)
class Schedule:
    """How the paper's protocol trains: epochs, images per step over all ranks, learning rate per 256 images."""

    epochs: int = 90
    batch_size: int = 4096
    base_lr: float = 0.02


PAPER = Schedule()


@dataclass(frozen=True)
class LinearResult:
    """top-1 and top-5 accuracy in percent (top5 None with fewer than five classes) of `images` validation images."""

    accuracy: float
    top5: float | None
    images: int


@dataclass(frozen=True)
class LinearProbe:
    """A backbone [N, 3, S, S] → [N, D] and the images to judge it on; all ranks call its methods together.

    Args:
        backbone: on the world's device.
        dtype: that it computes in under autocast; None is its own.
        say: takes lines for the user: an epoch is done, images could not be used.
    """

    config: Config
    world: World
    train: Manifest
    val: Manifest
    backbone: nn.Module
    dtype: torch.dtype | None
    say: Callable[[str], None]

    @property
    def classes(self) -> int:
        return len(self.train.classes)

    def quick(self) -> nn.Linear:
        """A classifier of raw features, fitted to standardised ones.

        Raises RunStopped where a feature is not finite or too many images cannot be used.
        """
        features, labels, count = self._own_features()
        mean, deviation = standardisation(features, count)
        features.sub_(mean).div_(deviation)
        if self.world.device.type == "cuda" and features.nbytes < torch.cuda.mem_get_info()[0] / 2:
            features = features.to(self.world.device)  # else they travel block by block, in each iteration
        classifier = fit(features, labels, self.classes, count, self.world.device)
        fold(classifier, mean.to(self.world.device), deviation.to(self.world.device))
        return classifier

    def paper(self, schedule: Schedule) -> nn.Linear:
        """A classifier trained on random crops, new ones in each epoch.

        Raises:
            DataError: the batch does not divide over the ranks, there are fewer images than one batch, or too many
                in a row cannot be read.
            RunStopped: a feature or the loss is not finite, or too many images cannot be used.
        """
        data, world = self.config.data, self.world
        parts = micro_batches(schedule.batch_size, world.size, self.config.evaluation.batch_size)
        loader = Loader(
            self.train,
            recipe="linear",
            image_size=data.image_size,
            batch_size=schedule.batch_size,
            seed=self.config.seed,
            rank=world.rank,
            world_size=world.size,
            device=world.device if data.decode != "cpu" else "cpu",
            accumulation_steps=parts,
            threads=data.threads,
            timeout=data.read_timeout,
        )
        classifier = None
        steps_per_epoch = loader.steps_per_epoch // parts
        steps = steps_per_epoch * schedule.epochs
        peak = schedule.base_lr * schedule.batch_size / 256
        sums = torch.zeros(2, dtype=torch.float64, device=world.device)  # of this epoch: loss, images that were right
        odd = torch.tensor(len(self.train), device=world.device)  # the first image with a non-finite feature
        failures: dict[int, Failure] = {}  # of this rank, by image
        replaced = 0  # images that the user was told of
        batches = loader.iterate(stop_step=steps * parts)
        for step in range(steps):
            for _ in range(parts):
                batch = on_all_ranks(lambda: next(batches))
                failures |= {failure.image: failure for failure in batch.failures}
                features, labels = self._features(batch.views[0]), batch.label.to(world.device)
                if classifier is None:
                    classifier = new_classifier(features.shape[1], self.classes, self.config.seed).to(world.device)
                    optimizer = LARS(classifier.parameters(), lr=peak, momentum=0.9)
                    gradient = flat_gradient(classifier)
                logits = classifier(features)
                loss = cross_entropy(logits, labels, reduction="sum") / schedule.batch_size
                loss.backward()
                sums += torch.stack([loss.detach(), (logits.argmax(dim=1) == labels).sum()])
                index = batch.index.to(world.device)
                odd = torch.where(features.isfinite().all(dim=1), odd, index).amin().minimum(odd)
            dist.all_reduce(gradient)
            optimizer.param_groups[0]["lr"] = learning_rate(
                step, steps, peak=peak, warmup_steps=0, kind="official", min_fraction=0.0
            )
            optimizer.step()
            gradient.zero_()
            epoch, rest = divmod(step + 1, steps_per_epoch)
            if rest == 0:
                dist.all_reduce(odd, dist.ReduceOp.MIN)
                if odd < len(self.train):
                    raise non_finite(self.train, int(odd))
                bad = count_left_out(failures.values(), len(self.train), data.max_bad_fraction)
                if bad.count > replaced:
                    replaced = bad.count
                    self._tell(bad.told("training", "replaced by others"))
                dist.all_reduce(sums)
                loss, right = (sums / steps_per_epoch).tolist()
                if not math.isfinite(loss):
                    raise RunStopped(f"the loss is not finite in epoch {epoch}; lower base_lr = {schedule.base_lr:g}")
                accuracy, lr = 100 * right / schedule.batch_size, optimizer.param_groups[0]["lr"]
                self.say(
                    f"epoch {epoch}/{schedule.epochs}  loss {loss:.4f}  accuracy on its crops {accuracy:.2f} %  "
                    f"lr {lr:.2e}"
                )
                sums.zero_()
        return classifier

    def judge(self, classifier: nn.Linear) -> LinearResult:
        """Accuracy on the validation images, each rank counting its own.

        Raises RunStopped where a feature is not finite or too many images cannot be used.
        """
        loader = self._loader(self.val)
        counts = torch.zeros(3, dtype=torch.int64)  # images, right, among the best five

        def count() -> None:
            for features, index in features_of(self.backbone, loader, self.world.device, self.dtype):
                with torch.no_grad():
                    logits = classifier(features)
                labels = torch.as_tensor(self.val.labels, dtype=torch.int64)[index].to(logits.device)
                best = logits.topk(min(5, self.classes), dim=1).indices == labels[:, None]
                found = torch.stack([best[:, 0].sum(), best.any(dim=1).sum()])
                counts.add_(torch.tensor([len(index), *found.tolist()]))

        on_all_ranks(count)
        left_out = self._left_out(loader, "validation")
        dist.all_reduce(counts)
        images, right, among_five = counts.tolist()
        if images + left_out != len(self.val):
            raise AssertionError(f"of {len(self.val)} validation images {images} were counted and {left_out} left out")
        return LinearResult(
            accuracy=100 * right / images,
            top5=100 * among_five / images if self.classes >= 5 else None,
            images=images,
        )

    def _features(self, images: Tensor) -> Tensor:
        autocast = torch.autocast(self.world.device.type, self.dtype, enabled=self.dtype is not None)
        with torch.no_grad(), evaluation_mode(self.backbone), autocast:
            return self.backbone(images.to(self.world.device)).float()

    def _loader(self, manifest: Manifest) -> EvaluationLoader:
        data, settings = self.config.data, self.config.evaluation
        return EvaluationLoader(
            manifest,
            data.image_size,
            settings.crop_fraction,
            settings.batch_size,
            rank=self.world.rank,
            world_size=self.world.size,
            device=self.world.device if data.decode != "cpu" else "cpu",
            threads=data.threads,
            timeout=data.read_timeout,
        )

    def _left_out(self, loader: EvaluationLoader, kind: str) -> int:
        """How many images no rank could use, of which the user is told."""
        images = len(loader.manifest)
        left_out = count_left_out(loader.failures, images, self.config.data.max_bad_fraction)
        self._tell(left_out.told(kind))
        return left_out.count

    def _tell(self, lines: list[str]) -> None:
        for line in lines:
            self.say(line)

    def _own_features(self) -> tuple[Tensor, Tensor, int]:
        """Features fp32 [N, D] and labels int64 [N] of this rank's training images, on the CPU; N over all ranks."""
        loader = self._loader(self.train)
        rows = torch.empty(0, 0)
        index: list[int] = []

        def read() -> None:
            nonlocal rows
            for features, places in features_of(self.backbone, loader, self.world.device, self.dtype):
                if not len(rows):
                    rows = torch.empty(len(loader.index), features.shape[1])
                rows[len(index) : len(index) + len(features)] = features.cpu()
                index.extend(places.tolist())

        on_all_ranks(read)
        count = len(self.train) - self._left_out(loader, "training")
        width = torch.tensor(rows.shape[1])
        dist.all_reduce(width, dist.ReduceOp.MAX)  # a rank without images has not seen it
        labels = torch.as_tensor(self.train.labels, dtype=torch.int64)[torch.tensor(index, dtype=torch.int64)]
        return rows[: len(index)].view(-1, int(width)), labels, count


def micro_batches(batch_size: int, ranks: int, most: int) -> int:
    """The least number of equal parts that leaves a rank at most `most` images of a batch at a time.

    It is 1 for a batch that does not divide over the ranks, which the loader refuses.
    """
    share = batch_size // ranks
    if batch_size % ranks:
        return 1
    return next(parts for parts in range(1, share + 1) if share % parts == 0 and share // parts <= most)


def flat_gradient(module: nn.Module) -> Tensor:
    """One vector of zeros, of which each parameter's gradient is a part from now on."""
    parameters = list(module.parameters())
    flat = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def new_classifier(features: int, classes: int, seed: int) -> nn.Linear:
    """Weights from a normal distribution of deviation 0.01, biases 0."""
    classifier = nn.Linear(features, classes)
    with torch.no_grad():
        classifier.weight.normal_(0, 0.01, generator=torch.Generator().manual_seed(seed))
        classifier.bias.zero_()
    return classifier


def standardisation(features: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each dimension over all ranks' features, fp32 [D]; 1 where nothing varies.

    Args:
        features: [N, D] of this rank.
        count: images over all ranks.
    """
    mean = torch.zeros(features.shape[1], dtype=torch.float64)
    for block in features.split(ROWS_AT_ONCE):
        mean += block.double().sum(0)
    dist.all_reduce(mean)
    mean /= count
    square = torch.zeros_like(mean)
    for block in features.split(ROWS_AT_ONCE):
        square += (block.double() - mean).square().sum(0)
    dist.all_reduce(square)
    deviation = (square / count).sqrt()
    deviation = torch.where(deviation > 1e-6 * deviation.max(), deviation, 1.0)
    return mean.float(), deviation.float()


def fold(classifier: nn.Linear, mean: Tensor, deviation: Tensor) -> None:
    """Make a classifier of (x − mean) / deviation one of x, in place."""
    with torch.no_grad():
        classifier.weight /= deviation
        classifier.bias -= classifier.weight @ mean


def fit(features: Tensor, labels: Tensor, classes: int, count: int, device: torch.device) -> nn.Linear:
    """Multinomial logistic regression by L-BFGS over all ranks' features, with an L2 penalty of `L2` / 2 · ‖W‖².

    Args:
        features: [N, D], of this rank, on any device.
        labels: int64 [N].
        count: images over all ranks.
        device: to compute on.
    """
    classifier = nn.Linear(features.shape[1], classes, device=device)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    parameters = list(classifier.parameters())
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=MOST_ITERATIONS, history_size=20, tolerance_grad=1e-6, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for rows, truth in zip(features.split(ROWS_AT_ONCE), labels.split(ROWS_AT_ONCE), strict=True):
            part = cross_entropy(classifier(rows.to(device)), truth.to(device), reduction="sum") / count
            part.backward()
            loss += part.detach()
        for tensor in (loss, *(parameter.grad for parameter in parameters)):
            dist.all_reduce(tensor)
        classifier.weight.grad += L2 * classifier.weight.detach()
        return (loss + L2 / 2 * classifier.weight.detach().square().sum()).float()

    optimizer.step(closure)
    return classifier
