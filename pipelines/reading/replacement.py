"""Chooses, without state, another image in place of one that cannot be used.

Every choice is a function of the seed, the epoch, the image and the state of its file, so all ranks, and a run that is
resumed, choose alike. Failures that depend on the moment, such as a disk that did not answer, are recorded by the run
and passed to a loader that repeats a step.
"""

import numpy as np

from ..files.headers import reason
from ..manifest import Manifest
from ..philox import SUBSTITUTE, philox
from .damage import Damaged
from .supply import UNOPENED

TRIES = 16  # substitutes for one image before the data counts as lost

# A black pixel as a PNG file, in place of a missing image.
BLANK = np.frombuffer(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
        "0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
    ),
    np.uint8,
)


class Candidates:
    """The requested image and its substitutes.

    Args:
        manifest: the images.
        seed: seed of the choice of substitutes; None uses `BLANK` instead of a substitute.
        known: steps and images that failed earlier in this run, with the reasons.
        damaged: images that were found to be bad, with the reasons.
    """

    def __init__(
        self, manifest: Manifest, seed: int | None, known: dict[tuple[int, int], str], damaged: Damaged
    ) -> None:
        self.manifest, self.seed, self.known, self.damaged = manifest, seed, known, damaged

    def image(self, epoch: int, asked: int, attempt: int) -> int | None:
        """The image of an attempt: first the requested one, then its substitutes; None if substitutes are off."""
        if not attempt:
            return asked
        return None if self.seed is None else substitute(self.seed, epoch, asked, attempt, len(self.manifest))

    def before(self, epoch: int, asked: int, taken: int) -> list[int]:
        """The images that were tried for a requested image before the one that was taken."""
        tried: list[int] = []
        while (image := self.image(epoch, asked, len(tried))) != taken and len(tried) <= TRIES:
            assert image is not None
            tried.append(image)
        return tried

    def known_bad(self, step: int, image: int) -> str | None:
        """Why an image cannot be used, if that is known before it is read."""
        return self.known.get((step, image)) or self.damaged.reason(image, step)

    def read(self, step: int, image: int) -> tuple[bytes, str | None]:
        """An image's encoded bytes, and the reason if it cannot be used, else None."""
        if (why := self.known_bad(step, image)) is not None:
            return b"", why
        try:
            data = self.manifest.read(image)
        except OSError as error:
            return b"", f"{UNOPENED}: {reason(error)}"
        return data, None if data else "the file is empty"


def substitute(seed: int, epoch: int, image: int, attempt: int, count: int) -> int:
    """Which of `count` images replaces one that cannot be used: a different one if `count` is above 1."""
    bits = philox(seed, epoch, np.array(image), stream=SUBSTITUTE, block=attempt)
    return (image + 1 + (int(bits[0]) << 32 | int(bits[1])) % max(1, count - 1)) % count
