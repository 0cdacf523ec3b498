"""`unigrad-fast data shard`: what it writes, goes on with, leaves out, refuses and finds damaged."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import tarfile
from collections import namedtuple
from pathlib import Path

import bad_files
import numpy as np
import pytest
from PIL import Image

from unigrad_fast import cli
from unigrad_fast.pipelines import DataError, Manifest
from unigrad_fast.pipelines.listing import shards
from unigrad_fast.pipelines.shards import packing, verification, writing


def draw(path: Path, number: int, size: tuple[int, int] = (24, 20), **options: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (4, 5, 3)).astype(np.uint8)
    Image.fromarray(pixels).resize(size).save(path, **options)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Eleven images in three classes, one of them a PNG."""
    for number in range(10):
        draw(tmp_path / f"tree/{'abc'[number % 3]}/{number}.JPEG", number)
    draw(tmp_path / "tree/c/10.v2.png", 10)
    return tmp_path / "tree"


def shard(source: Path, folder: Path, *words: str) -> int:
    return cli.main(["data", "shard", str(source), str(folder), *words])


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def by_name(manifest: Manifest) -> dict[str, tuple[bytes, str]]:
    """Bytes and class of every image, by the last part of its name without the ending."""
    names = [Path(manifest.path(i)).stem.replace(".", "_") for i in range(len(manifest))]
    return {name: (manifest.read(i), manifest.classes[manifest.labels[i]]) for i, name in enumerate(names)}


def test_shards_hold_the_same_bytes_and_classes(tree, tmp_path, capsys):
    assert shard(tree, tmp_path / "out", "--images_per_shard", "4") == 0
    assert "11 images of 3 classes in 3 shards" in capsys.readouterr().out
    packed = Manifest.open(tmp_path / "out")
    assert by_name(packed) == by_name(Manifest.open(tree))
    assert packed.classes == ["a", "b", "c"]


def test_the_order_is_shuffled_unless_asked_to_be_the_files(tree, tmp_path):
    def contents(path: Path) -> list[bytes]:
        manifest = Manifest.open(path)
        return [manifest.read(place) for place in range(len(manifest))]

    files = contents(tree)
    for folder, options in {"shuffled": (), "kept": ("--shuffle_seed", "null")}.items():
        assert shard(tree, tmp_path / folder, "--images_per_shard", "4", *options) == 0
        packed = contents(tmp_path / folder)
        assert sorted(packed) == sorted(files) and (packed == files) == (folder == "kept")


def test_shards_are_what_webdataset_reads(tree, tmp_path):
    """Members of a sample stand together, and share the name up to the first dot behind the last slash."""
    shard(tree, tmp_path / "out", "--images_per_shard", "6")
    labels = {}
    for path in sorted((tmp_path / "out").glob("*.tar")):
        with tarfile.open(path) as tar:
            members = tar.getmembers()
            for image, label in zip(members[::2], members[1::2], strict=True):
                key, _, ending = image.name.rpartition(".")
                assert ending in ("jpg", "png") and "." not in key and label.name == f"{key}.cls"
                labels[key] = int(tar.extractfile(label).read())
    assert len(labels) == 11 and labels["c/10_v2"] == 2 and labels["a/0"] == 0


@pytest.mark.parametrize("seed", ["0", "1", "null"])
def test_order_is_the_seeds_or_as_given(tree, tmp_path, seed):
    shard(tree, tmp_path / "out", "--shuffle_seed", seed)
    names = list(by_name(Manifest.open(tmp_path / "out")))
    given = list(by_name(Manifest.open(tree)))
    assert sorted(names) == sorted(given) and (names == given) == (seed == "null")


def test_start_on_another_machine_reads_only_the_index(tree, tmp_path, monkeypatch):
    shard(tree, tmp_path / "out", "--images_per_shard", "4")
    for path in (tmp_path / "out").glob("*.tar"):
        os.utime(path, ns=(1, 1))
    monkeypatch.setattr(shards, "_walk_shard", None)
    packed = Manifest.open(tmp_path / "out", cache=tmp_path / "new cache")
    assert packed.sizes.tolist() == [[24, 20]] * 11


def test_index_is_not_used_for_a_shard_of_another_size(tree, tmp_path):
    shard(tree, tmp_path / "out", "--images_per_shard", "4")
    path = tmp_path / "out/shard-000001.tar"
    with tarfile.open(path, "a") as tar:
        for name, content in (("x.jpg", (tree / "a/0.JPEG").read_bytes()), ("x.cls", b"0")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    with pytest.warns(UserWarning, match=r"index\.npz is damaged or belongs to other shards; it is ignored"):
        packed = Manifest.open(tmp_path / "out", cache=tmp_path / "new cache")
    assert len(packed) == 12 and by_name(packed)["x"][0] == (tree / "a/0.JPEG").read_bytes()


def changed(index: dict, lie: str) -> dict[str, np.ndarray]:
    """What an index says wrongly."""
    one = np.arange(len(index["at"])) == 1
    return {
        "labels too large": lambda: {"labels": index["labels"] + 10**6},
        "labels too small": lambda: {"labels": index["labels"] - 5},
        "no classes": lambda: {"classes": index["classes"][:0]},
        "labels in floats": lambda: {"labels": index["labels"] + 0.5},
        "classes in numbers": lambda: {"classes": np.arange(3)},
        "classes of no characters": lambda: {"classes": np.full(3, 0x220000, np.uint32).view("<U1")},
        "places in text": lambda: {"at": index["at"].astype(np.str_)},
        "one place": lambda: {"at": index["at"][0]},
        "unusable": lambda: {"unusable": np.array([10**6])},
        "sizes in text": lambda: {"sizes": index["sizes"].astype(np.str_)},
        "negative sizes": lambda: {"sizes": -index["sizes"]},
        "offsets": lambda: {"offsets": np.where(one.nonzero()[0] == np.arange(12), 10**6, index["offsets"])},
        "first offset": lambda: {"offsets": index["offsets"] - 5, "names": index["names"][:-5]},
        "negative length": lambda: {"length": np.where(one, -1, index["length"])},
        "negative place": lambda: {"at": np.where(one, -1, index["at"])},
        "overflow": lambda: {"at": np.where(one, 2**62, index["at"]), "length": np.where(one, 2**62, index["length"])},
        "shard in floats": lambda: {"shard": index["shard"].astype(np.float64)},
        "shard too large": lambda: {"shard": index["shard"] + np.int32(9)},
    }[lie]()


LIES = (
    *("labels too large", "labels too small", "no classes", "labels in floats", "classes in numbers"),
    *("classes of no characters", "places in text", "one place", "unusable", "sizes in text", "negative sizes"),
    *("offsets", "first offset", "negative length", "negative place", "overflow", "shard in floats"),
    "shard too large",
)


@pytest.mark.parametrize("lie", LIES)
def test_index_that_cannot_be_true_is_not_used(tree, tmp_path, lie):
    shard(tree, tmp_path / "out", "--images_per_shard", "4")
    path, cache = tmp_path / "out/index.npz", tmp_path / "new cache"
    with np.load(path) as content:
        arrays = dict(content)
    np.savez(path, **{**arrays, **changed(arrays, lie)})
    with pytest.warns(UserWarning, match=r"index\.npz is damaged or belongs to other shards; it is ignored"):
        packed = Manifest.open(tmp_path / "out", cache=cache)
    assert by_name(packed) == by_name(Manifest.open(tree)) and not len(packed.unreadable())

    (store,) = cache.iterdir()
    with np.load(store) as content:
        arrays = dict(content)
    np.savez(store, **{**arrays, **changed(arrays, lie)})
    path.unlink()
    again = Manifest.open(tmp_path / "out", cache=cache)
    assert by_name(again) == by_name(packed) and not len(again.unreadable())


@pytest.mark.parametrize(("place", "value"), [(6, 99), (8, 1), (10, 97), (10, 8)])
def test_index_with_a_damaged_zip_header_is_not_used(tree, tmp_path, place, value):
    """Version, encryption and compression in the directory of the file."""
    shard(tree, tmp_path / "out", "--images_per_shard", "4")
    content, start = bytearray((tmp_path / "out/index.npz").read_bytes()), 0
    while (start := content.find(b"PK\1\2", start)) >= 0:
        content[start + place] = value
        start += 4
    (tmp_path / "out/index.npz").write_bytes(content)
    with pytest.warns(UserWarning, match=r"index\.npz is damaged or belongs to other shards; it is ignored"):
        assert len(Manifest.open(tmp_path / "out", cache=tmp_path / "new cache")) == 11


@pytest.mark.parametrize("files", [np.arange(3), np.array(7), np.array([b"x.tar"])])
def test_index_whose_files_are_no_names_is_not_used(tree, tmp_path, files):
    shard(tree, tmp_path / "out")
    np.savez(tmp_path / "out/index.npz", files=files)
    with pytest.warns(UserWarning, match=r"index\.npz is damaged or belongs to other shards; it is ignored"):
        assert len(Manifest.open(tmp_path / "out", cache=tmp_path / "new cache")) == 11


def test_shard_whose_description_has_a_damaged_zip_header_is_written_anew(tmp_path):
    (tmp_path / ".unfinished").mkdir()
    (tmp_path / "shard-000000.tar").write_bytes(bytes(5))
    path = tmp_path / ".unfinished/000000.npz"
    np.savez(path, rows=np.zeros((1, 8), np.int64), bytes=5)
    assert packing._is_written(tmp_path, 0)
    content = bytearray(path.read_bytes())
    content[content.find(b"PK\1\2") + 8] = 1  # encrypted
    path.write_bytes(content)
    assert not packing._is_written(tmp_path, 0)


def test_keys_are_unique(tmp_path):
    for number, name in enumerate(["x.jpg", "x.png", "x.1.jpg", "x_1.jpg", "x-2.jpg"]):
        draw(tmp_path / "flat" / name, number)
    (tmp_path / "list.txt").write_text("".join(f"flat/{p.name}\n" for p in sorted((tmp_path / "flat").iterdir())) * 2)
    shard(tmp_path / "list.txt", tmp_path / "out")
    packed, given = Manifest.open(tmp_path / "out"), Manifest.open(tmp_path / "list.txt")
    assert len({packed.path(i) for i in range(10)}) == 10 and packed.labels is None
    assert sorted(packed.read(i) for i in range(10)) == sorted(given.read(i) for i in range(10))
    assert not (tmp_path / "out/classes.txt").exists()


def test_shards_can_be_packed_anew(tree, tmp_path):
    shard(tree, tmp_path / "one", "--images_per_shard", "4")
    assert shard(tmp_path / "one", tmp_path / "two", "--images_per_shard", "7") == 0
    assert by_name(Manifest.open(tmp_path / "two")) == by_name(Manifest.open(tree))


class Stopped(Exception):
    pass


@pytest.mark.parametrize("after", range(0, 12, 3))
@pytest.mark.parametrize("error", [KeyboardInterrupt, Stopped])
def test_interrupted_packing_goes_on_and_ends_with_the_same_bytes(tree, tmp_path, monkeypatch, capsys, after, error):
    words = ["--images_per_shard", "3", "--short_side", "16"]
    shard(tree, tmp_path / "whole", *words)
    original, calls = writing.short_digest, []

    def interrupted(content):
        calls.append(content)
        if len(calls) > after:
            raise error
        return original(content)

    monkeypatch.setattr(writing, "short_digest", interrupted)
    if error is Stopped:
        with pytest.raises(Stopped):
            shard(tree, tmp_path / "out", *words)
    else:
        assert shard(tree, tmp_path / "out", *words) == 130
    assert len(list((tmp_path / "out").glob("*.tar"))) == after // 3
    if after:
        assert cli.main(["data", "shard", str(tmp_path / "out"), str(tmp_path / "copy")]) == 2
        assert "its shards are unfinished" in capsys.readouterr().err

    calls.clear()
    monkeypatch.setattr(writing, "short_digest", lambda content: calls.append(content) or original(content))
    assert shard(tree, tmp_path / "out", *words) == 0
    assert len(calls) == 11 - after // 3 * 3
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_finished_packing_is_not_repeated(tree, tmp_path, monkeypatch, capsys):
    shard(tree, tmp_path / "out")
    before = digests(tmp_path / "out")
    monkeypatch.setattr(packing, "write_shard", None)
    assert shard(tree, tmp_path / "out") == 0
    assert "11 images of 3 classes in 1 shard" in capsys.readouterr().out and digests(tmp_path / "out") == before


def refused(capsys: pytest.CaptureFixture, *arguments) -> str:
    assert shard(*arguments) == 2
    return capsys.readouterr().err


def test_other_images_or_options_are_refused(tree, tmp_path, capsys):
    shard(tree, tmp_path / "out")
    assert "has shards with images_per_shard = 10000, not 5" in refused(
        capsys, tree, tmp_path / "out", "--images_per_shard", "5"
    )
    assert "has shards with short_side = null, not 32" in refused(capsys, tree, tmp_path / "out", "--short_side", "32")
    os.utime(tree / "a/0.JPEG", ns=(1, 1))
    assert f"has shards of other images from {tree}" in refused(capsys, tree, tmp_path / "out")


def test_folder_with_something_else_is_refused(tree, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    assert "is not empty" in refused(capsys, tree, tmp_path / "other")
    (tmp_path / "other/notes.txt").rename(tmp_path / "other/shards.json")
    assert "shards.json is damaged" in refused(capsys, tree, tmp_path / "other")
    (tmp_path / "other/shards.json").write_text("[]")
    assert "shards.json is damaged" in refused(capsys, tree, tmp_path / "other")
    (tmp_path / "file").write_text("")
    assert "is a file; give a folder" in refused(capsys, tree, tmp_path / "file")
    assert "absent does not exist" in refused(capsys, tmp_path / "absent", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_another_command_is_writing_is_left_to_it(tree, tmp_path, capsys, monkeypatch):
    original, told = packing._finish, []

    def finish(*arguments):
        told.append(refused(capsys, tree, tmp_path / "out"))  # flock is per opened file, so within a process too
        return original(*arguments)

    monkeypatch.setattr(packing, "_finish", finish)
    assert shard(tree, tmp_path / "out") == 0
    assert told == [
        f"error: folder = {tmp_path}/out: another `data shard` is writing there; wait for it, or give another folder\n"
    ]
    assert len(Manifest.open(tmp_path / "out")) == 11


def test_shards_among_the_images_are_refused(tree, tmp_path, capsys):
    (tmp_path / "link").symlink_to(tree / "a")
    for folder in (tree, tree / "shards", tmp_path / "link/shards"):
        assert f"folder = {folder}: lies in source = {tree}" in refused(capsys, tree, folder)
    assert not (tree / "shards").exists()


def test_disk_that_is_too_small_is_refused_before_any_work(tree, tmp_path, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda path: usage(9000, 0, 9000))
    assert "0.0 GB are free; free disk space" in refused(capsys, tree, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.tar"))


def test_full_disk_stops_with_the_name_of_the_shard(tree, tmp_path, capsys, monkeypatch):
    def full(content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing, "padded", full)
    assert shard(tree, tmp_path / "out") == 3
    assert f"{tmp_path}/out/shard-000000.tar cannot be written: No space left" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["shards.json"]


@pytest.fixture
def damaged(tree: Path) -> Path:
    """A truncated image, one that is none, and one that is gone, beside eleven good ones."""
    content = (tree / "a/0.JPEG").read_bytes()
    (tree / "a/cut.jpg").write_bytes(content[: len(content) // 2])
    (tree / "b/text.jpg").write_text("text")
    (tree / "c/gone.jpg").symlink_to(tree / "nowhere.jpg")
    return tree


def test_images_that_cannot_be_decoded_are_left_out_by_name(damaged, tmp_path, capsys):
    assert shard(damaged, tmp_path / "out", "--images_per_shard", "2") == 0
    out = capsys.readouterr().out
    assert "11 images of 3 classes in" in out and "3 images left out" in out
    lines = sorted((tmp_path / "out/left-out.txt").read_text().splitlines())
    assert [line.split("\t")[0] for line in lines] == [
        str(damaged / name) for name in ("a/cut.jpg", "b/text.jpg", "c/gone.jpg")
    ]
    assert "truncated" in lines[0] and "its header is not one of" in lines[1] and "no such file" in lines[2]
    assert all(f"{damaged / name}: " in out for name in ("a/cut.jpg", "b/text.jpg", "c/gone.jpg"))
    assert len(Manifest.open(tmp_path / "out")) == 11


def test_images_that_training_decodes_are_packed_as_they_are_though_pillow_refuses_them(tree, tmp_path):
    for kind in ("long text", "TIFF of floats"):
        bad_files.GOOD[kind](tree / f"a/{kind}.jpg")
    assert shard(tree, tmp_path / "out") == 0 and not (tmp_path / "out/left-out.txt").exists()
    packed = Manifest.open(tmp_path / "out")
    places = {Path(packed.path(i)).name: i for i in range(len(packed))}
    for name, ending in (("long text", "png"), ("TIFF of floats", "tif")):
        place = places[f"{name}.{ending}"]
        assert packed.read(place) == (tree / f"a/{name}.jpg").read_bytes() and packed.sizes[place].tolist() == [48, 36]


def test_image_with_line_breaks_in_its_name_is_left_out_once(tree, tmp_path, capsys):
    (tree / "a/x\ny\r\\z.jpg").write_text("text")
    assert shard(tree, tmp_path / "out") == 0
    assert "1 image left out" in (out := capsys.readouterr().out)
    (line,) = (tmp_path / "out/left-out.txt").read_text().splitlines()
    name = rf"{tree}/a/x\ny\r\\z.jpg"
    assert line.startswith(f"{name}\t") and f"  {name}: its header" in out


def test_class_with_a_line_break_in_its_name_is_refused_before_any_work(tree, tmp_path, capsys):
    (tree / "a").rename(tree / "a\nb")
    assert r"class 'a\nb' has a line break" in refused(capsys, tree, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shard_of_which_nothing_is_left(tree, tmp_path):
    for number in range(3):
        (tree / f"a/{number}-bad.jpg").write_text("text")
    assert shard(tree, tmp_path / "out", "--images_per_shard", "1") == 0
    assert len(list((tmp_path / "out").glob("*.tar"))) == 11 and len(Manifest.open(tmp_path / "out")) == 11
    assert shard(tree, tmp_path / "out", "--images_per_shard", "1", "--verify", "true") == 0


def test_short_side_makes_larger_images_smaller_and_copies_the_others(tmp_path, capsys):
    draw(tmp_path / "flat/large.jpg", 0, (90, 60))
    draw(tmp_path / "flat/tall.png", 1, (50, 131))
    draw(tmp_path / "flat/narrow.jpg", 2, (90, 20))
    assert shard(tmp_path / "flat", tmp_path / "out", "--short_side", "20", "--shuffle_seed", "null") == 0
    packed = Manifest.open(tmp_path / "out")
    assert [Path(packed.path(i)).name for i in range(3)] == ["large.jpg", "narrow.jpg", "tall.jpg"]
    assert packed.sizes.tolist() == [[30, 20], [90, 20], [20, 52]]
    assert packed.read(1) == (tmp_path / "flat/narrow.jpg").read_bytes()
    with Image.open(tmp_path / "flat/large.jpg") as image, Image.open(io.BytesIO(packed.read(0))) as smaller:
        wanted = np.asarray(image.convert("RGB").resize((30, 20), Image.Resampling.LANCZOS), np.float32)
        assert smaller.format == "JPEG" and np.abs(wanted - np.asarray(smaller, np.float32)).mean() < 5
    out = " ".join(capsys.readouterr().out.split())
    assert "2 images were shrunk to a short side of 20 pixels, with Lanczos and JPEG quality 90" in out
    assert "Published numbers come from the original pixels" in out


def test_quality_decides_the_bytes(tmp_path):
    draw(tmp_path / "flat/large.jpg", 0, (90, 60))
    for quality in ("30", "95"):
        shard(tmp_path / "flat", tmp_path / quality, "--short_side", "40", "--quality", quality)
    low, high = (Manifest.open(tmp_path / quality).total_bytes for quality in ("30", "95"))
    assert 1.2 * low < high


@pytest.mark.parametrize("kind", ["L", "P", "RGBA", "CMYK", "I;16"])
def test_modes_of_colour_survive_short_side(tmp_path, kind):
    path = tmp_path / "flat" / ("x.jpg" if kind == "CMYK" else "x.png")
    path.parent.mkdir()
    gray = Image.fromarray(np.full((40, 40), 100, np.uint8))
    image = Image.fromarray(np.full((40, 40), 30_000, np.uint16)) if kind == "I;16" else gray.convert(kind)
    image.save(path)
    assert shard(path.parent, tmp_path / "out", "--short_side", "20") == 0
    packed = Manifest.open(tmp_path / "out")
    if kind == "I;16":  # JPEG has no 16 bits: copied
        assert packed.read(0) == path.read_bytes()
    else:
        with Image.open(io.BytesIO(packed.read(0))) as smaller:
            assert smaller.size == (20, 20) and abs(np.asarray(smaller.convert("L"), np.int16) - 100).max() < 6


def verify(source: Path, folder: Path) -> int:
    return shard(source, folder, "--verify", "true")


def test_intact_shards_are_verified_without_their_source(tree, tmp_path, capsys):
    assert shard(tree, tmp_path / "out", "--verify", "true") == 0
    tree.rename(tmp_path / "elsewhere")
    assert verify(tree, tmp_path / "out") == 0
    assert "all shards match their digests" in capsys.readouterr().out


@pytest.mark.parametrize("position", ["image", "label", "header", "padding", "end", "index", "classes"])
def test_one_flipped_byte_is_found(tree, tmp_path, capsys, position):
    shard(tree, tmp_path / "out", "--images_per_shard", "4")
    packed = Manifest.open(tmp_path / "out")
    path, named = tmp_path / "out/shard-000000.tar", "shard-000000.tar: differs from what was written, outside"
    start, length = int(packed.storage.index.at[1]), int(packed.storage.index.length[1])
    place = {
        "image": start + length // 2,
        "header": start - 500,
        "padding": start + length,
        "label": start + -(-length // 512) * 512 + 512,
        "end": path.stat().st_size - 1,
        "index": 300,
        "classes": 0,
    }[position]
    if position == "image":
        named = packed.path(1)
    elif position in ("index", "classes"):
        path = tmp_path / "out" / {"index": "index.npz", "classes": "classes.txt"}[position]
        named = path.name
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    assert verify(tree, tmp_path / "out") == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("stopped: ") and named in lines[0] and len(lines) == 2


def test_missing_short_and_foreign_shards_are_found(tree, tmp_path, capsys):
    shard(tree, tmp_path / "out", "--images_per_shard", "4")
    first, second, third = sorted((tmp_path / "out").glob("*.tar"))
    first.write_bytes(first.read_bytes()[:-512])
    second.rename(tmp_path / "out/other.tar")
    assert verify(tree, tmp_path / "out") == 3
    error = capsys.readouterr().err
    assert "other.tar: was not written with the others" in error
    assert f"{first}: has " in error and f"{second}: no such file" in error and third.name not in error


def test_progress_reaches_the_end(tree, tmp_path):
    manifest, told = Manifest.open(tree), []
    for _ in range(2):
        told.clear()
        packing.pack(manifest, "tree", tmp_path / "out", packing.Packing(4), 2, told.append)
        assert sum(told) == 11
    told.clear()
    assert verification.verify(tmp_path / "out", 2, told.append) == []
    assert sum(told) == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.t*"))


def test_a_folder_of_which_a_shard_is_missing_is_refused(tree, tmp_path):
    shard(tree, tmp_path / "out", "--images_per_shard", "4")
    (tmp_path / "out/shard-000001.tar").unlink()
    with pytest.raises(DataError, match=r"shard-000001\.tar: missing; 1 of the shards"):
        Manifest.open(tmp_path / "out", cache=tmp_path / "new cache")
    (tmp_path / "out/index.npz").unlink()
    assert len(Manifest.open(tmp_path / "out", cache=tmp_path / "new cache")) == 7
