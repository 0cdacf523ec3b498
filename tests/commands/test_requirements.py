"""Folders that a run may use, and what is said of those that it may not."""

import pytest

from unigrad_fast.commands.requirements import require_folders
from unigrad_fast.config import resolve, to_yaml
from unigrad_fast.runtime.errors import UserError


def test_folders_are_checked(tmp_path):
    text = tmp_path / "list.txt"
    text.write_text("a.jpg")
    config = resolve(overrides={"data": {"train": str(tmp_path / "absent"), "val": str(text)}})
    with pytest.raises(UserError) as caught:
        require_folders(config)
    problem = f"no such file or folder; check the path, of which {tmp_path} exists"
    assert str(caught.value) == f"data.train = {tmp_path}/absent: {problem}"
    with pytest.raises(UserError, match="no training images"):
        require_folders(resolve())


@pytest.mark.parametrize("path", ["~nobody-has-this-name/images", "/" + "a" * 5000, "a\0b"])
def test_impossible_paths_are_refused_without_a_traceback(path):
    config = resolve(overrides={"data": {"train": path}})
    with pytest.raises(UserError, match="no such file or folder"):
        require_folders(config)
    with pytest.raises(UserError, match="no such file or shipped recipe"):
        resolve(path)


def test_output_that_holds_a_run_is_refused_by_fresh(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "images").mkdir()
    config = resolve(overrides={"data": {"train": str(tmp_path / "images")}, "output": str(run)})
    require_folders(config)
    (run / "config.yaml").write_text(to_yaml(config))
    require_folders(config)
    with pytest.raises(UserError, match="already contains a run; --fresh needs an empty folder"):
        require_folders(config, fresh=True)


def test_output_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "images").mkdir()
    config = resolve(overrides={"data": {"train": str(tmp_path / "images")}, "output": str(tmp_path / "file/run")})
    with pytest.raises(UserError, match="is a file; give a folder"):
        require_folders(config)


def test_a_run_within_its_images_is_refused_and_so_is_one_over_anothers_files(tmp_path):
    images = tmp_path / "images"
    (images / "cat").mkdir(parents=True)
    for output, numbered in ((images / "run", False), (images, False), (images / "runs/quickstart", True)):
        config = resolve(overrides={"data": {"train": str(images)}, "output": str(output)})
        with pytest.raises(UserError, match=f"output = {output}: lies in data.train = {images}"):
            require_folders(config, numbered=numbered)
    (tmp_path / "run").mkdir()
    config = resolve(overrides={"data": {"train": str(images)}, "output": str(tmp_path / "run")})
    for name in ("config.yaml", "summary.json"):
        (tmp_path / "run" / name).write_text("hi")
    with pytest.raises(UserError, match=r"a run would replace config\.yaml, summary\.json; give another folder"):
        require_folders(config)
    require_folders(config, numbered=True)  # which takes another one


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ({}, ["data.train = {}/data/quickstart/train: DRAW", "data.val = {}/data/quickstart/val: DRAW"]),
        (
            {"train": "typo"},
            ["data.train = {}/typo: CHECK, of which {} exists", "data.val = {}/data/quickstart/val: GIVE, NULL"],
        ),
        ({"train": "."}, ["data.val = {}/data/quickstart/val: GIVE, NULL"]),
        ({"train": ".", "val": "a/b"}, ["data.val = {}/a/b: CHECK, of which {} exists, NULL"]),
        ({"train": ".", "val": "link"}, ["data.val = {}/link: {}/link is a link to /nowhere, which "]),
    ],
)
def test_images_that_are_not_there_are_told_with_what_fits_their_path(tmp_path, monkeypatch, images, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("/nowhere")
    texts = {
        "DRAW": "no such file or folder; draw the built-in images with `unigrad-fast data synth data/quickstart`",
        "CHECK": "no such file or folder; check the path",
        "GIVE": "no such file or folder; give your validation images with --data.val IMAGES",
        "NULL": "or train without evaluation with --data.val null",
    }
    with pytest.raises(UserError) as caught:
        require_folders(resolve("quickstart", {"data": images}))
    for line, expected in zip(str(caught.value).split("\n"), said, strict=True):
        for short, text in texts.items():
            expected = expected.replace(short, text)
        assert line.startswith(expected.replace("{}", str(tmp_path)))


def test_a_new_run_around_its_images_is_refused_and_one_begun_there_goes_on(tmp_path):
    (tmp_path / "set/train").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "set")
    (tmp_path / "elsewhere").mkdir()
    output, train, elsewhere = (str(tmp_path / name) for name in ("set", "link/train", "elsewhere"))
    for key, images in (("train", {"train": train}), ("val", {"train": elsewhere, "val": train})):
        config = resolve(overrides={"data": images, "output": output})
        with pytest.raises(UserError) as caught:
            require_folders(config)
        assert str(caught.value) == (
            f"output = {output}: data.{key} = {train} lies in it, but a folder that holds a run cannot be opened as "
            f"images; give another folder, such as {output}/run"
        )
    (tmp_path / "set/config.yaml").write_text(to_yaml(config))
    require_folders(config)
