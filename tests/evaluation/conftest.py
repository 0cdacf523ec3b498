from __future__ import annotations

from pathlib import Path

import pytest
from drawn_images import draw_tree


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """train: 96 images of six classes; val: 103 of them, which no number of ranks divides."""
    root = tmp_path_factory.mktemp("linear")
    draw_tree(root / "train", per_class=16, classes=6)
    draw_tree(root / "val", per_class=18, classes=6)
    for name in range(13, 18):
        (root / f"val/class5/{name:03}.jpg").unlink()
    return root
