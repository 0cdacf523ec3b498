"""Gradient forms on the Triton path, against themselves in float64, which torch computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_objective import GATES, distance, in_double, views

from unigrad_fast.objectives import ROWS, GradientForm


@pytest.mark.parametrize("letter", ["a", "d", "j"])
def test_a_row_is_itself_in_float64(letter):
    row, dtype = replace(ROWS[letter], bank_size=40), torch.float16
    low, exact = GradientForm(32, row), GradientForm(32, row)
    for seed in range(2):
        online = [z.detach().to(dtype).requires_grad_() for z in views(3, 6, 32, seed)]
        target = [m.detach().to(dtype) for m in views(2, 6, 32, seed + 9)]
        same = in_double(online)
        low(online=online, target=target).loss.backward()
        exact(online=same, target=in_double(target)).loss.backward()
    error = distance(torch.cat([z.grad for z in online]), torch.cat([z.grad for z in same]))
    assert error < GATES[dtype]
