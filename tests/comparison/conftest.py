from __future__ import annotations

from pathlib import Path

import pytest
from drawn_images import draw_tree

RECIPE = """
recipe: cifar_subset
data: {{train: {root}/train, val: {root}/val, batch_size: 16, image_size: 16, threads: 1}}
model: {{projector: {{width: 16}}}}
schedule: {{epochs: 2, warmup_epochs: 1}}
checkpoint: {{every: 0.3}}
telemetry: {{every: 1, effective_rank_every: 1, tensorboard: false}}
engine: {{precision: fp32}}
"""


@pytest.fixture(scope="session")
def recipe(tmp_path_factory) -> Path:
    """A recipe of six steps, with labelled images."""
    root = tmp_path_factory.mktemp("compared")
    draw_tree(root / "train", per_class=24)
    draw_tree(root / "val", per_class=8)
    file = root / "tiny.yaml"
    file.write_text(RECIPE.format(root=root))
    return file
