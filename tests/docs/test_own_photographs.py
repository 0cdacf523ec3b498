"""The notebook examples/own_photographs.ipynb is the script beside it, and its cells run on a folder of images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from drawn_images import draw_tree
from write_notebook import NOTEBOOK, SCRIPT, execute, notebook_of, tidy

TESTS = Path(__file__).resolve().parents[1]
LARGEST = 300_000  # bytes of the notebook
SETTINGS = re.compile(r"^PHOTOGRAPHS = .*\nSETTINGS = .*$", re.MULTILINE)
SMALL = """
import sys
sys.path.insert(0, {tests!r})
from thin import thin
inside = thin().__enter__()
PHOTOGRAPHS = Path({images!r})
SETTINGS = {{"data.batch_size": 16, "data.image_size": 32, "schedule.epochs": 2, "telemetry.tensorboard": False}}
"""


def shown(cell: Any) -> str:
    return "".join(each.get("text", "") + each.get("data", {}).get("text/plain", "") for each in cell.outputs)


def test_the_notebook_is_the_script_with_outputs():
    written = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(written)
    made = notebook_of(SCRIPT.read_text(encoding="utf-8"))
    assert [(cell.cell_type, cell.source) for cell in written.cells] == [
        (cell.cell_type, cell.source) for cell in made.cells
    ]
    assert not [output for cell in written.cells for output in cell.get("outputs", []) if output.output_type == "error"]
    assert NOTEBOOK.stat().st_size < LARGEST


@pytest.mark.long
def test_the_cells_run_on_a_folder_of_images(tmp_path):
    for part, images in (("train", 20), ("val", 6)):
        draw_tree(tmp_path / "images" / part, per_class=images)
    small = SMALL.format(tests=str(TESTS), images=str(tmp_path / "images"))
    script, replaced = SETTINGS.subn(lambda _: small.strip(), SCRIPT.read_text(encoding="utf-8"))
    assert replaced == 1
    notebook = notebook_of(script)
    execute(notebook, tmp_path)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    pictures = [cell for cell in cells if any("image/jpeg" in each.get("data", {}) for each in cell.outputs)]
    assert [cell.source.partition("(")[0] for cell in pictures] == ["preview", "Image.open", "photograph = min"]
    tidy(notebook, tmp_path)
    assert str(tmp_path) not in str([cell.outputs for cell in cells])
    assert not [each for cell in pictures for each in cell.outputs if "image/png" in each.get("data", {})]
    assert "torch.Size([1, 128])" in shown(cells[-2])
    assert "cosine of both features: 1.0" in shown(cells[-1])
