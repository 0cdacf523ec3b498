"""Images of a Dataset in this process: the batches of the same files, bit for bit, and what is refused."""

import os
import pickle
import re
import shutil
import threading
from pathlib import Path

import bad_files
import numpy as np
import pytest
import torch
from PIL import Image
from same_batches import assert_same, batches
from torch.utils.data import IterableDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder

from unigrad_fast.pipelines import DataError, EvaluationLoader, Loader, Manifest, items
from unigrad_fast.pipelines.reading.damage import decoded


class Listed:
    """A Dataset of finished items."""

    def __init__(self, items, **attributes):
        self.items = list(items)
        vars(self).update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, place):
        item = self.items[place]
        if isinstance(item, Exception):
            raise item
        return item() if callable(item) else item


def contents(manifest):
    return [manifest.read(image) for image in range(len(manifest))]


def test_batches_are_those_of_the_same_files_at_any_step_and_rank(tree, manifest):
    bare = Listed(contents(manifest), targets=manifest.labels.tolist(), classes=manifest.classes)
    for dataset in (bare, ImageFolder(tree, loader=lambda path: Path(path).read_bytes())):
        found = Manifest.open(dataset)
        assert found.classes == manifest.classes and found.labels.tolist() == manifest.labels.tolist()
        assert_same(batches(found, start=5), batches(manifest, start=5))
        for rank in range(2):
            assert_same(batches(found, rank, 2, 7, 1), batches(manifest, rank, 2, 7, 1))
        fresh = Manifest.open(dataset)  # whose sizes are not known yet
        images, index = next(iter(EvaluationLoader(fresh, 16, batch_size=20, threads=1)))
        same, _ = next(iter(EvaluationLoader(manifest, 16, batch_size=20, threads=1)))
        assert torch.equal(images, same) and index.tolist() == list(range(20))


def tensor(image):
    pixels = torch.from_numpy(np.array(image))
    return pixels.permute(2, 0, 1) if pixels.ndim == 3 else pixels


FORMS = {"Pillow": lambda image: image, "array": np.array, "tensor": tensor, "row": lambda image: (image, 3)}


@pytest.fixture(scope="module")
def drawn(tree):
    manifest = Manifest.from_folder(tree)
    return [
        Image.fromarray(pixels) for pixels in decoded(np.frombuffer(data, np.uint8) for data in contents(manifest)[:40])
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_pixels_in_memory_give_the_views_of_png_files(drawn, tmp_path, mode, form):
    pictures = [image.convert(mode) for image in drawn]
    for number, picture in enumerate(pictures):
        if mode == "RGBA":
            picture.putalpha(Image.effect_noise(picture.size, 90))
        picture.save(tmp_path / f"{number:02}.png")
    found = Manifest.open(Listed([FORMS[form](picture) for picture in pictures]))
    files = Manifest.from_folder(tmp_path)
    mine, theirs = batches(found), batches(files)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one.index, other.index)
        for a, b in zip(one.views, other.views, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["1", "P", "LA", "PA"])
def test_other_modes_of_pillow_are_decoded_as_their_files(drawn, mode):
    picture = drawn[0].convert("LA" if mode == "PA" else mode).convert(mode)
    data = items.encoded(picture)
    as_file = picture.convert("RGBA") if mode == "PA" else picture  # PNG has no palette with alpha
    mine, theirs = decoded([np.frombuffer(data, np.uint8), np.frombuffer(bad_files.encoded(as_file, "PNG"), np.uint8)])
    assert np.array_equal(mine, theirs)


def test_encoded_bytes_pass_unchanged(manifest):
    data = manifest.read(0)
    array = np.frombuffer(data, np.uint8)
    for given in (data, bytearray(data), memoryview(data), array, torch.tensor(array)):
        assert items.encoded(given) == data


@pytest.mark.parametrize(
    "item, said",
    [
        (Image.new("I;16", (4, 4)), r'a Pillow image of mode I;16; return image.convert("RGB")'),
        (Image.new("CMYK", (4, 4)), r"mode CMYK; return image.convert"),
        (np.zeros((4, 4), np.uint16), "pixels of type uint16; return uint8, from 0 to 255"),
        (torch.zeros(3, 4, 4), "pixels of type float32; return uint8, from 0 to 255, without ToTensor"),
        (
            torch.zeros(6, 5, 3, dtype=torch.uint8),
            "pixels of shape [6, 5, 3]; return [C, H, W] with 1, 3 or 4 ",
        ),
        (np.zeros((3, 4, 5), np.uint8), "pixels of shape [3, 4, 5]; return [H, W, C] with 1, 3 or 4 channels"),
        (np.zeros((0, 4, 3), np.uint8), "pixels of shape [0, 4, 3]"),
        ("a.jpg", "a str; return a Pillow image, a uint8 tensor or array, or encoded bytes"),
        (None, "a NoneType; return"),
        ({"img": b""}, "a dict with img; name the picture `image` and its label `label`"),
        (KeyError("x"), "KeyError: 'x' ("),
        (RuntimeError("broken"), "RuntimeError: broken ("),
        (ValueError("broken"), "one that cannot read a picture raises OSError, and the picture is replaced"),
    ],
)
def test_an_item_that_is_no_picture_is_named(item, said):
    with pytest.raises(DataError, match=f"Listed, item 0: .*{re.escape(said)}"):
        Manifest.open(Listed([item]))


def test_pictures_that_cannot_be_read_are_replaced_as_bad_files_are(tree, manifest, tmp_path):
    order = Loader(manifest, "simsiam", 16, 3).indices(0)[1].tolist()
    bad = {order[2]: OSError("gone"), order[5]: b"garbage", order[9]: manifest.read(order[9])[:300]}
    bad |= {order[11]: Image.UnidentifiedImageError("?"), order[13]: SyntaxError("broken PNG file"), order[14]: b""}
    whole = contents(manifest)
    found = Manifest.open(Listed([bad.get(i, data) for i, data in enumerate(whole)], targets=manifest.labels))
    root = shutil.copytree(tree, tmp_path / "tree")
    for image, content in bad.items():
        data = content if isinstance(content, bytes) else b""
        (root / Path(manifest.path(image)).relative_to(tree)).write_bytes(data)
    mine, theirs = batches(found), batches(Manifest.open(root))
    assert_same(mine, theirs)
    assert {failure.image for failure in mine[0].failures} >= bad.keys()


def test_a_dataset_with_a_bug_stops_the_batches(manifest):
    data = contents(manifest)
    broken = int(Loader(manifest, "simsiam", 16, 3).indices(1)[1][4])
    found = Manifest.open(Listed(data))
    items.given(found.root).items[broken] = IndexError("list index out of range")
    loader = Loader(found, "simsiam", 16, 3, image_size=16, threads=1)
    with pytest.raises(DataError, match=rf"Listed, item {broken}: IndexError: .*test_items\.py, line \d+\);"):
        list(loader.iterate(0, 2))
    lasting = Loader(found, "simsiam", 16, 3, image_size=16, threads=1, outlasts=True)
    assert f"item {broken}: IndexError" in list(lasting.iterate(0, 2))[1].lost


def test_a_dataset_that_changes_is_refused(manifest):
    dataset = Listed(contents(manifest))
    found = Manifest.open(dataset)
    del dataset.items[-1]
    with pytest.raises(DataError, match="item 0: there were 103 items, and 102 now; their number must not change"):
        found.read(0)
    with pytest.raises(DataError, match=r"dataset:Listed:103:\w+: has changed since it was given, and is dataset:L"):
        Manifest.open(found.root)
    dataset = Listed(contents(manifest))
    found = Manifest.open(dataset)
    found.read(1)
    dataset.items[1] = Image.new("RGB", (3, 2))
    with pytest.raises(DataError, match=r"0000001: had \d+x\d+ pixels and has 3x2; an item must be the same each time"):
        found.read(1)


def test_random_transforms_are_refused():
    draws = iter(range(1000))
    dataset = Listed([lambda: Image.new("L", (4, 4), next(draws) % 256)] * 3)
    with pytest.raises(DataError, match=r"item 0: differs when it is read again; remove its random transforms"):
        Manifest.open(dataset)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


class CountedStream(Stream):
    def __len__(self):
        return 3


@pytest.mark.parametrize("dataset", [Stream(), CountedStream(), iter([]), {1, 2}])
def test_what_has_no_length_or_random_access_is_refused(dataset):
    said = "has no length or no random access, .*pack them with `unigrad-fast data shard SOURCE FOLDER`"
    with pytest.raises(DataError, match=f"a {type(dataset).__name__} {said}"):
        Manifest.open(dataset)


def test_a_dataset_without_items_or_readable_ones_is_refused():
    with pytest.raises(DataError, match="Listed has no items"):
        Manifest.open(Listed([]))
    with pytest.raises(DataError, match="none of 16 evenly spaced items can be read"):
        Manifest.open(Listed([OSError("gone")] * 20))


PIXEL = np.zeros((2, 2, 3), np.uint8)


@pytest.mark.parametrize(
    "dataset, labels, classes",
    [
        (Listed([PIXEL] * 3), None, []),
        (Listed([PIXEL] * 3, targets=torch.tensor([1, 0, 1])), [1, 0, 1], ["0", "1"]),
        (Listed([PIXEL] * 3, labels=[1, 0, 1], classes=["a", "b", "c"]), [1, 0, 1], ["a", "b", "c"]),
        (Subset(Listed([PIXEL] * 3, targets=[2, 0, 1], classes=["a", "b", "c"]), [1, 2]), [0, 1], ["a", "b", "c"]),
    ],
)
def test_labels_and_classes_are_the_attributes_that_torchvision_has(dataset, labels, classes):
    found = Manifest.open(dataset)
    assert (found.labels is None) if labels is None else found.labels.tolist() == labels
    assert found.classes == classes


def test_labels_in_the_items_are_read_once_and_that_is_told():
    pictures = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    with pytest.warns(UserWarning, match="TensorDataset has no `targets` with a label per item, so all 4 items"):
        assert Manifest.open(TensorDataset(pictures, torch.tensor([0, 2, 1, 2]))).labels.tolist() == [0, 2, 1, 2]
    with pytest.warns(UserWarning, match="not one integer from 0 per item, so they are not used"):
        assert Manifest.open(Listed([PIXEL] * 2, targets=[-1, 0])).labels is None
    with pytest.warns(UserWarning, match="has no `targets` with a label per item"):
        assert Manifest.open(Listed([{"image": PIXEL, "label": 1}] * 2, targets=[1])).labels.tolist() == [1, 1]


@pytest.mark.parametrize("label", ["cat", 0.5, torch.eye(3)[0], [0, 1]], ids=repr)
def test_labels_of_another_kind_are_left_out_and_that_is_told(label):
    with pytest.warns(UserWarning, match="its labels are not one integer from 0 per item, so they are not used"):
        assert Manifest.open(Listed([(PIXEL, label)] * 2)).labels is None


def test_classes_without_a_name_for_each_label_are_told():
    with pytest.warns(UserWarning, match="its `classes` name 2 of 3 classes, so their numbers are used"):
        assert Manifest.open(Listed([PIXEL] * 3, targets=[0, 2, 1], classes=["a", "b"])).classes == ["0", "1", "2"]


def test_names_of_classes_need_not_be_utf8():
    name = os.fsdecode(b"\xff")
    assert Manifest.open(Listed([PIXEL] * 2, targets=[0, 0], classes=[name])).classes == [name]


def test_only_some_items_are_read_at_the_start_and_no_others_later(manifest):
    read = []
    data = contents(manifest)

    class Counting(Listed):
        def __getitem__(self, place):
            read.append(place)
            return data[place]

    found = Manifest.open(Counting(data))
    assert len(set(read)) == items.SAMPLED and {0, 102} < set(read)
    assert len(read) == 3 * items.SAMPLED  # twice to compare, and once for labels
    read.clear()
    (batch,) = batches(found, count=1)
    ahead = Loader(found, "simsiam", 16, 3).ahead
    assert set(batch.index.tolist()) <= set(read) and len(read) <= 16 * (1 + ahead)


def test_items_are_read_by_several_threads_of_this_process(manifest):
    data, threads = contents(manifest), set()

    class Threaded(Listed):
        def __getitem__(self, place):
            threads.add(threading.get_ident())
            return data[place]

    found = Manifest.open(Threaded(data))
    threads.clear()
    loader = Loader(found, "simsiam", 16, 3, image_size=16, threads=1, read_threads=4)
    assert len(list(loader.iterate(0, 4))) == 4 and not loader.apart
    assert 1 < len(threads) <= 4 and threading.get_ident() not in threads


def test_a_dataset_has_its_fingerprint_from_sampled_items_and_labels(manifest):
    data = contents(manifest)
    first = Manifest.open(Listed(data))
    assert Manifest.open(Listed(data)).fingerprint == first.fingerprint
    assert re.fullmatch(r"dataset:Listed:103:[0-9a-f]{16}", first.root)
    for other in (Listed(data[:-1]), Listed([*data[1:], data[0]]), Listed(data, targets=manifest.labels)):
        assert Manifest.open(other).fingerprint != first.fingerprint


def test_a_manifest_that_is_sent_reads_the_dataset_of_its_process(manifest):
    found = Manifest.open(Listed(contents(manifest)))
    assert pickle.loads(pickle.dumps(found)).read(3) == manifest.read(3)
    with pytest.raises(DataError, match=r'dataset:Other:1:ab: a Dataset that was given from Python, .*"train"'):
        Manifest.open("dataset:Other:1:ab")


def test_a_part_has_the_items_at_its_positions(manifest):
    from unigrad_fast.pipelines.manifest import part

    found = part(Manifest.open(Listed(contents(manifest))), np.array([4, 9]), np.array([0, 1]), ["a", "b"])
    assert [found.read(0), found.read(1)] == [manifest.read(4), manifest.read(9)]
    assert found.sizes.tolist() == manifest.sizes[[4, 9]].tolist()
