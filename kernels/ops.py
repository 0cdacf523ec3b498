"""The torch operators of the library `unigrad_fast`: their schemas, who computes them, and what shapes they return.

They allocate what they return, and write to no other input than those whose schema says so. On CUDA they run the
Triton kernels, on the CPU `reference`; the environment variable `UNIGRAD_KERNELS` forces one of them ("triton" on the
CPU needs Triton's interpreter, "torch" on CUDA makes the host wait). float64 always takes torch. They check nothing:
`functional`, which calls them, says what their arguments are and checks them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .dispatch import exact_dtype, on_device_of, precision_of, takes_triton
from .heuristics import HALF
from .structures import Correlation, Rows, State

OPERATORS = torch.ops.unigrad_fast
_LIBRARY = torch.library.Library("unigrad_fast", "DEF")

_LIBRARY.define(
    "unit_embeddings(Tensor[] views, ScalarType dtype, Tensor(a!) nonfinite, Tensor(b!)? raised=None, "
    "Tensor(c!)? ticket=None, int since=0, int spare=0) -> (Tensor, Tensor)"
)


@torch.library.impl(_LIBRARY, "unit_embeddings", "CompositeExplicitAutograd")
def unit_embeddings(views, dtype, nonfinite, raised=None, ticket=None, since=0, spare=0):
    settings = {"dtype": dtype, "nonfinite": nonfinite, "raised": raised, "since": since, "spare": spare}
    if takes_triton(views[0].device, dtype, exact_dtype(*views)):
        from . import normalize

        with on_device_of(views[0]):
            return normalize.unit_embeddings(views, ticket=ticket, smallest_norm=reference.SMALLEST_NORM, **settings)
    return reference.unit_embeddings(views, **settings)


@torch.library.register_fake("unigrad_fast::unit_embeddings", lib=_LIBRARY)
def _(views, dtype, nonfinite, raised=None, ticket=None, since=0, spare=0):
    rows, width = len(views) * views[0].shape[0], views[0].shape[1]
    exact = torch.promote_types(dtype, exact_dtype(*views))
    return views[0].new_empty(rows + spare, width, dtype=dtype), views[0].new_empty(rows, dtype=exact)


_LIBRARY.define("sum_tails_(Tensor(a!) gathered, int ranks) -> (Tensor, Tensor)")


@torch.library.impl(_LIBRARY, "sum_tails_", "CompositeExplicitAutograd")
def sum_tails_(gathered, ranks):
    if takes_triton(gathered.device, gathered.dtype):
        from . import tails

        with on_device_of(gathered):
            return tails.sum_tails_(gathered, ranks)
    return reference.sum_tails_(gathered, ranks)


@torch.library.register_fake("unigrad_fast::sum_tails_", lib=_LIBRARY)
def _(gathered, ranks):
    return gathered.new_empty((), dtype=exact_dtype(gathered)), gathered.new_empty(4, dtype=torch.int32)


_LIBRARY.define(
    "update_correlation_(Tensor(a!) correlation, Tensor unit, Tensor decay, Tensor count, Tensor? skip, "
    "Tensor? updates, int first_row, Tensor(b!)? working, str? input_precision) -> ()"
)


@torch.library.impl(_LIBRARY, "update_correlation_", "CompositeExplicitAutograd")
def update_correlation_(correlation, unit, decay, count, skip, updates, first_row, working, input_precision):
    moved = Correlation(matrix=correlation, working=working, first_row=first_row)
    if takes_triton(correlation.device, correlation.dtype, unit.dtype):
        from . import correlation as kernel

        with on_device_of(correlation):
            kernel.update_correlation_(
                moved,
                unit.contiguous(),
                decay=decay,
                count=count,
                skip=skip if skip is None or skip.numel() == 1 else skip.ne(0).any().to(skip.dtype),
                updates=updates,
                input_precision=input_precision or precision_of(unit),
            )
    else:
        reference.update_correlation_(moved, unit, decay=decay, count=count, skip=skip, updates=updates)


@torch.library.register_fake("unigrad_fast::update_correlation_", lib=_LIBRARY)
def _(correlation, unit, decay, count, skip, updates, first_row, working, input_precision):
    return None


_LIBRARY.define("mirror_(Tensor(a!) correlation) -> ()")


@torch.library.impl(_LIBRARY, "mirror_", "CompositeExplicitAutograd")
def mirror_(correlation):
    if takes_triton(correlation.device, correlation.dtype):
        from . import correlation as kernel

        with on_device_of(correlation):
            kernel.mirror_(correlation)
    else:
        reference.mirror_(correlation)


@torch.library.register_fake("unigrad_fast::mirror_", lib=_LIBRARY)
def _(correlation):
    return None


_LIBRARY.define("correlation_product(Tensor unit, Tensor correlation, str? input_precision) -> Tensor")


@torch.library.impl(_LIBRARY, "correlation_product", "CompositeExplicitAutograd")
def correlation_product(unit, correlation, input_precision):
    if takes_triton(unit.device, unit.dtype, correlation.dtype):
        from . import gradient as kernel

        unit = unit.contiguous().to(correlation.dtype if correlation.dtype in HALF else unit.dtype)
        with on_device_of(unit):
            return kernel.correlation_product(
                unit, correlation.contiguous(), input_precision=input_precision or precision_of(unit)
            )
    return reference.correlation_product(unit, correlation)


@torch.library.register_fake("unigrad_fast::correlation_product", lib=_LIBRARY)
def _(unit, correlation, input_precision):
    return unit.new_empty(unit.shape[0], correlation.shape[0], dtype=exact_dtype(unit))


_POSITIVE_AND_STATE = (
    "Tensor inverse_norm, Tensor target, Tensor? first, Tensor? second, Tensor? ratio, Tensor? nonfinite, "
    "Tensor? skip, Tensor(a!)? updates, Tensor(b!)? ticket, float balance, float scale, ScalarType dtype"
)
_LIBRARY.define(f"embedding_gradient(Tensor product, Tensor unit, {_POSITIVE_AND_STATE}) -> (Tensor, Tensor)")


@torch.library.impl(_LIBRARY, "embedding_gradient", "CompositeExplicitAutograd")
def _embedding_gradient(
    product, unit, inverse_norm, target, first, second, ratio, nonfinite, skip, updates, ticket, balance, scale, dtype
):
    product = product.clone(memory_format=torch.contiguous_format)
    rows = Rows(unit=unit, inverse_norm=inverse_norm, target=target, first=first, second=second, ratio=ratio)
    state = State(nonfinite=nonfinite, skip=skip, updates=updates, ticket=ticket)
    return _gradient_from(product, rows, state, balance=balance, scale=scale, dtype=dtype)


@torch.library.register_fake("unigrad_fast::embedding_gradient", lib=_LIBRARY)
def _(product, unit, *arguments):
    *_, dtype = arguments
    return _fake_gradient(unit, dtype)


_LIBRARY.define(f"gradient_of_blocks(Tensor[] blocks, Tensor unit, {_POSITIVE_AND_STATE}) -> (Tensor, Tensor)")


@torch.library.impl(_LIBRARY, "gradient_of_blocks", "CompositeExplicitAutograd")
def gradient_of_blocks(
    blocks, unit, inverse_norm, target, first, second, ratio, nonfinite, skip, updates, ticket, balance, scale, dtype
):
    rows = Rows(unit=unit, inverse_norm=inverse_norm, target=target, first=first, second=second, ratio=ratio)
    state = State(nonfinite=nonfinite, skip=skip, updates=updates, ticket=ticket)
    return _gradient_from(torch.cat(blocks, dim=1), rows, state, balance=balance, scale=scale, dtype=dtype)


@torch.library.register_fake("unigrad_fast::gradient_of_blocks", lib=_LIBRARY)
def _(blocks, unit, *arguments):
    *_, dtype = arguments
    return _fake_gradient(unit, dtype)


_LIBRARY.define(
    f"unigrad_gradient(Tensor unit, Tensor correlation, {_POSITIVE_AND_STATE}, str? input_precision)"
    " -> (Tensor, Tensor)"
)


@torch.library.impl(_LIBRARY, "unigrad_gradient", "CompositeExplicitAutograd")
def unigrad_gradient(
    unit,
    correlation,
    inverse_norm,
    target,
    first,
    second,
    ratio,
    nonfinite,
    skip,
    updates,
    ticket,
    balance,
    scale,
    dtype,
    input_precision,
):
    product = correlation_product(unit, correlation, input_precision)
    rows = Rows(unit=unit, inverse_norm=inverse_norm, target=target, first=first, second=second, ratio=ratio)
    state = State(nonfinite=nonfinite, skip=skip, updates=updates, ticket=ticket)
    return _gradient_from(product, rows, state, balance=balance, scale=scale, dtype=dtype)


@torch.library.register_fake("unigrad_fast::unigrad_gradient", lib=_LIBRARY)
def _(unit, correlation, *arguments):
    *_, dtype, _input_precision = arguments
    return _fake_gradient(unit, dtype)


def _gradient_from(
    product: Tensor, rows: Rows, state: State, *, balance: float, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradient, in the memory of the product where it has the same dtype, and the terms."""
    gradient = product if product.dtype == dtype else product.new_empty(product.shape, dtype=dtype)
    rows, state = rows.contiguous(), state.contiguous()
    settings = {"gradient_MC": gradient, "balance": balance, "scale": scale}
    if takes_triton(product.device, product.dtype, rows.unit.dtype) and product.shape[0]:
        from . import gradient as kernel

        with on_device_of(product):
            return gradient, kernel.embedding_gradient(product, rows, state, **settings)
    return gradient, reference.embedding_gradient(product, rows, state, **settings)


def _fake_gradient(unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return unit.new_empty(unit.shape, dtype=dtype), unit.new_empty(5, dtype=exact_dtype(unit))


_LIBRARY.define(
    "lerp_(Tensor(a!)[] targets, Tensor[] onlines, Tensor(b!)[] copies, Tensor momentum, Tensor skip) -> ()"
)


@torch.library.impl(_LIBRARY, "lerp_", "CompositeExplicitAutograd")
def _lerp_(targets, onlines, copies, momentum, skip):
    from . import multi_tensor

    multi_tensor.lerp_(targets, onlines, copies, momentum=momentum, skip=skip)


@torch.library.register_fake("unigrad_fast::lerp_", lib=_LIBRARY)
def _(targets, onlines, copies, momentum, skip):
    return None


_LIBRARY.define(
    "lars_(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] velocities, Tensor lr, float momentum, "
    "float weight_decay, float trust_coefficient, bool adapt, Tensor? skip, Tensor? scale) -> ()"
)


@torch.library.impl(_LIBRARY, "lars_", "CompositeExplicitAutograd")
def _lars_(weights, gradients, velocities, lr, momentum, weight_decay, trust_coefficient, adapt, skip, scale):
    from . import multi_tensor

    multi_tensor.lars_(
        weights,
        gradients,
        velocities,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        trust_coefficient=trust_coefficient,
        adapt=adapt,
        skip=skip,
        scale=scale,
    )


@torch.library.register_fake("unigrad_fast::lars_", lib=_LIBRARY)
def _(weights, gradients, velocities, lr, momentum, weight_decay, trust_coefficient, adapt, skip, scale):
    return None
