"""Our loader with a network and a loss of your own."""

import torch
import torchvision
from torch.nn.functional import cross_entropy, normalize

from unigrad_fast.pipelines import Loader, Manifest


def info_nce(one, other, temperature=0.2):
    logits = normalize(one) @ normalize(other).T / temperature
    return cross_entropy(logits, torch.arange(len(one), device=one.device))


def train(images, batch_size=32, image_size=96, start_step=0, stop_step=20):
    """From another `start_step`, a run that was interrupted goes on with the batches that it would have had."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = Loader(
        Manifest.open(images),  # a folder, a list of paths or tar shards
        preset="simsiam",
        batch_size=batch_size,  # over all ranks; each rank also gives rank= and world_size=
        image_size=image_size,
        device=device,  # decodes and augments there
    )
    encoder = torchvision.models.resnet18(num_classes=64).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9)
    for batch in loader.iterate(start_step, stop_step):  # an epoch has loader.steps_per_epoch
        view1, view2 = batch.views  # [32, 3, 96, 96] each, normalised; batch.label and batch.index are there, too
        loss = info_nce(encoder(view1), encoder(view2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {batch.step}  loss {loss:.3f}")
    loader.close()
    return encoder


if __name__ == "__main__":
    train("data/quickstart/train")
