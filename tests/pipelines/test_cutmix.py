"""CutMix: boxes, partners and ratios, from stateless randomness."""

import numpy as np
import pytest
import torch
from scipy import stats

from unigrad_fast.pipelines import CutMix, DataError, Loader, Mix
from unigrad_fast.pipelines.cutmix import _beta, draw_mix
from unigrad_fast.pipelines.philox import philox

SIZE = 20


def equal(one: Mix, other: Mix) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("partner", "ratio", "box"))


def test_a_mixed_view_holds_its_partners_pixels_in_the_box_and_its_own_elsewhere():
    mix = draw_mix(CutMix(group=4), seed=1, step=2, first=0, count=12, size=SIZE)
    views = [torch.rand(12, 3, SIZE, SIZE).to(memory_format=torch.channels_last) for _ in range(2)]
    before = [view.clone() for view in views]
    for number, mixed in enumerate(mix.apply(views)):
        for image in range(12):
            left, top, right, bottom = mix.box[number, image].tolist()
            expected = before[number][image].clone()
            partner = mix.partner[number, image]
            expected[:, top:bottom, left:right] = before[number][partner][:, top:bottom, left:right]
            assert torch.equal(mixed[image], expected)
            pasted = (bottom - top) * (right - left) / SIZE**2
            assert mix.ratio[number, image].item() == pytest.approx(1 - pasted, abs=1e-6)
    assert all(torch.equal(view, kept) for view, kept in zip(views, before, strict=True))


def test_boxes_lie_in_the_view_and_reach_its_borders_and_corners():
    mix = draw_mix(CutMix(), seed=0, step=0, first=0, count=16 * 64, size=SIZE)
    low, high = mix.box[..., :2], mix.box[..., 2:]
    assert (low >= 0).all() and (low <= high).all() and (high <= SIZE).all()
    assert (low == 0).any() and (high == SIZE).any()
    assert ((mix.ratio >= 0) & (mix.ratio <= 1)).all()


@pytest.mark.parametrize("group", [2, 3, 16])
def test_partners_are_others_of_the_group_and_each_image_is_one_partner(group):
    mix = draw_mix(CutMix(group=group), seed=3, step=5, first=0, count=48, size=SIZE)
    own = torch.arange(48)
    for partner in mix.partner:
        assert (partner != own).all() and torch.equal(partner // group, own // group)
        assert torch.equal(partner.sort().values, own)


def test_the_mix_of_a_global_batch_is_made_of_the_ranks_mixes():
    whole = draw_mix(CutMix(group=4), seed=1, step=7, first=0, count=24, size=SIZE)
    for ranks in (2, 3, 6):
        share = 24 // ranks
        parts = [draw_mix(CutMix(group=4), 1, 7, rank * share, share, SIZE) for rank in range(ranks)]
        assert torch.equal(torch.cat([p.ratio for p in parts], dim=1), whole.ratio)
        assert torch.equal(torch.cat([p.box for p in parts], dim=1), whole.box)
        partners = [part.partner + rank * share for rank, part in enumerate(parts)]
        assert torch.equal(torch.cat(partners, dim=1), whole.partner)


def test_steps_seeds_and_views_mix_differently_and_the_same_step_alike():
    first = draw_mix(CutMix(), 1, 2, 0, 32, 224)
    assert equal(first, draw_mix(CutMix(), 1, 2, 0, 32, 224))
    for other in (draw_mix(CutMix(), 1, 3, 0, 32, 224), draw_mix(CutMix(), 2, 2, 0, 32, 224)):
        assert (first.box != other.box).any(dim=-1).float().mean() > 0.9
        assert not torch.equal(first.partner, other.partner)
    assert (first.box[0] != first.box[1]).any(dim=-1).float().mean() > 0.9
    assert not torch.equal(*first.partner)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_the_share_of_mixed_images_is_the_probability(probability):
    mix = draw_mix(CutMix(probability=probability), 0, 0, 0, 16 * 250, 224)
    share = (mix.box[..., 2:] > mix.box[..., :2]).all(dim=-1).float().mean().item()
    assert share == pytest.approx(probability, abs=0.02)
    untouched = (mix.box[..., 2:] == mix.box[..., :2]).all(dim=-1)
    assert (mix.ratio[untouched] == 1).all()


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0, 2.0, 8.0])
def test_the_area_is_drawn_from_the_beta_distribution(alpha):
    bits = philox(0, 0, np.arange(20_000), stream=9, block=0)
    values = _beta(alpha, (bits[0] + 0.5) * 2.0**-32, bits[1])
    assert stats.kstest(values, stats.beta(alpha, alpha).cdf).pvalue > 0.01


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"probability": 1.5}, "probability 1.5"),
        ({"alpha": 0.0}, "alpha 0.0"),
        ({"group": 1}, "group of 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(DataError, match=message):
        CutMix(**settings)


def test_a_loader_mixes_every_step_the_same_alone_and_on_any_number_of_ranks(tree):
    from unigrad_fast.pipelines import Manifest

    manifest, cutmix = Manifest.from_folder(tree), CutMix(group=4)
    options = {"batch_size": 24, "image_size": 16, "cutmix": cutmix, "threads": 1}
    whole = list(Loader(manifest, **options).iterate(stop_step=6))
    (alone,) = Loader(manifest, **options).iterate(start_step=5, stop_step=6)
    assert equal(whole[5].mix, alone.mix) and not equal(whole[4].mix, whole[5].mix)
    parts = [
        next(iter(Loader(manifest, **options, rank=rank, world_size=3).iterate(start_step=5, stop_step=6)))
        for rank in range(3)
    ]
    mixed = [torch.cat(views) for views in zip(*(part.mix.apply(part.views) for part in parts), strict=True)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(mixed, alone.mix.apply(alone.views), strict=True))
    assert next(iter(Loader(manifest, batch_size=24, image_size=16, threads=1).iterate(stop_step=1))).mix is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cutmix": CutMix(group=16)}, "group of 16 does not divide the 24 images per rank; use 12"),
        ({"cutmix": CutMix(group=4), "world_size": 24}, "use more than 1 image per rank"),
        ({"cutmix": CutMix(group=4), "preset": "linear"}, "preset has 1"),
    ],
)
def test_what_cannot_be_mixed_is_refused_before_any_work(tree, options, message):
    from unigrad_fast.pipelines import Manifest

    with pytest.raises(DataError, match=message):
        Loader(Manifest.from_folder(tree), batch_size=24, **options)
