"""The paper's protocol (appendix "Implementation Details", linear evaluation): random-resized crops and flips, LARS."""

from __future__ import annotations

import torch
from torch import nn

from unigrad_fast.evaluation.linear_training import Method, ProbeSchedule
from unigrad_fast.optimization.lars import LARS

SCHEDULE = ProbeSchedule(epochs=90, batch_size=4096, base_lr=0.02)


def new_classifier(features: int, classes: int, seed: int) -> nn.Linear:
    """A classifier with weights from a normal distribution with deviation 0.01, and biases 0."""
    classifier = nn.Linear(features, classes)
    with torch.no_grad():
        classifier.weight.normal_(0, 0.01, generator=torch.Generator().manual_seed(seed))
        classifier.bias.zero_()
    return classifier


METHOD = Method(new_classifier, lambda parameters, lr: LARS(parameters, lr=lr, momentum=0.9), kind="official")
