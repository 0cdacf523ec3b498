"""Our loader and any of our objectives in a Lightning module."""

import copy
from functools import cached_property

import lightning
import torch
import torchvision

from unigrad_fast.objectives import build
from unigrad_fast.pipelines import Loader, Manifest


class Pretraining(lightning.LightningModule):
    def __init__(self, encoder, width, method, **settings):
        super().__init__()
        self.encoder = encoder
        self.momentum_encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.objective = build(method, width=width, **settings)  # its state, such as F, is saved with the module's

    def configure_optimizers(self):
        return torch.optim.SGD([*self.encoder.parameters(), *self.objective.parameters()], lr=0.05, momentum=0.9)

    def training_step(self, views, index):
        online = [self.encoder(v) for v in views]
        out = self.objective(online=online, target=[self.momentum_encoder(v) for v in views])
        self.log_dict({"loss": out.loss.detach(), **out.metrics})
        return out.loss if not out.nonfinite else None  # None: Lightning skips this step

    def on_train_batch_end(self, outputs, views, index):
        with torch.no_grad():
            for averaged, trained in zip(self.momentum_encoder.parameters(), self.encoder.parameters(), strict=True):
                averaged.lerp_(trained, 1 - 0.99)


class Views:
    """The views of the trainer's current epoch. The loader is made when the trainer knows its rank and device."""

    def __init__(self, trainer, images, **settings):
        self.trainer, self.images, self.settings = trainer, images, settings

    @cached_property
    def loader(self):
        ranks = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        return Loader(Manifest.open(self.images), device=self.trainer.strategy.root_device, **ranks, **self.settings)

    def __len__(self):
        return self.loader.steps_per_epoch

    def __iter__(self):
        first = self.trainer.current_epoch * len(self)
        return (batch.views for batch in self.loader.iterate(first, first + len(self)))


if __name__ == "__main__":
    module = Pretraining(torchvision.models.resnet18(num_classes=64), width=64, method="unigrad")
    trainer = lightning.Trainer(max_epochs=2, log_every_n_steps=1)
    trainer.fit(module, Views(trainer, "data/quickstart/train", preset="simsiam", batch_size=32, image_size=96))
