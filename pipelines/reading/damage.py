"""Finds images that cannot be used, and remembers them."""

import io
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from .. import graph
from ..manifest import Manifest
from .supply import Supply

TOGETHER = 16  # images to decode at once when looking for bad ones


class Damaged:
    """Images known to be bad (until their file changes), and images that only the CPU can decode.

    Args:
        manifest: the images; those without a size are bad from the start.
        threads: number of threads that decode when looking for bad images.
    """

    def __init__(self, manifest: Manifest, threads: int = 1) -> None:
        self.manifest, self.threads = manifest, threads
        self._found: dict[int, tuple[tuple[int, int] | None, str]] = {}
        self._for_cpu: set[int] = set()
        self._silent: dict[int, tuple[int, str]] = {}

    def add(self, image: int, why: str) -> None:
        """Remembers that an image cannot be decoded."""
        self._found[image] = self._state(image), why

    def leave_out(self, image: int, step: int, why: str) -> None:
        """Skips an image from a step on: waiting for it in each epoch would cost hours."""
        first, _ = self._silent.get(image, (step, why))
        self._silent[image] = min(first, step), why

    def reason(self, image: int, step: int = 0) -> str | None:
        """Why an image counts as bad at a step; None if it does not, or its file has changed since."""
        width = self.manifest.sizes[image, 0]
        if width < 0 or (width == 0 and self.manifest.storage.on_disk):
            return "its header cannot be read" if width == 0 else "a scan found it unusable"
        if image in self._silent and self._silent[image][0] <= step:
            return self._silent[image][1]
        if image not in self._found:
            return None
        state, why = self._found[image]
        return why if state == self._state(image) else None

    def prepared(self, image: int, data: np.ndarray) -> np.ndarray:
        """Bytes for the pipeline's decoder: what the GPU cannot decode is decoded here and passed on as PNG."""
        if image in self._for_cpu:
            with suppress(RuntimeError):  # damaged meanwhile, which the pipeline will report
                return as_png(data)
        return data

    def find(self, supplies: Iterable[Supply], device_id: int | None) -> bool:
        """Looks for images that break a pipeline and remembers them; True if it found new ones."""
        images = {}
        for supply in supplies:
            images |= zip(supply.index.tolist(), supply.data, strict=True)
        images.pop(-1, None)
        bad = self._defects(images, device_id)
        learnt = set(bad)
        if device_id is not None:
            still_bad = self._defects({image: images[image] for image in bad}, None)
            # An image that fails although the CPU decoded it has another problem, which a replacement cannot fix.
            learnt = (bad.keys() - self._for_cpu) | still_bad.keys()
            self._for_cpu |= bad.keys() - still_bad.keys()
            bad = still_bad
        for image, why in bad.items():
            self.add(image, why)
        return bool(learnt)

    def find_resized(self, supply: Supply, shapes: np.ndarray) -> bool:
        """Remembers images whose shape (int64 [N, 3]: height, width, colours) is not the manifest's; True if any."""
        expected = self.manifest.sizes[supply.index]
        wrong = ((shapes[:, 1::-1] != expected).any(axis=1)) & (supply.index >= 0)
        for place in np.flatnonzero(wrong).tolist():
            self.add(int(supply.index[place]), _resized(tuple(shapes[place, 1::-1]), tuple(expected[place])))
        return bool(wrong.any())

    def _defects(self, images: dict[int, np.ndarray], device_id: int | None) -> dict[int, str]:
        """Reasons of the encoded images that cannot be used."""
        sizes = self.manifest.sizes[list(images)]
        why = defects(list(images.values()), device_id, sizes, self.threads)
        return {image: said for image, said in zip(images, why, strict=True) if said is not None}

    def _state(self, image: int) -> tuple[int, int] | None:
        try:
            return self.manifest.state(image)
        except OSError:
            return None


def defects(
    images: Sequence[np.ndarray], device_id: int | None = None, sizes: np.ndarray | None = None, threads: int = 1
) -> list[str | None]:
    """For each encoded image, why it cannot be used; None if it can.

    All threads decode a group of images at a time; a group that fails is split in halves. So beside the first pass, a
    bad image costs about twice the decoding of its group.

    Args:
        images: encoded bytes, uint8.
        device_id: index of the GPU that decodes; None for the CPU.
        sizes: [n, 2], expected width and height.
        threads: number of decoding threads.
    """
    found: list[str | None] = [None] * len(images)
    groups = deque(range(first, min(first + TOGETHER, len(images))) for first in range(0, len(images), TOGETHER))
    pipeline, fed = None, range(0)

    def source(info: Any) -> list:
        return [[images[place] for place in fed]]

    while groups:
        fed = groups.popleft()
        if pipeline is None:
            pipeline = graph.build_decoder(source, batch_size=TOGETHER, threads=threads, device_id=device_id)
        try:
            decoded, _ = pipeline.run()
        except RuntimeError as error:
            pipeline = None  # it cannot be used again
            if len(fed) > 1:
                half = len(fed) // 2
                groups.extendleft((fed[half:], fed[:half]))
            else:
                why = _diagnosis(images[fed[0]]) or _summary(str(error))
                found[fed[0]] = f"the image cannot be decoded: {why}"
            continue
        for number, place in enumerate(fed):
            height, width = decoded[number].shape()[:2]
            expected = (width, height) if sizes is None else tuple(sizes[place])
            found[place] = None if (width, height) == expected else _resized((width, height), expected)
    return found


def decoded(images: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The pixels of encoded images, uint8 [height, width, 3] each, decoded on the CPU, one after the other."""
    fed: list[np.ndarray] = []
    pipeline = graph.build_decoder(lambda info: [[*fed]])
    for data in images:
        fed[:] = [data]
        pixels, _ = pipeline.run()
        yield np.array(pixels[0])  # a copy, because the pipeline uses its memory again


def as_png(data: np.ndarray) -> np.ndarray:
    """The image, decoded on the CPU and encoded again without loss."""
    file = io.BytesIO()
    (pixels,) = decoded([data])
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return np.frombuffer(file.getvalue(), np.uint8)


def _resized(found: tuple, expected: tuple) -> str:
    return "the image is {}x{} now, but was {}x{} when it was listed".format(*found, *expected)


def _diagnosis(data: np.ndarray) -> str | None:
    """Pillow's error for an image, which is clearer than the decoder's; None if Pillow can load it."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except UnidentifiedImageError:
        return "it is not an image, or its header is damaged"
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return str(error)
    return None


def _summary(message: str) -> str:
    """The message of DALI's decoder, without its stack trace."""
    said = message.partition("encountered:")[2].strip() or message.strip()
    return re.sub(r"^\[[^]]*\]\s*|^Error\S*:\s*", "", said.splitlines()[0])
