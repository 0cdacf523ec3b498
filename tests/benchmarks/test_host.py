"""The host's time by kind of call: what is measured, and that the dry run reckons with what was measured."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
import torch

from unigrad_fast.benchmarks.counts import host
from unigrad_fast.kernels import batch_norm

ROWS = Path(__file__).resolve().parents[2] / "benchmarks/results/host.jsonl"


def test_the_dry_run_reckons_with_the_rows_that_were_measured():
    first, *_, later = (json.loads(line)["microseconds"] for line in ROWS.read_text(encoding="utf-8").splitlines())
    host = json.loads(resources.files("unigrad_fast").joinpath("cards.json").read_text(encoding="utf-8"))["host"]
    assert host["measured_us"][0] == {kind: round(value, 2) for kind, value in first.items()}
    loader = json.loads(ROWS.with_name("loader_host.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    held = 1000 * sum(value for part, value in loader["held"].items() if part != "reading in this process")
    assert host["named_us"]["image"][0] == round(host["factor"][0] * held / loader["images"])
    ratio = first["kernel"] / later["kernel"]
    added = {kind: round(ratio * value, 2) for kind, value in later.items() if kind not in first}
    assert host["measured_later_us"][0] == added and f"times {ratio:.2f}" in host["measured_later_us"][1]


def test_every_kind_is_measured(monkeypatch):
    monkeypatch.setattr(host, "CALLS", 2)
    monkeypatch.setattr(host, "ROUNDS", 1)
    found = host.kinds()
    assert found.keys() == json.loads(ROWS.read_text(encoding="utf-8").splitlines()[-1])["microseconds"].keys()
    differences = {"hook", "norm", "norm of backward", "gather in lockstep"}  # which may drown in so few calls
    assert all(value > 0 for kind, value in found.items() if kind not in differences)
    assert all(found[kind] >= 0 for kind in differences)


def test_kernels_are_launched_onto_nothing_and_as_before_afterwards(monkeypatch):
    x, rows = torch.ones(8, 64), torch.zeros(2, 64)
    caches = batch_norm.normalise_kernel.device_caches
    with host.nothing_driven():
        y, _ = batch_norm.normalise(x, rows, rows, rows[0], rows[0], None, 1e-5, True, False)
    assert y.shape == x.shape and batch_norm.normalise_kernel.device_caches is caches
    with pytest.raises(RuntimeError, match="driver"):
        batch_norm.normalise(x, rows, rows, rows[0], rows[0], None, 1e-5, True, False)
