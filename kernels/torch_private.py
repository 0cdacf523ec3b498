"""The private parts of torch that the kernels use; `tests/runtime/test_torch_private.py` has a test for each."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["FakeTensor", "dispatch_modes"]

dispatch_modes = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes that are active in this thread."""
