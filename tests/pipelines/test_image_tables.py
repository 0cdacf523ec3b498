"""Images in Arrow and Parquet files: the batches of the same files, and each mistake by name."""

import contextlib
import errno
import io
import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from same_batches import assert_same, batches

from unigrad_fast.pipelines import DataError, EvaluationLoader, Manifest
from unigrad_fast.pipelines.files import places
from unigrad_fast.pipelines.reading.damage import decoded
from unigrad_fast.pipelines.shards import archives
from unigrad_fast.pipelines.tables import listing, rows


def table(manifest: Manifest, changed: dict[int, bytes] | None = None, bare: bool = False) -> pyarrow.Table:
    """The images of a manifest as rows, as `datasets` lays them out, or bytes and texts alone."""
    content = [(changed or {}).get(i, manifest.read(i)) for i in range(len(manifest))]
    if bare:
        return pyarrow.table({"image": content, "label": [manifest.classes[label] for label in manifest.labels]})
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": manifest.classes}}
    told = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    images = [{"bytes": data, "path": f"{i}.jpg"} for i, data in enumerate(content)]
    return pyarrow.table({"image": images, "label": manifest.labels}).replace_schema_metadata(told)


def written(kind: str, manifest: Manifest, folder: Path, changed: dict[int, bytes] | None = None) -> str:
    """The source of one kind with the images of a manifest."""
    folder.mkdir()
    if kind == "bytes":
        parquet.write_table(table(manifest, changed, bare=True), folder / "all.parquet", row_group_size=40)
        return str(folder / "all.parquet")
    content = table(manifest, changed)
    if kind == "saved":
        whole = datasets.Dataset(content)
        datasets.DatasetDict(train=whole, test=whole.select(range(3))).save_to_disk(
            folder, num_shards={"train": 2, "test": 1}
        )
        return f"hf:{folder}:train"
    compression = {"hub": "none", "plain": "none", "compressed": "snappy"}[kind]
    names = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    (folder / "data").mkdir()
    for name, part in zip(names, (content.slice(0, 50), content.slice(50)), strict=True):
        dictionary = kind == "plain"  # values are in a dictionary at first, and a repeated one only there
        parquet.write_table(part, folder / name, 20, compression=compression, use_dictionary=dictionary)
    return f"hf:{folder}" if kind == "hub" else f"parquet:{folder / 'data'}:image:label"


KINDS = ("saved", "hub", "plain", "compressed", "bytes")
COPIED = ("compressed", "bytes")


@pytest.fixture(scope="module")
def sources(tree, tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("sources")
    manifest = Manifest.from_folder(tree)
    return {kind: written(kind, manifest, root / kind) for kind in KINDS}


@pytest.mark.filterwarnings("ignore:.*is compressed")
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_the_same_files_at_any_step_and_rank(kind, sources, manifest):
    found = Manifest.open(sources[kind])
    assert found.classes == manifest.classes and found.labels.tolist() == manifest.labels.tolist()
    assert found.sizes.tolist() == manifest.sizes.tolist() and found.lengths.tolist() == manifest.lengths.tolist()
    assert_same(batches(found, start=5), batches(manifest, start=5))
    for rank in range(2):
        assert_same(batches(found, rank, 2, 7, 1), batches(manifest, rank, 2, 7, 1))
    images, index = next(iter(EvaluationLoader(found, 16, batch_size=20, threads=1)))
    same, _ = next(iter(EvaluationLoader(manifest, 16, batch_size=20, threads=1)))
    assert torch.equal(images, same) and index.tolist() == list(range(20))


@pytest.mark.filterwarnings("ignore:.*is compressed")
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_takes_only_its_own_bytes_from_the_disk(kind, sources, manifest):
    found = Manifest.open(sources[kind])
    for image in (50, 3, 102):
        path, *_, at, length = found.place(image)
        with open(path, "rb") as file:
            assert os.pread(file.fileno(), length, at) == manifest.read(image)
        assert (".images" in path) == (kind in COPIED)
    assert places.read_place(pickle.loads(pickle.dumps(found)).place(3)) == manifest.read(3)


def test_what_datasets_writes_is_read_in_place(manifest, tmp_path):
    told = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=manifest.classes))
    datasets.Dataset(table(manifest)).cast(told).to_parquet(tmp_path / "0.parquet", batch_size=10)
    found = Manifest.open(tmp_path / "0.parquet")
    assert found.read(77) == manifest.read(77) and found.place(77)[0] == str(tmp_path / "0.parquet")


@pytest.mark.filterwarnings("ignore:.*is compressed")
def test_a_second_start_reads_no_table_and_a_lost_copy_is_made_again(sources, manifest, monkeypatch):
    first = Manifest.open(sources["compressed"])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        again = Manifest.open(sources["compressed"])
    assert again.fingerprint == first.fingerprint and again.read(5) == manifest.read(5)
    copy = Path(first.place(0)[0])
    for damage in (copy.unlink, lambda: copy.write_bytes(b"x" * copy.stat().st_size)):
        damage()
        assert Manifest.open(sources["compressed"]).read(5) == manifest.read(5)


@pytest.mark.filterwarnings("ignore:.*is compressed")
def test_a_start_digests_each_file_and_the_copy_once(sources, monkeypatch):
    looked, digests = [], archives.digests_of_ends
    monkeypatch.setattr(archives, "digests_of_ends", lambda root, files: looked.extend(files) or digests(root, files))
    for _ in range(2):  # without a cached listing, and with it
        looked.clear()
        found = Manifest.open(sources["compressed"])
        assert sorted(looked) == sorted(found.storage.shards.files) and len(looked) == 3


def test_a_dataset_of_hugging_face_may_be_given_as_it_is(sources, manifest):
    loaded = datasets.load_from_disk(sources["saved"].split(":")[1])["train"]
    found = Manifest.open(loaded)
    assert found.labels.tolist() == manifest.labels.tolist() and found.classes == manifest.classes
    pixels = next(decoded([np.frombuffer(found.read(7), np.uint8)]))
    with Image.open(manifest.path(7)) as image:
        assert np.array_equal(pixels, np.asarray(image))


def test_a_folder_of_tables_is_named_as_such(sources):
    for kind in ("saved", "hub"):
        folder = sources[kind].split(":")[1]
        with pytest.raises(DataError, match=rf"holds no images, only .*; give hf:{folder} if `datasets` saved it"):
            Manifest.open(folder)


def test_files_without_rows_take_no_labels_away(manifest, tmp_path):
    for number, part in enumerate((table(manifest).slice(0, 0), table(manifest).slice(0, 9))):
        parquet.write_table(part, tmp_path / f"{number}.parquet", compression="none")
    assert Manifest.open(f"parquet:{tmp_path}").labels.tolist() == manifest.labels[:9].tolist()


def test_a_copy_is_announced_and_needs_room(sources, monkeypatch, tmp_path):
    with pytest.warns(UserWarning, match=r"is compressed, so its images are copied once, to .*cache.*images"):
        Manifest.open(sources["compressed"])
    monkeypatch.setattr(listing.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10}))
    with pytest.raises(DataError, match=r"0\.0 GB for a copy of its images, .*name a folder with more room in"):
        Manifest.open(sources["compressed"], tmp_path / "other")


def test_bad_images_are_replaced_as_bad_files_are(tree, manifest, tmp_path):
    bad = {7: b"garbage", 30: manifest.read(30)[:300], 55: b""}
    found = Manifest.open(written("saved", manifest, tmp_path / "saved", bad))
    root = Path(shutil.copytree(tree, tmp_path / "tree"))
    for image, content in bad.items():
        (root / Path(manifest.path(image)).relative_to(tree)).write_bytes(content)
    files = Manifest.open(root)
    assert found.unreadable().tolist() == files.unreadable().tolist()
    mine, theirs = batches(found, count=6), batches(files, count=6)
    assert_same(mine, theirs)
    replaced = [{failure.image for batch in each for failure in batch.failures} for each in (mine, theirs)]
    assert replaced[0] == replaced[1] and replaced[0] & bad.keys()


@pytest.mark.parametrize(
    "source, said",
    [
        ("hf:{saved}", r"has several splits; give one of train, test, as hf:.*saved:train"),
        ("hf:{saved}:val", r"has no split val; give one of train, test"),
        ("hf:{saved}:train:picture", r"no column picture of encoded images; there is image"),
        ("hf:{saved}:train:image:name", r"no column name of labels; there is label"),
        ("hf:{saved}/train:train", r"has no splits, but train is given; leave it out"),
        ("hf:{hub}:test", r"has no split test; give one of train"),
        ("hf:{tree}", r"holds neither what `datasets` saved with save_to_disk nor \.parquet files"),
        ("hf:{hub}/none", r"hub/none does not exist; give hf:FOLDER"),
        ("parquet:{tree}", r"holds no \.parquet files; give a Parquet file, or a folder of them"),
        ("parquet:{tree}/none", r"none does not exist; give a Parquet file, or a folder of them"),
        ("parquet:{hub}/data:label", r"no column label of encoded images; there is image"),
    ],
)
def test_a_mistake_says_what_there_is(source, said, sources, tree):
    folders = {kind: source.split(":")[1] for kind, source in sources.items() if ":" in source}
    with pytest.raises(DataError, match=said):
        Manifest.open(source.format(**folders, tree=tree))


def save(tmp_path: Path, **columns: object) -> str:
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet", compression="none")
    return str(tmp_path / "t.parquet")


BYTES = pyarrow.binary()
PATH_ALONE = pyarrow.array([{"path": "/a.jpg"}], pyarrow.struct({"bytes": BYTES, "path": pyarrow.string()}))


@pytest.mark.parametrize(
    "columns, said",
    [
        ({"image": [1.0]}, r"no column of encoded images \(bytes, or a struct with bytes\)"),
        ({"image": pyarrow.array([], BYTES)}, "holds no images; its tables have no rows"),
        ({"a": [b"1"], "b": [b"2"]}, "several columns may hold the images; give one of a, b"),
        ({"image": PATH_ALONE}, "row 0 holds the path of a file, not its bytes"),
        ({"image": [b"1", b"2"], "label": [1, None]}, "0000001: has no label, but 1 of 2 have one; label all or none"),
        ({"image": [b"1", None]}, r"none of the 2 images in .*t\.parquet can be read; .*its header is not one of"),
    ],
)
def test_a_table_without_usable_images_is_refused(columns, said, tmp_path):
    with pytest.raises(DataError, match=said):
        Manifest.open(save(tmp_path, **columns))


def test_damaged_and_cut_off_tables_are_named(sources, tmp_path):
    whole = Path(sources["hub"].removeprefix("hf:"), "data/train-00000-of-00002.parquet").read_bytes()
    arrow = sources["saved"].split(":")[1]
    for content in (whole[:-1000], b"PAR1" + bytes(100), b""):
        (tmp_path / "0.parquet").write_bytes(content)
        with pytest.raises(DataError, match=r"0\.parquet cannot be read: .*; copy or save the file again"):
            Manifest.open(tmp_path / "0.parquet")
    folder = shutil.copytree(f"{arrow}/train", tmp_path / "saved")
    file = next(folder.glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"\.arrow cannot be read: .*; copy or save the file again"):
        Manifest.open(f"hf:{folder}")


def test_damage_in_a_compressed_column_is_named_and_so_is_a_full_disk(sources, tmp_path, monkeypatch):
    folder = Path(sources["compressed"].removeprefix("parquet:").split(":")[0])
    content = bytearray((folder / "train-00000-of-00002.parquet").read_bytes())
    content[1000:9000] = bytes(8000)
    (tmp_path / "0.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"0\.parquet cannot be read: .*; copy or save the file again"):
        Manifest.open(tmp_path / "0.parquet")

    class Full(io.BytesIO):
        def writelines(self, lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(listing, "_copying", lambda copy: contextlib.nullcontext(Full()))
    with pytest.raises(
        DataError, match=r"\.images cannot be written: no space left on device; name a folder with more"
    ):
        Manifest.open(sources["compressed"], tmp_path / "other")


@pytest.mark.filterwarnings("ignore:.*is compressed")
def test_a_copy_that_another_process_made_meanwhile_is_kept(sources, tmp_path, manifest):
    first = Manifest.open(sources["compressed"], tmp_path)
    os.unlink(next(tmp_path.glob("*.npz")))  # as a process sees it that began before
    second = Manifest.open(sources["compressed"], tmp_path)
    assert first.place(5) == second.place(5) and first.read(5) == manifest.read(5)
    assert not list(tmp_path.glob("*.new"))


def test_a_path_is_that_of_the_folder_in_which_it_was_given(manifest, tmp_path, monkeypatch):
    parquet.write_table(table(manifest).slice(0, 5), tmp_path / "0.parquet", compression="none")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = [Manifest.from_hugging_face("."), *map(Manifest.from_parquet, ("0.parquet", "~/0.parquet::label"))]
    monkeypatch.chdir("/")
    assert [one.read(3) for one in found] == [manifest.read(3)] * 3


def test_files_with_other_columns_are_refused(manifest, tmp_path):
    parquet.write_table(table(manifest), tmp_path / "0.parquet")
    parquet.write_table(table(manifest, bare=True), tmp_path / "1.parquet")
    with pytest.raises(DataError, match=r"1\.parquet: its column image is missing or of another type than in .*0\."):
        Manifest.open(f"parquet:{tmp_path}")


def test_a_changed_table_is_listed_again(manifest, tmp_path):
    parquet.write_table(table(manifest), tmp_path / "0.parquet", compression="none")
    before = Manifest.open(tmp_path / "0.parquet")
    parquet.write_table(table(manifest).slice(1), tmp_path / "0.parquet", compression="none")
    after = Manifest.open(tmp_path / "0.parquet")
    assert len(after) == len(before) - 1 and after.fingerprint != before.fingerprint
    assert after.read(0) == manifest.read(1)


def test_of_several_columns_of_classes_one_is_chosen_or_none(manifest, tmp_path):
    names = {"_type": "ClassLabel", "names": ["x", "y"]}
    told = {"info": {"features": {"img": {"_type": "Image"}, "fine": names, "coarse": names}}}
    columns = {"img": [manifest.read(0)] * 2, "fine": [0, 1], "coarse": [1, 1]}
    content = pyarrow.table(columns).replace_schema_metadata({b"huggingface": json.dumps(told).encode()})
    parquet.write_table(content, tmp_path / "0.parquet", compression="none")
    with pytest.warns(UserWarning, match=r"several columns of classes, .*give one of fine, coarse behind .*img:fine"):
        assert Manifest.open(tmp_path / "0.parquet").labels is None
    found = Manifest.open(f"parquet:{tmp_path / '0.parquet'}::coarse")
    assert found.labels.tolist() == [1, 1] and found.classes == ["x", "y"]
    unlabelled = content.set_column(1, "fine", pyarrow.array([-1, -1])).set_column(2, "coarse", pyarrow.array([0, 2]))
    parquet.write_table(unlabelled, tmp_path / "1.parquet", compression="none")
    assert Manifest.open(f"parquet:{tmp_path / '1.parquet'}:img:fine").labels is None
    with pytest.raises(DataError, match="0000001: label 2, but there are 2 class names"):
        Manifest.open(f"parquet:{tmp_path / '1.parquet'}:img:coarse")


def test_categories_are_labels_and_an_unusable_column_is_named(manifest, tmp_path):
    images = [manifest.read(0), manifest.read(1)]
    found = Manifest.open(save(tmp_path, image=images, label=pyarrow.array(["b", "a"]).dictionary_encode()))
    assert found.labels.tolist() == [1, 0] and found.classes == ["a", "b"]
    with pytest.warns(UserWarning, match="its column label is of type double, so no labels are read; save it as integ"):
        assert Manifest.open(save(tmp_path, image=images, label=[1.0, 0.0])).labels is None


@pytest.mark.parametrize("kind", ["saved", "hub"])
def test_names_of_tables_need_not_be_utf8(kind, sources, tmp_path):
    kept = Path(sources[kind].split(":")[1])
    other = shutil.copytree(kept, tmp_path / os.fsdecode(b"\xff"))
    found = Manifest.open(sources[kind].replace(str(kept), str(other)))
    assert found.fingerprint == Manifest.open(sources[kind]).fingerprint


@pytest.mark.parametrize(
    "names, split",
    [
        (["train-00000-of-00001-0123456789abcdef.parquet", "test-00000-of-00001.parquet"], "train"),
        (["default/train/0000.parquet", "default/train/0001.parquet", "default/test/0000.parquet"], "train"),
        (["validation.parquet", "train_0.parquet", "train_1.parquet"], "train"),
    ],
)
def test_splits_of_a_folder_as_on_the_hub(names, split, manifest, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table({"image": [manifest.read(0)]}), tmp_path / name, compression="none")
    assert len(Manifest.open(f"hf:{tmp_path}:{split}")) == sum(split in name for name in names)


def test_one_split_in_several_folders_is_refused(manifest, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        parquet.write_table(
            pyarrow.table({"image": [manifest.read(0)]}), tmp_path / name / "train-00000-of-00001.parquet"
        )
    with pytest.raises(DataError, match=r"has this split in .*/a, .*/b; give one of these folders"):
        Manifest.open(f"hf:{tmp_path}")


def test_without_pyarrow_the_line_that_installs_it_is_told(sources, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs pyarrow, .*; type `pip install 'unigrad-fast\[parquet\]'`"):
        Manifest.open(sources["saved"], tmp_path / "other")


def test_listing_holds_a_few_rows_at_a_time(sources, monkeypatch):
    taken = []
    chunk = rows._chunk
    monkeypatch.setattr(rows, "_chunk", lambda *given: taken.append(chunk(*given)) or taken[-1])
    with pytest.warns(UserWarning, match="is compressed"):
        Manifest.open(sources["compressed"])
    assert max(len(each.length) for each in taken) <= rows._BATCH and len(taken) > 1
