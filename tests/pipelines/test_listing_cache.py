import os

import numpy as np
import pytest
from PIL import Image

from unigrad_fast.pipelines import Manifest, storage


def save(path, size=(8, 6), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (200, 30, 60)).save(path, **options)
    return path


DAMAGES = [("version", 6, 99), ("encrypted", 8, 1), ("method", 10, 97), ("deflated", 10, 8)]


def with_entry(content, place, value):
    """A zip file with another byte in the entry of each file in its directory."""
    content, start = bytearray(content), 0
    while (start := content.find(b"PK\1\2", start)) >= 0:
        content[start + place] = value
        start += 4
    return bytes(content)


@pytest.fixture
def headers_read(monkeypatch):
    """Paths whose header was opened."""
    opened = []
    original = storage.read_size

    def read_size(path):
        opened.append(path)
        return original(path)

    monkeypatch.setattr(storage, "read_size", read_size)
    return opened


def test_second_listing_reads_no_header(tree, headers_read):
    first = Manifest.from_folder(tree)
    assert len(headers_read) == len(first)
    second = Manifest.from_folder(tree)
    assert len(headers_read) == len(first)
    assert np.array_equal(first.sizes, second.sizes) and first.fingerprint == second.fingerprint


def test_second_listing_looks_again_at_what_could_not_be_read(tmp_path, headers_read):
    save(tmp_path / "a.jpg")
    (tmp_path / "b.jpg").write_bytes(b"")
    for _ in range(2):
        headers_read.clear()
        assert Manifest.from_folder(tmp_path).unreadable().tolist() == [1]
    assert headers_read == [os.fsencode(tmp_path / "b.jpg")]


def touch(folder):
    os.utime(folder / "a.jpg", ns=(1, 1))


def grow(folder):
    state = (folder / "a.jpg").stat()
    (folder / "a.jpg").write_bytes((folder / "a.jpg").read_bytes() + b"\0")
    os.utime(folder / "a.jpg", ns=(state.st_atime_ns, state.st_mtime_ns))


def rename(folder):
    (folder / "a.jpg").rename(folder / "b.jpg")


def add(folder):
    save(folder / "b.jpg")


def rename_folder(folder):
    folder.rename(folder.with_name("dog"))


@pytest.mark.parametrize("change", [touch, grow, rename, add, rename_folder])
def test_change_makes_a_new_fingerprint_and_reads_headers_again(tmp_path, headers_read, change):
    save(tmp_path / "cat" / "a.jpg")
    before = Manifest.from_folder(tmp_path, cache=tmp_path / ".store")
    headers_read.clear()
    change(tmp_path / "cat")
    after = Manifest.from_folder(tmp_path, cache=tmp_path / ".store")
    assert after.fingerprint != before.fingerprint
    assert len(headers_read) == len(after)


def test_cached_sizes_are_used_only_for_their_own_folder(tmp_path):
    save(tmp_path / "one" / "a.bmp", (8, 6))
    save(tmp_path / "two" / "a.bmp", (6, 8))
    for folder in ("one", "two"):
        os.utime(tmp_path / folder / "a.bmp", ns=(1, 1))
    Manifest.from_folder(tmp_path / "one")
    assert Manifest.from_folder(tmp_path / "two").sizes.tolist() == [[6, 8]]


def test_damaged_cache_is_made_anew(tmp_path):
    save(tmp_path / "data" / "a.jpg")
    Manifest.from_folder(tmp_path / "data", cache=tmp_path / "store")
    (store,) = (tmp_path / "store").iterdir()
    store.write_bytes(store.read_bytes()[:100])
    assert Manifest.from_folder(tmp_path / "data", cache=tmp_path / "store").sizes.tolist() == [[8, 6]]


@pytest.mark.parametrize(("name", "place", "value"), DAMAGES)
def test_cache_with_a_damaged_zip_header_is_made_anew(tmp_path, name, place, value):
    save(tmp_path / "data" / "a.jpg")
    Manifest.from_folder(tmp_path / "data", cache=tmp_path / "store")
    (store,) = (tmp_path / "store").iterdir()
    store.write_bytes(with_entry(store.read_bytes(), place, value))
    assert Manifest.from_folder(tmp_path / "data", cache=tmp_path / "store").sizes.tolist() == [[8, 6]]


@pytest.mark.parametrize(
    "lie",
    [
        {"sizes": np.array([["wide", "high"]])},
        {"sizes": np.array([[8.5, 6.0]])},
        {"sizes": np.array([[-8, 6]], np.int32)},
        {"sizes": np.zeros((2, 2), np.int32)},
        {"unusable": np.array([10**6])},
        {"unusable": np.array([-2])},
        {"unusable": np.array(["0"])},
        {"unusable": np.array(0)},
    ],
)
def test_cache_with_impossible_numbers_is_not_used(tmp_path, lie):
    save(tmp_path / "data" / "a.jpg")
    Manifest.from_folder(tmp_path / "data", cache=tmp_path / "store")
    (store,) = (tmp_path / "store").iterdir()
    with np.load(store) as content:
        arrays = dict(content)
    np.savez(store, **{**arrays, **lie})
    manifest = Manifest.from_folder(tmp_path / "data", cache=tmp_path / "store")
    assert manifest.sizes.tolist() == [[8, 6]]
    np.savez(store, **{**arrays, **lie})
    manifest.mark_unusable([0])
    assert manifest.header_sizes().tolist() == [[8, 6]]


def test_cache_that_cannot_be_written_is_no_error(tmp_path):
    save(tmp_path / "data" / "a.jpg")
    (tmp_path / "store").write_text("a file where a folder should be")
    assert len(Manifest.from_folder(tmp_path / "data", cache=tmp_path / "store")) == 1
