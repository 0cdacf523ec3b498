"""Datasets and lists of pictures in place of folders: the run on the same files, resumed, and judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import STEPS_PER_EPOCH, require_equal

from unigrad_fast import DataError, Run, StopRun, evaluate, pretrain
from unigrad_fast.pipelines import Manifest, items

PARTS = ("train", "val")


class Encoded(torch.utils.data.Dataset):
    """A map-style Dataset with the files of a folder, in its order."""

    def __init__(self, folder: Path):
        self.files = Manifest.open(folder)
        self.classes = self.files.classes

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"image": self.files.read(place), "label": np.int64(self.files.labels[place])}


def pictures(folder: Path) -> list[tuple[Image.Image, int]]:
    """The files of a folder as pictures with labels, in its order."""
    files = Manifest.open(folder)
    return [(Image.open(files.path(place)), int(label)) for place, label in enumerate(files.labels)]


@pytest.fixture
def given(images: Path) -> dict[str, Encoded]:
    return {part: Encoded(images / part) for part in PARTS}


@pytest.fixture(scope="module")
def in_png(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images as files that hold exactly their pixels."""
    root = tmp_path_factory.mktemp("png")
    for file in images.rglob("*.jpg"):
        copy = root / file.relative_to(images).with_suffix(".png")
        copy.parent.mkdir(parents=True, exist_ok=True)
        Image.open(file).save(copy)
    return root


def trained_on(data: dict[str, Any], settings: dict[str, Any], output: Path, **others: Any) -> Run:
    return pretrain(**{**settings, "data": {**settings["data"], **data}}, output=output, **others)


@pytest.mark.filterwarnings("ignore:.* has no `targets`")
def test_a_run_on_a_dataset_is_that_on_its_files(given, finished, settings, tmp_path):
    run = trained_on(given, settings, tmp_path / "run")
    require_equal(run, finished)
    assert str(run.config.data.train) == items.give(given["train"])


@pytest.mark.filterwarnings("ignore:list has no `targets`")
def test_a_run_on_a_list_of_pictures_is_that_on_their_files(in_png, settings, tmp_path):
    on_files = trained_on({part: in_png / part for part in PARTS}, settings, tmp_path / "files")
    listed = {part: pictures(in_png / part) for part in PARTS}
    run = trained_on(listed, settings, tmp_path / "run")
    require_equal(run, on_files)
    assert str(run.config.data.val).startswith(f"dataset:list:{len(listed['val'])}:")


def again(data: dict[str, Any], settings: dict[str, Any], run: Run) -> Run:
    return trained_on(data, settings, run.path)


def in_its_process(data: dict[str, Any], settings: dict[str, Any], run: Run) -> Run:
    return run.resume()


def in_another(data: dict[str, Any], settings: dict[str, Any], run: Run) -> Run:
    items._given.clear()
    with pytest.raises(DataError, match=r"this process has none like it; give it again: pretrain, Run.resume and"):
        run.resume()
    return Run(run.path).resume(data=data)


@pytest.mark.filterwarnings("ignore:.* has no `targets`")
@pytest.mark.parametrize("resumed", [again, in_its_process, in_another])
def test_a_run_on_a_dataset_resumes(resumed: Callable[..., Run], given, finished, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(items, "_given", {})

    def stop(step: int, metrics: Any) -> None:
        if step == STEPS_PER_EPOCH:
            raise StopRun

    stopped = trained_on(given, settings, tmp_path / "run", on_step=stop)
    assert stopped.summary["stopped_by"] == "on_step"
    require_equal(resumed(given, settings, stopped), finished)


@pytest.mark.filterwarnings("ignore:.* has no `targets`")
def test_a_dataset_is_judged_as_its_files_are(given, images, finished, tmp_path):
    results = [
        evaluate.knn(finished, data=data, output=tmp_path / name, keep_features=False)
        for name, data in (("files", {part: images / part for part in PARTS}), ("given", given))
    ]
    assert results[0].figures["accuracy"] == results[1].figures["accuracy"]
    written = [
        np.load(evaluate.features(finished, source, output=tmp_path / f"{name}.npz", keep_features=False))
        for name, source in (("files", images / "val"), ("given", given["val"]))
    ]
    assert np.array_equal(written[0]["feature"], written[1]["feature"])
    assert np.array_equal(written[0]["label"], written[1]["label"])


def test_features_are_written_of_a_list_of_pictures_without_labels(in_png, finished, tmp_path):
    listed = [picture for picture, _ in pictures(in_png / "val")]
    found = np.load(evaluate.features(finished, listed, output=tmp_path / "a.npz"))
    on_files = np.load(evaluate.features(finished, in_png / "val", output=tmp_path / "b.npz"))
    assert np.array_equal(found["feature"], on_files["feature"])
