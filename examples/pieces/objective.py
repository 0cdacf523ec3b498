"""Any of our objectives with an encoder and images of your own."""

import copy

import torch
from torch import nn

from unigrad_fast.objectives import build


def train(method, target="momentum", steps=20, **settings):
    encoder = nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 16 * 16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32)
    )
    momentum_encoder = copy.deepcopy(encoder).requires_grad_(False)
    objective = build(method, width=32, target=target, **settings)
    optimizer = torch.optim.SGD([*encoder.parameters(), *objective.parameters()], lr=0.1, momentum=0.9)
    for _ in range(steps):
        images = torch.randn(64, 3, 16, 16)
        views = [images + 0.1 * torch.randn_like(images) for _ in range(2)]
        online = [encoder(v) for v in views]
        targets = [momentum_encoder(v) for v in views] if target == "momentum" else online
        out = objective(online=online, target=targets)
        optimizer.zero_grad()
        out.loss.backward()
        if not out.nonfinite:  # else the step is dropped, on all ranks
            optimizer.step()
            with torch.no_grad():
                for averaged, trained in zip(momentum_encoder.parameters(), encoder.parameters(), strict=True):
                    averaged.lerp_(trained, 1 - 0.99)
    return encoder, objective


if __name__ == "__main__":
    encoder, objective = train("unigrad")
    encoder, objective = train("simclr", temperature=0.2)
    encoder, objective = train("simsiam", target="stop_gradient")
