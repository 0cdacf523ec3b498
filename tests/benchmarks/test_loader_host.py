"""The cost of the loader's Python: every part and every ratio is measured, and files are read where the row says."""

from __future__ import annotations

import json

import pytest

from unigrad_fast.benchmarks.measures import loader_host
from unigrad_fast.pipelines.reading.apart import Apart


@pytest.fixture
def quick(monkeypatch):
    small = {"ROUNDS": 1, "BLOCK_SECONDS": 0.02, "IMAGES": 4, "ENTRIES": 16, "REPEATS": 1, "BYTES": 2000}
    for name, value in small.items():
        monkeypatch.setattr(loader_host, name, value)
    monkeypatch.setattr(loader_host, "rest", lambda: None)


def test_every_ratio_and_part_is_measured(quick, tmp_path, capsys):
    loader_host.main(output=tmp_path)
    *ratios, parts = map(json.loads, (tmp_path / "loader_host.jsonl").read_text(encoding="utf-8").splitlines())
    assert {(row["where"], row["images_per_s"]) for row in ratios} == {
        (where, rate) for where in loader_host.WHERE for rate in loader_host.RATES
    }
    assert all(row["reached"] > 0 for row in ratios) and len(ratios) == 8
    assert all(each > 0 for each in parts["held"].values()) and len(parts["held"]) == 4


def test_files_are_read_where_it_says(quick, tmp_path, monkeypatch):
    steps = []
    ask = Apart.ask
    monkeypatch.setattr(Apart, "ask", lambda self, step, places: steps.append(step) or ask(self, step, places))
    images = loader_host.manifest(tmp_path / "images", loader_host.BYTES)
    for where, apart in loader_host.WHERE.items():
        batches = loader_host.delivered(loader_host.made(images, "simsiam", apart))
        next(batches)
        batches.close()
        assert bool(steps) == apart, where
        steps.clear()
