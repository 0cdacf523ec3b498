"""`unigrad-fast checkpoint show` and `verify`."""

from pathlib import Path

import pytest
import torch

from unigrad_fast.checkpoints.files import write_weights
from unigrad_fast.cli import main
from unigrad_fast.config import resolve


@pytest.fixture
def run(tmp_path):
    """A folder with checkpoints of steps 10 and 20."""
    tensors = {"online.weight": torch.ones(3, 4), "online.bias": torch.ones(4), "target.weight": torch.ones(3, 4)}
    for step in (10, 20):
        write_weights(tmp_path, tensors, step, step / 10, resolve("quickstart").model_dump(mode="json"))
    return tmp_path


def test_show_says_what_the_newest_checkpoint_holds(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["checkpoint", "show", str(run)]) == 0
    out = capsys.readouterr().out
    rows = dict(line.strip("│ ").split("│") for line in out.splitlines() if line.count("│") == 3)
    rows = {name.strip(): value.strip() for name, value in rows.items()}
    assert rows["folder"] == str(run / "checkpoints/step-00000020")
    assert rows["step, epoch"] == "20, 2"
    assert rows["written by"] == "1 rank"
    assert rows["online"] == "2 tensors, 16 elements, 64 bytes"
    assert rows["target"] == "1 tensors, 12 elements, 48 bytes"
    assert rows["checkpoints of the run"] == "step-00000010, step-00000020"
    assert main(["checkpoint", "show", str(run / "checkpoints/step-00000010")]) == 0
    assert "step-00000010" in capsys.readouterr().out


def test_show_breaks_a_long_path_and_cuts_nothing(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["checkpoint", "show", str(run)]) == 0
    cells = [line.split("│")[2].strip() for line in capsys.readouterr().out.splitlines() if line.count("│") == 3]
    assert str(run / "checkpoints/step-00000020") in "".join(cells)


def test_verify_finds_intact_and_damaged_checkpoints(run, capsys):
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count("intact, 3 tensors in 1 file") == 2
    file = run / "checkpoints/step-00000010/rank-00000.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main(["checkpoint", "verify", str(run)]) == 2
    out, err = capsys.readouterr()
    assert "step-00000020: intact" in out and "step-00000010" not in out
    assert f"{file}: damaged" in err and len(err.splitlines()) == 1


def damage(run: Path, step: int) -> None:
    with open(run / f"checkpoints/step-{step:08}/rank-00000.pt", "r+b") as file:
        file.truncate(100)


def test_verify_says_which_checkpoint_remains_if_the_newest_is_damaged(run, capsys):
    damage(run, 20)
    assert main(["checkpoint", "verify", str(run)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "step-00000020/rank-00000.pt: has 100 bytes instead of" in first
    assert "newest intact checkpoint is that of step 10" in second and "--checkpoint 10" in second
    damage(run, 10)
    assert main(["checkpoint", "verify", str(run)]) == 2
    *damaged, last = capsys.readouterr().err.splitlines()
    assert len(damaged) == 2 and last.startswith(f"error: no checkpoint of {run} is intact")
    assert main(["checkpoint", "verify", str(run / "checkpoints/step-00000010")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_show_names_the_newest_intact_checkpoint_if_the_newest_cannot_be_shown(run, capsys):
    (run / "checkpoints/step-00000020/checkpoint.json").write_text("{")
    assert main(["checkpoint", "show", str(run)]) == 2
    intact = run / "checkpoints/step-00000010"
    assert capsys.readouterr().err.endswith(f"; the newest intact one is {intact}; give it\n")
    damage(run, 10)
    assert main(["checkpoint", "show", str(run)]) == 2
    assert f"; no checkpoint of {run} is intact" in capsys.readouterr().err


@pytest.mark.parametrize("step", [(), ("--checkpoint", "20")])
def test_export_of_a_damaged_checkpoint_names_the_newest_intact_one(run, capsys, step):
    damage(run, 20)
    assert main(["export", str(run), *step]) == 2
    assert capsys.readouterr().err.endswith("; --checkpoint 10 takes the newest intact one\n")
    damage(run, 10)
    assert main(["export", str(run), *step]) == 2
    assert f"; no checkpoint of {run} is intact" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_folder_without_checkpoints_is_named(tmp_path, capsys, command):
    assert main(["checkpoint", command, str(tmp_path)]) == 2
    assert f"path = {tmp_path}: no checkpoint there" in capsys.readouterr().err
