"""UniGrad's arithmetic against plain formulas in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unigrad_fast.kernels import effective_rank, unigrad_gradient, unit_embeddings, update_correlation_
from unigrad_fast.kernels.reference import PANEL_ROWS


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e6, 1e30])
def test_unit_embeddings_have_norm_one_at_any_scale(size):
    embedding = random(7, 33, dtype=torch.float32) * size
    unit, inverse = unit_embeddings(embedding)
    expected = torch.nn.functional.normalize(embedding.double(), dim=-1)
    torch.testing.assert_close(unit.double(), expected, rtol=1e-6, atol=1e-7)
    norm = torch.linalg.vector_norm(embedding.double(), dim=-1).clamp_min(1e-12)
    torch.testing.assert_close(inverse.double() * norm, torch.ones(7, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_units_are_computed_in_fp32_or_better(dtype):
    unit, inverse = unit_embeddings(random(3, 8, dtype=dtype))
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert unit.dtype == inverse.dtype == expected


def test_a_zero_row_has_zero_unit_and_zero_gradient():
    embedding = random(3, 8)
    embedding[1] = 0
    unit, inverse = unit_embeddings(embedding)
    gradient, _, _ = unigrad_gradient(unit, inverse, random(3, 8, seed=1), torch.eye(8).double(), balance=3, scale=1)
    assert not unit[1].any() and not gradient[1].any()
    assert unit[0].any() and gradient[0].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_row_is_flagged_and_zeroed_alone(value):
    embedding = random(4, 8)
    clean, _ = unit_embeddings(embedding)
    embedding[2, 5] = value
    flag = torch.zeros((), dtype=torch.int32)
    unit, inverse = unit_embeddings(embedding, flag)
    assert flag.item() == 1
    assert not unit[2].any() and inverse[2] == 0
    assert torch.equal(unit[[0, 1, 3]], clean[[0, 1, 3]])


def test_finite_rows_leave_the_flag_as_it_is():
    for before in (0, 1):
        flag = torch.tensor(before, dtype=torch.int32)
        unit_embeddings(random(2, 4), flag)
        assert flag.item() == before


def test_an_empty_batch_has_empty_units():
    unit, inverse = unit_embeddings(torch.zeros(0, 5))
    assert unit.shape == (0, 5) and inverse.shape == (0,)


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 20), width=st.integers(1, 24), decay=st.floats(0, 0.999), seed=st.integers(0, 99))
def test_the_correlation_follows_the_moving_average_and_is_symmetric_bit_for_bit(rows, width, decay, seed):
    first, second = (unit_embeddings(random(rows, width, seed=seed + i))[0] for i in (0, 1000))
    correlation = torch.zeros(width, width, dtype=torch.float64)
    update_correlation_(correlation, first, decay=0.0, count=rows)
    update_correlation_(correlation, second, decay=decay, count=rows)
    expected = decay * first.T @ first / rows + (1 - decay) * second.T @ second / rows
    torch.testing.assert_close(correlation, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(correlation, correlation.T)
    assert correlation.trace().item() == pytest.approx(1)
    assert torch.linalg.eigvalsh(correlation).min() > -1e-12


@pytest.mark.parametrize("width", [PANEL_ROWS - 1, PANEL_ROWS, 2 * PANEL_ROWS + 3])
def test_the_correlation_is_right_and_symmetric_across_panels(width):
    unit, _ = unit_embeddings(random(6, width, dtype=torch.float32))
    correlation = torch.zeros(width, width)
    update_correlation_(correlation, unit, decay=0.0, count=6)
    torch.testing.assert_close(correlation.double(), unit.double().T @ unit.double() / 6, rtol=1e-5, atol=1e-8)
    assert torch.equal(correlation, correlation.T)


def test_the_update_equals_the_one_with_a_reduction_over_ranks():
    unit, _ = unit_embeddings(random(8, PANEL_ROWS + 5))
    whole, halves = torch.zeros(2, PANEL_ROWS + 5, PANEL_ROWS + 5, dtype=torch.float64)
    update_correlation_(whole, unit, decay=0.0, count=8)
    others = iter([unit[4:, a:b].T @ unit[4:, a:] / 8 for a, b in ((0, PANEL_ROWS), (PANEL_ROWS, PANEL_ROWS + 5))])
    update_correlation_(halves, unit[:4], decay=0.0, count=8, reduce_=lambda panel: panel.add_(next(others)))
    torch.testing.assert_close(halves, whole, rtol=1e-12, atol=1e-15)


def test_a_skipped_update_leaves_the_correlation_bitwise_unchanged():
    correlation = torch.zeros(16, 16)
    update_correlation_(correlation, unit_embeddings(random(5, 16).float())[0], decay=0.0, count=5)
    before = correlation.clone()
    bad = torch.full((5, 16), torch.nan)
    update_correlation_(correlation, bad, decay=0.5, count=5, skip=torch.tensor(1))
    assert torch.equal(correlation, before)


def test_the_gradient_is_autograds_with_the_gradient_at_the_unit_held_constant():
    embedding = random(6, 12).requires_grad_()
    positive, correlation = random(6, 12, seed=1), random(12, 12, seed=2)
    correlation = correlation + correlation.T
    unit = torch.nn.functional.normalize(embedding, dim=-1)
    frozen = (-positive + 7.0 * unit @ correlation).detach()
    ((unit * frozen).sum() / 6).backward()

    gradient, cosine, negative = unigrad_gradient(
        *unit_embeddings(embedding.detach()), positive, correlation, balance=7.0, scale=1 / 6
    )
    torch.testing.assert_close(gradient, embedding.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(cosine, (unit * positive).sum(-1).detach())
    torch.testing.assert_close(negative, torch.einsum("mi,ij,mj->m", unit, correlation, unit).detach())


@settings(deadline=None, max_examples=20)
@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_the_gradient_is_orthogonal_to_the_embedding_and_inverse_to_its_scale(scale, seed):
    embedding, positive = random(5, 9, seed=seed), random(5, 9, seed=seed + 1000)
    correlation = random(9, 9, seed=seed + 2000)
    correlation = correlation @ correlation.T

    def gradient(z):
        return unigrad_gradient(*unit_embeddings(z), positive, correlation, balance=2.0, scale=0.2)

    first, cosine, negative = gradient(embedding)
    scaled, scaled_cosine, scaled_negative = gradient(embedding * scale)
    along = (first * embedding).sum(-1) / (first.norm(dim=-1) * embedding.norm(dim=-1))
    assert along.abs().max() < 1e-10
    torch.testing.assert_close(scaled * scale, first, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(scaled_cosine, cosine)
    torch.testing.assert_close(scaled_negative, negative)


def test_effective_rank_counts_directions():
    assert effective_rank(torch.eye(10) / 10).item() == pytest.approx(10)
    line = torch.outer(torch.arange(5.0), torch.arange(5.0))
    assert effective_rank(line).item() == pytest.approx(1)
