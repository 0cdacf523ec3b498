"""Validation is judged by the classes that training knows, by name, whatever either side lacks."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from unigrad_fast.config import Data
from unigrad_fast.evaluation.classes import GIVE, LABEL, match, without_unused
from unigrad_fast.pipelines import Manifest


def draw(folder: Path, **classes: int) -> Path:
    """A tree with so many images of each class."""
    for name, images in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(images):
            Image.new("RGB", (8 + number, 8)).save(folder / name / f"{number}.png")
    return folder


def listed(path: Path, images: Path, **labels: object) -> Manifest:
    """A list of all images of a tree with a label for each class."""
    files = sorted(images.rglob("*.png"))
    path.write_text("".join(f"{file}\t{labels[file.parent.name]}\n" for file in files if file.parent.name in labels))
    return Manifest.open(path)


@pytest.fixture
def train(tmp_path: Path) -> Manifest:
    return Manifest.open(draw(tmp_path / "train", ant=2, bee=2, cat=2, dog=2))


def names(manifest: Manifest) -> list[tuple[str, str]]:
    """Each image's file, and the name of its class."""
    labels = manifest.labels.tolist()
    return [(manifest.path(image), manifest.classes[label]) for image, label in enumerate(labels)]


def test_a_class_that_validation_lacks_is_said_and_the_others_keep_their_names(train, tmp_path):
    for folder in ({"bee": 3, "dog": 1}, {"bee": 3, "dog": 1, "ant": 0}):  # missing, or an empty folder
        val = Manifest.open(draw(tmp_path / f"val-{len(folder)}", **folder))
        queries = match(train, val)
        assert names(queries.val) == [(path, Path(path).parent.name) for path, _ in names(val)]
        assert queries.val.labels.tolist() == [1, 1, 1, 3] and queries.obstacle is None
        assert queries.told == (
            "2 of 4 classes in training have no validation images (ant, cat); the accuracy is that of the others",
        )


def test_a_list_without_the_largest_label_is_judged(train, tmp_path):
    numbers = {name: number for number, name in enumerate(("ant", "bee", "cat", "dog"))}
    images = Path(train.root)
    labelled = listed(tmp_path / "train.txt", images, **numbers)
    queries = match(labelled, listed(tmp_path / "val.txt", images, ant=0, cat=2))
    assert queries.val.labels.tolist() == [0, 0, 2, 2]
    assert "2 of 4 classes in training have no validation images (1, 3)" in queries.told[0]
    assert match(labelled, labelled).told == () and match(labelled, labelled).val is labelled


def test_without_the_classes_that_have_no_images_the_others_keep_their_order_and_numbers(train, tmp_path):
    images = Path(train.root)
    labels = {"ant": 203_093, "bee": 17, "cat": 5, "dog": 101_546}
    far = listed(tmp_path / "far.txt", images, **labels)
    val = match(far, listed(tmp_path / "val.txt", images, ant=203_093, cat=5)).val
    used_train, used_val, numbers = without_unused(far, val)
    assert numbers.tolist() == [5, 17, 101_546, 203_093] and used_train.classes == [str(n) for n in numbers]
    assert names(used_train) == names(far) and names(used_val) == names(val)
    assert used_train.labels.max() == 3 and far.used_classes == 4
    assert without_unused(train, train) == (train, train, None)


def test_images_of_a_class_that_training_has_not_are_left_out_and_counted(train, tmp_path):
    val = Manifest.open(draw(tmp_path / "val", ant=1, asp=2, bee=1, cat=1, dog=2, eel=1))
    queries = match(train, val)
    assert [name for _, name in names(queries.val)] == ["ant", "bee", "cat", "dog", "dog"]
    assert [queries.val.read(image) for image in range(5)] == [val.read(image) for image in (0, 3, 4, 5, 6)]
    assert np.array_equal(queries.val.sizes, val.sizes[[0, 3, 4, 5, 6]])
    assert queries.told == (
        "3 of 8 validation images are left out because no training image has their classes (asp, eel)",
    )


def test_a_part_of_shards_reads_the_same_images(tmp_path):
    draw(tmp_path / "images", ant=2, asp=1, bee=2, cat=1)
    train, val = tmp_path / "train.tar", tmp_path / "val.tar"
    for path, left_out in ((train, "asp"), (val, "cat")):
        with tarfile.open(path, "w") as shard:
            for file in sorted((tmp_path / "images").rglob("*.png")):
                if file.parent.name != left_out:
                    shard.add(file, f"{file.parent.name}/{file.name}")
    whole = Manifest.open(val)
    queries = match(Manifest.open(train), whole)
    assert [name for _, name in names(queries.val)] == ["ant", "ant", "bee", "bee"]
    kept = [0, 1, 3, 4]
    assert [queries.val.path(image) for image in range(4)] == [whole.path(image) for image in kept]
    assert [queries.val.read(image) for image in range(4)] == [whole.read(image) for image in kept]


def test_what_cannot_be_judged_is_named(train, tmp_path):
    data = Data(train=tmp_path / "for-training", val=tmp_path / "for-validation")
    trained, judged = f"data.train = {tmp_path}/for-training: ", f"data.val = {tmp_path}/for-validation: "

    def told(train: Manifest, val: Manifest) -> str:
        return match(train, val).obstacle.told(data)

    others = Manifest.open(draw(tmp_path / "others", asp=1, eel=1))
    assert told(train, others).startswith(
        f"{judged}training and validation images have different classes "
        "(training ant, bee, cat, ...; validation asp, eel); give "
    )
    a_level_higher = Manifest.open(tmp_path)
    assert "(training others, train; validation ant, bee, cat, ...)" in told(a_level_higher, train)
    flat = Manifest.open(Path(train.root) / "ant")
    assert told(flat, train) == f"{trained}the training images have no labels; {LABEL}"
    assert told(train, flat) == f"{judged}the validation images have no labels; {LABEL}, or {GIVE}"
    one = Manifest.open(draw(tmp_path / "one", inner=2))
    assert (
        told(one, one)
        == f"{trained}all images belong to one class, inner; check whether the class folders are one level lower"
    )


def test_without_validation_images_the_option_that_gives_them_is_named(train):
    assert match(train, None).obstacle.told(Data()) == f"data.val = null: no validation images; {GIVE}"
    assert "--data.val IMAGES" in GIVE
