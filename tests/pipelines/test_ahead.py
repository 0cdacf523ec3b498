"""What a loader does before it is asked for: files, parameters and orders; and what a newly found bad image costs."""

from __future__ import annotations

import shutil
import threading
from collections import Counter

import bad_files
import numpy as np
import pytest
import torch

from unigrad_fast.pipelines import CutMix, DataError, Loader, Manifest, cpu_views, graph, loader, order
from unigrad_fast.pipelines.loader import MOST_AHEAD
from unigrad_fast.pipelines.reading.damage import TOGETHER, Damaged
from unigrad_fast.pipelines.reading.source import Source

BATCH = 6


def loading(manifest: Manifest, **options) -> Loader:
    return Loader(manifest, **{"batch_size": BATCH, "image_size": 32, "threads": 1, "prefetch": 1, **options})


@pytest.fixture
def copied(tree, tmp_path) -> Manifest:
    return Manifest.from_folder(shutil.copytree(tree, tmp_path / "tree"))


def counting_reads(manifest: Manifest) -> Counter:
    """How often each image's file is read from now on."""
    counts: Counter = Counter()
    read = manifest.read
    object.__setattr__(manifest, "read", lambda image: counts.update([image]) or read(image))
    return counts


def assert_same(batches, others) -> None:
    for one, other in zip(batches, others, strict=True):
        assert one.step == other.step and torch.equal(one.index, other.index) and one.failures == other.failures
        assert all(torch.equal(a, b) for a, b in zip(one.views, other.views, strict=True))


def test_reading_ahead_is_measured_in_bytes_between_prefetched_batches_and_a_limit(manifest):
    batch = manifest.total_bytes // len(manifest) * BATCH
    assert [loading(manifest, read_ahead=batches * batch).ahead for batches in (0, 3, 50, 10**4)] == [
        1, 3, 50, MOST_AHEAD,
    ]  # fmt: skip
    assert loading(manifest, prefetch=4, read_ahead=batch).ahead == 4
    assert loading(manifest, world_size=3, read_ahead=6 * (batch // 3)).ahead == 6, "a rank reads its own share"
    with pytest.raises(DataError, match="0 threads cannot read images; use at least 1"):
        loading(manifest, read_threads=0)


def test_reading_ahead_changes_nothing(copied):
    bad_files.BAD["truncated"](bad_files.Path(copied.path(int(loading(copied).indices(9)[1][2]))))
    as_it_was = list(loading(copied).iterate(0, 40))
    assert sum(len(batch.failures) for batch in as_it_was) >= 2, "in more than one epoch"
    assert_same(loading(copied, read_ahead=10**6, read_threads=5, prefetch=2).iterate(0, 40), as_it_was)


def test_so_many_files_are_read_at_once_as_there_are_threads(manifest):
    together = threading.Barrier(20)
    read = manifest.read
    object.__setattr__(manifest, "read", lambda image: (together.wait(20), read(image))[1])
    source = Source(
        manifest,
        lambda step: (0, np.arange(20)),
        last=1,
        ahead=0,
        timeout=60.0,
        seed=0,
        known={},
        damaged=Damaged(manifest),
        threads=20,
    )
    assert len(source.take(0).data) == 20
    source.close()


def on_a_gpus_path(manifest: Manifest, steps: int, **options):
    """Batches from the graph for a GPU, on the CPU, and the threads that drew their parameters."""
    batches, drew = loading(manifest, **options), []
    make, draw = batches._on_gpu, batches._draw
    batches._draw = lambda supply: drew.append(threading.current_thread()) or draw(supply)
    return [batches._batch(supply, [view.clone() for view in views]) for supply, views in make(0, steps)], drew


@pytest.mark.parametrize("photometric", ["dali", "torch"])
def test_a_gpus_parameters_are_drawn_by_another_thread(copied, photometric):
    bad = int(loading(copied).indices(1)[1][2])
    bad_files.BAD["truncated"](bad_files.Path(copied.path(bad)))
    options = {"photometric": photometric, "cutmix": CutMix(1.0, group=2)}
    made, drew = on_a_gpus_path(copied, 4, **options)
    assert drew and threading.current_thread() not in drew
    expected = list(loading(copied, **options).iterate(0, 4))
    for batch, same in zip(made, expected, strict=True):
        assert torch.equal(batch.index, same.index) and batch.failures == same.failures
        assert torch.equal(batch.mix.partner[0], same.mix.partner[0])
        for view, other in zip(batch.views, same.views, strict=True):
            assert (view - other).abs().mean() < 0.2, "but for the two ways to make it"
    assert made[1].replaced.tolist() == [place == 2 for place in range(BATCH)]


def test_closing_a_gpus_path_ends_its_thread(manifest):
    before = set(threading.enumerate())
    made = loading(manifest)._on_gpu(0, None)
    next(made)
    made.close()
    for thread in set(threading.enumerate()) - before:
        if thread.name in ("views", "image reader"):
            thread.join(20)
            assert not thread.is_alive()


def test_the_next_epochs_order_is_computed_by_another_thread_before_it_is_asked_for(manifest, monkeypatch):
    begun = []
    monkeypatch.setattr(loader, "begin_order", lambda *of: begun.append(of))
    batches = loading(manifest, seed=77)
    epoch = batches.steps_per_epoch
    list(batches.iterate(0, 2 * epoch + 1))
    assert begun == [(77, 1, len(manifest)), (77, 2, len(manifest))], "none for an epoch that is not reached"

    computed, philox = [], order.philox

    def watched(*given, **named):
        computed.append(threading.current_thread())
        return philox(*given, **named)

    monkeypatch.setattr(order, "philox", watched)
    order.begin_order(78, 1, len(manifest))
    for thread in threading.enumerate():
        if thread.name == "order of the next epoch":
            thread.join(20)
    order.epoch_order(78, 1, len(manifest))
    assert len(computed) == 1 and threading.current_thread() not in computed


def test_a_newly_found_bad_image_costs_few_passes_and_no_file_is_read_again(copied, monkeypatch):
    runs, build = [], graph.build_decoder

    def build_decoder(source, **options):
        pipeline = build(source, **options)
        run = pipeline.run
        monkeypatch.setattr(pipeline, "run", lambda *of: runs.append(options.get("batch_size", 1)) or run(*of))
        return pipeline

    size = 48
    asked = loading(copied, batch_size=size).indices(0)[1]
    bad_files.BAD["truncated"](bad_files.Path(copied.path(int(asked[17]))))
    reads = counting_reads(copied)
    monkeypatch.setattr(graph, "build_decoder", build_decoder)
    batches = list(loading(copied, batch_size=size, prefetch=2).iterate(0, 2))
    assert batches[0].replaced.nonzero().tolist() == [[17]]
    instead = int(batches[0].index[17])
    expected = Counter([*asked.tolist(), *batches[1].index.tolist(), instead])
    assert reads == expected
    looked = [number for number in runs if number != size]
    in_flight = 2 * size
    assert len(looked) <= in_flight // TOGETHER + 2 * TOGETHER.bit_length()


@pytest.mark.parametrize("bad", [8, 9])
def test_an_image_that_turns_out_bad_after_it_was_read_ahead_is_replaced_alone(manifest, bad):
    damaged, reads = Damaged(manifest), counting_reads(manifest)
    source = Source(
        manifest,
        lambda step: (0, np.arange(4 * step, 4 * step + 4)),
        last=3,
        ahead=2,
        timeout=60.0,
        seed=0,
        known={},
        damaged=damaged,
    )
    source.take(0)
    later = source._begun[2]
    with later.changed:
        later.changed.wait_for(lambda: not later._left, 20)
    damaged.add(bad, "it was found in another step")
    supply = source.take(2)
    assert supply.replaced.tolist() == [image == bad for image in (8, 9, 10, 11)]
    assert [(failure.image, failure.reason) for failure in supply.failures] == [(bad, "it was found in another step")]
    assert max(reads[image] for image in (8, 9, 10, 11)) == 1
    source.close()


def test_views_for_a_gpu_are_made_in_pinned_memory_when_asked(manifest, monkeypatch):
    asked, empty = [], torch.empty

    def watched(*shape, pin_memory=False, **named):
        if len(shape) == 4:
            asked.append(pin_memory)
        return empty(*shape, **named)

    monkeypatch.setattr(cpu_views.torch, "empty", watched)
    for pinned in (True, False):
        asked.clear()
        list(loading(manifest, pinned=pinned).iterate(0, 1))
        assert set(asked) == {pinned}
