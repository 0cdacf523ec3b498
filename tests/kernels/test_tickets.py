"""Memory that batch norm's reductions keep between launches, around the capture of a CUDA graph."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from unigrad_fast.kernels import batch_norm_merges
from unigrad_fast.kernels.heuristics import NORM_KERNELS, cut

CUT, GPU = cut(64, 2, 128, NORM_KERNELS["sums"]), torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch):
    """A pretended card; its attributes are the current stream, and whether that is being captured."""
    card = SimpleNamespace(stream=1, capturing=False)
    zeros = torch.zeros
    monkeypatch.setattr(batch_norm_merges, "TICKETS", {})
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: zeros(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=card.stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: card.capturing)
    return card


def test_what_is_made_during_a_capture_is_not_found_outside(card):
    card.capturing = True
    captured = batch_norm_merges.tickets_for(CUT, GPU)
    card.capturing = False
    launched = batch_norm_merges.tickets_for(CUT, GPU)
    assert launched is not captured and launched is batch_norm_merges.tickets_for(CUT, GPU)


def test_a_capture_uses_what_was_made_before_it_on_its_stream(card):
    launched = batch_norm_merges.tickets_for(CUT, GPU)
    card.capturing = True
    assert batch_norm_merges.tickets_for(CUT, GPU) is launched
    card.stream = 2
    assert batch_norm_merges.tickets_for(CUT, GPU) is not launched


def test_none_is_given_up_as_a_graph_may_hold_its_address(card):
    made = []
    for card.stream in range(100):
        made.append(batch_norm_merges.tickets_for(CUT, GPU))
    card.stream = 0
    assert batch_norm_merges.tickets_for(CUT, GPU) is made[0]
