"""Baselines without learning, which an encoder has to beat: raw pixels and colour histograms.

Each baseline is a module without parameters that replaces the backbone, so that it uses the same loader and the same
classifier.
"""

import torch
from torch import Tensor, nn

from unigrad_fast.pipelines.presets import DEVIATION, MEAN


class RawPixels(nn.Module):
    """Images [N, 3, S, S] to standardised pixels [N, 3·S²]; an image of a single colour becomes zeros.

    With zero mean and unit deviation per image, cosine similarity is the correlation of two images, which does not
    depend on brightness and contrast.
    """

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1)
        pixels = pixels - pixels.mean(dim=1, keepdim=True)
        return pixels / pixels.std(dim=1, keepdim=True).clamp_min(1e-3)


class ColourHistogram(nn.Module):
    """Normalised images [N, 3, S, S] to square roots of joint RGB histograms, [N, bins³].

    The cosine similarity of two such features is the Bhattacharyya coefficient of the histograms.
    """

    def __init__(self, bins: int = 8) -> None:
        super().__init__()
        self.bins = bins

    def forward(self, images: Tensor) -> Tensor:
        mean, deviation = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (MEAN, DEVIATION))
        level = ((images * deviation + mean) * self.bins).long().clamp(0, self.bins - 1)  # [N, 3, S, S]
        cell = ((level[:, 0] * self.bins + level[:, 1]) * self.bins + level[:, 2]).flatten(1)  # [N, S²]
        one = torch.ones_like(cell, dtype=images.dtype)
        count = images.new_zeros(len(images), self.bins**3).scatter_add_(1, cell, one)
        return (count / cell.shape[1]).sqrt()


# By name: the module, and the side in pixels to which the central square of the image is resized.
BASELINES: dict[str, tuple[nn.Module, int]] = {
    "raw pixels": (RawPixels(), 32),
    "colour histogram": (ColourHistogram(), 64),
}
