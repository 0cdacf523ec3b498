"""The variants of the training step: a plain loop in the authors' formulation, ours, and only the networks."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from unigrad_fast.benchmarks.peers.authors import authors_loss
from unigrad_fast.benchmarks.peers.loader import augmentation, blur_image
from unigrad_fast.config import Config
from unigrad_fast.networks.encoder import Encoder, build_encoder
from unigrad_fast.pipelines import Manifest, preset_views
from unigrad_fast.runtime.precision import autocast_dtype
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training.target import make_target


class Variant:
    """A way to train; `step` makes one step."""

    def __init__(self, config: Config, world: World):
        self.config, self.device = config, world.device
        self.dtype = autocast_dtype(config.engine.precision, world.device)

    def step(self) -> None:
        raise NotImplementedError

    def phases(self, steps: int) -> dict[str, float]:
        """Milliseconds per phase, means over the last steps, as far as the variant measures them."""
        return {}

    def close(self) -> None:
        """Stop preparing images."""

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)


class Authors(Variant):
    """The published formulation as a plain loop."""

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.online = Encoder(config.model).to(self.device).train()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        settings = config.optimizer
        self.optimizer = torch.optim.SGD(
            self.online.parameters(),
            lr=settings.base_lr * config.data.batch_size / 256,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.correlation: Tensor | None = None
        self.batches = self._batches()

    def _batches(self) -> Iterator[list[Tensor]]:
        data = self.config.data
        augment = simsiam_augmentation(data.image_size)
        dataset = ImageFolder(str(data.train), transform=lambda image: [augment(image), augment(image)])
        loader = DataLoader(
            dataset,
            batch_size=data.batch_size,
            # One iteration for all steps, so that worker processes are started only once.
            sampler=RandomSampler(dataset, num_samples=self.config.schedule.epochs * len(dataset)),
            num_workers=2,
            multiprocessing_context="fork",  # the default in a plain script, but not in this spawned process
            pin_memory=self.device.type == "cuda",
            drop_last=True,
        )
        for views, _ in loader:
            yield views

    def step(self) -> None:
        views = [view.to(self.device, non_blocking=True) for view in next(self.batches)]
        with self.autocast():
            with torch.no_grad():
                target = self.target(views)
            online = self.online(views)
            settings = self.config.objective
            loss, self.correlation = authors_loss(online, target, self.correlation, settings.balance, settings.decay)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        momentum = self.config.target.momentum
        for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mine.data = mine.data * momentum + theirs.data * (1 - momentum)


def simsiam_augmentation(size: int) -> Callable[[Image.Image], Tensor]:
    """SimSiam's augmentation by torchvision: a Pillow image to a normalised tensor [3, size, size]."""
    view, _ = preset_views("simsiam", size)
    return augmentation(view, transforms, blur_image, [transforms.ToTensor()])


class Ours(Variant):
    """A step of `pretrain`, including reports and checks of earlier steps."""

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        from unigrad_fast.training.trainer import Trainer  # here, so that the others do not load DeepSpeed and DALI

        self.trainer = Trainer(config, world, Manifest.open(config.data.train))
        self.batches = self.trainer.loader.iterate(stop_step=self.trainer.total_steps * self.trainer.accumulation)
        self.steps = 0
        self.metrics: list[dict[str, float]] = []

    def step(self) -> None:
        self.trainer.step(self.steps, self.batches)
        self._receive()
        self.steps += 1

    def close(self) -> None:
        self.batches.close()

    def _receive(self) -> None:
        """Reports of earlier steps, one step late as in `pretrain`."""
        self.trainer.gate.check(self.steps)
        self.metrics += [metrics for _, metrics in self.trainer.metrics(before=self.steps)]

    def phases(self, steps: int) -> dict[str, float]:
        self._receive()
        last = self.metrics[-steps:]
        return {key: statistics.fmean(m[key] for m in last) for key in last[0] if key.startswith("ms_")}


class Ceiling(Variant):
    """Only the networks, in the same memory layout as ours."""

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        self.online = build_encoder(config.model, config.seed, self.device).to(memory_format=torch.channels_last)
        self.target = make_target(self.online)
        shape = (config.data.batch_size, 3, config.data.image_size, config.data.image_size)
        views = (torch.randn(shape, device=self.device) for _ in range(2))
        self.views = [view.to(memory_format=torch.channels_last) for view in views]

    def step(self) -> None:
        with self.autocast():
            with torch.no_grad():
                self.target(self.views)
            online = self.online(self.views)
        self.online.zero_grad()
        torch.cat(online).sum().backward()


VARIANTS: dict[str, type[Variant]] = {"authors": Authors, "ours": Ours, "ceiling": Ceiling}
