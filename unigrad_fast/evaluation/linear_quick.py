"""The quick protocol: a multinomial logistic regression on the features of one centre crop per training image.

Each rank caches the features of its own images. Shapes: N images, D feature dimension.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unigrad_fast.evaluation.linear import FrozenEncoder
from unigrad_fast.evaluation.passes import Keeper, read_features

ROWS_AT_ONCE = 1 << 16  # rows of features that are on the device at once
L2 = 1e-3  # penalty on standardised features
MOST_ITERATIONS = 200


def quick(encoder: FrozenEncoder, keeper: Keeper | None = None) -> nn.Linear:
    """A classifier for raw features, fitted on standardised features.

    Args:
        keeper: of the features of the training images; None keeps none.

    Raises RunStopped if a feature is not finite or too many images cannot be used.
    """
    device, world = encoder.world.device, encoder.world
    found = read_features(encoder, encoder.train, "training", keeper)
    encoder.leave_out("training", found.left_out)
    features, count = found.own(world), len(encoder.train) - found.left_out.count
    labels = torch.as_tensor(encoder.train.labels, dtype=torch.int64)[found.usable(world.rank, world.size)]
    mean, deviation = standardisation(features, count)
    features.sub_(mean).div_(deviation)
    if device.type == "cuda" and features.nbytes < torch.cuda.mem_get_info()[0] / 2:
        features = features.to(device)  # otherwise they are copied block by block, in each iteration
    classifier = fit(features, labels, len(encoder.train.classes), count, device)
    fold(classifier, mean.to(device), deviation.to(device))
    return classifier


def standardisation(features: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each dimension over all ranks' features, fp32 [D]; 1 for constant dimensions.

    Args:
        features: [N, D], this rank's.
        count: number of images over all ranks.
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
    """Turn a classifier of (x − mean) / deviation into a classifier of x, in place."""
    with torch.no_grad():
        classifier.weight /= deviation
        classifier.bias -= classifier.weight @ mean


def fit(features: Tensor, labels: Tensor, classes: int, count: int, device: torch.device) -> nn.Linear:
    """Multinomial logistic regression by L-BFGS over all ranks' features, with an L2 penalty of `L2` / 2 · ‖W‖².

    Args:
        features: [N, D], this rank's, on any device.
        labels: int64 [N].
        count: number of images over all ranks.
        device: device to compute on.
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
