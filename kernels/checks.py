"""Checks of the operators' arguments: shapes, dtypes, devices and numbers.

Every function here returns None or raises ValueError with the offending value. Shape suffixes: M rows, C embedding
width, K rows of targets, R rows of F.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import exact_dtype
from .heuristics import HALF
from .reference import tail_rows

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDEX = (torch.int64, torch.int32)


def require(
    name: str, tensor: Tensor | None, shape: tuple[int | None, ...], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """Require that a tensor is None, or has this shape (None is any size) and one of the dtypes, on this device."""
    if tensor is None:
        return
    sizes_fit = tensor.dim() == len(shape) and all(
        expected is None or size == expected for size, expected in zip(tensor.shape, shape, strict=True)
    )
    if not sizes_fit or tensor.dtype not in dtypes or tensor.device != device:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} must be {names} [{sizes}] on {device}, not {str(tensor.dtype).removeprefix('torch.')} "
            f"{list(tensor.shape)} on {tensor.device}"
        )


def require_flags(name: str, flags: Tensor | None, device: torch.device) -> None:
    """Require that flags are None, or int32 of any shape on the device."""
    if flags is not None:
        require(name, flags, tuple(flags.shape), (torch.int32,), device)


def require_precision(input_precision: str | None) -> None:
    if input_precision not in (None, "ieee", "tf32x3", "tf32"):
        raise ValueError(f"input_precision {input_precision!r} is unknown; use 'ieee', 'tf32x3' or 'tf32'")


def require_views(views: Sequence[Tensor]) -> None:
    """Require one or more floating-point views of the same shape [N, C] on the same device."""
    shapes = {tuple(view.shape) for view in views}
    if len(shapes) != 1 or views[0].dim() != 2:
        raise ValueError(f"embeddings have shapes {sorted(shapes)}; give one or more of the same shape [N, C]")
    for number, view in enumerate(views):
        require(f"embeddings[{number}]", view, (None, None), FLOATING, views[0].device)


def require_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATING:
        raise ValueError(f"{name} cannot have dtype {dtype}; use float32, bfloat16, float16 or float64")


def require_sent(
    rows: int, view: Tensor, *, nonfinite: Tensor, raised: Tensor | None, ticket: Tensor | None, since: int, spare: int
) -> None:
    """Require one writable flag per row, and arguments that fit unit embeddings to be sent to other ranks."""
    require("nonfinite", nonfinite, (rows,), (torch.int32,), view.device)
    if not nonfinite.is_contiguous():
        raise ValueError(f"nonfinite with strides {nonfinite.stride()} is not contiguous; give a contiguous tensor")
    require("raised", raised, (2,), (torch.int32,), view.device)
    require("ticket", ticket, (), (torch.int32,), view.device)
    if not 0 <= since <= rows:
        raise ValueError(f"since {since} is outside the rows; use 0 to {rows}")
    if spare and (raised is None or spare < tail_rows(view.shape[1])):
        raise ValueError(
            f"spare {spare}: give `raised`, and a spare of at least {tail_rows(view.shape[1])}, the rows of the tail"
        )


def require_correlation(correlation_RC: Tensor, *, first_row: int, working: Tensor | None) -> None:
    """Require writable rows of F from `first_row` on, in fp32 or float64, and a writable working copy or None."""
    device = correlation_RC.device
    require("the correlation", correlation_RC, (None, None), (torch.float32, torch.float64), device)
    rows, width = correlation_RC.shape
    if not 0 <= first_row <= width - rows:
        raise ValueError(f"{rows} rows of a correlation with {width} rows cannot start at row {first_row}")
    require("the working copy", working, (rows, width), HALF, device)
    for name, matrix in (("correlation", correlation_RC), ("working copy", working)):
        if matrix is not None and not matrix.is_contiguous():
            raise ValueError(f"a {name} with strides {matrix.stride()} is not contiguous; give a contiguous tensor")


def require_batch(unit_MC: Tensor, correlation_RC: Tensor, *, decay: Tensor | float, count: Tensor | float) -> None:
    """Require unit embeddings that fit F; numbers are checked only if the host knows them."""
    require("unit_MC", unit_MC, (None, correlation_RC.shape[1]), FLOATING, correlation_RC.device)
    if correlation_RC.dtype != exact_dtype(unit_MC):
        raise ValueError(f"a correlation in {correlation_RC.dtype} cannot be updated with units in {unit_MC.dtype}")
    for name, value, least in (("decay", decay, 0.0), ("count", count, 1.0)):
        if not isinstance(value, Tensor) and not value >= least:
            raise ValueError(f"{name} {value} is too small; use {least:g} or more")


def require_factor(correlation: Tensor, unit_MC: Tensor, *, rows: int | None) -> None:
    """Require unit embeddings, and F or its working copy in a form they can multiply; `rows` None is any number."""
    require("unit_MC", unit_MC, (None, None), FLOATING, unit_MC.device)
    dtypes = (*HALF, exact_dtype(unit_MC))
    require("the correlation", correlation, (rows, unit_MC.shape[1]), dtypes, unit_MC.device)


def require_product(product_MC: Tensor, unit_MC: Tensor) -> None:
    """Require unit embeddings, and the shape and dtype of their product with F."""
    require("unit_MC", unit_MC, (None, None), FLOATING, unit_MC.device)
    require("product_MC", product_MC, tuple(unit_MC.shape), (exact_dtype(unit_MC),), unit_MC.device)


def require_rows(
    unit_MC: Tensor,
    inverse_norm: Tensor,
    target: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    ratio: Tensor | None,
    *,
    dtype: torch.dtype,
) -> None:
    """Require norms and positives that fit these unit embeddings, and a floating dtype for the gradient."""
    device = unit_MC.device
    rows, width = unit_MC.shape
    require("inverse_norm_M", inverse_norm, (rows,), FLOATING, device)
    require("target_KC", target, (rows if first is None else None, width), FLOATING, device)
    for name, index in (("first", first), ("second", second)):
        require(name, index, (rows,), INDEX, device)
    require("ratio", ratio, (rows,), FLOATING, device)
    if (second is None) != (ratio is None) or (first is None and second is not None):
        raise ValueError("for pairs of targets give `first`, `second` and `ratio`; for single ones `first` or nothing")
    require_dtype("a gradient", dtype)


def require_state(
    device: torch.device,
    nonfinite: Tensor | None = None,
    skip: Tensor | None = None,
    updates: Tensor | None = None,
    ticket: Tensor | None = None,
) -> None:
    """Require that flags, update counter and ticket are each None or on the device."""
    require_flags("nonfinite", nonfinite, device)
    require_flags("skip", skip, device)
    require("updates", updates, (), (torch.int64,), device)
    require("ticket", ticket, (), (torch.int32,), device)
