"""What unit embeddings are sent with to other ranks, checked against what was put in."""

from __future__ import annotations

import torch
from formulas import random

from unigrad_fast.kernels import unit_embeddings
from unigrad_fast.kernels.ops import sum_tails_
from unigrad_fast.kernels.reference import tail_rows

SENT = [(3, 8), (2, 1), (0, 3), (129, 5)]  # images and width; of the last a rank sends more than one digit holds


def check_sent_rows(images: int, width: int, dtype: torch.dtype) -> None:
    """Three ranks of three views, of which the last two are sent; one is finite, one in what is sent only."""
    padding, gathered, ticket = 3, [], torch.zeros((), dtype=torch.int32)
    for rank, spoiled in enumerate((None, 0, images)):
        views = [random(images, width, seed=3 * rank + view, dtype=torch.float32) for view in range(3)]
        if images and spoiled is not None:
            views[spoiled // images][0, 0] = torch.nan
        raised, spare = torch.full((2,), -9, dtype=torch.int32), padding + tail_rows(width)
        units, _ = unit_embeddings(views, dtype, raised=raised, ticket=ticket, since=images, spare=spare)
        assert raised.tolist() == ([int(rank > 0), int(rank > 1)] if images else [0, 0]) and ticket == 0
        assert torch.equal(units[: 3 * images], unit_embeddings(views, dtype)[0])
        assert not units[3 * images : 3 * images + padding].any()
        gathered.append(units[images:])
    whole = torch.cat(gathered)
    expected = whole.clone().view(3, -1, width)
    expected[:, -tail_rows(width) :] = 0
    count, flags = sum_tails_(whole, 3)
    assert count == 6 * images and count.dtype == torch.promote_types(dtype, torch.float32)
    assert flags.tolist() == ([1, 1, 1, 1] if images else [0, 0, 1, 1])
    assert torch.equal(whole.view(3, -1, width), expected)
