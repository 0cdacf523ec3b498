"""Checkpoints on disk."""

from __future__ import annotations

import pytest
import torch

ELEMENTS, TENSORS = 1 << 20, 12


@pytest.mark.benchmark(group="checkpoints")
def test_save(benchmark, public, tmp_path):
    """48 MiB in 12 tensors, flushed to disk; replaces the previous checkpoint."""
    write, Piece = public("unigrad_fast.checkpoints.files:write"), public("unigrad_fast.checkpoints.files:Piece")
    values = torch.randn(TENSORS, ELEMENTS, generator=torch.Generator().manual_seed(0))
    pieces = [Piece(f"online.{number}", (1024, 1024), 0, each) for number, each in enumerate(values)]
    benchmark(lambda: write(tmp_path, 1, pieces, {"epoch": 1.0, "config": {}}))
