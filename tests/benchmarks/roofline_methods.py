"""FLOPs of every method's objective by count, and the largest array between rows and samples.

Counted are matrix products of a step of two global views, forward and backward: M = 2·N rows of N images, C channels, K
keys of the bank. DirectPred's decomposition is left out. The update of F computes one triangle: M·C·(C + block), with
`counts.roofline.Design.block`.
"""

from __future__ import annotations

from unigrad_fast.objectives import weighted_sums
from unigrad_fast.objectives.weighted_sums import products_first

CONTRASTIVE = {"moco", "simclr"}
OWN_BATCH = {"vicreg", "row j"}  # the correlation of a batch with itself: two products in backward
UNITS = {"byol": 3, "byol_directpred": 6, "unigrad": 4}  # of M·C² in plain torch


def plain_flops(group: str, N: int, C: int, K: int) -> int:
    """Of a key of `peers.methods.PLAIN`."""
    M = 2 * N
    if group in CONTRASTIVE:
        return 4 * M * C * (K if group == "moco" else M)
    return M * C * C * UNITS.get(group, 6 if group in OWN_BATCH else 4)


def flops(group: str, is_original: bool, N: int, C: int, K: int, block: int) -> int:
    """Of ours that stands against it."""
    M = 2 * N
    update = M * C * (C + block)
    if group == "byol_directpred":
        return update + 4 * M * C * C
    if group == "unigrad":
        return update + 2 * M * C * C
    if is_original or group in CONTRASTIVE:
        return plain_flops(group, N, C, K)
    return 2 * sums_flops(N, C)


def sums_flops(N: int, C: int) -> int:
    """Of Σ (q·k)·v of one view, in the cheaper order."""
    return 4 * N * C * (C if products_first(N, N, C) else N)


def plain_between(group: str, N: int, C: int, K: int) -> int:
    """Numbers in the largest array between rows and samples that plain torch holds."""
    return {"moco": N * (K + 1), "simclr": 2 * N * N}.get(group, C * C)


def between(group: str, N: int, C: int, K: int) -> int:
    """In a gradient form: of one chunk, or [C, C] where that is the cheaper order. F and W_h stay, and are not it."""
    if group in CONTRASTIVE:
        rows, samples = (2 * N, K) if group == "moco" else (2 * N, 2 * N)
    elif products_first(N, N, C):
        return C * C
    else:
        rows = samples = N
    return rows * min(samples, max(weighted_sums.LEAST, weighted_sums.CHUNK // rows))
