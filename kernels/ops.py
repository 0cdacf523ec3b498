"""The operators of a training step, without checks of their arguments; `functional` checks and describes them.

They allocate what they return, and write only to inputs that they declare as written. On CUDA they run the Triton
kernels, on the CPU `reference`. The environment variable `UNIGRAD_KERNELS` forces one of the two ("triton" on the CPU
needs Triton's interpreter, "torch" on CUDA makes the host wait). float64 always runs in torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .declaration import Operator
from .dispatch import exact_dtype, on_device_of, takes_triton

unit_embeddings = Operator(
    "unit_embeddings",
    reference.unit_embeddings,
    kernel="normalize",
    takes=lambda views, dtype, *_: takes_triton(views[0].device, dtype, exact_dtype(*views)),
    writes=("nonfinite", "raised", "ticket"),
    fake=lambda views, dtype, spare, **_: (
        views[0].new_empty(len(views) * views[0].shape[0] + spare, views[0].shape[1], dtype=dtype),
        views[0].new_empty(len(views) * views[0].shape[0], dtype=torch.promote_types(dtype, exact_dtype(*views))),
    ),
)

sum_tails_ = Operator(
    "sum_tails_",
    reference.sum_tails_,
    kernel="tails",
    writes=("gathered_MC",),
    fake=lambda gathered_MC, **_: (
        gathered_MC.new_empty((), dtype=exact_dtype(gathered_MC)),
        gathered_MC.new_empty(4, dtype=torch.int32),
    ),
)

update_correlation_ = Operator(
    "update_correlation_",
    reference.update_correlation_,
    kernel="correlation",
    takes=lambda correlation, unit_MC, *_: takes_triton(correlation.device, correlation.dtype, unit_MC.dtype),
    writes=("correlation", "working"),
)

mirror_ = Operator("mirror_", reference.mirror_, kernel="correlation", writes=("correlation",))

correlation_product = Operator(
    "correlation_product",
    reference.correlation_product,
    kernel="gradient",
    takes=lambda unit_MC, correlation, *_: takes_triton(unit_MC.device, unit_MC.dtype, correlation.dtype),
    fake=lambda unit_MC, correlation, **_: unit_MC.new_empty(
        unit_MC.shape[0], correlation.shape[0], dtype=exact_dtype(unit_MC)
    ),
)


def _gradient_of(
    product_MC: Tensor, dtype: torch.dtype | None, tensors: Sequence[Tensor | None], *state_and_settings
) -> tuple[Tensor, Tensor]:
    """The gradient, in the product's memory if it has the same dtype, and the terms."""
    gradient_MC = product_MC
    if dtype not in (None, product_MC.dtype):
        gradient_MC = product_MC.new_empty(product_MC.shape, dtype=dtype)
    rows = [tensor if tensor is None else tensor.contiguous() for tensor in tensors]
    if takes_triton(product_MC.device, product_MC.dtype, rows[0].dtype) and product_MC.shape[0]:
        from . import gradient

        with on_device_of(product_MC):
            return gradient_MC, gradient.embedding_gradient(product_MC, gradient_MC, *rows, *state_and_settings)
    return gradient_MC, reference.embedding_gradient(product_MC, gradient_MC, *rows, *state_and_settings)


def _embedding_gradient(
    product_MC: Tensor,
    unit_MC: Tensor,
    inverse_norm_M: Tensor,
    target_KC: Tensor,
    balance: float,
    scale: float,
    first: Tensor | None = None,
    second: Tensor | None = None,
    ratio: Tensor | None = None,
    nonfinite: Tensor | None = None,
    skip: Tensor | None = None,
    updates: Tensor | None = None,
    ticket: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    rows = (unit_MC, inverse_norm_M, target_KC, first, second, ratio, nonfinite, skip)
    product_MC = product_MC.clone(memory_format=torch.contiguous_format)
    return _gradient_of(product_MC, dtype, rows, updates, ticket, balance, scale)


def _gradient_of_blocks(
    blocks: Sequence[Tensor],
    unit_MC: Tensor,
    inverse_norm_M: Tensor,
    target_KC: Tensor,
    balance: float,
    scale: float,
    first: Tensor | None = None,
    second: Tensor | None = None,
    ratio: Tensor | None = None,
    nonfinite: Tensor | None = None,
    skip: Tensor | None = None,
    updates: Tensor | None = None,
    ticket: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`embedding_gradient` for a product given as blocks of columns [M, R], in order."""
    rows = (unit_MC, inverse_norm_M, target_KC, first, second, ratio, nonfinite, skip)
    return _gradient_of(torch.cat(blocks, dim=1), dtype, rows, updates, ticket, balance, scale)


def _unigrad_gradient(
    unit_MC: Tensor,
    inverse_norm_M: Tensor,
    target_KC: Tensor,
    correlation: Tensor,
    balance: float,
    scale: float,
    first: Tensor | None = None,
    second: Tensor | None = None,
    ratio: Tensor | None = None,
    nonfinite: Tensor | None = None,
    skip: Tensor | None = None,
    updates: Tensor | None = None,
    ticket: Tensor | None = None,
    dtype: torch.dtype | None = None,
    input_precision: str = "",
) -> tuple[Tensor, Tensor]:
    rows = (unit_MC, inverse_norm_M, target_KC, first, second, ratio, nonfinite, skip)
    product_MC = correlation_product.compute(unit_MC, correlation, input_precision)
    return _gradient_of(product_MC, dtype, rows, updates, ticket, balance, scale)


def _fake_gradient(unit_MC: Tensor, dtype: torch.dtype | None, **_) -> tuple[Tensor, Tensor]:
    exact = exact_dtype(unit_MC)
    return unit_MC.new_empty(unit_MC.shape, dtype=dtype or exact), unit_MC.new_empty(5, dtype=exact)


_COUNTED = ("updates", "ticket")
embedding_gradient = Operator("embedding_gradient", _embedding_gradient, writes=_COUNTED, fake=_fake_gradient)
gradient_of_blocks = Operator("gradient_of_blocks", _gradient_of_blocks, writes=_COUNTED, fake=_fake_gradient)
unigrad_gradient = Operator("unigrad_gradient", _unigrad_gradient, writes=_COUNTED, fake=_fake_gradient)


def _lerp_(
    targets: Sequence[Tensor], onlines: Sequence[Tensor], copies: Sequence[Tensor], momentum: Tensor, skip: Tensor
) -> None:
    from . import multi_tensor

    multi_tensor.lerp_(targets, onlines, copies, momentum, skip)


def _lars_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    velocities: Sequence[Tensor],
    lr: Tensor,
    momentum: float,
    weight_decay: float,
    trust_coefficient: float,
    adapt: bool,
    skip: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    from . import multi_tensor

    multi_tensor.lars_(
        weights, gradients, velocities, lr, momentum, weight_decay, trust_coefficient, adapt, skip, scale
    )


lerp_ = Operator("lerp_", _lerp_, writes=("targets", "copies"))
lars_ = Operator("lars_", _lars_, writes=("weights", "velocities"))
