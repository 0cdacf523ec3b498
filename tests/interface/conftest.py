from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drawn_images import draw_tree
from tiny_run import fast, settings_of

from unigrad_fast import Run, pretrain


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train (96 images) and val (32), in two classes."""
    root = tmp_path_factory.mktemp("images")
    draw_tree(root / "train", per_class=48)
    draw_tree(root / "val", per_class=16)
    return root


@pytest.fixture(scope="module", autouse=True)
def _fast() -> Iterator[None]:
    with fast():
        yield


@pytest.fixture(scope="session")
def settings(images: Path) -> dict[str, Any]:
    return settings_of(images)


@pytest.fixture(scope="session")
def finished(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nobody interrupted."""
    with fast():
        return pretrain(**settings, output=tmp_path_factory.mktemp("runs") / "finished")
