"""Writes examples/own_photographs.ipynb.

    python docs/write_notebook.py

Its cells are those of the script beside it; the outputs are of a run of minutes.
"""

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

SCRIPT = Path(__file__).resolve().parents[1] / "examples/own_photographs.py"
NOTEBOOK = SCRIPT.with_suffix(".ipynb")
CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


def notebook_of(script: str) -> nbformat.NotebookNode:
    """The notebook whose cells begin at the lines `# %%` of a script, without outputs."""
    _, *parts = CELL.split(script)
    cells = []
    for is_text, source in zip(parts[::2], map(str.strip, parts[1::2]), strict=True):
        made = nbformat.v4.new_markdown_cell if is_text else nbformat.v4.new_code_cell
        source = re.sub(r"^# ?", "", source, flags=re.MULTILINE) if is_text else source
        cells.append(made(source, id=f"cell-{len(cells)}"))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Runs the cells in a folder."""
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=1800, coalesce_streams=True, resources=place).execute()


def tidy(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Takes paths of this machine, times of execution, and the larger of two forms of a picture out of the outputs."""
    for cell in notebook.cells:
        cell.metadata.clear()
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = _anywhere(output["text"], folder)
            data = output.get("data", {})
            if "image/jpeg" in data:
                del data["image/png"]
            data.update({kind: _anywhere(data[kind], folder) for kind in data if kind.startswith("text/")})


def _anywhere(text: str, folder: Path) -> str:
    return text.replace(f"{folder}/", "").replace(f"{sys.prefix}/bin/", "")


if __name__ == "__main__":
    notebook = notebook_of(SCRIPT.read_text(encoding="utf-8"))
    with TemporaryDirectory() as folder:
        place = Path(folder).resolve()
        execute(notebook, place)
        tidy(notebook, place)
    nbformat.write(notebook, NOTEBOOK)
