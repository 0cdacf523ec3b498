from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from drawn_images import draw_tree
from tiny_run import settings_of, tiny

from unigrad_fast import Run, pretrain
from unigrad_fast.training.telemetry import curves


@pytest.fixture(scope="package")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train (96 images) and val (32), in two classes."""
    root = tmp_path_factory.mktemp("images")
    draw_tree(root / "train", per_class=48)
    draw_tree(root / "val", per_class=16)
    return root


@pytest.fixture(scope="package", autouse=True)
def _thin() -> Iterator[None]:
    """Runs are thin, and their curves, which take a second, are not drawn."""
    with tiny(), mock.patch.object(curves, "draw_comparison", drawn):
        yield


def drawn(runs: Mapping[str, Path], path: Path) -> Path:
    path.write_bytes(b"\x89PNG")
    return path


@pytest.fixture(scope="package")
def settings(images: Path) -> dict[str, Any]:
    return settings_of(images)


@pytest.fixture(scope="package")
def finished(settings: dict[str, Any], _thin: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nobody interrupted."""
    return pretrain(**settings, output=tmp_path_factory.mktemp("runs") / "finished")
