"""Stateless random bits: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

Evaluated for a whole batch at once. The counter is (image, epoch, stream, block) and the key is the seed, so no two
images, epochs or views share a number, and nothing depends on what was drawn before.
"""

import numpy as np

# Streams: the third word of the counter. Views count up from VIEW, mixed ones from CUTMIX.
ORDER, VIEW, CUTMIX, SUBSTITUTE = 0, 1, 1 << 16, 1 << 17

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_INCREMENTS = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds of Philox4x32 on uint32 counters [4, ...]; random bits of the same shape and dtype."""
    c0, c1, c2, c3 = counter.astype(np.uint64)
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = right >> _WORD ^ c1 ^ np.uint64(k0), right & _LOW
        c2, c3 = left >> _WORD ^ c3 ^ np.uint64(k1), left & _LOW
        k0, k1 = (k0 + _INCREMENTS[0]) & 0xFFFFFFFF, (k1 + _INCREMENTS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def philox(seed: int, epoch: int, index: np.ndarray, stream: int, block: int | np.ndarray) -> np.ndarray:
    """Random bits, uint32 [4, *broadcast(index, block)]."""
    counter = np.stack(np.broadcast_arrays(index, epoch, stream, block)).astype(np.uint32)
    return philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
