"""`unigrad-fast data scan`: what it prints, its exit status, and what training knows afterwards."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from unigrad_fast import cli
from unigrad_fast.pipelines import Manifest
from unigrad_fast.pipelines.scan import files, summary
from unigrad_fast.pipelines.scan import scanning as scanning
from unigrad_fast.pipelines.scan.decoder import Decoder

IMAGES = 12
BAD = [2, 7]


TOO_LARGE = "cannot be written: File too large; raise the limit on file sizes (`ulimit -f`)"


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of images, two of which are cut off."""
    folder = tmp_path / "photos"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(IMAGES):
        content = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (24, 24 + number, 3), dtype=np.uint8)).save(content, "JPEG")
        data = content.getvalue()
        (folder / f"{number:02}.jpg").write_bytes(data[:-100] if number in BAD else data)
    return folder


@pytest.fixture
def new_processes():
    """Gives the processes that were started in this test and are still alive."""
    before = set(multiprocessing.active_children())  # groups of ranks that other tests keep
    return lambda: set(multiprocessing.active_children()) - before


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch):
    """Calls a function before each decoding, in the worker."""

    def install(before) -> None:
        decode = Decoder.decode
        monkeypatch.setattr(Decoder, "decode", lambda self, data: before() or decode(self, data))

    return install


def scan(*arguments: object) -> int:
    return cli.main(["data", "scan", *map(str, arguments)])


def words(text: str) -> str:
    """Text without the lines of tables and with single spaces."""
    return re.sub(r"[│\s]+", " ", text)


def test_bad_images_are_named_and_counted_and_no_failure(images, tmp_path, capsys):
    assert scan(images, "--output", tmp_path / "found", "--threads", 2) == 0
    said = words(capsys.readouterr().out)
    assert "bad 2 (16.67%): truncated 2" in said
    assert "bad: 02.jpg: truncated (at row" in said and "bad: 07.jpg: truncated (at row" in said
    assert "data.max_bad_fraction" in said
    assert "formats JPEG 10" in said
    assert "smallest, median, largest 24x24, 30x24, 35x24" in said


def test_training_knows_the_bad_images_afterwards(images, tmp_path, capsys):
    assert not len(Manifest.open(images).unreadable())
    scan(images, "--output", tmp_path / "found")
    manifest = Manifest.open(images)
    assert manifest.unreadable().tolist() == BAD and (manifest.sizes[BAD] == -1).all()
    assert scan(images, "--output", tmp_path / "again") == 0
    assert (tmp_path / "again" / "manifest.csv").read_bytes() == (tmp_path / "found" / "manifest.csv").read_bytes()


def test_what_storage_did_not_give_is_bad_and_tried_again_by_training(images, tmp_path, capsys):
    (images / "99.jpg").symlink_to("removed")
    scan(images, "--output", tmp_path / "found")
    assert "missing 1" in words(capsys.readouterr().out)
    assert Manifest.open(images).sizes[-1].tolist() == [0, 0]  # not -1, which is final


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch):
    """Makes the storage hang at some images."""
    read = Manifest.read

    def install(images: set[int]) -> None:
        def hang(self: Manifest, image: int) -> bytes:
            return threading.Event().wait() if image in images else read(self, image)

        monkeypatch.setattr(Manifest, "read", hang)

    return install


@pytest.mark.timeout(60)
def test_what_does_not_answer_and_what_is_no_file_is_named_and_the_scan_goes_on(images, tmp_path, capsys, hanging):
    os.mkfifo(images / "90.jpg")
    (images / "91.jpg").symlink_to("/dev/zero")
    hanging({4})
    options = ("--threads", 1, "--read_timeout", 0.5)
    assert scan(images, "--output", tmp_path / "found", *options) == 0
    said = capsys.readouterr().out
    assert "bad: 04.jpg: cannot be read (no answer within 0.5 s)" in said
    assert "bad: 90.jpg: cannot be read (not a file but a named pipe)" in said
    assert (
        "91.jpg,,,,,,,,bad: cannot be read (not a file but a device)" in (tmp_path / "found/manifest.csv").read_text()
    )
    assert Manifest.open(images).unreadable().tolist() == [*BAD, 12, 13]  # training asks again for the one that hung

    assert cli.main(["data", "shard", str(images), str(tmp_path / "shards"), *map(str, options)]) == 0
    left_out = (tmp_path / "shards/left-out.txt").read_text()
    assert f"{images}/04.jpg\tno answer within 0.5 s\n" in left_out
    assert f"{images}/90.jpg\tnot a file but a named pipe\n" in left_out and len(left_out.splitlines()) == 5


@pytest.mark.timeout(60)
def test_storage_that_does_not_answer_any_more_ends_scan_and_shard(images, tmp_path, capsys, hanging):
    hanging(set(range(3, IMAGES)))
    options = ("--threads", "1", "--read_timeout", "0.05")
    assert scan(images, "--output", tmp_path / "found", *options) == 2
    assert (
        "neither it nor the 7 images before it could be read within 0.05 s; check the storage"
        in capsys.readouterr().err
    )
    options += ("--shuffle_seed", "null")
    assert cli.main(["data", "shard", str(images), str(tmp_path / "shards"), *options]) == 2
    assert "check the storage" in capsys.readouterr().err


def test_a_bad_image_whose_name_is_no_text_is_named_as_well_as_can_be(images, tmp_path, capsys):
    with open(os.fsencode(images) + b"/\xff.jpg", "wb") as file:
        file.write(b"no image")
    assert scan(images, "--output", tmp_path / "found") == 0
    assert "bad: \ufffd.jpg: not an image" in capsys.readouterr().out


def test_without_output_the_folder_is_named_after_the_images(images, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert scan(images) == 0
    assert f"into {tmp_path}/scan-photos" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "scan-photos").iterdir()} == {"scan.json", *files.FILES}


def test_interrupted_scan_says_how_to_go_on_and_does(images, tmp_path, capsys, decoding, monkeypatch, new_processes):
    count = multiprocessing.get_context("fork").RawValue("i", 0)

    def interrupt() -> None:
        count.value += 1
        if count.value == 6:
            os.kill(os.getppid(), signal.SIGINT)
            signal.pause()

    with monkeypatch.context():
        decoding(interrupt)
        assert scan(images, "--output", tmp_path / "found", "--threads", 1) == 130
    assert "5 of 12 images are scanned; repeat the command to continue" in capsys.readouterr().err
    assert not new_processes()
    assert scan(images, "--output", tmp_path / "found", "--threads", 1) == 0
    assert "5 of them were scanned before" in capsys.readouterr().out
    scan(images, "--output", tmp_path / "whole")
    for name in files.FILES:
        assert (tmp_path / "found" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_finished_scan_is_only_reported_again(images, tmp_path, capsys, decoding):
    scan(images, "--output", tmp_path / "found")
    decoding(lambda: 1 // 0)
    assert scan(images, "--output", tmp_path / "found") == 0
    said = words(capsys.readouterr().out)
    assert f"12 of them were scanned before; remove {tmp_path}/found to scan again" in said


def test_a_full_disk_ends_with_status_3_and_the_file(images, tmp_path, capsys, monkeypatch):
    append, rows = files.append, []

    def full(file: io.FileIO, content: bytes) -> None:
        rows.append(content)
        if len(rows) < 4:
            return append(file, content)
        with open("/dev/full", "ab", buffering=0) as device:
            return append(device, content)

    with monkeypatch.context() as patch:
        for module in (scanning, files):
            patch.setattr(module, "append", full)
        assert scan(images, "--output", tmp_path / "found", "--threads", 1) == 3
    assert "/dev/full cannot be written: No space left on device" in capsys.readouterr().err
    assert scan(images, "--output", tmp_path / "found", "--threads", 1) == 0
    assert "2 of them were scanned before" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["scan", "shard"])
def test_a_limit_of_file_sizes_ends_with_status_3_and_the_file(images, tmp_path, command):
    output = ["--output", str(tmp_path / "out")] if command == "scan" else [str(tmp_path / "out")]
    result = subprocess.run(
        [sys.executable, "-m", "unigrad_fast", "data", command, str(images), *output],
        capture_output=True,
        text=True,
        # What measures coverage there would write a file too.
        env={k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")} | {"UNIGRAD_CACHE": str(tmp_path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512)),
    )
    file = {"scan": "manifest.csv", "shard": "shard-000000.tar"}[command]
    assert result.stderr == f"stopped: {tmp_path}/out/{file} {TOO_LARGE}\n"
    assert result.returncode == 3


def test_a_limit_that_the_last_file_meets_names_it(images, tmp_path, capsys, monkeypatch):
    def too_large(*_):
        raise OSError(errno.EFBIG, "File too large")

    assert scan(images, "--output", tmp_path / "found") == 0
    monkeypatch.setattr(summary, "as_csv", too_large)
    capsys.readouterr()
    assert scan(images, "--output", tmp_path / "found") == 3
    assert capsys.readouterr().err == f"stopped: {tmp_path}/found/bad.csv {TOO_LARGE}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{root}/none"], "{root}/none does not exist"),
        (["{root}/photos", "--threads", "0"], "threads = 0"),
        (["{root}/photos", "--output", "{root}/photos/00.jpg"], "{root}/photos/00.jpg cannot be written: file exists"),
        (["{root}/photos", "--output", "{root}/photos/00.jpg/x"], "x cannot be written: not a directory"),
        (["{root}/photos", "--output", "{root}/" + "a" * 300], "cannot be written: file name too long"),
        ([], "path"),
    ],
)
def test_wrong_input_ends_with_status_2(images, tmp_path, capsys, arguments, message):
    assert scan(*(argument.format(root=tmp_path) for argument in arguments)) == 2
    assert message.format(root=tmp_path) in capsys.readouterr().err
