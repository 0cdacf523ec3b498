"""UniGrad's arithmetic in plain torch against formulas over whole tensors in float64."""

import pytest
import torch
from formulas import error, gradient, one_step, positives, random, unit
from hypothesis import given, settings
from hypothesis import strategies as st
from sent_rows import SENT, check_sent_rows

from unigrad_fast.kernels import (
    correlation_product,
    effective_rank,
    embedding_gradient,
    mirror_,
    unigrad_gradient,
    unit_embeddings,
    update_correlation_,
)
from unigrad_fast.kernels.heuristics import working_scale
from unigrad_fast.kernels.reference import CACHED_ELEMENTS, PANEL_ROWS


@pytest.fixture(autouse=True)
def _torch_path(monkeypatch, poisoned):
    monkeypatch.setenv("UNIGRAD_KERNELS", "torch")


def moment(units_MC: torch.Tensor) -> torch.Tensor:
    return units_MC.double().T @ units_MC.double() / len(units_MC)


def positive_matrix(width: int, seed: int = 2) -> torch.Tensor:
    return moment(unit(random(2 * width, width, seed=seed)))


# Unit embeddings


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e6, 1e30])
def test_unit_embeddings_have_norm_one_at_any_scale(size):
    embedding = random(7, 33, dtype=torch.float32) * size
    units, inverse = unit_embeddings(embedding)
    torch.testing.assert_close(units.double(), unit(embedding), rtol=1e-6, atol=1e-7)
    norm = torch.linalg.vector_norm(embedding.double(), dim=-1).clamp_min(1e-12)
    torch.testing.assert_close(inverse.double() * norm, torch.ones(7, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1e-11, 1e-12, 1e-13, 1e-14, 1e-30])
def test_norms_below_the_smallest_count_as_the_smallest_whatever_the_other_rows(size):
    row = torch.zeros(1, 4)
    row[0, 1] = size
    alone, inverse = unit_embeddings(row)
    beside, others = unit_embeddings(torch.cat([row, torch.ones(1, 4), torch.zeros(1, 4)]))
    expected = torch.nn.functional.normalize(row, dim=-1)
    torch.testing.assert_close(alone, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(beside[:1], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(inverse, torch.full((1,), 1 / max(size, 1e-12)), rtol=1e-6, atol=0)
    torch.testing.assert_close(others[:1], inverse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_units_are_computed_in_fp32_or_better(dtype):
    units, inverse = unit_embeddings(random(3, 8, dtype=dtype))
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert units.dtype == inverse.dtype == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_units_are_rounded_once_to_the_dtype_that_is_asked_for(dtype):
    embedding = random(3, 80, dtype=torch.float32)
    units, inverse = unit_embeddings(embedding, dtype)
    exact, exact_inverse = unit_embeddings(embedding)
    assert torch.equal(units, exact.to(dtype)) and torch.equal(inverse, exact_inverse)


def test_views_are_stacked_whatever_their_dtypes_and_strides():
    views = [
        random(5, 40, dtype=torch.float16),
        random(40, 5, seed=1, dtype=torch.float32).T,
        random(1, 40, seed=2, dtype=torch.bfloat16).expand(5, 40),
    ]
    units, inverse = unit_embeddings(views)
    assert units.shape == (15, 40) and inverse.shape == (15,)
    assert error(units, torch.cat([unit(view) for view in views])) < 1e-6


def test_rows_beyond_one_cached_block_are_taken_too():
    rows = CACHED_ELEMENTS // 64 + 3
    embedding = random(rows, 64, dtype=torch.float32)
    nonfinite = torch.full((rows,), -9, dtype=torch.int32)
    units, _ = unit_embeddings(embedding, nonfinite=nonfinite)
    assert error(units, unit(embedding)) < 1e-6 and not nonfinite.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_row_is_flagged_and_zeroed_alone(value):
    views = [random(4, 8), random(4, 8, seed=1)]
    clean, clean_inverse = unit_embeddings(views)
    views[0][2, 5] = value
    nonfinite = torch.full((8,), -9, dtype=torch.int32)
    units, inverse = unit_embeddings(views, nonfinite=nonfinite)
    others = [0, 1, 3, 4, 5, 6, 7]
    assert nonfinite.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert not units[2].any() and inverse[2] == 0
    torch.testing.assert_close(units[others], clean[others], rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(inverse[others], clean_inverse[others], rtol=1e-14, atol=0)


def test_a_zero_row_has_zero_unit_and_zero_gradient_and_is_finite():
    embedding = random(3, 8)
    embedding[1] = 0
    nonfinite = torch.full((3,), -9, dtype=torch.int32)
    units, inverse = unit_embeddings(embedding, nonfinite=nonfinite)
    dz, _ = unigrad_gradient(units, inverse, random(3, 8, seed=1), torch.eye(8).double(), balance=3, scale=1)
    assert not nonfinite.any()
    assert not units[1].any() and not dz[1].any()
    assert units[0].any() and dz[0].any()


def test_an_empty_batch_has_empty_units_and_no_gradient():
    units, inverse = unit_embeddings(torch.zeros(0, 5))
    assert units.shape == (0, 5) and inverse.shape == (0,)
    dz, terms = unigrad_gradient(units, inverse, units, torch.eye(5), balance=1.0, scale=1.0)
    assert dz.shape == (0, 5) and terms.tolist() == [0] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("images", "width"), SENT)
def test_rows_are_sent_with_their_number_and_flags_in_a_tail_that_is_summed_and_cleared(images, width, dtype):
    check_sent_rows(images, width, dtype)


# Correlation


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 20), width=st.integers(1, 24), decay=st.floats(0, 0.999), seed=st.integers(0, 99))
def test_the_correlation_follows_the_moving_average_and_is_symmetric_bit_for_bit(rows, width, decay, seed):
    first, second = (unit_embeddings(random(rows, width, seed=seed + i))[0] for i in (0, 1000))
    correlation = torch.zeros(width, width, dtype=torch.float64)
    update_correlation_(correlation, first, decay=0.0, count=rows)
    update_correlation_(correlation, second, decay=decay, count=rows)
    expected = decay * moment(first) + (1 - decay) * moment(second)
    torch.testing.assert_close(correlation, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(correlation, correlation.T)
    assert correlation.trace().item() == pytest.approx(1)
    assert torch.linalg.eigvalsh(correlation).min() > -1e-12


@pytest.mark.parametrize("width", [PANEL_ROWS - 1, PANEL_ROWS, 2 * PANEL_ROWS + 3])
def test_the_correlation_is_right_and_symmetric_across_panels(width):
    units, _ = unit_embeddings(random(6, width, dtype=torch.float32))
    correlation = torch.zeros(width, width)
    update_correlation_(correlation, units, decay=0.0, count=6)
    torch.testing.assert_close(correlation.double(), moment(units), rtol=1e-5, atol=1e-8)
    assert torch.equal(correlation, correlation.T)


def test_blocks_of_rows_make_up_the_whole_and_the_whole_product():
    width = PANEL_ROWS + 70
    units, online = unit(random(9, width)), unit(random(5, width, seed=1))
    whole = torch.zeros(width, width, dtype=torch.float64)
    blocks = torch.zeros(width, width, dtype=torch.float64)
    cuts = [(0, 1), (1, PANEL_ROWS + 5), (PANEL_ROWS + 5, width)]
    update_correlation_(whole, units, decay=0.0, count=9)
    for first, last in cuts:
        update_correlation_(blocks[first:last], units, decay=0.0, count=9, first_row=first)
    torch.testing.assert_close(blocks, whole, rtol=1e-12, atol=1e-15)
    columns = torch.cat([correlation_product(online, blocks[first:last]) for first, last in cuts], dim=1)
    torch.testing.assert_close(columns, online @ whole, rtol=1e-12, atol=1e-15)


def test_a_skipped_update_leaves_the_correlation_bitwise_unchanged():
    correlation = torch.zeros(16, 16)
    update_correlation_(correlation, unit_embeddings(random(5, 16).float())[0], decay=0.0, count=5)
    before = correlation.clone()
    bad = torch.full((5, 16), torch.nan)
    update_correlation_(correlation, bad, decay=0.5, count=5, skip=torch.tensor([[0, 0], [0, 1]], dtype=torch.int32))
    assert torch.equal(correlation, before)
    update_correlation_(correlation, unit(random(5, 16)).float(), decay=0.5, count=5, skip=torch.zeros(4).int())
    assert not torch.equal(correlation, before)


def test_the_first_update_does_not_read_what_the_correlation_held():
    units = unit(random(6, 16))
    correlation = torch.full((16, 16), torch.nan, dtype=torch.float64)
    updates = torch.tensor(0)
    update_correlation_(correlation, units, decay=0.9, count=6, updates=updates)
    torch.testing.assert_close(correlation, moment(units))
    assert updates == 0  # counted with the gradient


def test_decay_and_count_may_be_scalars_on_the_device_that_change_from_step_to_step():
    decay, count = torch.zeros(()), torch.tensor(12.0)
    correlation = expected = torch.zeros(16, 16)
    for step, value in enumerate((0.5, 0.9, 0.99)):
        decay.fill_(value)
        units = unit(random(6, 16, seed=step), torch.float32)
        expected = value * expected + (1 - value) * moment(units) / 2  # 12 rows over all ranks, of which 6 are here
        correlation = update_correlation_(correlation.clone(), units, decay=decay, count=count)
    assert error(correlation, expected) < 1e-6


def test_mirroring_fills_the_lower_triangle_from_the_upper():
    width = PANEL_ROWS + 9
    matrix = random(width, width)
    expected = matrix.triu() + matrix.triu(1).T
    matrix[torch.arange(width)[:, None] > torch.arange(width)] = 7
    assert mirror_(matrix) is matrix
    assert torch.equal(matrix, expected)


# Working copy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_working_copy_is_the_correlation_scaled_and_the_product_undoes_the_scale(dtype):
    units = unit(random(9, 300), torch.float32)
    correlation, working = torch.zeros(300, 300), torch.full((300, 300), torch.nan, dtype=dtype)
    update_correlation_(correlation, units, decay=0.0, count=9, working=working)
    scale = working_scale(dtype, 300)
    assert scale == (256 if dtype == torch.float16 else 1)
    assert torch.equal(working, (correlation * scale).to(dtype))
    product = correlation_product(units, working)
    assert product.dtype == torch.float32
    assert error(product, units.double() @ correlation.double()) < {torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]


def test_fp16_holds_the_smallest_and_the_largest_correlation_of_every_width():
    for width in (8, 300, 2048, 65536):
        scale = working_scale(torch.float16, width)
        assert scale * 1.0 < torch.finfo(torch.float16).max  # all on one direction
        assert scale / width >= min(0.5, 2**15 / width)  # all directions alike: far from where bits are lost


# Gradient


def test_the_gradient_is_autograds_with_the_gradient_at_the_unit_held_constant():
    embedding = random(6, 12).requires_grad_()
    positive, correlation = random(6, 12, seed=1), positive_matrix(12)
    frozen = (-positive + 7.0 * unit(embedding) @ correlation).detach()
    ((unit(embedding) * frozen).sum() / 6).backward()

    dz, terms = unigrad_gradient(*unit_embeddings(embedding.detach()), positive, correlation, balance=7.0, scale=1 / 6)
    torch.testing.assert_close(dz, embedding.grad, rtol=1e-12, atol=1e-14)
    _, *sums = gradient(embedding.detach(), positive, correlation, 7.0, 1 / 6)
    torch.testing.assert_close(terms[:3], torch.stack(sums), rtol=1e-12, atol=1e-14)
    assert terms[3].item() == pytest.approx((unit(embedding) * frozen).sum().item() / 6)


def test_the_gradient_passes_gradcheck_with_the_gradient_at_the_unit_held_constant():
    embedding, positive, correlation = random(4, 6).requires_grad_(), random(4, 6, seed=1), positive_matrix(6)
    frozen = (-positive + 7.0 * unit(embedding) @ correlation).detach()

    class Known(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            units, inverse = unit_embeddings(z)
            ctx.dz, _ = unigrad_gradient(units, inverse, positive, correlation, balance=7.0, scale=1.0)
            return (units * frozen).sum()

        @staticmethod
        def backward(ctx, grad_output):
            return ctx.dz * grad_output

    assert torch.autograd.gradcheck(Known.apply, embedding)


@settings(deadline=None, max_examples=20)
@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_the_gradient_is_orthogonal_to_the_embedding_and_inverse_to_its_scale(scale, seed):
    embedding, positive, correlation = random(5, 9, seed=seed), random(5, 9, seed=seed + 1000), positive_matrix(9, seed)

    def step(z):
        return unigrad_gradient(*unit_embeddings(z), positive, correlation, balance=2.0, scale=0.2)

    (first, terms), (scaled, scaled_terms) = step(embedding), step(embedding * scale)
    along = (first * embedding).sum(-1) / (first.norm(dim=-1) * embedding.norm(dim=-1))
    assert along.abs().max() < 1e-10
    torch.testing.assert_close(scaled * scale, first, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(scaled_terms, terms)


@settings(deadline=None, max_examples=10)
@given(order=st.permutations(range(7)), seed=st.integers(0, 99))
def test_permuting_images_permutes_their_gradients(order, seed):
    embedding, target, correlation = random(7, 9, seed=seed), unit(random(7, 9, seed=seed + 1)), positive_matrix(9)

    def step(rows):
        settings = {"balance": 2.0, "scale": 0.2}
        return unigrad_gradient(*unit_embeddings(embedding[rows]), target[rows], correlation, **settings)

    dz, terms = step(list(range(7)))
    permuted, permuted_terms = step(order)
    torch.testing.assert_close(permuted, dz[order], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(permuted_terms, terms)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_positives_are_one_target_or_the_weighted_mean_of_two(count):
    embedding, target, correlation = random(6, 9), unit(random(6, 9, seed=1)), positive_matrix(9)
    first, second = torch.tensor([5, 0, 0, 2, 4, 1]), torch.tensor([1, 1, 3, 2, 0, 5])
    pairs = (*(first, second, torch.tensor([1.0, 0.0, 0.5, 0.3, 0.9, 0.1]))[:count], None, None, None)[:3]
    names = dict(zip(("first", "second", "ratio"), pairs, strict=True))
    units, inverse = unit_embeddings(embedding)
    dz, terms = unigrad_gradient(units, inverse, target, correlation, balance=7.0, scale=0.2, **names)
    expected, *sums = gradient(embedding, positives(target, *pairs), correlation, 7.0, 0.2)
    torch.testing.assert_close(dz, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(terms[:3], torch.stack(sums), rtol=1e-12, atol=1e-14)


def test_the_gradient_from_a_product_equals_the_one_that_computes_it_and_spares_the_product():
    embedding, target, correlation = random(6, 9), unit(random(6, 9, seed=1)), positive_matrix(9)
    units, inverse = unit_embeddings(embedding)
    product = correlation_product(units, correlation)
    before = product.clone()
    settings = {"balance": 7.0, "scale": 0.2}
    ours = embedding_gradient(product, units, inverse, target, **settings)
    expected = unigrad_gradient(units, inverse, target, correlation, **settings)
    assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))
    assert torch.equal(product, before)


def test_rows_beyond_one_cached_block_have_their_gradient_too():
    rows = CACHED_ELEMENTS // 64 + 3
    embedding, target = random(rows, 64, dtype=torch.float32), random(rows, 64, seed=1, dtype=torch.float32)
    pairs = (torch.arange(rows).flip(0), torch.arange(rows), torch.linspace(0, 1, rows))
    names = dict(zip(("first", "second", "ratio"), pairs, strict=True))
    exact = one_step(embedding, target, pairs, 100.0)
    units, inverse = unit_embeddings([embedding, target])
    settings = {"balance": 100.0, "scale": 1 / rows, **names}
    dz, terms = unigrad_gradient(units[:rows], inverse[:rows], units[rows:], exact.correlation.float(), **settings)
    assert error(dz, exact.gradient) < 1e-6
    assert terms[0].item() == pytest.approx(exact.objective.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_is_rounded_once_to_the_dtype_that_is_asked_for(dtype):
    arguments = (*unit_embeddings(random(6, 9).float()), unit(random(6, 9, seed=1), torch.float32))
    settings = {"balance": 7.0, "scale": 0.2}
    dz, terms = unigrad_gradient(*arguments, positive_matrix(9).float(), **settings, dtype=dtype)
    exact, exact_terms = unigrad_gradient(*arguments, positive_matrix(9).float(), **settings)
    assert torch.equal(dz, exact.to(dtype)) and torch.equal(terms, exact_terms)


def test_flags_are_reported_and_skipped_batches_are_not_counted():
    arguments = (*unit_embeddings(random(3, 9)), unit(random(3, 9, seed=1)), positive_matrix(9))
    updates, raised, lowered = torch.tensor(5), torch.tensor([0, 1]).int(), torch.zeros(2).int()
    reported = []
    for nonfinite, skip in ((raised, lowered), (lowered, raised), (None, None)):
        settings = {"nonfinite": nonfinite, "skip": skip, "updates": updates}
        _, terms = unigrad_gradient(*arguments, balance=1.0, scale=0.1, **settings)
        reported.append((terms[4].item(), updates.item()))
    assert reported == [(1, 6), (0, 6), (0, 7)]


def test_effective_rank_counts_directions():
    assert effective_rank(torch.eye(10) / 10).item() == pytest.approx(10)
    line = torch.outer(torch.arange(5.0), torch.arange(5.0))
    assert effective_rank(line).item() == pytest.approx(1)
