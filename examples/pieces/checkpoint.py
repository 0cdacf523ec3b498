"""Weights of a run in a torchvision ResNet, and weights of your own as a run that our commands judge."""

from pathlib import Path

import torch
import torchvision

from unigrad_fast.checkpoints.weights import load_branch, open_checkpoint, write_run
from unigrad_fast.config import resolve


def read(run, backbone="resnet18", branch="online"):
    """The backbone of a run's newest checkpoint; `open_checkpoint(run, step)` opens another one."""
    checkpoint = open_checkpoint(Path(run))
    print(f"step {checkpoint.about['step']}, epoch {checkpoint.about['epoch']:g}, {len(checkpoint.names)} tensors")
    model = getattr(torchvision.models, backbone)()
    model.fc = torch.nn.Identity()
    model.load_state_dict(load_branch(checkpoint, f"{branch}.backbone"))  # compares the files with their digests
    return model


def write(model, run, images, backbone="resnet18"):
    """A new run for `unigrad-fast evaluate knn RUN` and `unigrad-fast export RUN`."""
    weights = {f"online.backbone.{name}": t for name, t in model.state_dict().items() if not name.startswith("fc.")}
    data = {"train": f"{images}/train", "val": f"{images}/val", "image_size": 96}
    config = resolve(overrides={"model": {"backbone": backbone}, "data": data})
    return write_run(Path(run), config, weights, step=1000, epoch=10)


if __name__ == "__main__":
    run = write(torchvision.models.resnet18(), "runs/mine", "data/quickstart")
    model = read(run)
    features = model.eval()(torch.randn(1, 3, 96, 96))  # [1, 512]
