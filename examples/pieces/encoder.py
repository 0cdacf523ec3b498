"""Our encoder, a backbone and a projector for several views, with images and a loss of your own."""

from itertools import islice

import torch
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2

from unigrad_fast.config import resolve
from unigrad_fast.networks.encoder import build_encoder

augment = v2.Compose(
    [v2.ToImage(), v2.RandomResizedCrop(64), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
)


def info_nce(one, other, temperature=0.2):
    logits = normalize(one) @ normalize(other).T / temperature
    return cross_entropy(logits, torch.arange(len(one), device=one.device))


def train(images, backbone="resnet18", batch_size=32, steps=20):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = {"backbone": backbone, "projector": {"depth": 2, "width": 256}}
    encoder = build_encoder(resolve(overrides={"model": model}).model, seed=0, device=device)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9)
    pairs = datasets.ImageFolder(images, transform=lambda image: [augment(image), augment(image)])
    batches = DataLoader(pairs, batch_size, shuffle=True, drop_last=True)
    for views, _ in islice(batches, steps):
        # One pass for all views, each with batch statistics of its own; on several ranks these are synchronised.
        one, other = encoder([view.to(device, memory_format=torch.channels_last) for view in views])
        loss = info_nce(one, other)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss:.3f}")
    return encoder  # encoder.backbone(images) are the features, [N, encoder.backbone.feature_dim]


if __name__ == "__main__":
    train("data/quickstart/train")
