"""Environment variables whose wrong values would end torch with a traceback, or abort it, as soon as it is imported."""

from __future__ import annotations

import re
from collections.abc import MutableMapping

from unigrad_fast.runtime.errors import UserError

_SETTING = r"\s*(?:expandable_segments:\s*(?:True|False)|(?!expandable_segments)\w+:(?:[^,\[]+|\[[^\]]*\]))\s*"
_ALLOCATOR = f"{_SETTING}(?:,{_SETTING})*,?", "settings like expandable_segments:True,max_split_size_mb:512"
_THREADS = r"\s*[1-9]\d*\s*(?:,\s*[1-9]\d*\s*)*", "an integer of at least 1"
EXPECTED = {
    "TORCH_DISTRIBUTED_DEBUG": ("(?i:off|info|detail)", "OFF, INFO or DETAIL"),
    "PYTORCH_ALLOC_CONF": _ALLOCATOR,
    "PYTORCH_CUDA_ALLOC_CONF": _ALLOCATOR,
    "OMP_NUM_THREADS": _THREADS,
    "MKL_NUM_THREADS": _THREADS,
}


def require_variables(environ: MutableMapping[str, str]) -> None:
    """Removes those that are empty, which means the same as unset.

    Raises:
        UserError: a value that torch would not understand.
    """
    wrong = []
    for name, (pattern, expected) in EXPECTED.items():
        value = environ.get(name)
        if value is not None and not value.strip():
            del environ[name]
        elif value is not None and not re.fullmatch(pattern, value):
            wrong.append(f"{name} = {value}: expected {expected}; change it or unset it")
    if wrong:
        raise UserError("\n".join(wrong))
