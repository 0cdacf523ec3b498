"""`unigrad-fast checkpoint show` and `verify`."""

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


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_folder_without_checkpoints_is_named(tmp_path, capsys, command):
    assert main(["checkpoint", command, str(tmp_path)]) == 2
    assert f"path = {tmp_path}: no checkpoint there" in capsys.readouterr().err
