"""Views that grow over the epochs."""

from itertools import pairwise

import pytest
import torch

from unigrad_fast.pipelines import CutMix, DataError, Loader, View, preset_views
from unigrad_fast.pipelines.presets import Growth


def sizes(growth, views, epochs):
    return [[view.size for view in growth.views(views, epoch)] for epoch in epochs]


def test_views_grow_evenly_by_multiples_and_are_then_themselves():
    views = preset_views("simsiam", 224)
    growth = Growth(96, 8)
    assert sizes(growth, views, range(9)) == [[side] * 2 for side in (96, 112, 128, 144, 160, 176, 192, 208, 224)]
    for epoch in (8, 9, 1000):
        assert growth.views(views, epoch) is views
    assert sizes(Growth(128, 3), views, range(4)) == [[side] * 2 for side in (128, 160, 192, 224)]


def test_local_views_keep_their_proportion():
    views = preset_views("multicrop", 224)
    for epoch, (first, second, *local) in enumerate(sizes(Growth(112, 7), views, range(7))):
        assert first == second == 112 + 16 * epoch
        assert len(local) == 6 and len(set(local)) == 1
        assert local[0] % 16 == 0 and abs(local[0] - 96 * first / 224) <= 8


@pytest.mark.parametrize(
    "full, local, multiple", [(220, 24, 16), (40, 20, 16), (225, 10, 32), (96, 96, 16), (33, 7, 1)]
)
def test_no_view_is_ever_larger_than_when_full_or_shrinks(full, local, multiple):
    views = (View(size=full), View(size=full), View(size=local))
    growth = Growth(max(multiple, full // 2), 10, multiple)
    growth.check(views)
    grown = sizes(growth, views, range(12))
    for before, after in pairwise(grown):
        assert all(a <= b for a, b in zip(before, after, strict=True))
    assert grown[-1] == [full, full, local] and min(min(row) for row in grown) > 0
    for row in grown[:10]:
        assert all(side % multiple == 0 or side == view.size for side, view in zip(row, views, strict=True))


def test_nothing_but_the_size_changes():
    views = preset_views("dino", 224)
    for grown, view in zip(Growth(96, 4).views(views, 1), views, strict=True):
        changed = {name for name in vars(view) if getattr(view, name) != getattr(grown, name)}
        assert changed == {"size"}


@pytest.mark.parametrize(
    "growth, message",
    [
        (Growth(8, 10), "from 8 to 224 pixels; start at 16 to 224"),
        (Growth(240, 10), "from 240 to 224 pixels; start at 16 to 224"),
        (Growth(-16, 10), "from -16 to 224"),
        (Growth(96, 0), "in 0 epochs by multiples of 16; use at least 1"),
        (Growth(96, 10, 0), "in 10 epochs by multiples of 0; use at least 1"),
        (Growth(96, 10, 128), "start at 128 to 224"),
    ],
)
def test_growth_that_is_impossible_is_refused(growth, message, manifest):
    views = preset_views("simsiam", 224)
    with pytest.raises(DataError, match=message):
        growth.check(views)
    with pytest.raises(DataError, match=message):
        Loader(manifest, views, batch_size=4, growth=growth)


def loading(manifest, **options):
    return Loader(
        manifest, "multicrop", 26, image_size=48, local_crops=1, local_views=dict(size=16), threads=1, **options
    )


@pytest.mark.parametrize("photometric", ["dali", "torch"])
def test_batches_grow_at_the_epochs_and_begin_anywhere(manifest, photometric):
    options = dict(growth=Growth(16, 2, multiple=8), cutmix=CutMix(group=13), photometric=photometric)
    batches = list(loading(manifest, **options).iterate(0, 8))  # 3 steps per epoch
    expected = [(16, 8)] * 3 + [(32, 8)] * 3 + [(48, 16)] * 2
    assert [(batch.views[0].shape[-1], batch.views[2].shape[-1]) for batch in batches] == expected
    for batch, (size, _) in zip(batches, expected, strict=True):
        assert batch.views[0].shape == batch.views[1].shape == (26, 3, size, size)
        assert batch.mix.box.max() <= size and batch.mix.box.max() > size // 2
        boxes = batch.mix.box
        area = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
        assert torch.allclose(batch.mix.ratio, 1 - area / size**2)
        assert all(view.shape == batch.views[0].shape for view in batch.mix.apply(batch.views[:2]))
    for start in (2, 5, 7):
        for batch in loading(manifest, **options).iterate(start, min(start + 2, 8)):
            assert all(torch.equal(a, b) for a, b in zip(batch.views, batches[batch.step].views, strict=True))
            assert torch.equal(batch.mix.box, batches[batch.step].mix.box)


def test_full_size_is_what_it_is_without_growth(manifest):
    grown, plain = loading(manifest, growth=Growth(16, 2, multiple=8)), loading(manifest)
    for left, right in zip(grown.iterate(6, 8), plain.iterate(6, 8), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left.views, right.views, strict=True))
