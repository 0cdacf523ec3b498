"""UniGrad's arithmetic as torch operators, the choice between Triton and torch, and the autograd function.

Operators of the library `unigrad_fast` allocate what they return, and write to no other input than those whose
schema says so. On CUDA they run the Triton kernels, on the CPU `reference`; the environment variable
`UNIGRAD_KERNELS` forces one of them ("triton" on the CPU needs Triton's interpreter, "torch" on CUDA makes the host
wait). float64 always takes torch.

Shape suffixes: V views, N images, M = V·N rows, C embedding width, K rows of targets, R rows of F.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import reference
from .heuristics import HALF, working_scale

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_LIBRARY = torch.library.Library("unigrad_fast", "DEF")


def use_triton(device: torch.device) -> bool:
    """Whether the Triton kernels run on a device.

    Raises:
        ValueError: `UNIGRAD_KERNELS` is neither "triton" nor "torch", or asks for Triton on the CPU without its
            interpreter.
    """
    choice = os.environ.get("UNIGRAD_KERNELS", "")
    if choice not in ("", "triton", "torch"):
        raise ValueError(f"UNIGRAD_KERNELS={choice} is unknown; use triton or torch, or unset it")
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    if choice == "triton" and device.type != "cuda" and not interpreted:
        raise ValueError(
            "UNIGRAD_KERNELS=triton on the CPU needs Triton's interpreter; set TRITON_INTERPRET=1 before Python starts"
        )
    return choice == "triton" or (choice == "" and device.type == "cuda")


def float32_precision() -> str:
    """How fp32 operands are multiplied: "ieee", or "tf32" where torch may use it for matrix products."""
    try:
        return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    except RuntimeError:  # the setting was made by the other of torch's two interfaces
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _takes_triton(device: torch.device, *dtypes: torch.dtype) -> bool:
    if torch.float64 in dtypes or not use_triton(device):
        return False
    if torch.bfloat16 in dtypes and device.type != "cuda":
        raise ValueError("Triton's interpreter cannot compute bf16; use fp16 or fp32, or UNIGRAD_KERNELS=torch")
    return True


def _require(
    name: str, tensor: Tensor | None, shape: tuple[int | None, ...], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """Raises ValueError unless a tensor is None or has this shape (None is any size), one of the dtypes, the device."""
    if tensor is None:
        return
    sizes_fit = tensor.dim() == len(shape) and all(
        expected is None or size == expected for size, expected in zip(tensor.shape, shape, strict=True)
    )
    if not sizes_fit or tensor.dtype not in dtypes or tensor.device != device:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} is {names} [{sizes}] on {device}, not {str(tensor.dtype).removeprefix('torch.')} "
            f"{list(tensor.shape)} on {tensor.device}"
        )


def _require_precision(input_precision: str | None) -> None:
    if input_precision not in (None, "ieee", "tf32x3", "tf32"):
        raise ValueError(f"input_precision {input_precision!r} is unknown; use 'ieee', 'tf32x3' or 'tf32'")


def _require_flags(name: str, flags: Tensor | None, device: torch.device) -> None:
    if flags is not None:
        _require(name, flags, tuple(flags.shape), (torch.int32,), device)


def unit_embeddings(
    embeddings: Tensor | Sequence[Tensor], dtype: torch.dtype | None = None, nonfinite: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """ℓ2-normalise embeddings row by row: u = z / max(‖z‖, 1e-12).

    Args:
        embeddings: one tensor or V views, each [N, C], any floating dtypes and strides.
        dtype: of the unit embeddings; None is fp32, float64 where an embedding is float64.
        nonfinite: int32 [V·N], written: 1 for a row that holds a NaN or an infinity, else 0.

    Returns:
        The unit embeddings [V·N, C] and the inverse norms [V·N], fp32 (float64 for float64). A row of zeros and a
        non-finite row give a zero unit embedding and a zero inverse norm, hence a zero gradient.

    Raises:
        ValueError: views of different shapes, not [N, C], not floating; `nonfinite` that does not fit; with its values.
    """
    views = [embeddings] if isinstance(embeddings, Tensor) else list(embeddings)
    shapes = {tuple(view.shape) for view in views}
    if len(shapes) != 1 or views[0].dim() != 2:
        raise ValueError(f"embeddings have shapes {sorted(shapes)}; give one or more of one shape [N, C]")
    for number, view in enumerate(views):
        _require(f"embeddings[{number}]", view, (None, None), FLOATING, views[0].device)
    dtype = dtype or _exact(views)
    if dtype not in FLOATING:
        raise ValueError(f"unit embeddings cannot be in {dtype}; use float32, bfloat16, float16 or float64")
    rows = len(views) * views[0].shape[0]
    if nonfinite is None:
        nonfinite = views[0].new_empty(rows, dtype=torch.int32)
    _require("nonfinite", nonfinite, (rows,), (torch.int32,), views[0].device)
    if not nonfinite.is_contiguous():
        raise ValueError(f"nonfinite with strides {nonfinite.stride()} cannot be written; give a contiguous one")
    return torch.ops.unigrad_fast.unit_embeddings([view.detach() for view in views], dtype, nonfinite)


_LIBRARY.define("unit_embeddings(Tensor[] views, ScalarType dtype, Tensor(a!) nonfinite) -> (Tensor, Tensor)")


@torch.library.impl(_LIBRARY, "unit_embeddings", "CompositeExplicitAutograd")
def _unit_embeddings(views, dtype, nonfinite):
    if _takes_triton(views[0].device, dtype, _exact(views)):
        from . import normalize

        with _on(views[0]):
            return normalize.unit_embeddings(views, dtype, nonfinite, reference.SMALLEST_NORM)
    return reference.unit_embeddings(views, dtype, nonfinite)


@torch.library.register_fake("unigrad_fast::unit_embeddings", lib=_LIBRARY)
def _(views, dtype, nonfinite):
    rows, width = len(views) * views[0].shape[0], views[0].shape[1]
    exact = torch.promote_types(dtype, _exact(views))
    return views[0].new_empty(rows, width, dtype=dtype), views[0].new_empty(rows, dtype=exact)


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

    Whole F (as many rows as columns) is taken to be symmetric, only its upper triangle is read, and it stays equal to
    Fᵀ bit for bit. With `working` only its upper triangle is sure to be kept up, which is
    what `correlation_product` reads; `mirror_` fills the rest.

    Args:
        correlation: F, [C, C] and symmetric, or some of its rows [R, C]; fp32, or float64 with float64 units.
        unit_MC: [M, C] unit embeddings.
        decay: ρ, a number or an fp32 scalar on the device; 0 makes F this batch's correlation.
        count: rows over all ranks (2·N·W for two global views), a number or an fp32 scalar on the device.
        skip: int32, any shape; where one of them is not 0, F stays bitwise as it is.
        updates: int64 scalar, how many batches F has taken; where it is 0, ρ is 0. It is only read here:
            `unigrad_gradient` counts it, and without that ρ stays 0.
        first_row: which row of F the first of `correlation` is.
        working: bf16 or fp16, shaped as `correlation`; written: F times `working_scale`, for the product.
        input_precision: how Triton multiplies fp32 units: "ieee", "tf32x3" or "tf32"; None is torch's setting.

    Returns:
        `correlation`.

    Raises:
        ValueError: shapes or dtypes that do not fit, with their values.
    """
    device = correlation.device
    _require("the correlation", correlation, (None, None), (torch.float32, torch.float64), device)
    rows, width = correlation.shape
    if not 0 <= first_row <= width - rows:
        raise ValueError(f"{rows} rows of a correlation with {width} cannot start at row {first_row}")
    _require("unit_MC", unit_MC, (None, width), FLOATING, device)
    _require("updates", updates, (), (torch.int64,), device)
    _require_flags("skip", skip, device)
    _require_precision(input_precision)
    for name, value, least in (("decay", decay, 0.0), ("count", count, 1.0)):
        if not isinstance(value, Tensor) and not value >= least:
            raise ValueError(f"{name} {value} is below {least:g}")
    if correlation.dtype != torch.promote_types(unit_MC.dtype, torch.float32):
        raise ValueError(f"a correlation in {correlation.dtype} cannot take units in {unit_MC.dtype}")
    _require("the working copy", working, (rows, width), HALF, device)
    for name, matrix in (("correlation", correlation), ("working copy", working)):
        if matrix is not None and not matrix.is_contiguous():
            raise ValueError(f"a {name} with strides {matrix.stride()} cannot be updated; give a contiguous one")
    torch.ops.unigrad_fast.update_correlation_(
        correlation,
        unit_MC,
        _scalar(decay, correlation),
        _scalar(count, correlation),
        skip,
        updates,
        first_row,
        working,
        input_precision,
    )
    return correlation


_LIBRARY.define(
    "update_correlation_(Tensor(a!) correlation, Tensor unit, Tensor decay, Tensor count, Tensor? skip, "
    "Tensor? updates, int first_row, Tensor(b!)? working, str? input_precision) -> ()"
)


@torch.library.impl(_LIBRARY, "update_correlation_", "CompositeExplicitAutograd")
def _update_correlation_(correlation, unit, decay, count, skip, updates, first_row, working, input_precision):
    if _takes_triton(correlation.device, correlation.dtype, unit.dtype):
        from . import correlation as kernel

        scale = 1.0 if working is None else working_scale(working.dtype, correlation.shape[1])
        with _on(correlation):
            kernel.update_correlation_(
                *(correlation, unit.contiguous(), decay, count, _contiguous(skip), updates),
                *(first_row, working, scale, input_precision or _precision_of(unit)),
            )
    else:
        reference.update_correlation_(correlation, unit, decay, count, skip, updates, first_row, working)


@torch.library.register_fake("unigrad_fast::update_correlation_", lib=_LIBRARY)
def _(correlation, unit, decay, count, skip, updates, first_row, working, input_precision):
    return None


def correlation_product(unit_MC: Tensor, correlation: Tensor, input_precision: str | None = None) -> Tensor:
    """u·F, or with some rows of F the columns of u·F that are theirs.

    Args:
        unit_MC: [M, C] unit embeddings.
        correlation: F as `update_correlation_` keeps it, [C, C] or [R, C]: F itself or its working copy.
        input_precision: as in `update_correlation_`.

    Returns:
        [M, R], fp32 (float64 for float64).

    Raises:
        ValueError: shapes or dtypes that do not fit, with their values.
    """
    _require("unit_MC", unit_MC, (None, None), FLOATING, unit_MC.device)
    exact = torch.promote_types(unit_MC.dtype, torch.float32)
    _require("the correlation", correlation, (None, unit_MC.shape[1]), (*HALF, exact), unit_MC.device)
    _require_precision(input_precision)
    return torch.ops.unigrad_fast.correlation_product(unit_MC, correlation, input_precision)


_LIBRARY.define("correlation_product(Tensor unit, Tensor correlation, str? input_precision) -> Tensor")


@torch.library.impl(_LIBRARY, "correlation_product", "CompositeExplicitAutograd")
def _correlation_product(unit, correlation, input_precision):
    if _takes_triton(unit.device, unit.dtype, correlation.dtype):
        from . import gradient

        unit = unit.contiguous().to(correlation.dtype if correlation.dtype in HALF else unit.dtype)
        scale = working_scale(unit.dtype, correlation.shape[1])
        with _on(unit):
            return gradient.correlation_product(
                unit, correlation.contiguous(), scale, input_precision or _precision_of(unit)
            )
    return reference.correlation_product(unit, correlation)


@torch.library.register_fake("unigrad_fast::correlation_product", lib=_LIBRARY)
def _(unit, correlation, input_precision):
    exact = torch.promote_types(unit.dtype, torch.float32)
    return unit.new_empty(unit.shape[0], correlation.shape[0], dtype=exact)


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
            without `first` target[i]. Numbers are not checked: on a GPU that would make the host wait.
        dtype: of the gradient; None is that of `product_MC`.
        nonfinite: int32, any shape: reported in the terms.
        skip, updates: as in `update_correlation_`, after which `updates` is counted here.
        ticket: int32 scalar that is 0, and 0 again afterwards; None makes one. No two streams may share one.

    Returns:
        dz [M, C], and [5] fp32 (float64 for float64), each summed over rows and times `scale`:
        L = −u·m⁺ + (λ/2)·u·F·uᵀ, the positive cosine u·m⁺, the negative term u·F·uᵀ, u·g (what the authors' code
        reports), and 1 where any of `nonfinite` is not 0.

    Raises:
        ValueError: shapes or dtypes that do not fit, with their values.
    """
    exact = torch.promote_types(unit_MC.dtype, torch.float32)
    _require("product_MC", product_MC, tuple(unit_MC.shape), (exact,), unit_MC.device)
    _require_rows(unit_MC, inverse_norm_M, target_KC, first, second, ratio, dtype or exact)
    _require_state(nonfinite, skip, updates, ticket, unit_MC.device)
    return torch.ops.unigrad_fast.embedding_gradient(
        *(product_MC, unit_MC, inverse_norm_M, target_KC, first, second, ratio, nonfinite, skip, updates, ticket),
        *(balance, scale, dtype or exact),
    )


def _require_rows(
    unit_MC: Tensor,
    inverse_norm_M: Tensor,
    target_KC: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    ratio: Tensor | None,
    dtype: torch.dtype,
) -> None:
    device = unit_MC.device
    _require("unit_MC", unit_MC, (None, None), FLOATING, device)
    rows, width = unit_MC.shape
    _require("inverse_norm_M", inverse_norm_M, (rows,), FLOATING, device)
    _require("target_KC", target_KC, (rows if first is None else None, width), FLOATING, device)
    for name, index in (("first", first), ("second", second)):
        _require(name, index, (rows,), (torch.int64, torch.int32), device)
    _require("ratio", ratio, (rows,), FLOATING, device)
    if (second is None) != (ratio is None) or (first is None and second is not None):
        raise ValueError("a pair of targets takes `first`, `second` and `ratio`, a single one `first` or none of them")
    if dtype not in FLOATING:
        raise ValueError(f"a gradient cannot be in {dtype}; use float32, bfloat16, float16 or float64")


def _require_state(
    nonfinite: Tensor | None, skip: Tensor | None, updates: Tensor | None, ticket: Tensor | None, device: torch.device
) -> None:
    _require_flags("nonfinite", nonfinite, device)
    _require_flags("skip", skip, device)
    _require("updates", updates, (), (torch.int64,), device)
    _require("ticket", ticket, (), (torch.int32,), device)


_POSITIVE_AND_STATE = (
    "Tensor inverse_norm, Tensor target, Tensor? first, Tensor? second, Tensor? ratio, Tensor? nonfinite, "
    "Tensor? skip, Tensor(a!)? updates, Tensor(b!)? ticket, float balance, float scale, ScalarType dtype"
)
_LIBRARY.define(f"embedding_gradient(Tensor product, Tensor unit, {_POSITIVE_AND_STATE}) -> (Tensor, Tensor)")


@torch.library.impl(_LIBRARY, "embedding_gradient", "CompositeExplicitAutograd")
def _embedding_gradient(product, *arguments):
    return _gradient_from(product.clone(memory_format=torch.contiguous_format), *arguments)


@torch.library.register_fake("unigrad_fast::embedding_gradient", lib=_LIBRARY)
def _(product, unit, *arguments):
    return _fake_gradient(unit, arguments[-1])


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
    """`embedding_gradient` of `correlation_product`, without a copy of the product.

    Args, returns and raises: theirs, with `correlation` whole. The paper, section "UniGrad": g = −m⁺ + λ·u·F,
    dz = (g − u·(u·g)) / ‖z‖ · scale.
    """
    exact = torch.promote_types(unit_MC.dtype, torch.float32)
    _require_rows(unit_MC, inverse_norm_M, target_KC, first, second, ratio, dtype or exact)
    _require("the correlation", correlation, (unit_MC.shape[1],) * 2, (*HALF, exact), unit_MC.device)
    _require_state(nonfinite, skip, updates, ticket, unit_MC.device)
    _require_precision(input_precision)
    return torch.ops.unigrad_fast.unigrad_gradient(
        *(unit_MC, correlation, inverse_norm_M, target_KC, first, second, ratio, nonfinite, skip, updates, ticket),
        *(balance, scale, dtype or exact, input_precision),
    )


_LIBRARY.define(
    f"unigrad_gradient(Tensor unit, Tensor correlation, {_POSITIVE_AND_STATE}, str? input_precision)"
    " -> (Tensor, Tensor)"
)


@torch.library.impl(_LIBRARY, "unigrad_gradient", "CompositeExplicitAutograd")
def _unigrad_gradient(unit, correlation, *arguments):
    *arguments, input_precision = arguments
    return _gradient_from(_correlation_product(unit, correlation, input_precision), unit, *arguments)


@torch.library.register_fake("unigrad_fast::unigrad_gradient", lib=_LIBRARY)
def _(unit, correlation, *arguments):
    return _fake_gradient(unit, arguments[-2])


def _gradient_from(
    product, unit, inverse_norm, target, first, second, ratio, nonfinite, skip, updates, ticket, balance, scale, dtype
):
    """The gradient, in the memory of the product where it has the same dtype, and the terms."""
    gradient = product if product.dtype == dtype else product.new_empty(product.shape, dtype=dtype)
    rows = (product, *map(_contiguous, (unit, inverse_norm, target, first, second, ratio)), gradient)
    state = (_contiguous(nonfinite), _contiguous(skip), updates)
    if _takes_triton(unit.device, product.dtype, unit.dtype) and len(unit):
        from . import gradient as kernel

        with _on(unit):
            return gradient, kernel.embedding_gradient(*rows, *state, ticket, balance, scale)
    return gradient, reference.embedding_gradient(*rows, *state, balance, scale)


def _fake_gradient(unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(unit.dtype, torch.float32)
    return unit.new_empty(unit.shape, dtype=dtype), unit.new_empty(5, dtype=exact)


def _exact(tensors: Sequence[Tensor]) -> torch.dtype:
    """fp32, or float64 where one of the tensors is."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _precision_of(unit: Tensor) -> str:
    return float32_precision() if unit.dtype == torch.float32 else "ieee"


def _scalar(value: Tensor | float, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=like.dtype, device=like.device)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _on(tensor: Tensor) -> torch.cuda.device:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)


class _KnownGradient(Function):
    @staticmethod
    def forward(ctx, terms: Tensor, gradient_MC: Tensor, *embeddings: Tensor) -> Tensor:
        ctx.dtypes = [embedding.dtype for embedding in embeddings]
        ctx.save_for_backward(gradient_MC)
        # A view saves a launch. Compiled code confuses it with the caller's other views of the terms.
        return terms[0].clone() if torch.compiler.is_compiling() else terms[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        (gradient_MC,) = ctx.saved_tensors
        # Multiplied before it is rounded: a scale of the loss is there to lift gradients into fp16's range.
        dtype = ctx.dtypes[0] if len(set(ctx.dtypes)) == 1 else gradient_MC.dtype
        scaled_MC = torch.empty_like(gradient_MC, dtype=dtype)
        torch.mul(gradient_MC, grad_output.to(gradient_MC.dtype), out=scaled_MC)
        views = scaled_MC.chunk(len(ctx.dtypes))
        return None, None, *(view.to(dtype) for view, dtype in zip(views, ctx.dtypes, strict=True))


def attach_gradient(terms: Tensor, gradient_MC: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
    """Give a loss the gradient that was computed with it.

    UniGrad's gradient holds F constant and is not the derivative of a program that happens to compute the loss,
    so it is handed to autograd as it is.

    Args:
        terms: the loss that is reported, and whatever else, as `unigrad_gradient` returns them.
        gradient_MC: [V·N, C], dloss/dembedding of all views.
        embeddings: V tensors [N, C] that the loss depends on.

    Returns:
        The loss, a scalar; its backward gives each embedding its gradient times `grad_output`, in its dtype.
    """
    return _KnownGradient.apply(terms, gradient_MC, *embeddings)
