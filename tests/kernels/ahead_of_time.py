"""Kernels compiled for a GPU that need not be there. Without the compiler, modules that import this are skipped."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler: Triton installed, its interpreter off", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compiled(
    kernel,
    architecture: int,
    constants: Mapping,
    kind: Callable[[str], Any],
    aligned: Iterable[str] = (),
    **options: int,
):
    """The kernel for sm_`architecture`; `asm` has PTX and cubin.

    Args:
        constants: values of its constexpr arguments, by name; of elements of tuples, by position.
        kind: the Triton type of another argument.
        aligned: arguments that are multiples of 16.
        options: of the launch, like `num_warps`.
    """
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else kind(name) for name in names},
        dict(constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in constants},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def wide_accesses(result, access: str) -> int:
    """How many 128-bit loads ("ld") or stores ("st") of global memory the PTX has."""
    return len(re.findall(rf"{access}\.global[\w.:]*\.v4\.b32", result.asm["ptx"]))
