"""What kNN reaches without learning: an encoder has to beat raw pixels and colours.

Each baseline is a module without parameters that takes the place of the backbone, so that its images come
through the same loader and its features go through the same classifier.
"""

import torch
from torch import Tensor, nn

from unigrad_fast.pipelines.presets import DEVIATION, MEAN


class RawPixels(nn.Module):
    """Images [N, 3, S, S] to standardised pixels [N, 3·S²]; an image of one colour becomes zeros.

    With zero mean and unit deviation per image, cosine similarity is the correlation of two images, which
    brightness and contrast do not change.
    """

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1)
        pixels = pixels - pixels.mean(dim=1, keepdim=True)
        return pixels / pixels.std(dim=1, keepdim=True).clamp_min(1e-3)


class ColourHistogram(nn.Module):
    """Normalised images [N, 3, S, S] to the roots of joint RGB histograms, [N, bins³].

    The cosine similarity of the roots is the Bhattacharyya coefficient of two histograms.
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


# By name: the module, and the side in pixels at which it sees the whole image's central square.
BASELINES: dict[str, tuple[nn.Module, int]] = {
    "raw pixels": (RawPixels(), 32),
    "colour histogram": (ColourHistogram(), 64),
}
