"""UniGrad's arithmetic as functions that check their arguments and call an operator of `ops` through the dispatcher.

Shape suffixes: V views, N images, M = V·N rows, C embedding width, K rows of targets, R rows of F.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks, ops  # noqa: F401  the operators are declared there
from .declaration import OPERATORS
from .dispatch import exact_dtype


def unit_embeddings(
    embeddings: Tensor | Sequence[Tensor],
    dtype: torch.dtype | None = None,
    nonfinite: Tensor | None = None,
    *,
    raised: Tensor | None = None,
    ticket: Tensor | None = None,
    since: int = 0,
    spare: int = 0,
) -> tuple[Tensor, Tensor]:
    """ℓ2-normalise embeddings row by row: u = z / max(‖z‖, 1e-12).

    Args:
        embeddings: one tensor or V views, each [N, C], with any floating dtypes and strides.
        dtype: dtype of the unit embeddings; None is float64 if an embedding is float64, else fp32.
        nonfinite: int32 [V·N], written: 1 for a row that contains a NaN or an infinity, else 0.
        raised: int32 [2], written: whether any row is not finite, and whether any row from `since` on is not.
        ticket: int32 scalar, 0 before and after the call; None creates one. Two streams must not share one.
        since: the first of the rows that are sent to other ranks.
        spare: number of rows to append: zeros, and a tail with the number of rows from `since` on and `raised` (see
            `tails`). The tail takes `tail_rows(C)` of these rows; with 0 nothing is appended.

    Returns:
        The unit embeddings [V·N + spare, C] and the inverse norms [V·N], fp32 (float64 for float64). A row of zeros and
        a non-finite row give a zero unit embedding and a zero inverse norm, hence a zero gradient.

    Raises:
        ValueError: views of different shapes, not [N, C] or not floating; a `nonfinite` that does not fit.
    """
    views = [embeddings] if isinstance(embeddings, Tensor) else list(embeddings)
    checks.require_views(views)
    dtype = dtype or exact_dtype(*views)
    checks.require_dtype("unit embeddings", dtype)
    rows = len(views) * views[0].shape[0]
    if nonfinite is None:
        nonfinite = views[0].new_empty(rows, dtype=torch.int32)
    checks.require_sent(rows, views[0], nonfinite=nonfinite, raised=raised, ticket=ticket, since=since, spare=spare)
    return OPERATORS.unit_embeddings([view.detach() for view in views], dtype, nonfinite, raised, ticket, since, spare)


def update_correlation_(
    correlation: Tensor,
    unit_MC: Tensor,
    *,
    decay: Tensor | float,
    count: Tensor | float,
    skip: Tensor | None = None,
    updates: Tensor | None = None,
    first_row: int = 0,
    working: Tensor | None = None,
    input_precision: str | None = None,
) -> Tensor:
    """Move the correlation towards this batch's, in place: F ← ρ·F + (1−ρ)/count · Σ mᵀm.

    A whole F (as many rows as columns) must be symmetric; only its upper triangle is read, and it stays equal to Fᵀ bit
    for bit. With `working`, only the upper triangle is guaranteed to be up to date, which `correlation_product` reads;
    `mirror_` fills the rest.

    Args:
        correlation: F, [C, C] and symmetric, or some of its rows [R, C]; fp32, or float64 with float64 units.
        unit_MC: [M, C] unit embeddings.
        decay: ρ, a number or an fp32 scalar on the device; 0 replaces F by this batch's correlation.
        count: number of rows over all ranks (2·N·W for two global views), a number or an fp32 scalar on the device.
        skip: int32, any shape; if any of them is not 0, F stays bitwise unchanged.
        updates: int64 scalar, the number of batches F was updated with; if it is 0, ρ is 0. It is only read here:
            `unigrad_gradient` increments it, and until then ρ stays 0.
        first_row: index in F of the first row of `correlation`.
        working: bf16 or fp16, shaped like `correlation`; written: F times `working_scale`, for the product.
        input_precision: how Triton multiplies fp32 units: "ieee", "tf32x3" or "tf32"; None uses torch's setting.

    Returns:
        `correlation`.

    Raises:
        ValueError: shapes or dtypes that do not fit, with their values.
    """
    checks.require_correlation(correlation, first_row=first_row, working=working)
    checks.require_batch(unit_MC, correlation, decay=decay, count=count)
    checks.require_state(correlation.device, skip=skip, updates=updates)
    checks.require_precision(input_precision)
    decay, count = _scalar(decay, correlation), _scalar(count, correlation)
    # Positional, because torch needs a microsecond for each keyword argument.
    OPERATORS.update_correlation_(
        correlation, unit_MC, decay, count, skip, updates, first_row, working, input_precision or ""
    )
    return correlation


def mirror_(correlation: Tensor) -> Tensor:
    """Fill the lower triangle of F [C, C], fp32 or float64, from the upper one, in place; returns F.

    Raises:
        ValueError: a matrix that is not square or not contiguous, with its shape or strides.
    """
    checks.require_correlation(correlation, first_row=0, working=None)
    checks.require(
        "the correlation", correlation, (correlation.shape[1],) * 2, (correlation.dtype,), correlation.device
    )
    OPERATORS.mirror_(correlation)
    return correlation


def correlation_product(unit_MC: Tensor, correlation: Tensor, input_precision: str | None = None) -> Tensor:
    """u·F; given only some rows of F, the matching columns of u·F.

    Args:
        unit_MC: [M, C] unit embeddings.
        correlation: F as `update_correlation_` leaves it, [C, C] or [R, C]: F itself or its working copy.
        input_precision: as in `update_correlation_`.

    Returns:
        [M, R], fp32 (float64 for float64).

    Raises:
        ValueError: shapes or dtypes that do not fit, with their values.
    """
    checks.require_factor(correlation, unit_MC, rows=None)
    checks.require_precision(input_precision)
    return OPERATORS.correlation_product(unit_MC, correlation, input_precision or "")


def embedding_gradient(
    product_MC: Tensor,
    unit_MC: Tensor,
    inverse_norm_M: Tensor,
    target_KC: Tensor,
    *,
    balance: float,
    scale: float,
    first: Tensor | None = None,
    second: Tensor | None = None,
    ratio: Tensor | None = None,
    dtype: torch.dtype | None = None,
    nonfinite: Tensor | None = None,
    skip: Tensor | None = None,
    updates: Tensor | None = None,
    ticket: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """UniGrad's gradient with respect to the embeddings, from u·F, and the terms of the objective.

    Args:
        product_MC: [M, C] u·F.
        unit_MC: [M, C] unit embeddings of the online branch.
        inverse_norm_M: [M] 1/‖z‖, as `unit_embeddings` returns it.
        target_KC: [K, C] unit embeddings of the target branch.
        balance: λ.
        scale: weight of one row in the loss, 1/(N·V).
        first, second, ratio: [M] int64, int64 and floating: the positive of row i is
            ratio[i]·target[first[i]] + (1−ratio[i])·target[second[i]]. Without `second` it is target[first[i]],
            without `first` target[i]. Indices are not checked: on a GPU that would make the host wait.
        dtype: dtype of the gradient; None is the dtype of `product_MC`.
        nonfinite: int32, any shape: reported in the terms.
        skip: as in `update_correlation_`.
        updates: as in `update_correlation_`; incremented here, unless `skip` is raised.
        ticket: int32 scalar, 0 before and after the call; None creates one. Two streams must not share one.

    Returns:
        dz [M, C], and [5] fp32 (float64 for float64), each summed over rows and times `scale`:
        L = −u·m⁺ + (λ/2)·u·F·uᵀ, the positive cosine u·m⁺, the negative term u·F·uᵀ, and u·g (what the authors' code
        reports); the last is 1 if any of `nonfinite` is not 0, else 0, and is not scaled.

    Raises:
        ValueError: shapes or dtypes that do not fit, with their values.
    """
    dtype = dtype or exact_dtype(unit_MC)
    rows, positives = (unit_MC, inverse_norm_M, target_KC), (first, second, ratio)
    state = (nonfinite, skip, updates, ticket)
    checks.require_product(product_MC, unit_MC)
    checks.require_rows(*rows, *positives, dtype=dtype)
    checks.require_state(unit_MC.device, *state)
    return OPERATORS.embedding_gradient(product_MC, *rows, balance, scale, *positives, *state, dtype)


def unigrad_gradient(
    unit_MC: Tensor,
    inverse_norm_M: Tensor,
    target_KC: Tensor,
    correlation: Tensor,
    *,
    balance: float,
    scale: float,
    first: Tensor | None = None,
    second: Tensor | None = None,
    ratio: Tensor | None = None,
    dtype: torch.dtype | None = None,
    nonfinite: Tensor | None = None,
    skip: Tensor | None = None,
    updates: Tensor | None = None,
    ticket: Tensor | None = None,
    input_precision: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`embedding_gradient` applied to `correlation_product`, without a copy of the product.

    Arguments, results and errors are as in these two; `correlation` must be whole. The paper, section "UniGrad":
    g = −m⁺ + λ·u·F, dz = (g − u·(u·g)) / ‖z‖ · scale.
    """
    dtype = dtype or exact_dtype(unit_MC)
    rows, positives = (unit_MC, inverse_norm_M, target_KC), (first, second, ratio)
    state = (nonfinite, skip, updates, ticket)
    checks.require_factor(correlation, unit_MC, rows=unit_MC.shape[1])
    checks.require_rows(*rows, *positives, dtype=dtype)
    checks.require_state(unit_MC.device, *state)
    checks.require_precision(input_precision)
    return OPERATORS.unigrad_gradient(
        *rows, correlation, balance, scale, *positives, *state, dtype, input_precision or ""
    )


def _scalar(value: Tensor | float, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=like.dtype, device=like.device)
