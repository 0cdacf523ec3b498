"""Learning rate and target momentum at the steps that matter."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unigrad_fast.optimization.schedules import learning_rate, target_momentum


def test_the_rate_rises_from_the_floor_and_returns_to_it_at_the_last_step():
    rates = [learning_rate(step, 1000, peak=0.2, warmup_steps=50) for step in range(1000)]
    assert rates[0] == pytest.approx(0.2e-3)
    assert rates[50] == pytest.approx(0.2) == max(rates)
    assert rates[-1] == pytest.approx(0.2e-3)
    assert rates[25] == pytest.approx((0.2 + 0.2e-3) / 2)


@given(total=st.integers(1, 400), data=st.data())
def test_the_rate_stays_between_floor_and_peak_and_falls_after_warmup(total, data):
    warmup = data.draw(st.integers(0, total))
    rates = [learning_rate(step, total, peak=1.0, warmup_steps=warmup, min_fraction=0.01) for step in range(total)]
    assert all(0.01 - 1e-12 <= rate <= 1 + 1e-12 for rate in rates)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_without_warmup_the_run_starts_at_the_peak():
    assert learning_rate(0, 10, peak=0.3, warmup_steps=0) == pytest.approx(0.3)


def test_the_authors_schedule_ends_above_the_floor():
    last = learning_rate(99_999, 100_000, peak=1.0, warmup_steps=5_000, kind="official")
    assert last == pytest.approx(0.00715, abs=5e-6)
    halfway = learning_rate(5_000 + 50_000, 100_000, peak=1.0, warmup_steps=5_000, kind="official")
    assert halfway == pytest.approx(0.001 + 0.999 * 0.5)


def test_the_momentum_follows_a_cosine_to_its_final_value():
    assert target_momentum(0, 100, initial=0.996, final=1.0) == pytest.approx(0.996)
    assert target_momentum(100, 100, initial=0.996, final=1.0) == 1.0
    assert target_momentum(25, 100, initial=0.9, final=1.0) == pytest.approx(1 - 0.1 * (1 + math.cos(math.pi / 4)) / 2)
