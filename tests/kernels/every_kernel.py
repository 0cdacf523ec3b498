"""Every Triton kernel of the project with the variants that its launcher compiles and the types of its arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import ahead_of_time  # skips the importing module where there is no compiler
import triton.language as tl

from unigrad_fast.kernels import batch_norm, correlation, gradient, multi_tensor, norm_product, normalize, tails
from unigrad_fast.kernels.heuristics import NORM_KERNELS, NormKernel, cut

PARTS = NORM_KERNELS["sums"].parts

ROWS = 64
PRODUCT = {"PRECISION": "ieee", "ROWS": ROWS, "COLUMNS": ROWS, "DEPTH": ROWS}
UPDATE = {"WORKING": True, "TRIANGLE": 128, "PRECISION": "ieee", "BLOCK": ROWS, "DEPTH": ROWS}
TILE = {"ROWS": 32, "COLUMNS": 64}
PASS = {**TILE, "WORD": batch_norm.WORD}
BEFORE = ("p_mean", "p_variance", "p_weight", "p_bias")  # of the norm before a product
POOLED = {"p_mask": None, "p_second": None, "p_kept": None}
ALONE = {**POOLED, "p_choice": None}
LARS = {"MAX_CHUNKS": multi_tensor.MAX_CHUNKS, "BLOCK": multi_tensor.BLOCK}

# Types of pointers by the module of the kernel, where they are not fp32.
OBJECTIVE = dict.fromkeys(("p_unit", "p_target", "p_working", "p_gradient", "p_tail", "p_gathered"), "*bf16")
OBJECTIVE |= dict.fromkeys(("p_first", "p_second", "p_updates"), "*i64")
OBJECTIVE |= dict.fromkeys(("p_nonfinite", "p_skip", "p_ticket", "p_raised", "p_flags"), "*i32")
OBJECTIVE |= {"p_views": ("*fp32", "*bf16"), "strides": ("i32", "i32")}
NORM = dict.fromkeys(("p_x", "p_y", "p_dy", "p_dx", "p_residual", "p_second", "p_kept"), "*bf16")
NORM |= dict.fromkeys(("p_count", "p_sums", "p_statistics", "p_parts"), "*fp64")
NORM |= {"p_mask": "*i32", "p_choice": "*u8", "p_tickets": "*i32", "p_tracked": "*i64"}
TENSORS = {"p_chunks": "*i64", "p_addresses": "*i64", "p_copies": "*i64", "p_lr": "*fp64", "p_momentum": "*fp64"}
POINTERS = {module: OBJECTIVE for module in (correlation, gradient, normalize, tails)}
POINTERS |= {batch_norm: NORM, norm_product: NORM | {"p_matrix": "*bf16"}, multi_tensor: TENSORS}
REAL = {
    "working_scale", "unscale", "balance", "scale", "eps", "momentum", "weight_decay", "trust_coefficient",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A kernel with the values of its constexpr arguments, and types of pointers that differ from the module's."""

    module: Any
    name: str
    constants: dict[str, Any]
    types: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return next(name for name, variant in VARIANTS.items() if variant is self)

    @property
    def kernel(self) -> Any:
        return getattr(self.module, f"{self.name}_kernel")

    def kind(self, name: str) -> Any:
        """The Triton type of an argument."""
        found = {**POINTERS[self.module], **self.types}.get(name)
        return found or ("*fp32" if name.startswith("p_") else "fp32" if name in REAL else "i32")

    @property
    def integers(self) -> list[str]:
        """Arguments that are integers on the host, or tuples of them."""
        names = [name for name in self.kernel.arg_names if name not in self.constants]
        return [name for name in names if "i32" in self.kind(name) and "*" not in self.kind(name)]

    def compiled(self, ones: Iterable[str] = (), aligned: Iterable[str] = (), architecture: int = 90, **options: int):
        """The kernel as Triton specialises it: for arguments that are 1, and for multiples of 16."""
        names, kinds, constants = self.kernel.arg_names, {}, dict(self.constants)
        for name in ones:
            kind = self.kind(name)
            if isinstance(kind, tuple):
                kinds[name] = ("constexpr",) * len(kind)
                constants |= {(names.index(name), number): 1 for number in range(len(kind))}
            else:
                constants[name] = 1
        return ahead_of_time.compiled(
            self.kernel, architecture, constants, lambda name: kinds.get(name) or self.kind(name), aligned, **options
        )


VARIANTS = {
    "units": Variant(normalize, "unit_embeddings", {"SMALLEST_NORM": 1e-12, "DIGIT": 256, "BLOCK": 1024}),
    "tails": Variant(tails, "sum_tails", {"DIGIT": 256, "BLOCK": 128}),
    "mirror": Variant(correlation, "mirror", {"BLOCK": ROWS}),
    "update": Variant(correlation, "update_correlation", {**UPDATE, "SYMMETRIC": True}),
    "update_of_rows": Variant(correlation, "update_correlation", {**UPDATE, "SYMMETRIC": False}),
    "product": Variant(gradient, "correlation_product", {**PRODUCT, "TRIANGLE": False}, {"p_correlation": "*bf16"}),
    "product_of_triangle": Variant(
        gradient, "correlation_product", {**PRODUCT, "TRIANGLE": True}, {"p_correlation": "*bf16"}
    ),
    "gradient": Variant(gradient, "embedding_gradient", {"WHOLE_ROW": True, "BLOCK": 1024}),
    "gradient_in_blocks": Variant(gradient, "embedding_gradient", {"WHOLE_ROW": False, "BLOCK": 1024}),
    "norm_statistics": Variant(batch_norm, "statistics", {**TILE, "PARTS": PARTS}),
    "norm_product": Variant(
        norm_product, "norm_product", {**PRODUCT, "BUNCH": 2 * PARTS, "PARTS": PARTS, **dict.fromkeys(BEFORE)}
    ),
    "norm_product_normalising": Variant(norm_product, "norm_product", {**PRODUCT, "BUNCH": 2 * PARTS, "PARTS": PARTS}),
    "norm_settle": Variant(batch_norm, "settle", {"GROUPS": 2, "COLUMNS": 64}),
    "norm_settle_mean_of_all": Variant(batch_norm, "settle", {"GROUPS": 2, "COLUMNS": 64, "momentum": None}),
    "normalise": Variant(batch_norm, "normalise", {**PASS, "RELU": False, "p_mask": None, "p_residual": None}),
    "normalise_relu": Variant(batch_norm, "normalise", {**PASS, "RELU": True, "p_mask": None, "p_residual": None}),
    "normalise_add": Variant(batch_norm, "normalise", {**PASS, "RELU": True}),
    "norm_sums": Variant(
        batch_norm,
        "sums",
        {**PASS, "RELU": False, "PARTS": PARTS, **ALONE},
    ),
    "norm_sums_relu": Variant(batch_norm, "sums", {**PASS, "RELU": True, "PARTS": PARTS, **ALONE}),
    "norm_sums_add": Variant(
        batch_norm, "sums", {**PASS, "RELU": True, "PARTS": PARTS, "p_second": None, "p_choice": None}
    ),
    "norm_sums_twice": Variant(batch_norm, "sums", {**PASS, "RELU": True, "PARTS": PARTS, "p_choice": None}),
    "norm_sums_pool": Variant(batch_norm, "sums", {**PASS, **POOLED, "RELU": False, "PARTS": PARTS}),
    "norm_gradient": Variant(batch_norm, "gradient", {**TILE, "RELU": False, "p_choice": None}),
    "norm_gradient_relu": Variant(batch_norm, "gradient", {**TILE, "RELU": True, "p_choice": None}),
    "norm_gradient_pool": Variant(batch_norm, "gradient", {**TILE, "RELU": False}),
    "norm_pool": Variant(batch_norm, "pool", {**TILE, "NOWHERE": batch_norm.NOWHERE}),
    "norm_pool_alone": Variant(batch_norm, "pool", {**TILE, "NOWHERE": batch_norm.NOWHERE, "p_choice": None}),
    "target": Variant(multi_tensor, "lerp", {"BLOCK": multi_tensor.BLOCK, "DTYPE": None, "p_copies": None}),
    "target_and_copy": Variant(multi_tensor, "lerp", {"BLOCK": multi_tensor.BLOCK, "DTYPE": tl.bfloat16}),
    "square_sums": Variant(multi_tensor, "square_sums", {"BLOCK": multi_tensor.BLOCK}),
    "lars": Variant(multi_tensor, "lars", {**LARS, "ADAPT": True}),
    "lars_without_ratio": Variant(multi_tensor, "lars", {**LARS, "ADAPT": False}),
}


def settings_of(name: str) -> NormKernel | None:
    """How batch norm launches a variant; None for `settle`, and for what is not batch norm's."""
    kernel = VARIANTS[name].name
    pooled = kernel in ("sums", "gradient") and name.endswith("_pool")
    return NORM_KERNELS.get(kernel + "_pool" * pooled)


def as_launched(name: str) -> tuple[Variant, dict[str, int]]:
    """A variant with the tile of a large norm, and the options of its launch, if those are known."""
    variant, settings = VARIANTS[name], settings_of(name)
    if settings is None:
        return variant, {}
    cuts = cut(802_816, 2, 256, settings)
    tile = {"ROWS": cuts.rows, "COLUMNS": cuts.columns}
    return replace(variant, constants={**variant.constants, **tile}), settings.options
