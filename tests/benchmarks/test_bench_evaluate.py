"""The feature pass and the sweep are measured against what they are compared with, on images of one's own."""

from __future__ import annotations

import json

from command_process import command
from drawn_images import draw_tree


def test_rows_have_all_variants_and_both_ratios(tmp_path):
    draw_tree(tmp_path / "images", per_class=4, classes=2)
    small = ("--backbone", "resnet18", "--image_size", 32, "--batch_size", 4, "--batches", 1, "--repetitions", 2)
    result = command(
        "bench", "evaluate", *small, "--photographs", tmp_path / "images", "--output", tmp_path, is_thin=True
    )
    assert result.returncode == 0, result.stderr
    rows = {row["what"]: row for row in map(json.loads, (tmp_path / "evaluate.jsonl").read_text().splitlines())}
    files, memory, sweep, single, of_files, of_sweep = rows.values()
    assert all(
        row["images"].endswith("images") and row["classes"] == 1000 and row["median"] > 0 for row in rows.values()
    )
    assert of_files["least"] <= files["most"] / memory["least"] and of_files["most"] >= files["least"] / memory["most"]
    assert of_sweep["what"] == "time, sweep / single classifier"
    assert of_sweep["least"] <= single["most"] / sweep["least"] and of_sweep["most"] >= single["least"] / sweep["most"]
