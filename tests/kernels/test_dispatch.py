"""Which kernels a device gets."""

from __future__ import annotations

import pytest
import torch

from unigrad_fast.doctor import choices
from unigrad_fast.kernels import dispatch
from unigrad_fast.kernels.dispatch import as_on_cuda, takes_triton, use_triton

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def capability(monkeypatch):
    """Sets the compute capability of the GPU; no choice is made by a variable."""
    monkeypatch.delenv("UNIGRAD_KERNELS", raising=False)
    return lambda *found: monkeypatch.setattr(dispatch, "capability_of", lambda device: found)


@pytest.mark.parametrize(
    ("found", "has_triton"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((8, 9), True), ((12, 0), True)]
)
def test_triton_serves_gpus_from_compute_capability_8_on(capability, found, has_triton):
    capability(*found)
    assert use_triton(GPU) is takes_triton(GPU, torch.float16) is has_triton
    with as_on_cuda(found):
        assert use_triton(CPU) is has_triton and dispatch.acts_as_cuda(CPU)
    assert not use_triton(CPU)


def test_triton_on_an_older_gpu_is_refused(capability, monkeypatch):
    capability(7, 5)
    monkeypatch.setenv("UNIGRAD_KERNELS", "triton")
    with pytest.raises(ValueError, match=r"needs compute capability 8\.0, and this GPU has 7\.5; unset it"):
        use_triton(GPU)


def test_doctor_says_what_computes_on_an_older_gpu(capability):
    capability(7, 5)
    kernels, _ = choices._kernels(GPU)
    assert kernels.found.startswith("plain torch, as Triton does not support compute capability 7.5")
    assert f"{choices.WITHOUT_TRITON} times as long" in kernels.found and kernels.status == "note"
