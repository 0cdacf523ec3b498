"""Samples of labelled images: drawn, balanced over classes, or listed in a file."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unigrad_fast.evaluation import samples
from unigrad_fast.pipelines import Manifest
from unigrad_fast.pipelines.manifest import part
from unigrad_fast.runtime.errors import UserError


@given(counts=st.lists(st.integers(1, 12), min_size=2, max_size=6), share=st.floats(0.0, 1.0), seed=st.integers(0, 9))
def test_a_sample_is_balanced_and_depends_on_the_seed_alone(counts, share, seed):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    fraction = (len(counts) + share * (len(labels) - len(counts))) / len(labels)
    chosen = samples.balanced(labels, fraction, seed)
    assert np.array_equal(chosen, samples.balanced(labels, fraction, seed))
    assert len(np.unique(chosen)) == len(chosen) == round(fraction * len(labels)) and (np.diff(chosen) > 0).all()
    taken = Counter(labels[chosen].tolist())
    for one, of_one in enumerate(counts):
        assert taken[one] >= 1
        assert taken[one] == of_one or taken[one] >= max(taken.values()) - 1


def test_another_seed_draws_another_sample():
    labels = np.arange(1000) % 10
    assert not np.array_equal(samples.balanced(labels, 0.1, 0), samples.balanced(labels, 0.1, 1))


def test_fewer_labels_than_classes_are_refused_with_the_least_fraction():
    labels = np.arange(1000) % 7
    with pytest.raises(UserError) as caught:
        samples.balanced(labels, 0.006, 0)
    assert str(caught.value) == "fraction = 0.006: 6 labels of 1,000 images for 7 classes; give at least 0.007"
    assert len(samples.balanced(labels, 0.007, 0)) == 7


@pytest.fixture(scope="module")
def named(data, tmp_path_factory) -> Manifest:
    """Three classes of two images, which have names of their own except for one in the third."""
    root = tmp_path_factory.mktemp("named")
    for number, name in enumerate(["a/a_0.jpg", "a/a_1.jpg", "b/b_0.jpg", "b/same.jpg", "c/c_0.jpg", "c/same.jpg"]):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(data / f"train/class0/{number:03}.jpg", root / name)
    return Manifest.from_folder(root)


def test_a_list_has_names_with_or_without_folders_and_a_sample_is_written_as_one(named, tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("c_0.jpg\r\n\na_1.jpg\nb/same.jpg\na_1.jpg\n")
    assert samples.listed(named, path).tolist() == [1, 3, 4]
    chosen = np.array([0, 3, 5])
    path.write_bytes(samples.as_list(part(named, chosen, named.labels[chosen], named.classes)))
    assert path.read_text() == "a/a_0.jpg\nb/same.jpg\nc/same.jpg\n"
    assert np.array_equal(samples.listed(named, path), chosen)


def test_a_sample_of_names_with_spaces_at_their_ends_is_read_back(named, tmp_path):
    for name in (" a", "b ", "#c"):
        shutil.copytree(Path(named.root) / "a", tmp_path / "images" / name)
    images, path = Manifest.from_folder(tmp_path / "images"), tmp_path / "names.txt"
    path.write_bytes(samples.as_list(images))
    assert samples.listed(images, path).tolist() == list(range(6))


def test_a_list_may_have_paths_of_the_images(named, tmp_path):
    path, link = tmp_path / "names.txt", tmp_path / "link"
    link.symlink_to(named.root)
    path.write_text(f"./a/a_1.jpg\n{named.root}/b//same.jpg\n{link}/c/same.jpg\n")
    assert samples.listed(named, path).tolist() == [1, 3, 5]
    path.write_text("/elsewhere/a/a_1.jpg\n")
    with pytest.raises(UserError, match=f"first /elsewhere/a/a_1.jpg; .* names are relative to {named.root}$"):
        samples.listed(named, path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "lists no image; write the name of a file per line"),
        ("a_0.jpg\nx.jpg\ny.jpg\n", "2 of 3 names are not of a training image, first x.jpg; correct or remove them"),
        ("b/a_0.jpg\n", "1 of 1 name is not of a training image, first b/a_0.jpg; correct or remove them"),
        ("a_0.jpg\nsame.jpg\n", "1 of 2 names is of several training images, first same.jpg; write them with their"),
        ("a_0.jpg\na_1.jpg\n", "has no image of 2 of 3 classes, first b; list at least one of each"),
        (None, "cannot be read (No such file or directory); give a file of names"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(named, tmp_path, content, said):
    path = tmp_path / "names.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as caught:
        samples.listed(named, path)
    assert str(caught.value).startswith(f"subset = {path}: {said}") and "\n" not in str(caught.value)
