"""Our LARS with a network of your own: biases and norms not adapted, clipping, no step on numbers not finite."""

import torch
import torchvision
from torch.nn.functional import cross_entropy

from unigrad_fast.training.optimizers import LARS


def train(batches, steps=100, base_lr=0.3, batch_size=32):
    model = torchvision.models.resnet18(num_classes=10)
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]  # biases and norms
    groups = [{"params": weights, "weight_decay": 1e-6}, {"params": vectors, "adapt": False}]
    optimizer = LARS(groups, lr=base_lr * batch_size / 256, momentum=0.9, trust_coefficient=0.001, clip_norm=10.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    dropped = torch.zeros(())
    for images, labels in batches:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # changes nothing if a gradient is not finite; the host does not wait for that
        schedule.step()
        dropped += optimizer.nonfinite
        print(f"loss {loss:.3f}  gradient {optimizer.gradient_norm:.3f}")
    print(f"{dropped:.0f} steps dropped")
    return model


if __name__ == "__main__":
    train([(torch.randn(32, 3, 64, 64), torch.randint(10, [32])) for _ in range(10)], steps=10)
