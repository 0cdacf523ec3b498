"""What we did not write is never replaced: files, the folders of runs, images, links that lead nowhere."""

import errno
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from unigrad_fast import cli
from unigrad_fast.commands import bench
from unigrad_fast.config import resolve, to_yaml
from unigrad_fast.runtime import outputs
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.files import unwritable
from unigrad_fast.runtime.run_folder import OWN, RunFolder


def make_run(folder: Path) -> Path:
    """What every run begins with, and a checkpoint."""
    (folder / "checkpoints/step-00000003").mkdir(parents=True)
    (folder / "checkpoints/step-00000003/checkpoint.json").write_text("{}")
    (folder / "config.yaml").write_text(to_yaml(resolve(overrides={"output": folder})))
    return folder


def refused_file(path: Path, **arguments) -> str:
    with pytest.raises(UserError) as caught:
        outputs.require_file(path, **arguments)
    return str(caught.value)


def test_a_file_that_exists_is_replaced_only_when_told_so_and_none_of_several_where_one_may_not_be(tmp_path):
    first, second = tmp_path / "a.png", tmp_path / "a.png.json"
    second.write_bytes(b"mine")
    with pytest.raises(UserError, match=r"a\.png\.json: already exists; give another name, or --overwrite true"):
        outputs.write_files({first: b"1", second: b"2"}, overwrite=False)
    assert not first.exists() and second.read_bytes() == b"mine"
    outputs.write_files({first: b"1", second: b"mine"}, overwrite=False)  # the same content is no fault
    outputs.write_files({first: b"1", second: b"2"}, overwrite=True)
    assert (first.read_bytes(), second.read_bytes()) == (b"1", b"2")


@pytest.mark.parametrize("path", ["config.yaml", "checkpoints/step-00000003/rank-00000.pt", "new.pt", "export"])
def test_nothing_goes_into_a_run_but_its_exports(path, tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(run)
    for name in ("run", "link"):
        assert f"is inside the run in {run}; give a file" in refused_file(tmp_path / name / path)
    outputs.require_file(run / "export/encoder.pt")
    outputs.require_file(tmp_path / "encoder.pt")


def test_a_run_is_known_by_its_checkpoints_or_its_configuration_and_by_no_other_file_of_that_name(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text("")
    assert RunFolder(run).holds_run()
    for text in ("hi", "", "seed: 0\n", "- 1\n", "a: [", "\0", to_yaml(resolve())):
        (tmp_path / "config.yaml").write_text(text)
        assert not RunFolder(tmp_path).holds_run()
    (tmp_path / "config.yaml").write_text(to_yaml(resolve(overrides={"output": "/moved/since"})))
    assert RunFolder(tmp_path).holds_run()


@pytest.mark.parametrize("name", sorted(each.name for each in OWN))
def test_a_folder_in_which_a_run_would_replace_something_is_refused_by_name(name, tmp_path):
    (tmp_path / "slurm-17.out").write_text("")
    (tmp_path / "train.py").write_text("")
    assert RunFolder(tmp_path).problem() is None
    (tmp_path / name).write_text("hi")
    assert f"not a run's folder, but a run would replace {name}; give another" in RunFolder(tmp_path).problem()


def test_a_run_in_which_something_stands_in_the_way_is_refused(tmp_path):
    run = make_run(tmp_path / "run")
    assert RunFolder(run).problem() is None
    (run / "tensorboard").write_text("")
    assert "tensorboard is a file, but must be a folder" in RunFolder(run).problem()
    (run / "tensorboard").unlink()
    (run / "metrics.jsonl").mkdir()
    assert "metrics.jsonl is a folder, but must be a file" in RunFolder(run).problem()
    (run / "metrics.jsonl").rmdir()
    (run / "tensorboard").symlink_to("/nonexistent/scratch")
    assert RunFolder(run).problem().startswith(f"{run}/tensorboard is a link to /nonexistent/scratch")


def test_evaluations_of_checkpoints_that_are_gone_are_not_begun_over(tmp_path):
    run = make_run(tmp_path / "run")
    for name in ("knn.json", "summary.json"):
        (run / name).write_text("{}")
    assert RunFolder(run).problem() is None
    shutil.rmtree(run / "checkpoints")
    assert "knn.json belongs to deleted checkpoints; move it away" in RunFolder(run).problem()
    (run / "knn.json").unlink()
    assert RunFolder(run).problem() is None


def test_pictures_do_not_go_to_the_images_by_whatever_path(tmp_path):
    images = tmp_path / "set/train"
    images.mkdir(parents=True)
    (tmp_path / "link").symlink_to(images)
    given = {"data.train": tmp_path / "link", "data.val": None}
    for path in (images, images / "class/x.png", tmp_path / "link/run/x.png"):
        assert f"lies in data.train = {tmp_path}/link" in refused_file(path, images=given)
    for path in (tmp_path / "set/x.png", tmp_path / "set/train-2/x.png"):
        outputs.require_file(path, images=given)


@pytest.mark.parametrize(
    "words",
    [
        *("pretrain --data.train {images} --output {out}", "pretrain --data.train {out}"),
        *("evaluate knn {out}", "evaluate linear {out}", "checkpoint show {out}", "checkpoint verify {out}"),
        *("export {run} --output {out}.pt", "export {out}", "import {out} {run}", "import {images} {out}"),
        *("data synth {out}", "data scan {images} --output {out}", "data shard {images} {out}", "data preview {out}"),
        *("data preview {images} --output {out}.png", "bench step --output {out}", "bench loader --photographs {out}"),
        *("bench kernels --compile_only true --output {out}", "bench width --data.train {images} --output {out}"),
        "bench scaling --data.train {images} --output {out}",
    ],
)
@pytest.mark.parametrize("below", [False, True])
def test_every_command_names_a_link_that_leads_nowhere_and_its_target(words, below, tmp_path, capsys):
    (tmp_path / "images").mkdir()
    run = make_run(tmp_path / "run")
    link = tmp_path / "scratch"
    for name in (link, tmp_path / "scratch.pt", tmp_path / "scratch.png"):
        name.symlink_to("/nonexistent/me")
    out = link / "x" if below else link
    command = words.format(images=tmp_path / "images", run=run, out=out)
    assert cli.main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and f"{link}" in line
    assert "is a link to /nonexistent/me, which does not exist; create it, or give another path" in line


@pytest.mark.parametrize(
    ("words", "key"),
    [
        *(("pretrain --data.train {images} --output {out}", "output"), ("plan --output {out}", "output")),
        *(("data synth {out}", "folder"), ("data shard {images} {out}", "folder"), ("import {images}/a {out}", "run")),
        *(("bench step --output {out}", "output"), ("bench step --dry_run true --output {out}", "output")),
        *(("bench loader --output {out}", "output"), ("bench kernels --output {out}", "output")),
        *(("bench kernels --compile_only true --output {out}", "output"), ("bench methods --output {out}", "output")),
        *(("bench width --output {out}", "output"), ("bench scaling --output {out}", "output")),
    ],
)
def test_every_command_refuses_a_place_where_no_folder_can_be_made_before_any_work(
    words, key, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(bench, "_fitting_threads", nullcontext)
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a").touch()
    out = "/proc/unigrad/x"
    assert cli.main(words.format(images=tmp_path / "images", out=out).split()) == 2
    why = "/proc is not writable (No such file or directory); give another folder"
    assert capsys.readouterr() == ("", f"error: {key} = {out}: {why}\n")


def test_a_full_disk_is_no_fault_of_the_place(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "mkdir", full)
    assert unwritable(tmp_path / "new") is None


def test_trying_a_place_leaves_nothing_there(tmp_path):
    assert unwritable(tmp_path / "new/folder") is None
    assert not list(tmp_path.iterdir())


def test_without_a_name_too_a_link_that_leads_nowhere_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "runs").symlink_to("/nonexistent/me")
    assert cli.main(["pretrain", "--data.train", "images"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/runs is a link to /nonexistent/me" in line
