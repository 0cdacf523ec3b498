"""`evaluate features`: file, label and feature of each image, whatever the format and the number of ranks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from command_process import command, command_on_two_ranks
from test_runs import images, made, run, said  # noqa: F401

from unigrad_fast import cli
from unigrad_fast.evaluation import feature_files, rows
from unigrad_fast.evaluation.writing import WRITERS
from unigrad_fast.runtime.errors import PREEMPTED


def loaded(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path) as archive:
            return dict(archive)
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="r")
        return {name: np.asarray(array[name]) for name in array.dtype.names}
    table = pytest.importorskip("pyarrow.parquet").read_table(path)
    assert str(table.schema.field("feature").type) == f"fixed_size_list<element: float>[{len(table['feature'][0])}]"
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


@pytest.mark.parametrize("ending", WRITERS)
def test_every_format_has_a_row_for_each_image_in_their_order(ending, run, images, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(rows, "BLOCK", 5)
    path = tmp_path / f"new/features{ending}"
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    printed = said(capsys, "evaluate", "features", run, "--output", path)
    assert f"features [24, 128]: {path} (" in printed and f"described in features{ending}.json" in printed
    found = loaded(path)
    assert found["file"].tolist() == [f"class{label}/{name:03}.jpg" for label in range(3) for name in range(8)]
    assert found["label"].tolist() == [label for label in range(3) for _ in range(8)]
    assert found["feature"].shape == (24, 128) and found["feature"].dtype.kind == "f"
    said(capsys, "evaluate", "features", run)  # of the features that are kept
    whole = loaded(run / "export/features-epoch2.npz")
    assert whole["feature"].dtype == np.float32 and np.array_equal(whole["feature"], found["feature"])
    assert len(np.unique(found["feature"], axis=0)) == 24
    about = json.loads((tmp_path / f"new/features{ending}.json").read_text())
    assert (about["epoch"], about["width"], about["counts"]) == (2.0, 128, {"used": 24, "left_out": 0})
    assert about["classes"] == ["class0", "class1", "class2"] and about["root"] == str(images / "train")
    assert sorted(each.name for each in (tmp_path / "new").iterdir()) == [f"features{ending}", f"features{ending}.json"]


@pytest.mark.parametrize("ending", WRITERS)
def test_a_file_of_many_rows_is_written_some_at_a_time(ending, tmp_path):
    """40 parts of 1 MiB never take the memory of more than a few, in NumPy or in Arrow."""
    in_arrow = int  # which gives 0
    if ending == ".parquet":
        in_arrow = pytest.importorskip("pyarrow").total_allocated_bytes
    rows_of_part, width, parts, held = 2**12, 64, 1, []

    def column(make):
        def all_parts():
            for number in range(parts):
                held.append(in_arrow())
                yield make(number)

        return all_parts

    columns = {
        "file": column(lambda number: np.full(rows_of_part, f"{number}.jpg")),
        "label": column(lambda number: np.full(rows_of_part, number)),
        "feature": column(lambda number: np.full((rows_of_part, width), number, np.float32)),
    }
    types = {"file": np.dtype("U8"), "label": np.dtype(np.int64), "feature": np.dtype((np.float32, (width,)))}
    WRITERS[ending](tmp_path / f"one{ending}", columns, types, rows_of_part)  # imports what it needs
    parts = 40
    tracemalloc.start()
    WRITERS[ending](tmp_path / f"features{ending}", columns, types, parts * rows_of_part)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    part = rows_of_part * sum(kind.itemsize for kind in types.values())
    assert most < 6 * part and max(held) < 6 * part  # the whole is 40
    found = loaded(tmp_path / f"features{ending}")
    assert np.array_equal(found["label"], np.repeat(np.arange(parts), rows_of_part))


def test_features_are_read_where_they_are_kept_and_not_kept_otherwise(run, images, tmp_path, capsys):  # noqa: F811
    said(capsys, "evaluate", "knn", run)
    printed = said(capsys, "evaluate", "features", run, images / "val")
    assert f"features of 9 images were read from {run}/evaluation/features" in printed
    kept = loaded(run / "export/features-epoch2.npz")
    before = sorted(run.rglob("*"))
    given = ("--keep_features", "false", "--output", tmp_path / "again.npz")
    assert "images" not in said(capsys, "evaluate", "features", run, images / "val", *given)
    assert sorted(run.rglob("*")) == before
    for name, column in loaded(tmp_path / "again.npz").items():
        assert np.array_equal(column, kept[name])


def test_images_without_labels_and_weights_without_a_run_are_taken(run, images, tmp_path, capsys):  # noqa: F811
    file = tmp_path / "weights.safetensors"
    said(capsys, "export", run, "--output", file)
    given = ("--weights", file, "--backbone", "resnet18")
    assert said(capsys, "evaluate", "features", *given, status=2).endswith("give --images IMAGES\n")
    said(capsys, "evaluate", "features", *given, "--images", images / "val/class0")
    found = loaded(tmp_path / "weights.safetensors-evaluation/features-epoch2.npz")
    assert found["label"].tolist() == [-1, -1, -1] and found["file"].tolist() == ["000.jpg", "001.jpg", "002.jpg"]


def test_a_file_in_the_way_and_what_cannot_be_written_are_refused_before_any_work(run, tmp_path, capsys, monkeypatch):  # noqa: F811
    (tmp_path / "there.npy").write_text("mine")
    for name, message in (
        ("there.npy", "already exists; give another name, or --overwrite true"),
        ("x.csv", "give a name that ends in one of .npz, .npy, .parquet"),
    ):
        refused = said(capsys, "evaluate", "features", run, "--output", tmp_path / name, status=2)
        assert refused == f"error: output = {tmp_path}/{name}: {message}\n"
    said(capsys, "evaluate", "features", run, "--output", tmp_path / "there.npy", "--overwrite", "true")
    assert len(np.load(tmp_path / "there.npy")) == 24
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    from unigrad_fast.evaluation.writing import require_writer
    from unigrad_fast.runtime.errors import UserError

    with pytest.raises(
        UserError, match=r"needs pyarrow, which is not installed; type `pip install 'unigrad-fast\[parq"
    ):
        require_writer(tmp_path / "a.parquet")


def test_a_file_without_room_beside_it_is_refused_with_what_helps(run, tmp_path, capsys, monkeypatch):  # noqa: F811
    usage = shutil.disk_usage(tmp_path)._replace(free=9_000)
    monkeypatch.setattr("unigrad_fast.evaluation.passes.shutil.disk_usage", lambda path: usage)
    words = ["--keep_features", "false", "--output", tmp_path / "x.npy"]
    line = said(capsys, "evaluate", "features", run, *words, status=2).splitlines()[-1]
    assert line.endswith(f" are free in {tmp_path}; free some, or give another folder with --output")


def test_a_replaced_file_never_stands_beside_the_description_of_the_old_one(run, tmp_path, capsys, monkeypatch):  # noqa: F811
    given = ("evaluate", "features", run, "--output", tmp_path / "a.npy", "--overwrite", "true")
    said(capsys, *given)
    monkeypatch.setattr(feature_files, "write_whole", full_disk)
    said(capsys, *given, status=3)
    assert not (tmp_path / "a.npy.json").exists() and (tmp_path / "a.npy").exists()


def full_disk(path: Path, content: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_two_ranks_write_each_row_once(made, images, tmp_path):  # noqa: F811
    shutil.copytree(made, tmp_path / "run")
    (tmp_path / "images").mkdir()
    shutil.copytree(images / "val", tmp_path / "images", dirs_exist_ok=True)
    arguments = ("evaluate", "features", tmp_path / "run", tmp_path / "images", "--output")
    alone = command(*arguments, tmp_path / "one.npz", "--keep_features", "false", is_thin=True)
    both = command_on_two_ranks(*arguments, tmp_path / "two.npz", "--keep_features", "false", is_thin=True)
    again = command(*arguments, tmp_path / "kept.npz", is_thin=True)
    assert [result.returncode for result in (alone, both, again)] == [0, 0, 0], alone.stderr + both.stderr
    one, two, kept = (loaded(tmp_path / f"{name}.npz") for name in ("one", "two", "kept"))
    assert len(one["file"]) == 9
    for name in one:
        assert np.array_equal(one[name], two[name]) and np.array_equal(one[name], kept[name])


@pytest.mark.parametrize("at", ["extract", "WRITERS"])
@pytest.mark.parametrize("keep", ["true", "false"])
def test_a_signal_leaves_nothing_unfinished(run, images, capsys, tmp_path, monkeypatch, at, keep):  # noqa: F811
    left: list[int] = []

    def interrupted(*_: object) -> None:
        assert [path for path in run.rglob(".*") if path.is_dir()]
        os.kill(os.getpid(), signal.SIGTERM)
        while not left:
            time.sleep(0.01)
        assert not list(run.rglob(".*"))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "_exit", left.append)
    if at == "extract":
        monkeypatch.setattr("unigrad_fast.evaluation.passes.extract", interrupted)
    else:
        monkeypatch.setitem(WRITERS, ".npz", interrupted)
    (run / "export").mkdir(exist_ok=True)
    cli.main(["evaluate", "features", str(run), "--keep_features", keep])
    assert left == [PREEMPTED] and not list(run.rglob(".*")) and not list((run / "export").iterdir())
