"""Turns decoded images into views on the CPU, a few images at a time in each of several threads."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from . import crops, photometric
from .parameters import Parameters
from .presets import View

CHUNK = 8  # images that a thread crops and recolours at once
_setting = threading.Lock()


def augment(
    images: list[torch.Tensor],
    views: tuple[View, ...],
    parameters: list[Parameters],
    exact: bool,
    pool: ThreadPoolExecutor,
    pinned: bool = False,
) -> list[torch.Tensor]:
    """Views of decoded images, fp32 [N, 3, S, S] each, channels-last and normalised.

    Args:
        images: uint8 [height, width, 3] each.
        parameters: one per view.
        exact: recolour as `photometric` does, not as `crops` does.
        pool: threads that compute with one core each.
        pinned: allocate the views in pinned memory, from which a GPU copies asynchronously.
    """
    outputs = [
        torch.empty(len(images), view.size, view.size, 3, dtype=torch.float32, pin_memory=pinned) for view in views
    ]

    def some(first: int) -> None:
        part = slice(first, first + CHUNK)
        for view, whole, output in zip(views, parameters, outputs, strict=True):
            p = whole[part]
            crop = torch.empty(output[part].shape, dtype=torch.uint8)
            crops.crop_and_resize(images[part], view, p, crop)
            if exact:
                flipped = replace(p, flip=np.zeros_like(p.flip))  # `crops` has flipped already
                output[part] = photometric.apply(view, crop, flipped).permute(0, 2, 3, 1)
            else:
                crops.recolour(view, crop, p, output[part])

    list(pool.map(some, range(0, len(images), CHUNK)))
    return [output.permute(0, 3, 1, 2) for output in outputs]


@contextmanager
def one_thread_each(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads in each of which torch uses one core; other threads keep their setting."""
    ready = threading.Barrier(count)

    def begin() -> None:
        torch.get_num_threads()  # the first call in a thread applies the global setting
        torch.set_num_threads(1)
        ready.wait()

    with ThreadPoolExecutor(count, "augmentation") as pool:
        with _setting:
            before = torch.get_num_threads()
            list(pool.map(lambda _: begin(), range(count)))
            torch.set_num_threads(before)  # threads that start later take the value of the last call
        yield pool
