"""Lists and tar shards: the same images, labels and bytes as in a tree, and each mistake by name."""

import io
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import tarfile
import threading
import warnings
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from unigrad_fast.pipelines import DataError, Manifest, storage
from unigrad_fast.pipelines.files import open_files, places, slow_storage, tar_format
from unigrad_fast.pipelines.listing import shards
from unigrad_fast.pipelines.listing.marks import OF_A_RUN
from unigrad_fast.pipelines.shards import packing


def encoded(size=(8, 6), kind="JPEG", colour=(200, 30, 60)):
    content = io.BytesIO()
    Image.new("RGB", size, colour).save(content, kind)
    return content.getvalue()


def save(path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(**options))
    return path


def pack(path, members, form=tarfile.USTAR_FORMAT):
    """A tar in the layout of WebDataset's TarWriter: plain members, one after the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w|", format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.uname = len(content), 0o444, "bigdata"
            tar.addfile(info, io.BytesIO(content))
    return path


def members(manifest, start, stop):
    for i in range(start, stop):
        key = os.path.relpath(manifest.path(i), manifest.root).removesuffix(".jpg")
        yield f"{key}.cls", str(manifest.labels[i]).encode()
        yield f"{key}.jpg", manifest.read(i)


@pytest.fixture
def packed(manifest, tmp_path):
    """The tree in two shards, with class names beside them."""
    middle = len(manifest) // 2
    pack(tmp_path / "shards/b-1.tar", members(manifest, middle, len(manifest)))
    pack(tmp_path / "shards/b-0.tar", members(manifest, 0, middle))
    (tmp_path / "shards/classes.txt").write_text("\n".join(manifest.classes) + "\n")
    return tmp_path / "shards"


@pytest.fixture
def listed(manifest, tmp_path):
    """The tree as a list with names for labels."""
    lines = [f"{manifest.path(i)}\t{manifest.classes[manifest.labels[i]]}\n" for i in range(len(manifest))]
    (tmp_path / "list.txt").write_text("# all\n\n" + "".join(lines))
    return tmp_path / "list.txt"


@pytest.fixture
def tar_walks(monkeypatch):
    walked = []
    original = shards._walk_shard
    monkeypatch.setattr(shards, "_walk_shard", lambda path: walked.append(path) or original(path))
    return walked


def refused(path, match):
    with pytest.raises(DataError, match=match):
        Manifest.open(path)


@pytest.mark.parametrize("source", ["listed", "packed"])
def test_list_and_shards_hold_what_the_tree_holds(source, manifest, request):
    other = Manifest.open(request.getfixturevalue(source))
    assert len(other) == len(manifest)
    assert other.classes == manifest.classes and np.array_equal(other.labels, manifest.labels)
    assert np.array_equal(other.sizes, manifest.sizes)
    assert [other.read(i) for i in range(len(other))] == [manifest.read(i) for i in range(len(manifest))]
    assert other.total_bytes == manifest.total_bytes == sum(len(manifest.read(i)) for i in range(len(manifest)))


def test_image_in_a_shard_has_a_name_for_people_and_the_state_of_its_shard(packed):
    manifest = Manifest.open(packed)
    assert manifest.path(0) == str(packed / "b-0.tar/class0/000.jpg")
    found = (packed / "b-1.tar").stat()
    assert manifest.state(-1) == (found.st_size, found.st_mtime_ns)
    (packed / "b-1.tar").unlink()
    with pytest.raises(FileNotFoundError):
        manifest.state(-1)


def test_state_of_a_file(tmp_path):
    path = save(tmp_path / "a.jpg")
    manifest = Manifest.open(tmp_path)
    assert manifest.state(0) == (path.stat().st_size, path.stat().st_mtime_ns)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        manifest.state(0)


def test_one_shard_by_itself(packed, manifest):
    one = Manifest.open(packed / "b-1.tar")
    assert len(one) == len(manifest) - len(manifest) // 2 and one.read(-1) == manifest.read(-1)


def test_second_start_on_shards_walks_no_tar_and_reads_no_header(packed, tar_walks, monkeypatch):
    first = Manifest.open(packed)
    assert len(tar_walks) == 2
    monkeypatch.setattr(storage, "size_in", None)
    second = Manifest.open(packed)
    assert len(tar_walks) == 2 and second.fingerprint == first.fingerprint
    assert [second.read(i) for i in range(len(second))] == [first.read(i) for i in range(len(first))]


@pytest.mark.parametrize("change", ["touch", "grow", "classes"])
def test_change_of_a_shard_or_the_class_names_walks_again(packed, tar_walks, change):
    before = Manifest.open(packed)
    if change == "touch":
        os.utime(packed / "b-0.tar", ns=(1, 1))
    elif change == "grow":
        pack(packed / "b-0.tar", [("x.jpg", encoded()), ("x.cls", b"0")])
    else:
        (packed / "classes.txt").write_text("a\nb\nc\nd\ne\nf\n")
    after = Manifest.open(packed)
    assert len(tar_walks) == 4 and after.fingerprint != before.fingerprint
    assert (after.classes[0] == "a") == (change == "classes")


@pytest.mark.parametrize("index", ["cached", "beside the shards"])
def test_another_shard_of_the_same_size_and_time_is_indexed_anew(tmp_path, index):
    def members(labels):
        return [*((f"{key}.jpg", encoded()) for key in "ab"), ("a.cls", labels[0]), ("b.cls", labels[1])]

    path = pack(tmp_path / "given/0.tar", members([b"0", b"1"]))
    if index == "beside the shards":
        options = packing.Packing(shuffle_seed=None)
        packing.pack(Manifest.open(path), "given", tmp_path / "shards", options, 1, lambda images: None)
        path = tmp_path / "shards/shard-000000.tar"
    source = path.parent
    assert Manifest.open(source).labels.tolist() == [0, 1]
    state = path.stat()
    other = pack(tmp_path / "other.tar", members([b"1", b"0"])).read_bytes()
    path.write_bytes(other[: state.st_size])  # zeros behind the end may be fewer
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert Manifest.open(source).labels.tolist() == [1, 0]
    assert len(told) == (index != "cached") and all("belongs to other shards" in str(line.message) for line in told)


@pytest.mark.parametrize("seconds", [-1, 10**10, 2**33])
def test_a_time_of_change_that_64_bits_cannot_hold_is_a_time_like_any_other(tmp_path, seconds):
    save(tmp_path / "tree/a.jpg")
    pack(tmp_path / "x.tar", [("a.jpg", encoded())])
    for path, source in ((tmp_path / "tree/a.jpg", tmp_path / "tree"), (tmp_path / "x.tar", tmp_path / "x.tar")):
        os.utime(path, (seconds, seconds))
        if path.stat().st_mtime != seconds:
            pytest.skip("this file system keeps no such time")
        manifest = Manifest.open(source)
        assert manifest.read(0) == encoded() and manifest.fingerprint == Manifest.open(source).fingerprint
        os.utime(path, (seconds + 1, seconds + 1))
        assert manifest.fingerprint != Manifest.open(source).fingerprint


def test_shard_that_changes_during_a_run_is_not_read(packed):
    manifest = Manifest.open(packed)
    open_files.opened.cache_clear()
    (packed / "b-0.tar").write_bytes(b"\0" * (packed / "b-0.tar").stat().st_size)
    with pytest.raises(OSError, match="has changed"):
        manifest.read(0)


def test_threads_processes_and_pickles_read_the_same(packed, manifest):
    shards = Manifest.open(packed)
    wanted = [manifest.read(i) for i in range(len(manifest))]
    found = [None] * len(shards)

    def read(start):
        for i in range(start, len(shards), 4):
            found[i] = shards.read(i)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(shards.read, range(len(shards))) == wanted
        pool.close()  # ended by a signal, a process that measures coverage may wait for a lock for ever
        pool.join()
    copy = pickle.loads(pickle.dumps(shards))
    assert [copy.read(i) for i in range(len(copy))] == wanted


def test_more_shards_than_are_kept_open(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "opened", lru_cache(2)(open_files.opened.__wrapped__))
    contents = [encoded((8, 6 + number)) for number in range(5)]
    for number, content in enumerate(contents):
        pack(tmp_path / f"{number}.tar", [(f"{number}.jpg", content)])
    manifest = Manifest.open(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    assert [manifest.read(i) for i in (*range(5), *range(5))] == contents * 2
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("form", ["gnu", "posix", "ustar"])
def test_tar_of_gnu_tar_with_long_and_odd_names(tmp_path, form):
    folder = "d" * (90 if form == "ustar" else 190)
    names = [f"{folder}/{'n' * 60}.JPG", "zoë.v/ü.png", "a b.jpeg"]
    for number, name in enumerate(names):
        kind = "PNG" if name.endswith("png") else "JPEG"
        save(tmp_path / "tree" / name, size=(8 + number, 6), kind=kind)
        (tmp_path / "tree" / name).with_suffix(".cls").write_text(f"{number}\n")
    subprocess.run(["tar", f"--format={form}", "-cf", tmp_path / "x.tar", "."], cwd=tmp_path / "tree", check=True)
    manifest = Manifest.open(tmp_path / "x.tar")
    found = {manifest.path(i): i for i in range(len(manifest))}
    assert sorted(found) == sorted(f"{tmp_path}/x.tar/{name}" for name in names)
    for number, name in enumerate(names):
        i = found[f"{tmp_path}/x.tar/{name}"]
        assert manifest.read(i) == (tmp_path / "tree" / name).read_bytes()
        assert manifest.labels[i] == number and manifest.sizes[i].tolist() == [8 + number, 6]


@given(
    st.lists(
        st.tuples(st.text("aé/-_ 1", min_size=1, max_size=150), st.sampled_from([".jpg", ".png", ".txt", ".json"])),
        min_size=1,
        max_size=8,
        unique=True,
    ),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_walk_finds_what_tarfile_finds(tmp_path_factory, names, form):
    path = tmp_path_factory.mktemp("walk") / "x.tar"
    contents = {}
    for number, (stem, ending) in enumerate(names):
        if form != tarfile.USTAR_FORMAT or len(f"{stem}{number}".encode()) < 90:
            contents[f"x{stem}{number}{ending}".replace("//", "/")] = b"{}" + bytes(100 * number)
    pack(path, contents.items(), form)
    walked = {
        name: (at, content()) for name, at, _, _, content in tar_format.members(str(path))
    }  # a name that stands twice is the last one in both
    with tarfile.open(path) as tar:
        assert walked == {
            member.name.encode(): (member.offset_data, tar.extractfile(member).read()) for member in tar.getmembers()
        }


def test_size_of_eight_gigabytes_and_more():
    info = tarfile.TarInfo("x")
    info.size = 9 * 2**30
    header = info.tobuf(tarfile.GNU_FORMAT)
    assert tar_format._number(header[124:136]) == 9 * 2**30


def test_header_behind_much_metadata_is_found(tmp_path):
    exif = Image.Exif()
    exif[0x010E] = "x" * 60_000
    content = io.BytesIO()
    Image.new("RGB", (9, 7)).save(content, "JPEG", exif=exif, icc_profile=bytes(60_000))
    pack(tmp_path / "x.tar", [("a.jpg", content.getvalue())])
    assert Manifest.open(tmp_path / "x.tar").sizes.tolist() == [[9, 7]]


def test_labels_of_json_are_integers_or_names(tmp_path):
    images = [("a.jpg", encoded()), ("b.jpg", encoded())]
    for values, labels, classes in ([2, 0], [2, 0], ["0", "1", "2"]), (["cat", "ant"], [1, 0], ["ant", "cat"]):
        documents = [
            (f"{key}.json", json.dumps({"label": value}).encode()) for key, value in zip("ab", values, strict=True)
        ]
        manifest = Manifest.open(pack(tmp_path / "x.tar", images + documents))
        assert manifest.labels.tolist() == labels and manifest.classes == classes


def test_json_without_label_is_no_label(tmp_path):
    path = pack(tmp_path / "x.tar", [("a.json", b'{"caption": "x"}'), ("a.jpg", encoded())])
    assert Manifest.open(path).labels is None


def test_other_and_hidden_members_are_ignored(tmp_path):
    content = [("d/._a.jpg", b"x"), ("d/a.txt", b"x"), ("d/a.jpg", encoded()), ("d/a.seg.png", b"x"), ("README", b"x")]
    manifest = Manifest.open(pack(tmp_path / "x.tar", content))
    assert len(manifest) == 1 and manifest.path(0) == f"{tmp_path}/x.tar/d/a.jpg"


def test_image_whose_name_has_a_second_dot_is_an_image_of_its_own(tmp_path):
    """As in a plain tar; its label is its own, or that of the name up to an earlier dot."""
    names = ["d/a.jpg", "d/a.v2.jpg", "d/b.1.x.PNG", "e/2024.01.03.jpg"]
    images = [(name, encoded((8, 6 + number))) for number, name in enumerate(names)]
    manifest = Manifest.open(pack(tmp_path / "x.tar", images))
    assert [manifest.read(i) for i in range(4)] == [content for _, content in images]
    assert manifest.labels.tolist() == [0, 0, 0, 1] and manifest.classes == ["d", "e"]
    labels = [("d/a.cls", b"3"), ("d/a.v2.meta.json", b"no JSON"), ("d/b.1.cls", b"1"), ("d/b.cls", b"9")]
    labels += [("e/2024.01.03.json", b'{"label": 2}')]
    images[1] = ("d/a.v2.x.jpg", images[1][1])  # beside d/a.jpg and d/a.cls it would be a part of that sample
    del images[0]
    manifest = Manifest.open(pack(tmp_path / "x.tar", images + labels))
    assert manifest.labels.tolist() == [3, 1, 2]


def test_what_a_shard_leaves_out_is_counted_by_ending_from_the_cache_too(tmp_path):
    members = [("a.gif", b"x"), ("b.GIF", b"x"), ("README", b"x"), ("c.jpg", encoded()), ("c.cls", b"0")]
    members += [("c.seg.png", b"x"), ("c.txt", b"x"), (".hidden", b"x")]
    path = pack(tmp_path / "x.tar", members)
    for _ in range(2):
        with pytest.warns(
            UserWarning, match=r"x\.tar: ignored 2 \.gif, 1 without an extension, 1 \.txt, 1 \.seg\.png;"
        ):
            manifest = Manifest.open(path, tmp_path / "cache")
        assert len(manifest) == 1


def test_listing_of_a_shard_that_was_remembered_without_what_it_leaves_out_is_not_used(tmp_path):
    path = pack(tmp_path / "x.tar", [("a.jpg", encoded()), ("b.jpg", encoded())])
    Manifest.open(path, tmp_path / "cache")
    (store,) = (tmp_path / "cache").iterdir()
    with np.load(store) as content:
        arrays = dict(content)
    cut = {key: arrays[key][:1] for key in ("shard", "at", "length", "sizes", "names")}
    arrays |= {**cut, "names": arrays["names"][: arrays["offsets"][1]], "offsets": arrays["offsets"][:2]}
    np.savez(store, **arrays)
    assert len(Manifest.open(path, tmp_path / "cache")) == 1
    del arrays["left_out"]  # as before there was an image with such a name
    np.savez(store, **arrays)
    assert len(Manifest.open(path, tmp_path / "cache")) == 2


def broken(tmp_path, what):
    image = ("a.jpg", encoded())
    path = tmp_path / "x.tar"
    if what == "cut in an image":
        path.write_bytes(pack(path, [image]).read_bytes()[:700])
    elif what == "cut between images":
        path.write_bytes(pack(path, [image]).read_bytes()[: 512 + -(-len(image[1]) // 512) * 512])
    elif what == "damaged header":
        content = bytearray(pack(path, [image, ("b.jpg", encoded())]).read_bytes())
        content[512 + -(-len(image[1]) // 512) * 512] ^= 1
        path.write_bytes(content)
    elif what == "compressed":
        with tarfile.open(path, "w:gz") as tar:
            tar.add(save(tmp_path / "a.jpg"))
    elif what == "text":
        path.write_text("text" * 200)
    elif what.startswith("pax "):
        info = tarfile.TarInfo("pax.jpg")
        content = dict(PAX)[what]
        info.type, info.size = tarfile.XHDTYPE, len(content)
        path.write_bytes(info.tobuf() + content + bytes(-len(content) % 512) + pack(path, [image]).read_bytes())
    elif what == "negative length":
        content = bytearray(pack(path, [image]).read_bytes())
        content[124:136] = b"-0000001000\0"
        content[148:156] = b"%06o\0 " % (sum(content[:148]) + 8 * 32 + sum(content[156:512]))
        path.write_bytes(content)
    elif what == "link":
        with tarfile.open(path, "w") as tar:
            info = tarfile.TarInfo("b.jpg")
            info.type, info.linkname = tarfile.LNKTYPE, "a.jpg"
            tar.addfile(info)
    else:
        pack(path, dict(BROKEN)[what])
    return path


BROKEN = [
    ("no images", [("a.txt", b"x")]),
    ("same key", [("a.jpg", b"x"), ("a.png", b"x")]),
    ("some labels", [("a.jpg", b"x"), ("a.cls", b"1"), ("b.jpg", b"x")]),
    ("no integer", [("a.jpg", b"x"), ("a.cls", b"cat")]),
    ("large label", [("a.jpg", b"x"), ("a.cls", b"1000000")]),
    ("bad json", [("a.jpg", b"x"), ("a.json", b"{")]),
    ("odd label", [("a.jpg", b"x"), ("a.json", b'{"label": [1]}')]),
    ("half a character", [("a.jpg", b"x"), ("a.json", rb'{"label": "\ud800"}')]),
    ("deep json", [("a.jpg", b"x"), ("a.json", b"[" * 100_000)]),
    ("long cls", [("a.jpg", b"x"), ("a.cls", b"7" * 5000)]),
    ("long json", [("a.jpg", b"x"), ("a.json", b'{"label": %s}' % (b"7" * 5000))]),
    ("long text", [("a.jpg", b"x"), ("a.json", b'{"label": "%s"}' % (b"7" * 5000))]),
]
PAX = [
    ("pax of no length", b"0 path=x\n"),
    ("pax garbage", b"garbage"),
    ("pax zeros", bytes(20)),
    ("pax too long", b"99 path=x\n"),
    ("pax size", b"12 size=abc\n"),
    ("pax negative size", b"14 size=-1024\n"),
    ("pax long size", b"5011 size=" + b"7" * 5000 + b"\n"),
    ("pax zero in a name", b"11 path=a\0b\n"),
]


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("cut in an image", r"x\.tar: cut off after 700 bytes; copy or pack it again"),
        ("cut between images", r"x\.tar: cut off after"),
        ("damaged header", r"x\.tar: its header at byte \d+ is damaged"),
        ("compressed", r"x\.tar: compressed, but images are read by offset; unpack it"),
        ("text", r"x\.tar: not a tar file"),
        ("link", r"x\.tar/b\.jpg: a link; pack it with"),
        ("no images", r"x\.tar: holds no images"),
        ("same key", r"x\.tar/a\.png: the second image with the key a; rename"),
        ("some labels", r"x\.tar/b\.jpg: has no label .* 1 of 2 images have one"),
        ("no integer", r"x\.tar/a\.cls: says cat; a \.cls file must hold an integer"),
        ("large label", r"x\.tar/a\.jpg: label 1000000 is out of range"),
        ("bad json", r"x\.tar/a\.json: not valid JSON"),
        ("odd label", r"x\.tar/a\.json: its label is \[1\]"),
        ("half a character", r"x\.tar/a\.json: its label is '\\ud800'; it must be an integer or a name"),
        ("deep json", r"x\.tar/a\.json: not valid JSON .*; repair or remove it"),
        ("long cls", r"x\.tar/a\.jpg: label 7{20}\.\.\. is out of range; integers must be in 0 to"),
        ("long json", r"x\.tar/a\.json: not valid JSON .*; repair or remove it"),
        ("long text", r"x\.tar/a\.jpg: label 7{20}\.\.\. is out of range; integers must be in 0 to"),
        ("negative length", r"x\.tar: not a tar file"),
        *((what, r"x\.tar/pax\.jpg: its extended header at byte 512 is damaged; copy or pack") for what, _ in PAX),
    ],
)
def test_mistake_in_a_shard_is_named(tmp_path, what, match):
    refused(broken(tmp_path, what), match)


def test_zeros_before_a_label_do_not_count(tmp_path):
    save(tmp_path / "a.jpg")
    (tmp_path / "x.txt").write_text(f"a.jpg\t{'0' * 5000}2\na.jpg\t000\na.jpg\t-0\n")
    assert Manifest.open(tmp_path / "x.txt").labels.tolist() == [2, 0, 0]


def test_archives_that_were_joined_are_all_read(tmp_path):
    contents = [encoded((8, 6 + number)) for number in range(3)]
    parts = [
        pack(tmp_path / f"{number}.tmp", [(f"{number}.jpg", content)], tarfile.PAX_FORMAT).read_bytes()
        for number, content in enumerate(contents)
    ]
    (tmp_path / "x.tar").write_bytes(parts[0] + bytes(2 << 20) + parts[1] + parts[2] + b"garbage" * 200)
    manifest = Manifest.open(tmp_path / "x.tar")
    assert [manifest.read(i) for i in range(len(manifest))] == contents
    (tmp_path / "x.tar").write_bytes(parts[0] + parts[1][:600])
    refused(tmp_path / "x.tar", r"x\.tar: cut off after")


@pytest.mark.parametrize("garbage", [b"", b"x", b"garbage" * 200, bytes(100), bytes(600) + b"x"])
def test_what_is_no_archive_behind_the_end_of_a_shard_is_ignored(tmp_path, garbage):
    path = pack(tmp_path / "x.tar", [("a.jpg", encoded())])
    path.write_bytes(path.read_bytes() + garbage)
    assert len(Manifest.open(path)) == 1


def test_labels_in_some_shards_only(tmp_path):
    pack(tmp_path / "a.tar", [("a.jpg", encoded())])
    pack(tmp_path / "b.tar", [("a.jpg", encoded()), ("a.cls", b"0")])
    refused(tmp_path, r"a\.tar: its images have no labels, but those of .*b\.tar do")


def test_label_without_a_class_name(packed):
    (packed / "classes.txt").write_text("one\ntwo\n")
    refused(packed, r"label 4, but classes\.txt next to the shards names 2 classes")


def test_shards_may_end_in_capitals_and_compressed_ones_beside_them_are_announced(tmp_path):
    for name in ("A.TAR", "b.tar"):
        pack(tmp_path / name, [(f"{name[0]}.jpg", encoded())])
    assert len(Manifest.open(tmp_path)) == 2 and len(Manifest.open(tmp_path / "A.TAR")) == 1
    for name in ("c.tar.GZ", "d.tgz"):
        (tmp_path / name).write_bytes(b"\x1f\x8b" * 512)
    with pytest.warns(UserWarning, match=r"ignored 2 compressed archives \(c\.tar\.GZ for one\); unpack them to \.tar"):
        assert len(Manifest.open(tmp_path)) == 2
    refused(tmp_path / "c.tar.GZ", r"c\.tar\.GZ: compressed, but images are read by offset; unpack it")


def test_tar_files_beside_a_tree_do_not_hide_it(tmp_path):
    save(tmp_path / "cat/a.jpg")
    pack(tmp_path / "cat.tar", [("b.jpg", encoded())])
    assert Manifest.open(tmp_path).path(0) == str(tmp_path / "cat/a.jpg")


@pytest.mark.parametrize(
    ("text", "labels", "classes"),
    [
        ("a.jpg\nb.jpg\n", None, []),
        ("a.jpg\t3\r\nb.jpg\t1", [3, 1], ["0", "1", "2", "3"]),
        ("a.jpg\tdog\nb.jpg\tblue cat\n", [1, 0], ["blue cat", "dog"]),
        ("a.jpg 3\nb.jpg 1\n", [3, 1], ["0", "1", "2", "3"]),
        ("\ufeff# comment\n\n  \na.jpg\t1\n./b.jpg\t0", [1, 0], ["0", "1"]),
    ],
)
def test_forms_of_a_list(tmp_path, text, labels, classes):
    save(tmp_path / "a.jpg", size=(8, 6))
    save(tmp_path / "b.jpg", size=(9, 6))
    (tmp_path / "x.lst").write_text(text, newline="")
    manifest = Manifest.open(tmp_path / "x.lst")
    assert manifest.sizes.tolist() == [[8, 6], [9, 6]] and manifest.classes == classes
    assert (None if manifest.labels is None else manifest.labels.tolist()) == labels


def test_a_tilde_is_the_home_folder_in_paths_lists_and_the_place_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("UNIGRAD_CACHE", "~/kept")
    save(tmp_path / "tree/a.jpg")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists/x.txt").write_text("~/tree/a.jpg\n../tree/a.jpg\n")
    for source in ("~/tree", "~/lists/x.txt"):
        manifest = Manifest.open(source)
        assert manifest.read(0) == manifest.read(-1) == encoded() and manifest.path(0) == str(tmp_path / "tree/a.jpg")
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_list_keeps_its_order_and_takes_names_with_blanks(tmp_path):
    for name in ("b 2", "a.jpg", "sub/c 1"):
        save(tmp_path / name)
    (tmp_path / "x.txt").write_text(f"sub/c 1\n{tmp_path}/b 2\na.jpg\na.jpg\n")
    manifest = Manifest.open(tmp_path / "x.txt")
    assert [manifest.path(i) for i in range(4)] == [str(tmp_path / n) for n in ("sub/c 1", "b 2", "a.jpg", "a.jpg")]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a.jpg\nc.jpg\nd.jpg\n", r"x\.txt, line 2: .*c\.jpg does not exist or is not a file \(and 1 more\); correct"),
        ("a.jpg\t1\nb.jpg\n", r"x\.txt, line 2: has no label \(a TAB and a label\), but 1 of 2"),
        ("a.jpg 1\nb.jpg\n", r"x\.txt, line 2: has no label \(a blank and an integer\), but 1 of 2"),
        ("a.jpg\t1\t2\n", r"x\.txt, line 1: unreadable; write PATH, or PATH, one TAB and a label"),
        ("a.jpg\t\n", r"x\.txt, line 1: unreadable"),
        ("a.jpg\t1\nb.jpg\t-1\n", r"x\.txt, line 2: label -1 is out of range; integers must be in 0 to"),
        ("a.jpg\t" + "7" * 5000, r"x\.txt, line 1: label 7{20}\.\.\. is out of range"),
        ("# nothing\n", r"x\.txt: lists no image"),
        ("a\0b", r"x\.txt: not a text file"),
        (
            "Photographs of cats, which were taken in the garden last year.\n",
            r"x\.txt, line 1: Photographs of cats, which were taken in\.\.\. does not exist or is not a file; correct",
        ),
        (f"{'far/' * 20}c.jpg\n", rf"x\.txt, line 1: .*{'far/' * 20}c\.jpg does not exist"),
        ("sub\n", r"x\.txt, line 1: .*/sub does not exist or is not a file"),
    ],
)
def test_mistake_in_a_list_is_named(tmp_path, text, match):
    save(tmp_path / "a.jpg")
    save(tmp_path / "b.jpg")
    (tmp_path / "sub").mkdir()
    (tmp_path / "x.txt").write_text(text)
    refused(tmp_path / "x.txt", match)


def test_labels_belong_to_the_fingerprint_of_a_list(tmp_path):
    save(tmp_path / "a.jpg")
    prints = set()
    for text in ("a.jpg", "a.jpg\t0", "a.jpg\t1", "a.jpg\tcat"):
        (tmp_path / "x.txt").write_text(text)
        prints.add(Manifest.open(tmp_path / "x.txt").fingerprint)
    assert len(prints) == 4


def test_what_is_no_source_is_refused(tmp_path):
    refused(tmp_path / "absent", "absent does not exist; give a folder of images, a list of them, or .tar shards")
    refused(save(tmp_path / "a.jpg"), "is an image; give the folder")


def opened(source, tmp_path):
    for name in "abc":
        save(tmp_path / f"tree/{name}.jpg")
    if source == "tree":
        return tmp_path / "tree"
    if source == "list":
        (tmp_path / "x.txt").write_text("".join(f"tree/{name}.jpg\n" for name in "abc"))
        return tmp_path / "x.txt"
    return pack(tmp_path / "x.tar", [(f"{name}.jpg", encoded()) for name in "abc"])


@pytest.mark.parametrize("source", ["tree", "list", "shard"])
def test_unusable_images_are_remembered_until_something_changes(tmp_path, source):
    path = opened(source, tmp_path)
    first, second = Manifest.open(path), Manifest.open(path)
    first.mark_unusable(np.array([1]))
    second.mark_unusable([2])  # another process, which had not seen the first mark
    for manifest in (second, Manifest.open(path)):
        assert manifest.sizes.tolist() == [[8, 6], [-1, -1], [-1, -1]]
        assert manifest.unreadable().tolist() == [1, 2]
        assert manifest.header_sizes().tolist() == [[8, 6]] * 3
    assert "a scan found it unusable" in second.complaint(1)
    changed = {"tree": tmp_path / "tree/a.jpg", "list": tmp_path / "tree/a.jpg", "shard": tmp_path / "x.tar"}[source]
    os.utime(changed, ns=(1, 1))
    assert Manifest.open(path).sizes.tolist() == [[8, 6]] * 3


def test_waiting_storage_is_read_in_threads(monkeypatch):
    seen = []
    clock = iter(range(100))
    monkeypatch.setattr(slow_storage.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(slow_storage.time, "thread_time", lambda: 0.0)
    result = slow_storage.spread(lambda task: seen.append(threading.current_thread()) or task, range(20))
    assert result == list(range(20)) and seen[0] is threading.main_thread() is not seen[-1]


def test_copy_of_shards_is_the_same_to_other_machines(packed, tmp_path):
    from unigrad_fast.images.manifests import digest

    copy = shutil.copytree(packed, tmp_path / "copy", copy_function=shutil.copyfile)
    assert digest(Manifest.open(copy)) == digest(Manifest.open(packed))


PARTS = st.sampled_from(
    ["cat", "dog", "train", "007", "12", "a", ".hidden", "@eaDir", "lost+found", "e\u0301", "\u00e9"]
)


@settings(max_examples=40)
@given(st.lists(st.lists(PARTS, max_size=3), min_size=1, max_size=8), st.booleans())
def test_a_tar_of_a_tree_has_the_trees_images_and_classes(tmp_path_factory, folders, wrapped):
    root = tmp_path_factory.mktemp("packed") / "tree"
    for number, folder in enumerate(folders):
        save(root.joinpath(*folder) / f"{number}.jpg", size=(8, 6 + number))
    place = ["-C", root.parent, "tree"] if wrapped else ["-C", root, "."]
    subprocess.run(["tar", "-cf", root.with_suffix(".tar"), *place], check=True)

    def found(path):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                manifest = Manifest.open(path)
            except DataError as error:
                assert "holds no" in str(error)
                return None
        named = [
            (os.path.basename(manifest.path(i)), manifest.classes[manifest.labels[i]] if manifest.has_labels else "")
            for i in range(len(manifest))
        ]
        said = [str(line.message).partition(": ")[2].replace("/tree.tar", "").replace("/tree", "") for line in told]
        return sorted(named), manifest.classes, len(said)

    packed, files = found(root.with_suffix(".tar")), found(root)
    if wrapped and files is not None and not files[1]:  # a folder of images is the only class of the tar that has it
        assert packed[1] == ["tree"] and [name for name, _ in packed[0]] == [name for name, _ in files[0]]
    elif not wrapped or (files is not None and len(files[1]) > 1):
        assert packed == files


@pytest.mark.parametrize("source", ["tree", "tree.tar", "shards"])
def test_classes_are_the_folders_below_those_that_lead_to_all_images(tmp_path, source):
    for number, name in enumerate(["cat/a/0", "cat/b/1", "dog/2", "dog/.ipynb_checkpoints/2", "#recycle/3", "4"]):
        save(tmp_path / f"tree/train/{name}.jpg", size=(8, 6 + number))
    subprocess.run(["tar", "-cf", tmp_path / "tree.tar", "-C", tmp_path / "tree", "."], check=True)
    if source == "shards":
        with pytest.warns(UserWarning, match="lie directly in"):
            given = Manifest.open(tmp_path / "tree.tar")
        packing.pack(given, "tree.tar", tmp_path / source, packing.Packing(), 1, lambda images: None)
        manifest = Manifest.open(tmp_path / source)
    else:
        for _ in range(2):  # from the cache too
            with pytest.warns(UserWarning) as told:
                manifest = Manifest.open(tmp_path / source)
            where = f"{tmp_path / source}/train"
            assert [str(line.message) for line in told] == [
                f"1 images lie directly in {where} or above it, next to its class folders; they are ignored",
                f"{tmp_path / source}: the classes are the folders in {where} (cat, dog); 2 images lie deeper, in "
                "folders such as train/cat/a",
            ]
    named = {(os.path.basename(manifest.path(i)), manifest.classes[manifest.labels[i]]) for i in range(len(manifest))}
    assert named == {("0.jpg", "cat"), ("1.jpg", "cat"), ("2.jpg", "dog")} and len(manifest) == 3


@pytest.mark.parametrize("source", ["tree", "tree.tar", "list.txt", "json.tar", "classes"])
def test_class_names_of_another_unicode_form_are_one_class(tmp_path, source):
    names = ["Cafe\u0301", "Caf\u00e9", "The"]  # as macOS and as Linux write it
    for number, name in enumerate(names):
        save(tmp_path / f"tree/{name}/{number}.jpg", size=(8, 6 + number))
    subprocess.run(["tar", "-cf", tmp_path / "tree.tar", "-C", tmp_path / "tree", "."], check=True)
    (tmp_path / "list.txt").write_text(
        "".join(f"tree/{name}/{number}.jpg\t{name}\n" for number, name in enumerate(names))
    )
    images = [(f"{number}.jpg", encoded((8, 6 + number))) for number in range(3)]
    labels = [(f"{number}.json", json.dumps({"label": name}).encode()) for number, name in enumerate(names)]
    pack(tmp_path / "json.tar", images + labels)
    pack(tmp_path / "classes/0.tar", [*images, *((f"{number}.cls", str(number // 2).encode()) for number in range(3))])
    (tmp_path / "classes/classes.txt").write_text("Cafe\u0301\nThe\n")
    manifest = Manifest.open(tmp_path / source)
    assert manifest.classes == ["Caf\u00e9", "The"]
    by_size = dict(zip(manifest.sizes[:, 1].tolist(), manifest.labels.tolist(), strict=True))
    assert by_size == {6: 0, 7: 0, 8: 1}


def test_pictures_of_a_run_in_a_tar_are_no_images(tmp_path):
    names = ["cat/0.jpg", "dog/1.jpg", "run/curves.png", "run/export/preview.png"]
    marks = [(f"run/{name.decode()}", b"") for name in OF_A_RUN] + [("cat/config.yaml", b"")]
    path = pack(tmp_path / "x.tar", [*((name, encoded()) for name in names), *marks])
    with pytest.warns(UserWarning, match=r"x\.tar contains 1 folders of runs among the images \(run for one\)"):
        manifest = Manifest.open(path)
    assert manifest.classes == ["cat", "dog"] and len(manifest) == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["x.tar", "classes.txt"])
def test_named_pipe_in_place_of_a_shard_or_of_its_class_names_is_not_waited_for(tmp_path, name):
    pack(tmp_path / "a.tar", [("a.jpg", encoded()), ("a.cls", b"0")])
    os.mkfifo(tmp_path / name)
    refused(tmp_path / name if name.endswith(".tar") else tmp_path, rf"{name}: not a file but a named pipe")
