import gc
import os
import shutil
import threading
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from unigrad_fast.pipelines import CutMix, DataError, Loader, Manifest, View
from unigrad_fast.pipelines.presets import Growth


def loader(manifest, batch_size=12, image_size=32, threads=1, **options):
    return Loader(manifest, batch_size=batch_size, image_size=image_size, threads=threads, **options)


def assert_same(left, right):
    """Bitwise."""
    assert torch.equal(left.index, right.index) and torch.equal(left.label, right.label)
    assert all(torch.equal(a, b) for a, b in zip(left.views, right.views, strict=True))


def join(batches):
    """The batches of ranks or micro-batches as one."""
    first = batches[0]
    return type(first)(
        views=[torch.cat(parts) for parts in zip(*(batch.views for batch in batches), strict=True)],
        index=torch.cat([batch.index for batch in batches]),
        label=torch.cat([batch.label for batch in batches]),
        step=first.step,
        replaced=torch.cat([batch.replaced for batch in batches]),
    )


def test_batch_holds_what_it_says(manifest):
    (batch,) = loader(manifest).iterate(5, 6)
    assert batch.step == 5 and batch.mix is None
    assert len(batch.views) == 2 and not torch.equal(*batch.views)
    for view in batch.views:
        assert view.shape == (12, 3, 32, 32) and view.dtype == torch.float32
        assert view.is_contiguous(memory_format=torch.channels_last)
    assert batch.index.dtype == batch.label.dtype == torch.int64
    assert batch.label.tolist() == manifest.labels[batch.index.numpy()].tolist()
    assert batch.replaced.dtype == torch.bool and not batch.replaced.any()


@pytest.mark.parametrize("photometric", ["dali", "torch"])
def test_views_are_channels_last_and_shared_with_no_other_batch(manifest, photometric):
    batches = list(loader(manifest, local_crops=1, photometric=photometric).iterate(0, 4))
    views = [view for batch in batches for view in batch.views]
    assert all(view.is_contiguous(memory_format=torch.channels_last) for view in views)
    assert len({view.untyped_storage().data_ptr() for view in views}) == 12
    kept = [view.clone() for view in views]
    for view in views[:3]:
        view.zero_()
    assert all(torch.equal(view, copy) for view, copy in zip(views[3:], kept[3:], strict=True))


def test_batches_stay_valid_while_later_ones_are_made_and_after_closing(manifest):
    batches = loader(manifest)
    kept = []
    for batch in batches.iterate(0, 6):
        kept.append((batch, [view.clone() for view in batch.views]))
    batches.close()
    gc.collect()
    for batch, copies in kept:
        assert all(torch.equal(view, copy) for view, copy in zip(batch.views, copies, strict=True))


def test_folder_without_labels_gives_minus_one(pictures):
    (batch,) = loader(Manifest.from_folder(pictures), batch_size=4).iterate(0, 1)
    assert batch.label.tolist() == [-1] * 4


def test_epoch_drops_what_does_not_fill_a_global_batch(manifest):
    assert loader(manifest, batch_size=20).steps_per_epoch == 5
    assert loader(manifest, batch_size=20, world_size=4).steps_per_epoch == 5
    assert loader(manifest, batch_size=20, accumulation_steps=2).steps_per_epoch == 10


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_global_batch_is_the_same_on_any_number_of_ranks(manifest, world_size):
    (alone,) = loader(manifest).iterate(9, 10)  # the second epoch
    ranks = [loader(manifest, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert_same(join([next(rank.iterate(9, 10)) for rank in ranks]), alone)


def everything(manifest, photometric="dali", **options):
    """All that changes a batch at once: 4 steps of 24 images per epoch, the views grow in two of them."""
    return loader(
        manifest,
        preset="dino",
        batch_size=24,
        local_crops=2,
        local_views=dict(size=16),
        cutmix=CutMix(group=2),
        growth=Growth(16, 2, multiple=8),
        photometric=photometric,
        seed=3,
        **options,
    )


@pytest.fixture(scope="module", params=["dali", "torch"])
def whole(request, tree, tmp_path_factory):
    """A loader's keywords, and its steps 0 to 9 in one go."""
    manifest = Manifest.from_folder(tree, tmp_path_factory.mktemp("cache"))
    return dict(photometric=request.param), list(everything(manifest, request.param).iterate(0, 10))


def assert_mixed_alike(left, right):
    assert_same(left, right)
    for name in ("partner", "ratio", "box"):
        assert torch.equal(getattr(left.mix, name), getattr(right.mix, name))
    for a, b in zip(left.mix.apply(left.views[:2]), right.mix.apply(right.views[:2]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("start", [1, 3, 4, 9])
def test_with_everything_a_step_alone_is_the_step_of_the_whole_run(manifest, whole, start):
    options, batches = whole
    assert [view.shape[-1] for view in batches[0].views] == [16, 16, 8, 8]
    assert [view.shape[-1] for view in batches[9].views] == [32, 32, 16, 16]
    for batch in everything(manifest, **options).iterate(start, min(start + 2, 10)):
        assert_mixed_alike(batch, batches[batch.step])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_with_everything_the_ranks_make_the_global_batch(manifest, whole, world_size):
    options, batches = whole
    ranks = [everything(manifest, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for step in (3, 9):
        parts = [next(rank.iterate(step, step + 1)) for rank in ranks]
        assert_same(join(parts), batches[step])
        for view in range(2):
            mixed = torch.cat([part.mix.apply(part.views[:2])[view] for part in parts])
            assert torch.equal(mixed, batches[step].mix.apply(batches[step].views[:2])[view])
            assert not torch.equal(mixed, batches[step].views[view])


@pytest.mark.parametrize("changed", [dict(threads=3), dict(prefetch=1), dict(prefetch=3, threads=2)])
def test_with_everything_threads_and_prefetching_change_nothing(manifest, whole, changed):
    options, batches = whole
    for batch in everything(manifest, **options, **changed).iterate(3, 6):
        assert_mixed_alike(batch, batches[batch.step])


def test_torch_and_dali_recolour_the_same_crops_differently(manifest):
    (left,), (right,) = (loader(manifest, photometric=name).iterate(0, 1) for name in ("dali", "torch"))
    assert torch.equal(left.index, right.index) and not torch.equal(left.views[0], right.views[0])
    plain = dict(jitter_probability=0.0, gray_probability=0.0, blur_probability=0.0)
    (left,), (right,) = (loader(manifest, photometric=name, **plain).iterate(0, 1) for name in ("dali", "torch"))
    for a, b in zip(left.views, right.views, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_micro_batches_of_an_optimizer_step_are_slices_of_its_batch(manifest):
    (alone,) = loader(manifest).iterate(9, 10)
    parts = loader(manifest, accumulation_steps=3).iterate(27, 30)
    assert_same(join(list(parts)), alone)


def test_micro_batches_on_ranks_are_slices_of_the_micro_batch(manifest):
    (part,) = loader(manifest, accumulation_steps=2).iterate(5, 6)
    ranks = [loader(manifest, accumulation_steps=2, rank=rank, world_size=3) for rank in range(3)]
    assert_same(join([next(rank.iterate(5, 6)) for rank in ranks]), part)


def test_step_is_bitwise_the_same_without_those_before_it(manifest):
    stream = list(loader(manifest).iterate(0, 11))  # over the end of the epoch of 8 steps
    assert [batch.step for batch in stream] == list(range(11))
    for start in (3, 8, 10):
        resumed = list(loader(manifest).iterate(start, 11))
        for batch in resumed:
            assert_same(batch, stream[batch.step])
        assert len(resumed) == 11 - start


@pytest.mark.parametrize("options", [dict(threads=3), dict(prefetch=1), dict(prefetch=5)])
def test_threads_and_prefetching_change_nothing(manifest, options):
    pairs = zip(loader(manifest).iterate(6, 9), loader(manifest, **options).iterate(6, 9), strict=True)
    for left, right in pairs:
        assert_same(left, right)


def test_same_image_is_augmented_anew_in_another_epoch(tmp_path, pictures):
    shutil.copy(pictures / "0.jpg", tmp_path)
    first, second = loader(Manifest.from_folder(tmp_path), batch_size=1).iterate(0, 2)
    assert not torch.equal(first.views[0], second.views[0])


def test_seed_changes_order_and_augmentation(manifest):
    (first,), (second,) = (loader(manifest, seed=seed).iterate(0, 1) for seed in (0, 1))
    assert not torch.equal(first.index, second.index)
    assert not torch.equal(first.views[0], second.views[0])


def test_endless_iteration_goes_on_over_epochs(manifest):
    batches = loader(manifest, batch_size=96)
    seen = [set(batch.index.tolist()) for batch in islice(batches.iterate(), 3)]
    assert all(len(indices) == 96 for indices in seen) and seen[0] != seen[1] != seen[2]


def test_nothing_is_made_for_an_empty_range(manifest):
    assert list(loader(manifest).iterate(4, 4)) == []


def test_closing_ends_iteration(manifest):
    batches = loader(manifest)
    stream = batches.iterate()
    next(stream)
    batches.close()
    assert list(stream) == []


def test_closing_ends_the_iteration_of_another_thread(manifest):
    batches = loader(manifest, image_size=16)
    began, ended = threading.Event(), []

    def consume():
        try:
            for _ in batches.iterate():
                began.set()
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    assert began.wait(60)
    batches.close()
    thread.join(60)
    assert ended == [None]


def test_closing_waits_for_the_batch_that_another_thread_is_at(manifest, monkeypatch):
    batches = loader(manifest, image_size=16)
    inside, go_on, ended = threading.Event(), threading.Event(), []

    def slow(self, supply, views):
        inside.set()
        go_on.wait(60)
        return supply

    monkeypatch.setattr(Loader, "_batch", slow)
    stream = batches.iterate()
    consumer = threading.Thread(target=lambda: ended.append(len(list(stream))), daemon=True)
    consumer.start()
    assert inside.wait(60)
    closer = threading.Thread(target=batches.close, daemon=True)
    closer.start()
    while not stream._ended:  # until it has asked
        pass
    go_on.set()
    closer.join(60)
    consumer.join(60)
    assert ended == [1]


def test_views_may_be_given_instead_of_a_name(manifest):
    views = (View(size=32, blur_probability=0.0), View(size=16), View(size=16, solarize_probability=1.0))
    (batch,) = Loader(manifest, views, batch_size=4, threads=1).iterate(0, 1)
    assert [view.shape[-1] for view in batch.views] == [32, 16, 16]


def test_override_changes_every_view_of_a_preset(manifest):
    assert [view.scale for view in loader(manifest, scale=(0.5, 1.0)).views] == [(0.5, 1.0)] * 2


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(batch_size=100, world_size=8), "batch size 100 does not divide over 8 ranks; use 96 or 104"),
        (dict(batch_size=2, world_size=4), "does not divide over 4 ranks; use 4$"),
        (
            dict(batch_size=9, world_size=2, accumulation_steps=2),
            "2 ranks and 2 accumulation steps; use 8 or 12",
        ),
        (dict(batch_size=0), "batch size 0"),
        (dict(batch_size=12.0), r"batch_size 12\.0 is not an integer"),
        (dict(rank="0"), "rank '0' is not an integer"),
        (dict(batch_size=104), "103 images cannot fill a batch of 104; use a batch size of 103 or less"),
        (dict(batch_size=104, world_size=4), "use a batch size of 100 or less, or at least 104 images$"),
        (dict(batch_size=200, world_size=100), "use a batch size of 100, or at least 200 images$"),
        (dict(batch_size=104, world_size=104), "cannot fill a batch of 104; use at least 104 images$"),
        (dict(rank=2, world_size=2), "rank 2 of 2"),
        (dict(threads=0), "0 threads"),
        (dict(prefetch=0), "prefetch 0"),
        (dict(timeout=0), "timeout of 0 s .* use 60"),
        (dict(photometric="numpy"), "photometric 'numpy' is unknown; use 'dali' or 'torch'"),
        (dict(hw_decoder_load=1.5), r"load 1\.5 is not a share"),
        (dict(growth=Growth(8, 4)), "cannot grow from 8 to 32 pixels; start at 16 to 32"),
        (dict(device="meta"), "device meta"),
        (dict(preset="none"), "preset 'none' is unknown"),
        (dict(scale=(2.0, 3.0)), "more than the whole image"),
        (dict(sharpness=1), "no field sharpness"),
    ],
)
def test_wrong_option_is_refused_with_a_remedy(manifest, options, message):
    with pytest.raises(DataError, match=message):
        loader(manifest, **options)


def test_the_remedy_for_too_few_images_is_never_a_batch_of_one(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"1 image cannot fill a batch of 3; use at least 3 images$"):
        loader(Manifest.from_folder(tmp_path), batch_size=3)
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png")
    with pytest.raises(DataError, match=r"use a batch size of 2, or at least 3 images$"):
        loader(Manifest.from_folder(tmp_path), batch_size=3)


def test_recipe_is_the_older_name_of_preset(manifest):
    with pytest.warns(FutureWarning, match=r"Loader\(recipe=...\) is now Loader\(preset=...\)"):
        views = loader(manifest, recipe="byol").views
    assert views == loader(manifest, preset="byol").views != loader(manifest).views
    assert loader(manifest).views == loader(manifest, preset="simsiam").views
    with (
        pytest.warns(FutureWarning),
        pytest.raises(DataError, match="recipe 'byol' and preset 'swav' are both given; leave out recipe"),
    ):
        loader(manifest, recipe="byol", preset="swav")


def test_what_is_no_manifest_is_refused_with_the_way_to_one(manifest):
    class ImageFolder:  # torchvision's, as far as it matters
        root = "/data/images"

    with pytest.raises(DataError, match=r"a ImageFolder is not a Manifest; use Manifest.from_folder\('/data/images'\)"):
        loader(ImageFolder())
    with pytest.raises(DataError, match=r"a str is not a Manifest; use Manifest.from_folder\(FOLDER\)"):
        loader("/data/images")
    with pytest.raises(DataError, match=r"a list is not a Manifest; use Manifest.open\(DATASET\)"):
        loader([b""])


@pytest.mark.parametrize("photometric", ["dali", "torch"])
def test_a_default_dtype_of_float64_changes_no_batch(manifest, photometric):
    expected = next(iter(loader(manifest, photometric=photometric).iterate(0, 1)))
    torch.set_default_dtype(torch.float64)
    try:
        found = next(iter(loader(manifest, photometric=photometric).iterate(0, 1)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(found, expected)


def test_negative_start_is_refused(manifest):
    with pytest.raises(DataError, match=r"start step -1"):
        loader(manifest).iterate(-1)


TURNED = Image.Exif()
TURNED[0x0112] = 6


@pytest.mark.parametrize(
    "mode, name, options",
    [
        ("L", "gray.jpg", {}),
        ("CMYK", "print.jpg", {}),
        ("RGB", "progressive.jpg", dict(progressive=True)),
        ("RGB", "turned.jpg", dict(exif=TURNED)),
        ("RGBA", "transparent.png", {}),
        ("P", "palette.png", {}),
        ("I;16", "deep.png", {}),
        ("RGB", "really_png.jpg", dict(format="PNG")),
        ("RGB", "picture.webp", {}),
        ("RGB", "picture.bmp", {}),
    ],
)
def test_unusual_files_are_decoded(tmp_path, mode, name, options):
    Image.new("RGB", (48, 40), (250, 250, 250)).convert("L" if mode == "I;16" else mode).convert(mode).save(
        tmp_path / name, **options
    )
    manifest = Manifest.from_folder(tmp_path)
    assert manifest.sizes.tolist() == [[48, 40]]
    (batch,) = loader(manifest, batch_size=1, scale=(1.0, 1.0), ratio=(1.2, 1.2)).iterate(0, 1)
    assert all(view.isfinite().all() for view in batch.views)


def test_ranks_share_no_image_of_a_step(manifest):
    ranks = [loader(manifest, rank=rank, world_size=4) for rank in range(4)]
    assert len(np.unique(np.concatenate([rank.indices(0)[1] for rank in ranks]))) == 12


@pytest.mark.parametrize(
    ("cores", "allowed", "ranks", "threads"),
    [
        (16, 16, 1, 15),  # one process
        (96, 96, 8, 11),  # torchrun: all ranks may use all cores
        (96, 12, 8, 11),  # srun: each rank has cores of its own
        (2, 2, 2, 1),
        (1, 1, 1, 1),
    ],
)
def test_a_rank_decodes_on_its_share_of_the_cores_less_one(manifest, monkeypatch, cores, allowed, ranks, threads):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert Loader(manifest, batch_size=4, image_size=16).threads == threads


@pytest.mark.parametrize("world_size, accumulation_steps", [(4, 1), (2, 2), (5, 1)])
def test_each_image_comes_at_most_once_per_epoch_and_all_but_the_tail_exactly_once(
    manifest, world_size, accumulation_steps
):
    ranks = [
        loader(manifest, batch_size=20, world_size=world_size, rank=rank, accumulation_steps=accumulation_steps)
        for rank in range(world_size)
    ]
    per_epoch = ranks[0].steps_per_epoch
    left_out = []
    for epoch in range(3):
        found = [rank.indices(step) for rank in ranks for step in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
        assert {number for number, _ in found} == {epoch}
        taken = np.concatenate([images for _, images in found])
        assert len(taken) == len(set(taken.tolist())) == 100
        left_out.append(frozenset(range(103)) - set(taken.tolist()))
    assert len(set(left_out)) == 3


def test_batches_of_an_epoch_hold_the_images_that_were_announced(manifest):
    ranks = [loader(manifest, batch_size=20, image_size=16, world_size=4, rank=rank) for rank in range(4)]
    taken = [image for rank in ranks for batch in rank.iterate(5, 10) for image in batch.index.tolist()]
    assert taken == [image for rank in ranks for step in range(5, 10) for image in rank.indices(step)[1].tolist()]
    assert len(set(taken)) == 100


@pytest.mark.timeout(60)
def test_a_pipe_among_the_images_does_not_hold_up_the_listing(tree, tmp_path):
    shutil.copytree(tree, tmp_path / "tree")
    os.mkfifo(tmp_path / "tree/class0/pipe.jpg")
    manifest = Manifest.open(tmp_path / "tree")
    assert [manifest.path(i) for i in manifest.unreadable()] == [str(tmp_path / "tree/class0/pipe.jpg")]
