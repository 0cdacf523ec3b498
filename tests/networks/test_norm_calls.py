"""What a norm on a GPU asks of the host, counted on a driver that does nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from unigrad_fast.benchmarks.counts.host import nothing_driven
from unigrad_fast.kernels.dispatch import as_on_cuda
from unigrad_fast.networks.batch_norm import convert
from unigrad_fast.runtime import process_group
from unigrad_fast.runtime.torch_private import init_fake_process_group

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(str(ROOT / folder) for folder in ("kernels", "unigrad_fast"))
pytest.importorskip("triton")


@pytest.fixture(scope="module")
def norm() -> Iterator[nn.Module]:
    """One of eight ranks."""
    norm = nn.BatchNorm2d(16)
    convert(norm).count = 2
    init_fake_process_group(8)
    with as_on_cuda(), nothing_driven():
        yield norm
    process_group.stop()


def images() -> Tensor:
    return torch.zeros(4, 16, 1, 1).contiguous(memory_format=torch.channels_last)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls of this package's functions, in all ("ours") and by name, and Triton's launches ("launch")."""
    found: Counter[str] = Counter()

    def note(frame, event: str, _) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            found["ours"] += 1
            found[code.co_name] += 1
        elif event == "call" and code.co_filename.endswith("jit.py") and code.co_name == "run":
            found["launch"] += 1

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def after_a_first(call: Callable[[], object]) -> Counter[str]:
    call()
    with counted() as found:
        call()
    return found


def test_a_norm_without_gradient_is_one_choice_of_functions(norm):
    x = images()
    with torch.no_grad():
        found = after_a_first(lambda: norm(x, relu=True))
    assert found["launch"] == 3 and found["gathered"] == 1
    assert found["chosen_for"] == found["needs_dispatcher"] == found["on_device_of"] == 1
    assert found["ours"] <= 24


def test_a_norm_and_its_backward_pass_are_one_choice_of_functions_each(norm):
    x, added, dy = images().requires_grad_(), images(), images()
    forward = after_a_first(lambda: norm(x, residual=added, relu=True))
    y = norm(x, residual=added, relu=True)
    backward = after_a_first(lambda: torch.autograd.grad(y, [x, norm.weight], dy, retain_graph=True))
    assert forward["launch"] == 3 and forward["gathered"] == 1
    assert backward["launch"] == 2 and backward["summed_"] == 1
    for found in (forward, backward):
        assert found["chosen_for"] == found["needs_dispatcher"] == found["on_device_of"] == 1
    assert forward["ours"] <= 28 and backward["ours"] <= 17
