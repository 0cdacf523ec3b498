"""The drawn image set: the same bytes again, a complete labelled tree, never on top of other files."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from unigrad_fast import cli
from unigrad_fast.images import drawing
from unigrad_fast.images.drawn_pictures import CLASSES
from unigrad_fast.runtime.errors import UserError

SMALL = {"train_per_class": 3, "val_per_class": 2, "size": 32}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.jpg"))}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "set"
    drawing.draw(folder, seed=3, **SMALL)
    return folder


def test_the_same_seed_gives_the_same_bytes(drawn: Path, tmp_path: Path) -> None:
    drawing.draw(tmp_path / "again", seed=3, **SMALL)
    assert contents(tmp_path / "again") == contents(drawn)


def test_another_seed_gives_other_pictures(drawn: Path, tmp_path: Path) -> None:
    drawing.draw(tmp_path / "other", seed=4, **SMALL)
    other, first = contents(tmp_path / "other"), contents(drawn)
    assert other.keys() == first.keys()
    assert not set(other.values()) & set(first.values())


def test_every_class_has_its_pictures_in_both_parts(drawn: Path) -> None:
    assert len(CLASSES) >= 10
    for part, count in (("train", 3), ("val", 2)):
        assert {path.name for path in (drawn / part).iterdir()} == set(CLASSES)
        for name in CLASSES:
            assert len(list((drawn / part / name).glob("*.jpg"))) == count


def test_no_picture_is_drawn_twice(drawn: Path) -> None:
    files = contents(drawn)
    assert len(set(files.values())) == len(files)


def test_pictures_are_jpeg_of_the_size_asked_for(drawn: Path) -> None:
    for path in drawn.rglob("*.jpg"):
        with Image.open(path) as image:
            assert (image.format, image.size, image.mode) == ("JPEG", (32, 32), "RGB")
            assert np.asarray(image).std() > 5


def test_a_finished_set_is_not_drawn_again(drawn: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in drawn.rglob("*")}
    drawing.draw(drawn, seed=3, **SMALL)
    assert {path: path.stat().st_mtime_ns for path in drawn.rglob("*")} == before


def test_what_is_missing_of_a_finished_set_is_drawn_again_and_said(drawn: Path, tmp_path: Path, capsys) -> None:
    copy = tmp_path / "set"
    shutil.copytree(drawn, copy)
    (copy / "train/plain-star/0001.jpg").unlink()
    shutil.rmtree(copy / "val/spoked-ring")
    (copy / "notes.txt").write_text("mine")
    drawing.draw(copy, seed=3, **SMALL)
    assert f"3 images of the set in {copy} were missing and have been drawn again" in capsys.readouterr().out
    assert contents(copy) == contents(drawn)
    assert {path.name for path in copy.rglob("*") if path.is_file()} == {
        *(path.name for path in drawn.rglob("*") if path.is_file()),
        "notes.txt",
    }
    drawing.draw(copy, seed=3, **SMALL)
    assert capsys.readouterr().out == ""


def test_other_content_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=str(tmp_path)):
        drawing.draw(tmp_path, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_set_of_other_parameters_is_refused_and_kept(drawn: Path) -> None:
    before = contents(drawn)
    with pytest.raises(UserError, match=str(drawn)):
        drawing.draw(drawn, seed=5, **SMALL)
    assert contents(drawn) == before


def test_an_empty_folder_is_accepted(tmp_path: Path) -> None:
    drawing.draw(tmp_path, **SMALL)
    assert contents(tmp_path)


def test_a_full_disk_stops_the_drawing_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    assert cli.main(["data", "synth", str(tmp_path / "set")]) == 3
    full_disk = f"stopped: {tmp_path}/set cannot be written: No space left on device; free disk space\n"
    assert capsys.readouterr().err == full_disk
    assert list(tmp_path.iterdir()) == []
