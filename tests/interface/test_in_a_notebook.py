"""The interface in a notebook's kernel: a bar that moves, results that show, a stop button that saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import require_equal

from unigrad_fast import Run

SETUP = """
import sys, threading
sys.path[:0] = {paths}
from pathlib import Path
from tiny_run import settings_of, tiny
from unigrad_fast import Preempted, Run, pretrain
inside = tiny().__enter__()
settings = settings_of(Path({images!r}))
"""
STOPPED = """
import os, signal
def stop(step, metrics):
    if step == 1:
        os.kill(os.getpid(), signal.SIGINT)
try:
    pretrain(**settings, output={folder!r} + "/stopped", on_step=stop)
except Preempted as error:
    run = Run(error.run)
    print("preempted after", *run.checkpoints)
"""


def outputs(cell: Any, kind: str) -> list[str]:
    """The outputs of a cell in one form."""
    found = [each.get("text", "") if kind == "stream" else each.get("data", {}).get(kind) for each in cell.outputs]
    return [each for each in found if each]


@pytest.mark.slow  # a kernel imports everything
def test_a_notebook_trains_looks_and_stops_bit_for_bit_as_elsewhere(images, finished, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    cells = [
        SETUP.format(paths=paths, images=str(images)),
        f"run = pretrain(**settings, output={str(tmp_path)!r} + '/run')\nrun",
        "run.figures()",
        "run.metrics",
        STOPPED.format(folder=str(tmp_path)),
        "len(run.resume().metrics)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    _, trained, figures, metrics, stopped, resumed = notebook.cells
    bar, shown = outputs(trained, "text/plain")
    assert bar.startswith("epoch 2.0/2 ████") and "100 %" in bar and shown.startswith("Run(path ")
    assert "\x1b" not in "".join(outputs(trained, "stream")) and "<table>" in outputs(trained, "text/html")[0]
    assert outputs(figures, "image/png") and "<th>loss</th>" in outputs(metrics, "text/html")[0]
    assert "preempted after 3" in "".join(outputs(stopped, "stream"))
    assert outputs(resumed, "text/plain")[-1] == "6"
    require_equal(Run(tmp_path / "run"), finished)
    require_equal(Run(tmp_path / "stopped"), finished)
