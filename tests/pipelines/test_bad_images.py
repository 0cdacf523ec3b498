"""Images that cannot be used are replaced, and nothing else changes."""

import os
import shutil
import tarfile
from contextlib import closing

import bad_files
import numpy as np
import pytest
import torch
from PIL import Image

from unigrad_fast.pipelines import DataError, EvaluationLoader, Loader, Manifest, graph, stream
from unigrad_fast.pipelines.files.open_files import opened
from unigrad_fast.pipelines.reading.damage import Damaged
from unigrad_fast.pipelines.reading.replacement import BLANK, TRIES, substitute
from unigrad_fast.pipelines.reading.source import THREADS
from unigrad_fast.pipelines.reading.supply import Supply

STEPS = 6
BATCH = 6


def loading(manifest, batch_size=BATCH, threads=1, prefetch=1, **options):
    return Loader(manifest, batch_size=batch_size, image_size=32, threads=threads, prefetch=prefetch, **options)


def run(manifest, start=0, stop=STEPS, **options):
    return list(loading(manifest, **options).iterate(start, stop))


@pytest.fixture(scope="module")
def good(tree, tmp_path_factory):
    """Batches of the undamaged tree."""
    return run(Manifest.from_folder(tree, tmp_path_factory.mktemp("cache")))


@pytest.fixture
def copied(tree, tmp_path):
    """A manifest of a tree that may be damaged."""
    return Manifest.from_folder(shutil.copytree(tree, tmp_path / "tree"))


@pytest.fixture
def make_fifo():
    """Makes files that never answer; what waits for them is released at the end."""
    made = []

    def make(path):
        os.unlink(path)
        os.mkfifo(path)
        made.append(path)

    yield make
    for path in made:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def pack(manifest, folder, damaged=None, count=2):
    """The manifest's images in tar shards, in its order; `damaged` has the bytes of some of them."""
    folder.mkdir()
    parts = np.array_split(np.arange(len(manifest)), count)
    for shard, part in enumerate(parts):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for i in part.tolist():
                content = (damaged or {}).get(i, manifest.read(i))
                for name, data in ((f"{i:03}.jpg", content), (f"{i:03}.cls", str(manifest.labels[i]).encode())):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, bad_files.io.BytesIO(data))
    return Manifest.open(folder)


def places_of(batch, other):
    return (batch.index != other.index).nonzero().flatten().tolist()


def assert_same(left, right, but=()):
    """Bitwise, at all places but some."""
    rest = [place for place in range(len(left.index)) if place not in but]
    assert left.step == right.step
    for a, b in zip((left.index, left.label, *left.views), (right.index, right.label, *right.views), strict=True):
        assert torch.equal(a[rest], b[rest])


def assert_replaced(batches, good, bad, labels, reason=""):
    """That exactly the images {(step, place): how many candidates failed} were replaced, and told of."""
    for batch, whole in zip(batches, good, strict=True):
        here = {place: tries for (step, place), tries in bad.items() if step == batch.step}
        assert_same(batch, whole, here)
        assert batch.replaced.tolist() == [place in here for place in range(len(batch.index))]
        failed = []
        for place, tries in here.items():
            asked = int(whole.index[place])
            epoch = batch.step // (len(labels) // BATCH)
            chain = [asked, *(substitute(0, epoch, asked, attempt, len(labels)) for attempt in range(1, tries + 1))]
            assert batch.index[place] == chain[-1]
            failed += chain[:-1]
            for view, as_it_was in zip(batch.views, whole.views, strict=True):
                assert view[place].isfinite().all() and not torch.equal(view[place], as_it_was[place])
        assert [failure.image for failure in batch.failures] == sorted(failed)
        assert all(failure.step == batch.step and reason in failure.reason for failure in batch.failures)
        assert batch.label.tolist() == labels[batch.index.numpy()].tolist()


REASONS = {
    "truncated": "decoded",
    "missing end marker": "decoded",
    "garbage": "",
    "header of 100 bytes": "",
    "GIF": "",
    "truncated PNG": "decoded",
    "empty": "",
    "missing": "",
    "unreadable": "",
}


def test_every_kind_of_bad_file_is_tried():
    assert REASONS.keys() == bad_files.BAD.keys()


@pytest.mark.parametrize("kind", bad_files.BAD)
def test_image_damaged_before_the_listing_is_replaced(copied, good, kind, tmp_path):
    asked = int(good[3].index[4])
    path = copied.path(asked)
    bad_files.BAD[kind](bad_files.Path(path))
    listed = Manifest.from_folder(copied.root, tmp_path / "other")
    assert len(listed) == len(copied)
    batches = run(listed)
    assert_replaced(batches, good, {(3, 4): 1}, copied.labels, REASONS[kind])
    assert [failure.path for failure in batches[3].failures] == [path] and batches[3].failures[0].reason


@pytest.mark.parametrize("kind", [*bad_files.BAD, "removed", "resized", "became a folder"])
def test_image_damaged_while_iterating_is_replaced(copied, good, kind):
    first = 10
    whole = run(copied, first, first + 12)
    asked = int(whole[10].index[2])
    stream = loading(copied).iterate(first, first + 12)
    batches = [next(stream)]
    path = bad_files.Path(copied.path(asked))
    if kind == "removed":
        path.unlink()
    elif kind == "resized":
        Image.new("RGB", (5, 7)).save(path)
    elif kind == "became a folder":
        path.unlink()
        path.mkdir()
    else:
        bad_files.BAD[kind](path)
    batches += stream
    assert_replaced(batches, whole, {(first + 10, 2): 1}, copied.labels)
    (failure,) = batches[10].failures
    assert failure.path == str(path)
    expected = {
        "removed": "no such file",
        "missing": "no such file",
        "unreadable": "cannot be opened",
        "empty": "empty",
        "resized": "5x7 now, but was {}x{}".format(*copied.sizes[asked]),
        "became a folder": "directory",
        "garbage": "not an image",
    }.get(kind, "decoded")
    assert expected in failure.reason


@pytest.mark.parametrize("kind", bad_files.GOOD)
def test_odd_image_that_can_be_decoded_is_not_replaced(copied, good, kind):
    asked = int(good[1].index[2])
    path = bad_files.Path(copied.path(asked))
    bad_files.GOOD[kind](path)
    batches = run(Manifest.from_folder(copied.root), 0, 3)
    for batch, whole in zip(batches, good, strict=False):
        assert_same(batch, whole, [2] if batch.step == 1 else [])
        assert not batch.replaced.any() and not batch.failures
    assert batches[1].index[2] == asked and not torch.equal(batches[1].views[0][2], good[1].views[0][2])


def test_substitute_is_augmented_as_if_its_file_stood_in_the_place_of_the_bad_one(copied, good, tmp_path):
    asked = int(good[2].index[3])
    instead = substitute(0, 0, asked, 1, len(copied))
    os.truncate(copied.path(asked), 0)
    batch = run(copied, 2, 3)[0]
    shutil.copy(copied.path(instead), copied.path(asked))
    (same,) = run(Manifest.from_folder(copied.root, tmp_path / "other"), 2, 3)
    assert batch.index[3] == instead and same.index[3] == asked
    assert all(torch.equal(a, b) for a, b in zip(batch.views, same.views, strict=True))


@pytest.mark.parametrize("prefetch", [1, 4])
def test_many_bad_images_in_first_last_and_neighbouring_batches(copied, good, prefetch):
    bad = {(0, 0): 1, (0, 5): 1, (1, 3): 1, (2, 0): 1, (2, 1): 1, (2, 2): 1, (4, 5): 1, (5, 0): 1, (5, 5): 1}
    kinds = ["truncated", "garbage", "GIF", "empty", "missing", "truncated", "truncated PNG", "unreadable", "truncated"]
    for (step, place), kind in zip(bad, kinds, strict=True):
        bad_files.BAD[kind](bad_files.Path(copied.path(int(good[step].index[place]))))
    gone = {int(good[step].index[place]) for step, place in bad}
    assert not any(substitute(0, 0, image, 1, len(copied)) in gone for image in gone), "take other places"
    assert_replaced(run(copied, prefetch=prefetch), good, bad, copied.labels)


def test_whole_batch_of_bad_images_is_replaced(copied, good):
    for image in good[3].index.tolist():
        bad_files.BAD["truncated"](bad_files.Path(copied.path(image)))
    batches = run(copied)
    assert batches[3].replaced.all() and len(batches[3].failures) >= BATCH
    for step in (0, 1, 2, 4, 5):
        assert_same(batches[step], good[step])


def test_bad_substitute_is_replaced_in_turn(copied, good):
    asked = int(good[1].index[0])
    chain = [asked, *(substitute(0, 0, asked, attempt, len(copied)) for attempt in (1, 2))]
    for image, kind in zip(chain, ("truncated", "truncated PNG", "missing"), strict=True):
        bad_files.BAD[kind](bad_files.Path(copied.path(image)))
    batch = run(copied, 1, 2)[0]
    assert_replaced([batch], [good[1]], {(1, 0): 3}, copied.labels)


def test_substitute_is_another_image_chosen_evenly():
    for count in (2, 3, 10):
        taken = [substitute(5, 1, image, attempt, count) for image in range(count) for attempt in range(1, 200)]
        pairs = np.reshape(taken, (count, -1))
        assert not (pairs == np.arange(count)[:, None]).any()
        assert all(len(set(row)) == count - 1 for row in pairs.tolist())
    assert substitute(5, 1, 0, 1, 1) == 0
    assert len({substitute(seed, epoch, 7, 1, 10**6) for seed in (0, 1) for epoch in (0, 1)}) == 4


@pytest.fixture
def damaged(copied, good):
    """Bad images of several kinds; what the batches then are."""
    for step, place, kind in ((1, 5, "truncated"), (2, 0, "empty"), (2, 4, "GIF"), (4, 3, "missing")):
        bad_files.BAD[kind](bad_files.Path(copied.path(int(good[step].index[place]))))
    batches = run(copied)
    assert sum(int(batch.replaced.sum()) for batch in batches) == 4
    return batches


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_and_any_start_replace_alike(copied, damaged, world_size):
    ranks = [run(copied, 2, 5, rank=rank, world_size=world_size) for rank in range(world_size)]
    for whole, *parts in zip(damaged[2:5], *ranks, strict=True):
        assert torch.equal(whole.index, torch.cat([part.index for part in parts]))
        assert torch.equal(whole.replaced, torch.cat([part.replaced for part in parts]))
        for number, view in enumerate(whole.views):
            assert torch.equal(view, torch.cat([part.views[number] for part in parts]))
        assert {failure.image for failure in whole.failures} == {f.image for part in parts for f in part.failures}


@pytest.mark.parametrize("options", [dict(threads=3), dict(prefetch=3), dict(threads=2, prefetch=5)])
def test_threads_and_prefetching_do_not_change_what_replaces(copied, damaged, options):
    for batch, same in zip(run(copied, **options), damaged, strict=True):
        assert_same(batch, same)
        assert torch.equal(batch.replaced, same.replaced) and batch.failures == same.failures


def test_file_that_does_not_answer_is_replaced_and_again_when_it_is_known(copied, good, make_fifo, tree):
    asked = int(good[1].index[4])
    make_fifo(copied.path(asked))
    batches = run(copied, 0, 3, timeout=0.5)
    assert_replaced(batches, good[:3], {(1, 4): 1}, copied.labels, "could not be read within 0.5 s")

    known = {(failure.step, failure.image): failure.reason for batch in batches for failure in batch.failures}
    assert list(known) == [(1, asked)]
    answers = Manifest.from_folder(tree)
    for options in (dict(), dict(threads=2, prefetch=3)):
        for batch, same in zip(run(answers, 0, 3, known=known, **options), batches, strict=True):
            assert_same(batch, same)
            assert torch.equal(batch.replaced, same.replaced)
            assert [f.reason for f in batch.failures] == [f.reason for f in same.failures]
    assert_same(run(answers, 1, 2, known={(2, asked): "in another step"})[0], good[1])


def test_substitute_that_does_not_answer_is_replaced_and_known(copied, good, make_fifo, tree):
    asked = int(good[1].index[4])
    instead = substitute(0, 0, asked, 1, len(copied))
    for image in (asked, instead):
        make_fifo(copied.path(image))
    (batch,) = run(copied, 1, 2, timeout=0.5)
    assert_replaced([batch], [good[1]], {(1, 4): 2}, copied.labels, "could not be read within 0.5 s")
    known = {(failure.step, failure.image): failure.reason for failure in batch.failures}
    assert_same(run(Manifest.from_folder(tree), 1, 2, known=known)[0], batch)


def test_more_files_that_do_not_answer_than_there_are_threads(copied, good, make_fifo):
    stalled = [int(image) for batch in good[:2] for image in batch.index]
    assert len(stalled) > THREADS
    for image in stalled:
        make_fifo(copied.path(image))
    batches = run(copied, 0, 4, timeout=0.5)
    assert all(batch.replaced.all() for batch in batches[:2])
    assert_same(batches[3], good[3])


def test_folder_that_vanished_ends_with_a_message(copied):
    stream = loading(copied).iterate(0, 30)
    next(stream)
    shutil.rmtree(copied.root)
    with pytest.raises(
        DataError, match=rf"{copied.root}/.*neither it nor any of {TRIES} .*no such file.*check the storage"
    ) as error:
        list(stream)
    assert "Error" not in str(error.value)


def test_storage_that_answers_nothing_ends_with_a_message(tmp_path, make_fifo, pictures):
    manifest = Manifest.from_folder(shutil.copytree(pictures, tmp_path / "pictures"))
    for image in range(len(manifest)):
        make_fifo(manifest.path(image))
    with pytest.raises(DataError, match=r"neither it nor 2 substitutes could be read within 0\.05 s.*storage"):
        run(manifest, 0, 1, batch_size=1, timeout=0.05)


def test_closing_does_not_wait_for_a_file_that_does_not_answer(copied, make_fifo):
    batches = loading(copied, timeout=1e6)
    make_fifo(copied.path(int(batches.indices(1)[1][0])))
    stream = batches.iterate()
    assert next(stream).step == 0
    batches.close()
    assert list(stream) == []


def counted(monkeypatch):
    """The calls that make a decoder."""
    made, build = [], graph.build_decoder

    def build_decoder(*arguments, **options):
        made.append(options)
        return build(*arguments, **options)

    monkeypatch.setattr(graph, "build_decoder", build_decoder)
    return made


def test_corrupt_image_is_decoded_once(copied, good, monkeypatch):
    asked = int(good[1].index[4])
    bad_files.BAD["truncated"](bad_files.Path(copied.path(asked)))
    batches, made = loading(copied), counted(monkeypatch)
    first = list(batches.iterate(0, 3))
    assert len(made) > 1
    made.clear()
    for start in (0, 1):
        for batch in batches.iterate(start, 3):
            assert_same(batch, first[batch.step])
            assert batch.failures == first[batch.step].failures
    assert len(made) == 2  # one for each iteration


def test_repaired_image_is_used_again(copied, good, tree):
    asked = int(good[1].index[4])
    path = copied.path(asked)
    bad_files.BAD["truncated"](bad_files.Path(path))
    batches = loading(copied)
    (bad,) = batches.iterate(1, 2)
    assert bad.replaced[4]
    shutil.copyfile(os.path.join(tree, os.path.relpath(path, copied.root)), path)
    (repaired,) = batches.iterate(1, 2)
    assert_same(repaired, good[1])
    assert not repaired.replaced.any() and not repaired.failures


def test_damaged_finds_the_bad_among_steps_that_are_on_their_way(copied):
    found = Damaged(copied)
    bad_files.BAD["truncated"](bad_files.Path(copied.path(7)))
    Image.new("RGB", (5, 7)).save(copied.path(8))
    supplies = []
    for step, images in enumerate(([2, 3], [-1, 7], [8, 4])):
        data = [np.frombuffer(copied.read(image), np.uint8) if image >= 0 else BLANK for image in images]
        supplies.append(Supply(step, 0, np.array(images), np.array(images), data))
    assert not found.find(supplies[:1], None)
    assert found.find(supplies, None)
    assert "decoded" in found.reason(7) and "5x7 now" in found.reason(8)
    assert [image for image in range(len(copied)) if found.reason(image)] == [7, 8]


def test_file_that_changes_all_the_time_ends_with_a_message(copied, monkeypatch):
    bad_files.BAD["truncated"](bad_files.Path(copied.path(int(loading(copied).indices(0)[1][0]))))
    states = iter(range(10**6))
    monkeypatch.setattr(Manifest, "state", lambda self, image: (0, next(states)))
    monkeypatch.setattr(stream, "BREAKS", 5)
    with pytest.raises(DataError, match=r"step 0 .* 5 times, .*; check whether something is changing the files"):
        run(copied)


def test_damaged_remembers_until_size_or_time_changes(copied):
    found = Damaged(copied)
    assert found.reason(5) is None
    found.add(5, "why")
    assert found.reason(5) == "why" and found.reason(6) is None
    os.utime(copied.path(5), (1, 1))
    assert found.reason(5) is None
    found.add(5, "again")
    assert found.reason(5) == "again"
    os.truncate(copied.path(5), 7)
    os.utime(copied.path(5), (1, 1))
    assert found.reason(5) is None
    os.unlink(copied.path(5))
    assert found.reason(5) is None
    copied.mark_unusable([9])
    assert "scan" in found.reason(9)


# Shards.


@pytest.mark.parametrize("kind", ["truncated", "garbage", "GIF", "truncated PNG", "empty"])
def test_bad_image_in_a_shard_is_replaced(manifest, copied, good, kind, tmp_path):
    asked = int(good[3].index[4])
    path = bad_files.Path(copied.path(asked))
    bad_files.BAD[kind](path)
    packed = pack(manifest, tmp_path / "shards", {asked: path.read_bytes()})
    batches = run(packed)
    assert_replaced(batches, good, {(3, 4): 1}, manifest.labels)
    assert batches[3].failures[0].path == packed.path(asked) and f"{asked:03}.jpg" in packed.path(asked)


def test_shards_give_what_a_folder_gives(manifest, good, tmp_path):
    for batch, whole in zip(run(pack(manifest, tmp_path / "shards")), good, strict=True):
        assert_same(batch, whole)


def test_images_of_a_shard_that_vanished_are_replaced(manifest, good, tmp_path):
    packed = pack(manifest, tmp_path / "shards", count=8)
    os.unlink(tmp_path / "shards/3.tar")
    opened.cache_clear()  # as in a process that begins now
    lost = range(39, 52)
    assert "/3.tar/" in packed.path(39) and "/3.tar/" in packed.path(51) and "/3.tar/" not in packed.path(52)
    batches = run(packed)
    for batch, whole in zip(batches, good, strict=True):
        gone = [place for place, image in enumerate(whole.index.tolist()) if image in lost]
        assert_same(batch, whole, gone)
        assert batch.replaced.nonzero().flatten().tolist() == gone
        assert not set(batch.index.tolist()) & set(lost)
        assert all("no such file" in failure.reason for failure in batch.failures)
    assert any(batch.replaced.any() for batch in batches)


def test_shards_that_all_vanished_end_with_a_message(manifest, tmp_path):
    packed = pack(manifest, tmp_path / "shards")
    shutil.rmtree(tmp_path / "shards")
    opened.cache_clear()
    with pytest.raises(DataError, match=r"shards/[01]\.tar/\d+\.jpg: neither it nor"):
        run(packed)


# Refusals of a GPU.


@pytest.fixture
def refusing(monkeypatch):
    """A stand-in for the decoder of "device 0", which decodes all but some files; a set of their bytes."""
    refused, build = set(), graph.build_decoder
    garbage = np.frombuffer(b"what only this device takes it for " * 9, np.uint8)

    def build_decoder(source, *, device_id=None, **options):
        def changed(info):
            images, *rest = source(info)
            return [[garbage if image.tobytes() in refused else image for image in images], *rest]

        return build(changed if device_id == 0 else source, **options)

    monkeypatch.setattr(graph, "build_decoder", build_decoder)
    return refused


@pytest.mark.parametrize("kind", [None, *bad_files.GOOD])
def test_image_that_only_the_gpu_refuses_is_used(copied, good, refusing, monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    asked = int(good[2].index[1])
    if kind:
        bad_files.GOOD[kind](bad_files.Path(copied.path(asked)))
        copied = Manifest.from_folder(copied.root, "/nonexistent")
    bad = int(good[1].index[3])
    bad_files.BAD["truncated"](bad_files.Path(copied.path(bad)))

    def decode(device_id):
        batches = loading(copied)
        with closing(batches._source(5)) as source:
            made = stream.run_pipeline(
                source,
                lambda feed: graph.build_decoder(feed, batch_size=BATCH, prefetch=2, device_id=device_id),
                lambda supply: [supply.data],
                device_id,
            )
            return batches.damaged, [(supply, [np.array(image) for image in images]) for supply, (images,) in made]

    _, on_cpu = decode(None)
    content = copied.read(asked)
    refusing.add(content)
    found, on_gpu = decode(0)
    for (supply, images), (same, as_they_are) in zip(on_gpu, on_cpu, strict=True):
        assert supply.step == same.step and np.array_equal(supply.index, same.index)
        assert supply.failures == same.failures
        assert all(np.array_equal(a, b) for a, b in zip(images, as_they_are, strict=True))
    assert on_gpu[2][0].index[1] == asked and on_gpu[1][0].replaced.tolist() == [place == 3 for place in range(BATCH)]
    assert found.reason(asked) is None and found.reason(bad)

    data = np.frombuffer(content, np.uint8)
    cut = data[: len(data) // 2]
    assert found.prepared(asked, cut) is cut
    handed_on = found.prepared(asked, data)
    assert handed_on.tobytes().startswith(b"\x89PNG") and found.prepared(asked + 1, data) is data
    with Image.open(bad_files.io.BytesIO(handed_on)) as image:
        assert np.array_equal(np.array(image), on_cpu[2][1][1])


def test_failure_that_no_image_explains_is_not_swallowed(manifest, monkeypatch):
    build = graph.build_decoder

    def build_decoder(source, **options):
        pipeline = build(source, **options)
        if options.get("batch_size") == BATCH:
            monkeypatch.setattr(pipeline, "run", fail)
        return pipeline

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(graph, "build_decoder", build_decoder)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(manifest)


# Evaluation.


@pytest.mark.parametrize("kind", bad_files.BAD)
def test_evaluation_leaves_a_bad_image_out(copied, kind):
    def evaluate():
        batches = EvaluationLoader(copied, 32, batch_size=20, threads=1)
        found = list(batches)
        return batches, torch.cat([images for images, _ in found]), torch.cat([index for _, index in found])

    _, whole, _ = evaluate()
    bad_files.BAD[kind](bad_files.Path(copied.path(50)))
    batches, images, index = evaluate()
    rest = [i for i in range(len(copied)) if i != 50]
    assert index.tolist() == rest and torch.equal(images, whole[rest])
    assert [(failure.image, failure.path) for failure in batches.failures] == [(50, copied.path(50))]


def test_evaluation_leaves_out_what_does_not_answer_or_has_changed(copied, make_fifo):
    make_fifo(copied.path(7))
    Image.new("RGB", (5, 5)).save(copied.path(102))
    for image in range(20, 30):
        os.unlink(copied.path(image))
    batches = EvaluationLoader(copied, 32, batch_size=10, threads=1, timeout=0.5)
    for _ in range(2):
        seen = [index.tolist() for _, index in batches]
        out = {7, 102, *range(20, 30)}
        assert [image for batch in seen for image in batch] == [i for i in range(103) if i not in out]
        assert len(batches.failures) == 12
    reasons = {failure.image: failure.reason for failure in batches.failures}
    assert "within 0.5 s" in reasons[7] and "5x5 now" in reasons[102] and "no such file" in reasons[25]
