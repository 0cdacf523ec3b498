"""The folder of a run: taken by one alone, left as it was where nothing came of it, begun again as a whole."""

import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from unigrad_fast.config import resolve, to_yaml
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.run_folder import ENTRIES, RunFolder

LOCK = RunFolder.lock.name


def text_for(folder: Path) -> str:
    return to_yaml(resolve("quickstart", {"output": folder}))


def test_the_page_lists_everything_that_a_run_writes():
    page = (Path(__file__).resolve().parents[2] / "docs/commands.md").read_text(encoding="utf-8")
    listed = page.partition("## What a run writes")[2].partition("\n## ")[0]
    earlier = {RunFolder.first_knn, RunFolder.first_linear, RunFolder.first_probe}
    for entry in {*ENTRIES} - earlier:
        assert f"`{entry.name}{'/' * entry.is_folder}`" in listed


def test_of_many_that_start_at_once_each_takes_a_folder_of_its_own(tmp_path):
    run = RunFolder(tmp_path / "runs/mine")

    def take(_: int) -> str:
        with run.occupied(numbered=True) as taken:
            taken.begin(text_for(taken.path), goes_on=False)
            return taken.path.name

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(take, range(12)))
    assert sorted(names) == sorted(["mine", *(f"mine-{number}" for number in range(2, 13))])


@pytest.mark.parametrize("numbered", [False, True])
def test_a_run_that_fails_before_it_writes_leaves_things_as_they_were(numbered, tmp_path):
    for folder in ("new/runs/mine", "."):
        with pytest.raises(ZeroDivisionError), RunFolder(tmp_path / folder).occupied(numbered) as taken:
            assert taken.lock.exists()
            raise ZeroDivisionError
        assert list(tmp_path.iterdir()) == []


def test_a_run_that_begins_again_has_no_file_of_the_attempt_before_but_the_log(tmp_path):
    text = text_for(tmp_path)
    names = ("metrics.jsonl", "summary.json", "curves.png", "bad_images.jsonl", "log.txt", "slurm-17.out")
    with RunFolder(tmp_path).occupied() as run:
        assert run.begin(text, goes_on=False) is False
    (tmp_path / "tensorboard").mkdir()
    for name in (*names, "tensorboard/events.out.tfevents.17.host", "tensorboard/notes.txt"):
        (tmp_path / name).write_text("of the attempt before")
    before = {path.name for path in tmp_path.rglob("*")}
    with RunFolder(tmp_path).occupied() as run:
        assert run.begin(text, goes_on=True) is False
        assert {path.name for path in tmp_path.rglob("*")} == before
        assert run.begin(text, goes_on=False) is True
    left = {"config.yaml", LOCK, "log.txt", "slurm-17.out", "tensorboard", "notes.txt"}
    assert {path.name for path in tmp_path.rglob("*")} == left


def test_a_checkpoint_that_came_meanwhile_is_not_begun_over(tmp_path):
    text = text_for(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    with RunFolder(tmp_path).occupied() as run:
        (tmp_path / "checkpoints/step-00000001").mkdir(parents=True)
        (tmp_path / "metrics.jsonl").write_text("{}")
        with pytest.raises(UserError, match="another process trained there meanwhile"):
            run.begin(text, goes_on=False)
    assert (tmp_path / "metrics.jsonl").exists()


def test_what_a_run_would_replace_is_refused_here_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine")
    with pytest.raises(UserError, match=r"a run would replace metrics\.jsonl"), RunFolder(tmp_path).occupied():
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_disk_with_space_for_less_than_two_checkpoints_is_warned_of(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9 << 30, 0, 3 << 30))
    assert RunFolder(tmp_path).little_space(checkpoint=3 << 29, keep=2) is None
    said = RunFolder(tmp_path).little_space(checkpoint=2 << 30, keep=2)
    assert f"3 GiB are free on the disk of {tmp_path}, a checkpoint takes 2 GiB" in said
    assert "checkpoint.keep = 2 keeps up to 3 of them; free disk space" in said and "\n" not in said
