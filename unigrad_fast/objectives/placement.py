"""Where F is kept: whole on every rank, or sharded. The choice is an estimate that comes out the same on all ranks."""

from __future__ import annotations

from unigrad_fast.kernels.heuristics import TRIANGLE

MOST_REPLICATED = 4 << 30  # largest F with its bf16 copy to keep whole, in bytes; exceeded from C = 26,755 on
GAIN = 0.9  # sharding must take less than this share of the replicated time to justify its extra collectives
# An H100, as in `cards.json`: FLOP/s of a product, bytes/s of memory and of the bus, seconds per collective.
PRODUCT, MEMORY, BUS, COLLECTIVE = 798e12, 2.4e12, 360e9, 25e-6
HALF, FULL = 2, 4  # bytes of a number


def choose(width: int, images: int, views: int, ranks: int) -> str:
    """The placement that `auto` stands for: "replicated" or "sharded".

    F stays whole on a single rank, and if it has fewer rows than there are ranks. Otherwise it is sharded if F and its
    bf16 copy take more than `MOST_REPLICATED` bytes, or if the estimated time of a step's update, product and
    collectives is less than `GAIN` times that of a replicated F. The estimate always assumes bf16 on an H100, so that
    all ranks choose the same.

    Args:
        images: number of images per rank.
        views: number of views per image that pass through the online branch.
    """
    if not 1 < ranks <= width:
        return "replicated"
    if (FULL + HALF) * width**2 > MOST_REPLICATED:
        return "sharded"
    sharded, replicated = (seconds(each, width, images, views, ranks) for each in ("sharded", "replicated"))
    return "sharded" if sharded < GAIN * replicated else "replicated"


def seconds(placement: str, width: int, images: int, views: int, ranks: int) -> float:
    """Estimated seconds of the update, the product and their collectives.

    With a whole F: an update of one triangle (F is symmetric), the product, and one gather. With a sharded F: update
    and product of the rank's rows for all ranks, and three collectives.
    """
    sent = exchanged(placement, width, images, views, ranks)
    passing = sum(size for _, size in sent) * (ranks - 1) / ranks / BUS
    return compute_seconds(placement, width, images, views, ranks) + len(sent) * COLLECTIVE + passing


def compute_seconds(placement: str, width: int, images: int, views: int, ranks: int) -> float:
    """Estimated seconds of the update and the product, without collectives."""
    targets, online = 2 * images, views * images
    if placement == "replicated":
        update = max(ranks * targets * width * (width + TRIANGLE) / PRODUCT, 5 * width**2 / MEMORY)
        return update + max(2 * online * width**2 / PRODUCT, HALF * width**2 / MEMORY)
    update = max(2 * targets * width**2 / PRODUCT, (2 * FULL + HALF) * width**2 / ranks / MEMORY)
    return update + max(2 * online * width**2 / PRODUCT, HALF * width**2 / ranks / MEMORY)


def exchanged(placement: str, width: int, images: int, views: int, ranks: int) -> list[tuple[str, int]]:
    """The collectives of one update and product: kind, and total bytes gathered or exchanged.

    The estimate leaves out the tail row with the number of images that each rank sends too.
    """
    if ranks == 1:
        return []
    targets, online = HALF * 2 * images * width * ranks, HALF * views * images * width * ranks
    if placement == "replicated":
        return [("gather", targets)]
    return [("gather", targets), ("gather", online), ("exchange", FULL * views * images * width)]
