"""How far a run's configuration travels: the modules that are handed the whole of it while a run starts and trains."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from drawn_images import draw_tree
from forked import start
from thin import thin

from unigrad_fast.config import Config, resolve

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("unigrad_fast", "pipelines", "kernels")
MOST = 12  # modules; before parts were given their group of keys it was 14


@contextmanager
def handed_all() -> Iterator[set[str]]:
    """While inside, the modules whose functions are handed a whole configuration: as argument, or attribute of self."""
    found: set[str] = set()
    module_of = {str(path): str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")}

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        module = module_of.get(code.co_filename) if event == "call" else None
        if module is None or module in found:
            return
        count = code.co_argcount + code.co_kwonlyargcount
        given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        if count and code.co_varnames[0] == "self":
            given += getattr(given[0], "__dict__", {}).values()
        if any(isinstance(each, Config) for each in given):
            found.add(module)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def walk(folder: Path) -> None:
    """Writes down the modules that are handed all of it by a run of two steps, with evaluations and a checkpoint."""
    from unigrad_fast.training import loop

    for part in ("train", "val"):
        draw_tree(folder / part, per_class=16)
    images = {"train": folder / "train", "val": folder / "val", "batch_size": 16, "image_size": 16, "threads": 1}
    config = resolve(
        "cifar_subset",
        {
            "output": folder / "run",
            "data": images,
            "model": {"projector": {"width": 32}},
            "schedule": {"epochs": 1, "warmup_epochs": 0},
            "evaluation": {"every": 1},
            "engine": {"precision": "fp32", "device": "cpu"},
        },
    )
    with thin(stages=1), handed_all() as found:
        loop.pretrain(config)
    (folder / "found.json").write_text(json.dumps(sorted(found)))


@pytest.mark.long
def test_few_modules_are_handed_the_whole_configuration(tmp_path):
    process = start(walk, tmp_path)
    process.join(600)
    assert process.exitcode == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert "unigrad_fast/training/loop.py" in found
    assert len(found) <= MOST, found
