"""Folders that a run may use, and what is said of those that it may not."""

import pytest

from unigrad_fast.commands.requirements import fresh_output, require_folders
from unigrad_fast.config import resolve
from unigrad_fast.runtime.errors import UserError


def test_folders_are_checked(tmp_path):
    text = tmp_path / "list.txt"
    text.write_text("a.jpg")
    config = resolve(overrides={"data": {"train": str(tmp_path / "absent"), "val": str(text)}})
    with pytest.raises(UserError) as caught:
        require_folders(config)
    assert str(caught.value) == f"data.train = {tmp_path}/absent: no such file or folder"
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
    config = resolve(overrides={"data": {"train": str(tmp_path)}, "output": str(run)})
    require_folders(config)
    (run / "config.yaml").write_text("seed: 0\n")
    require_folders(config)
    with pytest.raises(UserError, match="holds a run, which --fresh does not continue; give another folder"):
        require_folders(config, fresh=True)


def test_output_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    config = resolve(overrides={"data": {"train": str(tmp_path)}, "output": str(tmp_path / "file/run")})
    with pytest.raises(UserError, match="is not writable"):
        require_folders(config)


def test_fresh_output_is_the_first_free_folder(tmp_path):
    names = []
    for _ in range(3):
        names.append(fresh_output("quickstart", tmp_path).name)
        (tmp_path / names[-1]).mkdir()
    assert names == ["quickstart", "quickstart-2", "quickstart-3"]
