"""The product with F, the gradient and the terms of the objective against float64; Triton runs in its interpreter."""

from __future__ import annotations

import json
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from formulas import error, gradient, one_step, positives, random, unit
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from unigrad_fast.kernels import (
    correlation_product,
    embedding_gradient,
    unigrad_gradient,
    unit_embeddings,
    update_correlation_,
)
from unigrad_fast.kernels import gradient as kernel
from unigrad_fast.kernels.heuristics import TABLE, TRIANGLE, Tile, working_scale

pytestmark = pytest.mark.usefixtures("poisoned")
GATES = {torch.float32: 1e-6, torch.float16: 1e-3}
BALANCE = 100.0
SHAPES = sorted(
    {
        tuple(entry["tile"][:3])
        for arithmetics in json.loads(TABLE.read_text(encoding="utf-8"))["product"].values()
        for entries in arithmetics.values()
        for entry in entries
    }
)


@pytest.fixture(params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def tile(request, monkeypatch):
    monkeypatch.setattr(kernel, "tile_for", lambda *_: Tile(*request.param, warps=1, stages=1))


@pytest.fixture
def short_blocks(monkeypatch):
    """Rows in blocks of 16 channels, as rows too long for the registers are taken."""
    monkeypatch.setattr(kernel, "row_tile", lambda *_, **__: (16, 1))


def pairs_of(views: int, images: int, mixed: bool = False) -> tuple:
    """Indices of the positives: the other view's target; for local views the mean of both; for CutMix the pair."""
    image = torch.arange(images)
    first = torch.cat([image + images, image, *[image] * (views - 2)])
    if views == 2 and not mixed:
        return first, None, None
    partner = torch.randperm(images, generator=torch.Generator().manual_seed(1)) if mixed else image
    second = torch.cat([partner + images, partner, *[image + images] * (views - 2)])
    shares = random(2 * images, dtype=torch.float32).sigmoid() if mixed else torch.ones(2 * images)
    return first, second, torch.cat([shares, torch.full(((views - 2) * images,), 0.5)])


def step(online: torch.Tensor, target: torch.Tensor, pairs: tuple, dtype: torch.dtype) -> tuple:
    """F after one update, dz and terms, all from the kernels; embeddings in one tensor each."""
    width = online.shape[1]
    units, inverse = unit_embeddings(online, dtype)
    targets, _ = unit_embeddings(target, dtype)
    correlation = torch.full((width, width), torch.nan)
    working = None if dtype == torch.float32 else torch.full((width, width), torch.nan, dtype=dtype)
    update_correlation_(correlation, targets, decay=0.0, count=len(targets), working=working)
    operand = correlation if working is None else working
    names = dict(zip(("first", "second", "ratio"), pairs, strict=True))
    return operand, *unigrad_gradient(
        units, inverse, targets, operand, balance=BALANCE, scale=1 / len(online), dtype=dtype, **names
    )


def check_step(views: int, images: int, width: int, mixed: bool, dtype: torch.dtype, seed: int = 0) -> None:
    online = random(views * images, width, seed=seed, dtype=dtype)
    target = random(2 * images, width, seed=seed + 1000, dtype=dtype)
    pairs = pairs_of(views, images, mixed)
    exact, plain = (one_step(online, target, pairs, BALANCE, each) for each in (torch.float64, dtype))
    _, dz, terms = step(online, target, pairs, dtype)
    assert dz.dtype == dtype and terms.dtype == torch.float32
    ours, theirs = error(dz, exact.gradient), error(plain.gradient, exact.gradient)
    assert ours < min(GATES[dtype], 1.5 * theirs + 1e-7), f"plain torch: {theirs}"
    objective, cosine, negative, surrogate, flag = terms.double()
    tolerance = GATES[dtype] * (1 + BALANCE * exact.negative)
    assert abs(objective - exact.objective) < tolerance
    assert abs(cosine - exact.cosine) < GATES[dtype]
    assert abs(negative - exact.negative) < GATES[dtype] * exact.negative
    assert abs(surrogate - (BALANCE * exact.negative - exact.cosine)) < tolerance
    assert flag == 0


# Every three of the four with each other.
@pytest.mark.parametrize(
    ("images", "width", "views", "mixed", "dtype"),
    [
        (*((2, 8), (3, 129))[size], (2, 8)[views], bool(mixed), list(GATES)[(size + views + mixed) % 2])
        for size, views, mixed in product(range(2), repeat=3)
    ],
)
def test_one_step_is_that_of_float64(images, width, views, mixed, dtype):
    check_step(views, images, width, mixed, dtype)


@settings(deadline=None, max_examples=3, phases=[Phase.generate])  # the interpreter is too slow to shrink
@given(
    images=st.integers(2, 9),
    width=st.integers(16, 150),
    views=st.integers(2, 5),
    mixed=st.booleans(),
    dtype=st.sampled_from(list(GATES)),
    seed=st.integers(0, 99),
)
def test_one_step_of_any_size_is_that_of_float64(images, width, views, mixed, dtype, seed):
    check_step(views, images, width, mixed, dtype, seed)


def product_operands(rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    targets = unit(random(20, width, seed=1))
    return unit(random(rows, width), dtype), (targets.T @ targets / 20).float()


@pytest.mark.parametrize(
    ("rows", "width", "dtype"), [(1, 8, torch.float16), (33, 40, torch.float32), (2, 150, torch.float16)]
)
def test_the_product_is_that_of_float64(rows, width, dtype, tile):
    units, correlation = product_operands(rows, width, dtype)
    assert error(correlation_product(units, correlation), units.double() @ correlation.double()) < GATES[dtype]


@pytest.mark.parametrize("width", [TRIANGLE, 2 * TRIANGLE + 7])
def test_the_product_with_a_working_copy_does_not_read_below_its_triangle(width, tile):
    units, correlation = product_operands(7, width, torch.float16)
    working = (correlation * working_scale(torch.float16, width)).half()
    block = torch.arange(width) // TRIANGLE
    working[block[:, None] > block[None, :]] = torch.nan
    product = correlation_product(units, working)
    assert error(product, units.double() @ correlation.double()) < 1e-3


@pytest.mark.parametrize("dtype", GATES)
@pytest.mark.parametrize("is_working", [False, True])
def test_blocks_of_rows_give_the_products_columns(is_working, dtype):
    units, correlation = product_operands(33, 100, dtype)
    operand = (correlation * working_scale(torch.float16, 100)).half() if is_working else correlation
    cuts = [0, 1, 40, 99, 100]
    parts = [correlation_product(units, operand[a:b]) for a, b in pairwise(cuts)]
    expected = units.double() @ correlation.double()
    assert error(torch.cat(parts, dim=1), expected) < (1e-3 if is_working else GATES[dtype])


def test_entries_that_half_precision_cannot_hold_count_in_the_product():
    units, correlation = torch.full((2, 100), 0.1, dtype=torch.float16), torch.full((100, 100), 1e-6)
    assert error(correlation_product(units, correlation), units.double() @ correlation.double()) < 1e-3


def row_operands(rows: int, width: int, targets: int, dtype: torch.dtype = torch.float32) -> tuple:
    embedding = random(rows, width, dtype=dtype)
    target = unit(random(targets, width, seed=1), dtype)
    correlation = product_operands(1, width, torch.float32)[1]
    return embedding, target, correlation


@pytest.mark.parametrize("dtype", GATES)
@pytest.mark.parametrize("indices", [0, 1, 3])
@pytest.mark.parametrize("blocks", ["whole rows", "short blocks"])
def test_the_gradient_from_a_product_is_that_of_float64(blocks, indices, dtype, request):
    if blocks == "short blocks":
        request.getfixturevalue("short_blocks")
    embedding, target, correlation = row_operands(6, 100, 6, dtype)
    pairs = (*pairs_of(2, 3, mixed=True)[:indices], None, None, None)[:3]
    units, inverse = unit_embeddings(embedding)
    product = units @ correlation
    before = product.clone()
    names = dict(zip(("first", "second", "ratio"), pairs, strict=True))
    dz, terms = embedding_gradient(
        product, units.to(dtype), inverse, target, balance=BALANCE, scale=0.1, dtype=dtype, **names
    )
    expected, *sums = gradient(embedding, positives(target.double(), *pairs), correlation.double(), BALANCE, 0.1)
    assert dz.dtype == dtype and error(dz, expected) < GATES[dtype]
    torch.testing.assert_close(terms[:3].double(), torch.stack(sums), rtol=GATES[dtype], atol=GATES[dtype])
    assert torch.equal(product, before)


def test_indices_and_shares_may_have_any_dtype_and_stride():
    embedding, target, correlation = row_operands(14, 40, 14)
    units, inverse = unit_embeddings(embedding)
    first, second, ratio = pairs_of(2, 7, mixed=True)
    arguments, settings = (units, inverse, target, correlation), {"balance": BALANCE, "scale": 0.1}
    expected = unigrad_gradient(*arguments, **settings, first=first, second=second, ratio=ratio)
    every_other = [t.repeat_interleave(2)[::2] for t in (first.int(), second, ratio.double())]
    names = dict(zip(("first", "second", "ratio"), every_other, strict=True))
    for value, other in zip(unigrad_gradient(*arguments, **settings, **names), expected, strict=True):
        assert torch.equal(value, other)


def test_every_stride_of_units_and_targets_is_followed():
    embedding, target, correlation = row_operands(14, 40, 14)
    units, inverse = unit_embeddings(embedding)
    settings = {"balance": BALANCE, "scale": 0.1}
    expected = unigrad_gradient(units, inverse, target, correlation, **settings)
    wide = [torch.cat([t, t], dim=1)[:, :40] for t in (units, target, correlation)]
    value = unigrad_gradient(wide[0], inverse.repeat_interleave(2)[::2], wide[1], wide[2], **settings)
    assert torch.equal(value[0], expected[0]) and torch.equal(value[1], expected[1])
    transposed = correlation_product(units, correlation).T.contiguous().T
    value = embedding_gradient(transposed, units, inverse, target, **settings)
    assert torch.equal(value[0], expected[0]) and torch.equal(value[1], expected[1])


def test_terms_are_summed_over_more_rows_than_one_block_of_them():
    embedding, target, correlation = row_operands(1030, 8, 1030)
    arguments = unit(embedding).float(), 1 / embedding.norm(dim=-1), target, correlation
    _, terms = unigrad_gradient(*arguments, balance=BALANCE, scale=1 / 1030)
    _, *sums = gradient(embedding, target.double(), correlation.double(), BALANCE, 1 / 1030)
    torch.testing.assert_close(terms[:3].double(), torch.stack(sums), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("blocks", ["whole rows", "short blocks"])
def test_rows_without_a_usable_embedding_have_zero_gradients_and_leave_the_others_alone(blocks, request):
    if blocks == "short blocks":
        request.getfixturevalue("short_blocks")
    embedding, target, correlation = row_operands(6, 40, 6)

    def dz(z):
        return unigrad_gradient(*unit_embeddings(z), target, correlation, balance=BALANCE, scale=0.1)[0]

    clean = dz(embedding)
    embedding[1], embedding[4, 7] = 0, torch.nan
    damaged = dz(embedding)
    assert not damaged[[1, 4]].any()
    assert torch.equal(damaged[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])


@pytest.mark.parametrize("flags", [1, 3000])
def test_flags_are_reported_and_skipped_batches_are_not_counted(flags):
    embedding, target, correlation = row_operands(3, 16, 3)
    arguments = (*unit_embeddings(embedding), target, correlation)
    updates, ticket = torch.tensor(5), torch.tensor(0, dtype=torch.int32)
    raised, lowered = (torch.zeros(flags, dtype=torch.int32) for _ in range(2))
    raised[-1] = 1
    reported = []
    for nonfinite, skip in ((raised, lowered), (lowered, raised), (None, None)):
        settings = {"nonfinite": nonfinite, "skip": skip, "updates": updates, "ticket": ticket}
        _, terms = unigrad_gradient(*arguments, balance=BALANCE, scale=0.1, **settings)
        reported.append((terms[4].item(), updates.item(), ticket.item()))
    assert reported == [(1, 6, 0), (0, 6, 0), (0, 7, 0)]


def test_an_empty_batch_has_no_gradient_and_is_counted_and_flagged_all_the_same():
    units, inverse = unit_embeddings(torch.zeros(0, 16))
    updates, skip = torch.tensor(5), torch.zeros(1, dtype=torch.int32)
    nonfinite = torch.ones(1, dtype=torch.int32)
    settings = {"balance": 1.0, "scale": 1.0, "nonfinite": nonfinite, "skip": skip, "updates": updates}
    dz, terms = unigrad_gradient(units, inverse, units, torch.eye(16), **settings)
    assert dz.shape == (0, 16) and terms.tolist() == [0, 0, 0, 0, 1] and updates == 6


@pytest.mark.parametrize("dtype", GATES)
def test_two_runs_are_bitwise_equal(dtype):
    online, target = random(12, 100, dtype=dtype), random(6, 100, seed=1, dtype=dtype)
    runs = [step(online, target, pairs_of(4, 3), dtype) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


def test_three_steps_of_the_authors_implementation(golden):
    data = {
        key: torch.from_numpy(value)
        for key, value in np.load(golden / "unigrad_world1_rank0.npz").items()
        if key.startswith("step")
    }
    correlation, updates = torch.full((40, 40), torch.nan), torch.tensor(0)
    first, _, _ = pairs_of(2, 12)
    for number in range(3):
        views = [data[f"step{number}_{name}"].float() for name in ("z1", "z2", "z1m", "z2m")]
        units, inverse = unit_embeddings(views)
        update_correlation_(correlation, units[24:], decay=0.99, count=24, updates=updates)
        dz, terms = unigrad_gradient(
            *(units[:24], inverse[:24], units[24:], correlation),
            balance=BALANCE,
            scale=1 / 24,
            first=first,
            updates=updates,
        )
        assert error(correlation, data[f"step{number}_F"]) < 1e-6
        for ours, name in zip(dz.chunk(2), ("dz1", "dz2"), strict=True):
            assert error(ours, data[f"step{number}_{name}"]) < 1e-6
        assert terms[3].item() == pytest.approx(data[f"step{number}_loss"].item(), rel=1e-6)
        assert terms[1].item() == pytest.approx(data[f"step{number}_pos_sim"].item(), rel=1e-5)
    assert updates == 3


def test_autograd_is_told_of_what_the_kernels_write():
    embedding, target, correlation = row_operands(6, 40, 6)
    working = correlation.half()
    nonfinite, updates = torch.zeros(6, dtype=torch.int32), torch.tensor(0)
    written = [nonfinite, correlation, working, updates]
    versions = [each._version for each in written]
    units, inverse = unit_embeddings(embedding, nonfinite=nonfinite)
    update_correlation_(correlation, target, decay=0.5, count=6, working=working)
    unigrad_gradient(units, inverse, target, correlation, balance=BALANCE, scale=0.1, updates=updates)
    assert all(each._version > version for each, version in zip(written, versions, strict=True))
