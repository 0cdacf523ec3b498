"""UniGrad's arithmetic in plain torch: the ground truth, and the path on the CPU.

Shape suffixes: M rows (images times views), C embedding width, K rows of targets, R rows of F. With u the unit
embedding, m⁺ the positive, F the correlation, λ the balance factor and ρ the decay (the paper, section "UniGrad"):

    F  ← ρ·F + (1−ρ)/count · Σ mᵀm                        moving average of the correlation
    g  = −m⁺ + λ·u·F                                      gradient with respect to u
    dz = (g − u·(u·g)) / ‖z‖ · scale                      the same through the normalisation

Everything is computed in fp32, or in float64 if the embeddings are float64. Row-wise operations process a few rows at a
time, which stay in the processor's cache from the first operation to the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .dispatch import exact_dtype
from .heuristics import blocks, working_scale

SMALLEST_NORM = 1e-12  # u = z / max(‖z‖, 1e-12), as in torch.nn.functional.normalize
PANEL_ROWS = 256  # rows of F per panel: fewer waste less work on the diagonal, more make the products faster
CACHED_ELEMENTS = 2**17  # 512 KiB of fp32
TAIL = 5  # numbers in a tail (see `tails`): three digits of the number of rows, and two flags
DIGIT = 256  # base of the digits: bf16 represents every integer up to it exactly


def unit_embeddings(
    views: Sequence[Tensor],
    dtype: torch.dtype,
    nonfinite: Tensor,
    raised: Tensor | None = None,
    ticket: Tensor | None = None,
    since: int = 0,
    spare: int = 0,
) -> tuple[Tensor, Tensor]:
    """See `functional.unit_embeddings`; `ticket` is ignored."""
    images, width = views[0].shape
    exact = torch.promote_types(dtype, exact_dtype(*views))
    unit_MC = torch.empty(len(views) * images + spare, width, dtype=dtype, device=views[0].device)
    inverse_norm_M = torch.empty(len(views) * images, dtype=exact, device=views[0].device)
    norm_M1 = inverse_norm_M.unsqueeze(-1)  # holds the norms first
    chunks = [
        (view_NC[part], slice(number * images + part.start, number * images + part.stop))
        for number, view_NC in enumerate(views)
        for part in _cached_rows(images, width)
    ]
    for row_MC, out in chunks:
        row_MC = row_MC.to(exact)
        torch.linalg.vector_norm(row_MC, dim=-1, keepdim=True, out=norm_M1[out])
        torch.div(row_MC, norm_M1[out], out=unit_MC[out])
    rows = len(views) * images
    nonfinite[:rows] = 0
    # For norms in this range squares neither overflow nor underflow, even in fp32.
    within_M1 = (norm_M1 > SMALLEST_NORM) & (norm_M1 < 1 / SMALLEST_NORM)
    torch.reciprocal(inverse_norm_M, out=inverse_norm_M)
    outside = [] if within_M1.all() else [(row_MC, out) for row_MC, out in chunks if not within_M1[out].all()]
    for row_MC, out in outside:
        row_MC, scaled_M1, scale_M1, finite_M1 = _scaled(row_MC.to(exact))
        torch.div(row_MC, scaled_M1, out=unit_MC[out])
        inverse_norm_M[out] = (scale_M1 / scaled_M1).squeeze(-1)
        nonfinite[out] = (~finite_M1).squeeze(-1).to(nonfinite.dtype)
    unit_MC[rows:] = 0
    if raised is not None:
        raised.copy_(torch.stack([nonfinite.any(), nonfinite[since:].any()]))
        if spare:
            tail = _tails(unit_MC[rows:], 1)[0]
            for place in range(TAIL - 2):
                tail[place] = (rows - since) // DIGIT**place % DIGIT
            tail[-2:] = raised
    return unit_MC, inverse_norm_M


def sum_tails_(gathered_MC: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Combine the tails of all ranks' gathered rows (see `tails`), and replace the tails by zeros.

    Args:
        gathered_MC: the rows of all ranks, the same number from each.
        ranks: number of ranks.

    Returns:
        The number of rows over all ranks, a scalar in fp32 (float64 for float64), and int32 flags [4]: whether any rank
        raised the first and the second flag, and the same two flags, also raised if no rank has a row.
    """
    tails_WT = _tails(gathered_MC, ranks)
    sums = tails_WT.to(torch.int64).sum(dim=0)
    tails_WT.zero_()
    count = sums[0] + DIGIT * sums[1] + DIGIT**2 * sums[2]
    raised = sums[TAIL - 2 :] != 0
    flags = torch.cat([raised, raised | (count == 0)]).to(torch.int32)
    return count.to(torch.promote_types(gathered_MC.dtype, torch.float32)), flags


def tail_rows(width: int) -> int:
    """Number of rows of this width that a tail takes; the rest of these rows is 0."""
    return blocks(TAIL, width)


def refusal(like: Tensor, rows: int) -> Tensor:
    """`rows` rows of zeros, with a tail that raises both flags."""
    refused_MC = like.new_zeros(rows, like.shape[1])
    _tails(refused_MC, 1)[0, TAIL - 2 :] = 1
    return refused_MC


def _tails(gathered_MC: Tensor, ranks: int) -> Tensor:
    """The tail numbers [W, TAIL] that follow each rank's rows."""
    width = gathered_MC.shape[1]
    rows_WMC = gathered_MC.view(ranks, -1, width)
    return rows_WMC[:, rows_WMC.shape[1] - tail_rows(width) :].flatten(1)[:, :TAIL]


def _scaled(row_MC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Divide rows by their largest entry, so that squares neither overflow nor underflow.

    Returns:
        The scaled rows [M, C], their norms [M, 1], the factors [M, 1] that the rows were multiplied by, and whether the
        rows are finite [M, 1]. For a row of zeros or a non-finite row, the scaled row and the factor are 0.
    """
    peak_M1 = row_MC.abs().amax(dim=-1, keepdim=True)
    finite_M1 = torch.isfinite(peak_M1)
    usable_M1 = finite_M1 & (peak_M1 > 0)
    peak_M1 = torch.where(usable_M1, peak_M1, 1.0)
    row_MC = torch.where(usable_M1, row_MC / peak_M1, 0.0)
    norm_M1 = torch.linalg.vector_norm(row_MC, dim=-1, keepdim=True)
    return row_MC, torch.maximum(norm_M1, SMALLEST_NORM / peak_M1), torch.where(usable_M1, 1 / peak_M1, 0.0), finite_M1


def update_correlation_(
    correlation: Tensor,
    unit_MC: Tensor,
    decay: Tensor,
    count: Tensor,
    skip: Tensor | None = None,
    updates: Tensor | None = None,
    first_row: int = 0,
    working: Tensor | None = None,
    input_precision: str = "",
) -> None:
    """See `functional.update_correlation_`.

    For a whole F only the upper triangle is computed, panel by panel, and then mirrored: this halves the arithmetic,
    makes F equal to Fᵀ bit for bit, and needs no temporary larger than one panel. The host reads the scalars.
    """
    if skip is not None and skip.any():
        return
    rows, width = correlation.shape
    whole = rows == width
    unit_MC = unit_MC.to(correlation.dtype)
    rho = 0.0 if updates is not None and updates == 0 else decay.item()
    weight = (1.0 - rho) / count.item()
    for first in range(0, rows, PANEL_ROWS):
        last = min(first + PANEL_ROWS, rows)
        start = first if whole else 0
        panel = correlation[first:last, start:]
        left_MP = unit_MC[:, first_row + first : first_row + last]
        panel.addmm_(left_MP.T, unit_MC[:, start:], beta=rho, alpha=weight)
        if whole:
            _mirror_panel_(correlation, first, last)
    if working is not None:
        round_into_(working, correlation)


def mirror_(correlation: Tensor) -> None:
    """See `functional.mirror_`."""
    for first in range(0, correlation.shape[0], PANEL_ROWS):
        _mirror_panel_(correlation, first, min(first + PANEL_ROWS, correlation.shape[0]))


def round_into_(working_RC: Tensor, correlation_RC: Tensor) -> Tensor:
    """Write F, or some rows of it, times `working_scale` to a working copy in bf16 or fp16; returns the copy."""
    scale = working_scale(working_RC.dtype, correlation_RC.shape[1])
    for first in range(0, correlation_RC.shape[0], PANEL_ROWS):
        rows = slice(first, first + PANEL_ROWS)
        working_RC[rows] = correlation_RC[rows] * scale
    return working_RC


def _mirror_panel_(correlation_CC: Tensor, first: int, last: int) -> None:
    diagonal = correlation_CC[first:last, first:last]
    diagonal.copy_(diagonal.triu() + diagonal.triu(1).T)
    correlation_CC[last:, first:last].copy_(correlation_CC[first:last, last:].T)


def correlation_product(unit_MC: Tensor, correlation: Tensor, input_precision: str = "") -> Tensor:
    """See `functional.correlation_product`."""
    exact = torch.promote_types(unit_MC.dtype, torch.float32)
    with torch.autocast(unit_MC.device.type, enabled=False):
        if correlation.dtype in (torch.float32, torch.float64):
            return unit_MC.to(exact) @ correlation.T.to(exact)
        product_MR = (unit_MC.to(correlation.dtype) @ correlation.T).to(exact)
    return product_MR.mul_(1.0 / working_scale(correlation.dtype, correlation.shape[1]))


def embedding_gradient(
    product_MC: Tensor,
    gradient_MC: Tensor,
    unit_MC: Tensor,
    inverse_norm_M: Tensor,
    target_KC: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    ratio: Tensor | None,
    nonfinite: Tensor | None,
    skip: Tensor | None,
    updates: Tensor | None,
    ticket: Tensor | None,
    balance: float,
    scale: float,
) -> Tensor:
    """Returns the terms of `functional.embedding_gradient`; `ticket` is ignored.

    `product_MC` is overwritten, `gradient_MC` is written and may be `product_MC`.
    """
    exact = product_MC.dtype
    count, width = product_MC.shape
    cosine_M, negative_M = (product_MC.new_empty(count) for _ in range(2))
    factor_M1 = (inverse_norm_M * scale).unsqueeze(-1)
    weight_M1 = balance * factor_M1
    for chunk in _cached_rows(count, width):
        step_MC, row_MC = product_MC[chunk], unit_MC[chunk].to(exact)
        positive_MC = _positives(target_KC, first, second, ratio, chunk, exact)
        terms_MC = row_MC * positive_MC
        cosine_M[chunk] = terms_MC.sum(dim=-1)
        negative_M[chunk] = torch.mul(row_MC, step_MC, out=terms_MC).sum(dim=-1)
        along_M1 = (balance * negative_M[chunk] - cosine_M[chunk]).unsqueeze(-1)
        step_MC.mul_(weight_M1[chunk]).addcmul_(positive_MC, factor_M1[chunk], value=-1.0)
        step_MC.addcmul_(row_MC, along_M1 * factor_M1[chunk], value=-1.0)
        if gradient_MC is not product_MC:
            gradient_MC[chunk] = step_MC
    if updates is not None:
        updates.add_(1 if skip is None else (~skip.any()).to(updates.dtype))
    cosine, negative = cosine_M.sum() * scale, negative_M.sum() * scale
    flag = cosine.new_zeros(()) if nonfinite is None else nonfinite.any().to(cosine.dtype)
    objective, surrogate = balance / 2 * negative - cosine, balance * negative - cosine
    return torch.stack([objective, cosine, negative, surrogate, flag])


def _positives(
    target_KC: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    ratio: Tensor | None,
    chunk: slice,
    exact: torch.dtype,
) -> Tensor:
    """m⁺ for a chunk of rows."""
    if first is None:
        return target_KC[chunk].to(exact)
    first_MC = target_KC.index_select(0, first[chunk]).to(exact)
    if second is None or ratio is None:
        return first_MC
    second_MC = target_KC.index_select(0, second[chunk]).to(exact)
    return torch.lerp(second_MC, first_MC, ratio[chunk].to(exact).unsqueeze(-1))


def effective_rank(correlation_CC: Tensor) -> Tensor:
    """Participation ratio trace(F)² / ‖F‖², the number of directions that embeddings use, from 1 to C; a scalar."""
    return (correlation_CC.diagonal().sum() / torch.linalg.vector_norm(correlation_CC)).square()


def _cached_rows(rows: int, width: int) -> Iterator[slice]:
    step = max(1, CACHED_ELEMENTS // max(1, width))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))
