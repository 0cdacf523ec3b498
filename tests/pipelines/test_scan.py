"""The scan finds what training cannot decode, and ends the same however it was interrupted."""

import csv
import faulthandler
import io
import multiprocessing
import os
import shutil
import signal
import tarfile
from pathlib import Path

import pytest
from bad_files import BAD, GOOD, encoded, picture
from hypothesis import given
from hypothesis import strategies as st

from unigrad_fast.pipelines import DataError, Manifest
from unigrad_fast.pipelines.scan import scanning as scanning
from unigrad_fast.pipelines.scan.decoder import Decoder
from unigrad_fast.pipelines.scan.files import BAD as BEGINS_BAD
from unigrad_fast.pipelines.scan.files import as_csv
from unigrad_fast.pipelines.scan.summary import Summary, summarize

IMAGES = 24


def scan(root: Path, output: Path, threads: int = 1) -> Summary:
    manifest = Manifest.open(root)
    for _ in scanning.scan(manifest, output, threads):
        pass
    return summarize(manifest, output)


def rows(output: Path, name: str = "manifest.csv") -> list[dict[str, str]]:
    with open(output / name, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


def content(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.iterdir()}


@pytest.fixture(scope="module")
def scanned(tmp_path_factory) -> dict[str, dict[str, str]]:
    """The row of each kind of file, good and bad."""
    root = tmp_path_factory.mktemp("kinds")
    for name, make in {**BAD, **GOOD}.items():
        make(root / f"{name}.jpg")
    output = tmp_path_factory.mktemp("scans") / "scan"
    scan(root, output)
    return {row["path"].removesuffix(".jpg"): row for row in rows(output)}


@pytest.fixture
def images(tmp_path) -> Path:
    """Two classes of small images, a few of them bad."""
    root = tmp_path / "images"
    for number in range(IMAGES):
        path = root / f"class{number * 2 // IMAGES}" / f"{number:02}, a.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(16 + number, 16)))
        if number % 7 == 3:
            BAD["truncated"](path)
    return root


@pytest.fixture
def new_processes():
    """Gives the processes that were started in this test and are still alive."""
    before = set(multiprocessing.active_children())  # groups of ranks that other tests keep
    return lambda: set(multiprocessing.active_children()) - before


@pytest.fixture
def decoding(monkeypatch):
    """Calls a function with the image's bytes before each decoding, in the worker."""

    def install(before) -> None:
        decode = Decoder.decode
        monkeypatch.setattr(Decoder, "decode", lambda self, data: before(data) or decode(self, data))

    return install


REASONS = {
    "truncated": "truncated (at row",
    "missing end marker": "truncated (at row",
    "garbage": "not an image",
    "header of 100 bytes": "truncated (in its header)",
    "GIF": "unsupported format (GIF)",
    "truncated PNG": "truncated",
    "empty": "empty",
    "missing": "missing",
    "unreadable": "cannot be read (no such device",
}
NOTES = {
    "PNG": "PNG named .jpg",
    "WebP": "WEBP named .jpg",
    "RGBA": "PNG named .jpg",
    "16-bit PNG": "PNG named .jpg; 16 bits per channel",
    "gray": "",
    "CMYK": "CMYK",
    "progressive": "",
    "EXIF rotation": "EXIF rotation ignored",
    "animated": "WEBP named .jpg; several pictures in one file",
    "early end marker": "damaged but decodes (premature end of data segment)",
    "flipped bits": "damaged but decodes (extraneous bytes before marker 0xd9)",
    **dict.fromkeys(("long text", "TIFF of floats", "BigTIFF"), "unusual header or pixels"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_training_cannot_decode_is_bad(scanned, name):
    assert scanned[name]["note"].startswith(BEGINS_BAD + REASONS[name])


@pytest.mark.parametrize("name", GOOD)
def test_what_training_decodes_is_good_and_noted_where_odd(scanned, name):
    row = scanned[name]
    assert row["note"] == NOTES[name]
    assert (row["width"], row["height"]) == ("48", "36")


def test_rows_say_what_each_file_is(images, tmp_path):
    scan(images, tmp_path / "scan")
    row = rows(tmp_path / "scan")[15]
    data = (images / "class1" / "15, a.jpg").read_bytes()
    assert row.pop("digest") != rows(tmp_path / "scan")[16]["digest"]
    assert row == {
        "path": "class1/15, a.jpg",
        "label": "class1",
        "width": "31",
        "height": "16",
        "format": "JPEG",
        "colour": "RGB",
        "bytes": str(len(data)),
        "note": "",
    }


def test_summary_adds_up(images, tmp_path):
    shutil.copy(images / "class0" / "00, a.jpg", images / "class1" / "99.jpg")
    found = scan(images, tmp_path / "scan")
    bad = [3, 10, 17]
    assert found.images == IMAGES + 1
    assert found.bad == bad
    assert found.reasons == {"truncated": 3}
    assert [path for path, _ in found.first] == [row["path"] for row in rows(tmp_path / "scan", "bad.csv")]
    assert found.formats == {"JPEG": IMAGES + 1 - 3} and found.colours == {"RGB": IMAGES + 1 - 3}
    assert found.sizes == [(16, 16), (28, 16), (39, 16)]
    assert found.bytes == sum(path.stat().st_size for path in images.rglob("*.jpg"))
    assert found.duplicates == 1
    assert rows(tmp_path / "scan", "duplicates.csv") == [{"path": "class1/99.jpg", "same_as": "class0/00, a.jpg"}]


@pytest.mark.parametrize("threads", [2, 5])
def test_output_is_the_same_for_any_number_of_threads(images, tmp_path, threads):
    scan(images, tmp_path / "one")
    scan(images, tmp_path / "many", threads)
    assert content(tmp_path / "one") == content(tmp_path / "many")


def test_a_scan_killed_at_any_byte_ends_as_an_uninterrupted_one(images, tmp_path, decoding):
    scan(images, tmp_path / "whole")
    whole = content(tmp_path / "whole")
    for cut in range(0, len(whole["manifest.csv"]), 97):
        (tmp_path / "cut").mkdir(exist_ok=True)
        (tmp_path / "cut" / "scan.json").write_bytes(whole["scan.json"])
        (tmp_path / "cut" / "manifest.csv").write_bytes(whole["manifest.csv"][:cut])
        scan(images, tmp_path / "cut")
        assert content(tmp_path / "cut") == whole


def test_a_scan_killed_before_its_first_row_can_be_begun_again(images, tmp_path):
    (tmp_path / "scan").mkdir()
    (tmp_path / "scan" / "manifest.csv").touch()
    assert len(scan(images, tmp_path / "scan").bad) == 3


def test_what_is_scanned_is_not_decoded_again(images, tmp_path, decoding, new_processes):
    steps = scanning.scan(Manifest.open(images), tmp_path / "scan", 1)
    done = next(step.done for step in steps if step.done >= 5)
    steps.close()
    assert not new_processes()
    seen = tmp_path / "seen"
    decoding(lambda data: seen.open("a").write("x") and None)
    progress = scanning.scan(Manifest.open(images), tmp_path / "scan", 1)
    assert next(progress).done == done
    for _ in progress:
        pass
    assert len(seen.read_text()) == IMAGES - done


def test_names_that_are_no_text_survive(tmp_path):
    names = [b'new\nline, "quoted".jpg', b"\xff latin.jpg"]
    for name in names:
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).write_bytes(encoded())
    scan(tmp_path, tmp_path / "scan")
    whole = (tmp_path / "scan" / "manifest.csv").read_bytes()
    assert [os.fsencode(row["path"]) for row in rows(tmp_path / "scan")] == names
    (tmp_path / "scan" / "manifest.csv").write_bytes(whole[: whole.index(b"line")])
    scan(tmp_path, tmp_path / "scan")
    assert (tmp_path / "scan" / "manifest.csv").read_bytes() == whole


NAMES = st.text(st.sampled_from("\r\n\t\",;' a\xe9\x85\u2028\udcff\udc80"), max_size=8)


@given(st.lists(st.tuples(NAMES, NAMES), max_size=4))
def test_rows_of_all_names_are_read_as_they_were_written(written):
    content = as_csv(written).decode("utf-8", "surrogateescape")
    assert [tuple(row) for row in csv.reader(io.StringIO(content, newline=""))] == written
    assert content.endswith("\n") or not written


def test_a_carriage_return_in_names_survives_in_all_files(tmp_path):
    root = tmp_path / "images"
    for folder in ("c\rd", "e"):
        (root / folder).mkdir(parents=True)
        (root / folder / "x\ry.jpg").write_bytes(encoded())
        (root / folder / "z\r.jpg").write_text("no image")
    found = scan(root, tmp_path / "scan")
    assert [(row["path"], row["label"]) for row in rows(tmp_path / "scan")] == [
        (f"{folder}/{name}", folder) for folder in ("c\rd", "e") for name in ("x\ry.jpg", "z\r.jpg")
    ]
    assert [path for path, _ in found.first] == ["c\rd/z\r.jpg", "e/z\r.jpg"]
    assert [row["path"] for row in rows(tmp_path / "scan", "bad.csv")] == ["c\rd/z\r.jpg", "e/z\r.jpg"]
    same = {row["path"]: row["same_as"] for row in rows(tmp_path / "scan", "duplicates.csv")}
    assert same == {"e/x\ry.jpg": "c\rd/x\ry.jpg", "e/z\r.jpg": "c\rd/z\r.jpg"}
    progress = scanning.scan(Manifest.open(root), tmp_path / "scan", 1)
    assert next(progress).done == 4
    progress.close()


def test_changed_files_start_the_scan_anew(images, tmp_path):
    scan(images, tmp_path / "scan")
    for path in images.rglob("*.jpg"):
        path.write_bytes(encoded())
    with pytest.warns(UserWarning, match="starts again"):
        found = scan(images, tmp_path / "scan")
    assert not len(found.bad) and not rows(tmp_path / "scan", "bad.csv")


def test_scans_of_other_images_and_other_files_are_left_alone(images, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.jpg").write_bytes(encoded())
    scan(images, tmp_path / "scan")
    before = content(tmp_path / "scan")
    with pytest.raises(DataError, match=f"holds the scan of {images}"):
        scan(tmp_path / "other", tmp_path / "scan")
    assert content(tmp_path / "scan") == before
    (tmp_path / "other" / "manifest.csv").write_text("mine")
    with pytest.raises(DataError, match=r"holds a manifest\.csv that is not from a scan"):
        scan(images, tmp_path / "other")
    assert (tmp_path / "other" / "manifest.csv").read_text() == "mine"


@pytest.mark.parametrize("text", ["hi", "[]", '{"path": "mine"}', "\xff"])
def test_a_description_that_no_scan_wrote_is_left_alone_and_what_lies_beside_it(images, tmp_path, text):
    (tmp_path / "scan").mkdir()
    (tmp_path / "scan/scan.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "scan/manifest.csv").write_text("mine")
    before = content(tmp_path / "scan")
    with pytest.raises(DataError, match=r"holds a scan\.json that is not from a scan"):
        scan(images, tmp_path / "scan")
    assert content(tmp_path / "scan") == before


def test_two_scans_do_not_write_into_one_folder(images, tmp_path):
    manifest = Manifest.open(images)
    first = scanning.scan(manifest, tmp_path / "scan", 1)
    next(first)
    with pytest.raises(DataError, match="another scan is writing there"):
        next(scanning.scan(manifest, tmp_path / "scan", 1))
    first.close()


def test_a_file_that_crashes_the_decoder_is_bad_and_the_scan_goes_on(images, tmp_path, decoding):
    hostile = (images / "class0" / "05, a.jpg").read_bytes()

    def crash(data: bytes) -> None:
        if data == hostile:
            faulthandler.disable()  # pytest's would print
            os.kill(os.getpid(), signal.SIGSEGV)

    decoding(crash)
    found = scan(images, tmp_path / "scan", 2)
    assert found.bad == [3, 5, 10, 17]
    assert rows(tmp_path / "scan")[5]["note"] == "bad: crashes the decoder (SIGSEGV)"


def test_a_worker_that_dies_once_costs_no_image(images, tmp_path, decoding):
    died = tmp_path / "died"

    def die_once(data: bytes) -> None:
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    decoding(die_once)
    assert scan(images, tmp_path / "scan").bad == [3, 10, 17]


def test_a_fault_of_the_scan_itself_is_not_an_image_s(images, tmp_path, decoding, new_processes):
    decoding(lambda data: 1 // 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        scan(images, tmp_path / "scan")
    assert not new_processes()


def test_lists_and_shards_are_scanned_as_folders_are(images, tmp_path):
    names = sorted(path.relative_to(tmp_path).as_posix() for path in images.rglob("*.jpg"))
    (tmp_path / "list.txt").write_text("\n".join(names))
    (tmp_path / "shards").mkdir()
    with tarfile.open(tmp_path / "shards" / "0.tar", "w") as tar:
        for name in names:
            tar.add(tmp_path / name, name)
    facts = []
    for number, source in enumerate([images, tmp_path / "list.txt", tmp_path / "shards"]):
        assert scan(source, tmp_path / str(number), 2).bad == [3, 10, 17]
        kept = ("width", "height", "digest", "note")
        facts.append([{key: row[key] for key in kept} for row in rows(tmp_path / str(number))])
    assert facts[0] == facts[1] == facts[2]


def test_photographs_decode(photographs, tmp_path):
    found = scan(photographs, tmp_path / "scan")
    assert not len(found.bad) and found.duplicates == 0
