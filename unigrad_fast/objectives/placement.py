"""Where F is kept: whole on every rank, or in shards. The choice by counting, which all ranks make alike."""

from __future__ import annotations

from unigrad_fast.kernels.heuristics import TRIANGLE

MOST_REPLICATED = 4 << 30  # bytes of F and its copy that a rank keeps whole; from C = 26,755 on it is more in bf16
GAIN = 0.9  # share of the replicated time below which shards are worth their further collectives
# Of an H100, as in `cards.json`: FLOP/s of a product, bytes/s of memory and of the bus, seconds of a collective.
PRODUCT, MEMORY, BUS, COLLECTIVE = 798e12, 2.4e12, 360e9, 25e-6
HALF, FULL = 2, 4  # bytes of a number


def choose(width: int, images: int, views: int, ranks: int) -> str:
    """ "replicated" or "sharded": what `auto` is.

    F stays whole on one rank, and where it has fewer rows than there are ranks. Else it is sharded where F and its bf16
    copy take more than `MOST_REPLICATED`, or where the counted time of a step's update, product and collectives is less
    than `GAIN` of that of a replicated F. Counted is in bf16 on an H100, wherever it runs: all ranks choose alike.

    Args:
        images: of a rank; `views` of each pass the online branch.
    """
    if not 1 < ranks <= width:
        return "replicated"
    if (FULL + HALF) * width**2 > MOST_REPLICATED:
        return "sharded"
    sharded = sharded_seconds(width, images, views, ranks)
    return "sharded" if sharded < GAIN * replicated_seconds(width, images, views, ranks) else "replicated"


def replicated_seconds(width: int, images: int, views: int, ranks: int) -> float:
    """Of the update with half of the products, for F is symmetric, the product, and one gather."""
    return _seconds("replicated", width, images, views, ranks)


def sharded_seconds(width: int, images: int, views: int, ranks: int) -> float:
    """Of the update and the product of a share of the rows with the embeddings of all ranks, and three collectives."""
    return _seconds("sharded", width, images, views, ranks)


def compute_seconds(placement: str, width: int, images: int, views: int, ranks: int) -> float:
    """Of the update and the product alone."""
    targets, online = 2 * images, views * images
    if placement == "replicated":
        update = max(ranks * targets * width * (width + TRIANGLE) / PRODUCT, 5 * width**2 / MEMORY)
        return update + max(2 * online * width**2 / PRODUCT, HALF * width**2 / MEMORY)
    update = max(2 * targets * width**2 / PRODUCT, (2 * FULL + HALF) * width**2 / ranks / MEMORY)
    return update + max(2 * online * width**2 / PRODUCT, HALF * width**2 / ranks / MEMORY)


def exchanged(placement: str, width: int, images: int, views: int, ranks: int) -> list[tuple[str, int]]:
    """The collectives of one update and product: kind, and bytes of all that is gathered or exchanged.

    As they are counted here; each rank also gives a row that says how many images it has.
    """
    if ranks == 1:
        return []
    targets, online = HALF * 2 * images * width * ranks, HALF * views * images * width * ranks
    if placement == "replicated":
        return [("gather", targets)]
    return [("gather", targets), ("gather", online), ("exchange", FULL * views * images * width)]


def _seconds(placement: str, width: int, images: int, views: int, ranks: int) -> float:
    sent = exchanged(placement, width, images, views, ranks)
    passing = sum(size for _, size in sent) * (ranks - 1) / ranks / BUS
    return compute_seconds(placement, width, images, views, ranks) + len(sent) * COLLECTIVE + passing
