"""Our momentum copy of an encoder of your own, here for BYOL in plain torch."""

import math

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from unigrad_fast.training.target import make_target, update_target_


def mlp(*widths):
    first, hidden, last = widths
    return nn.Sequential(nn.Linear(first, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, last))


def train(steps=100, momentum=0.99):
    encoder, predictor = nn.Sequential(nn.Flatten(), mlp(3 * 16 * 16, 256, 64)), mlp(64, 128, 64)
    target = make_target(encoder)  # in training mode with running statistics of its own, without gradients
    optimizer = torch.optim.SGD([*encoder.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9)
    for step in range(steps):
        images = torch.randn(64, 3, 16, 16)
        one, other = (images + 0.1 * torch.randn_like(images) for _ in range(2))
        loss = -cosine_similarity(predictor(encoder(one)), target(other)).mean()
        loss = loss - cosine_similarity(predictor(encoder(other)), target(one)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept = 1 - (1 - momentum) * (1 + math.cos(math.pi * (step + 1) / steps)) / 2  # rises to 1
        update_target_(target, encoder, kept, skip=torch.zeros(()))  # 1 on the device would leave the target as it is
    return encoder, target, loss.item()


if __name__ == "__main__":
    print(f"loss {train()[-1]:.3f}")
