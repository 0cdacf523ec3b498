from pathlib import Path

import pytest
from drawn_images import draw_tree


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 labelled JPEG files in two classes."""
    return draw_tree(tmp_path_factory.mktemp("images") / "train", per_class=48)
