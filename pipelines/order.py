"""The images of each step, in order: pure functions, so that any step can be made without the others.

An optimizer step takes `batch_size` images over all ranks and accumulation steps. Steps are counted in micro-batches:
step s is part s mod A of the A parts of optimizer step s // A, and rank r takes slice r of that part. Images that
remain after the last whole batch of an epoch are left out; the next epoch leaves out others.
"""

import threading
from functools import lru_cache

import numpy as np

from .philox import ORDER, philox


@lru_cache(maxsize=4)  # this epoch and the next, for training and for a shuffled probe
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Order of `count` images in one epoch: int64 [count], a permutation, read-only."""
    bits = philox(seed, epoch, np.arange(count), stream=ORDER, block=0)
    keys = bits[0].astype(np.uint64) << np.uint64(32) | bits[1]
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order


def begin_order(seed: int, epoch: int, count: int) -> None:
    """Computes the order of an epoch in a thread, in advance; for a million images it takes half a second."""
    threading.Thread(target=epoch_order, args=(seed, epoch, count), name="order of the next epoch", daemon=True).start()


def batch_indices(
    seed: int,
    step: int,
    count: int,
    batch_size: int,
    accumulation_steps: int = 1,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[int, np.ndarray]:
    """The images of one micro-batch of one rank.

    Args:
        seed: seed of the run.
        step: micro-batches since the start of the run.
        count: images in the manifest, at least `batch_size`.
        batch_size: images of one optimizer step, a multiple of `accumulation_steps * world_size`.

    Returns:
        The epoch and the positions in the manifest, int64 [batch_size / (accumulation_steps * world_size)].
    """
    optimizer_step, part = divmod(step, accumulation_steps)
    epoch, place = divmod(optimizer_step, count // batch_size)
    share = batch_size // (accumulation_steps * world_size)
    start = place * batch_size + (part * world_size + rank) * share
    return epoch, epoch_order(seed, epoch, count)[start : start + share]
