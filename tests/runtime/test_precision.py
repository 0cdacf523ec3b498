"""What torch keeps for the whole process is as it was when a run ends."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from unigrad_fast.runtime.precision import deterministic, fastest_convolutions, tensor_float32

MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


def newer() -> list[str]:
    return [each.fp32_precision for each in (MATMUL, CUDNN.conv, CUDNN.rnn)]


def older() -> list[object]:
    return [MATMUL.allow_tf32, CUDNN.allow_tf32, torch.get_float32_matmul_precision()]


def medium() -> None:
    torch.set_float32_matmul_precision("medium")


def exact() -> None:
    MATMUL.allow_tf32 = CUDNN.allow_tf32 = False


def fast() -> None:
    MATMUL.allow_tf32 = CUDNN.allow_tf32 = True


def newer_only() -> None:
    CUDNN.conv.fp32_precision = "ieee"


@pytest.fixture
def precision() -> Iterator[None]:
    """Puts back what a test sets."""
    matrices, values, onednn = older(), newer(), torch.backends.mkldnn.matmul.fp32_precision
    yield
    MATMUL.allow_tf32, CUDNN.allow_tf32, _ = matrices
    for each, value in zip((MATMUL, CUDNN.conv, CUDNN.rnn), values, strict=True):
        each.fp32_precision = value
    torch.backends.mkldnn.matmul.fp32_precision = onednn


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("given", [None, exact, fast, medium])
def test_tf32_is_used_where_it_is_asked_for_alone_and_then_as_before(given, allowed):
    if given is not None:
        given()
    before = newer(), older(), torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(KeyError), tensor_float32(allowed):
        assert newer() == ["tf32" if allowed else "ieee"] * 3
        assert [MATMUL.allow_tf32, CUDNN.allow_tf32] == [allowed] * 2
        raise KeyError
    assert (newer(), older(), torch.backends.mkldnn.matmul.fp32_precision) == before


@pytest.mark.usefixtures("precision")
def test_settings_that_contradict_each_other_come_back_too():
    newer_only()
    before = newer()
    with tensor_float32(True):
        assert newer() == ["tf32"] * 3
    assert newer() == before
    with pytest.raises(RuntimeError, match="mix"):
        older()


def test_cudnn_tries_its_algorithms_on_a_gpu_while_a_run_lasts(monkeypatch):
    monkeypatch.setattr(CUDNN, "benchmark", False)
    with fastest_convolutions(torch.device("cpu")):
        assert not CUDNN.benchmark
    with fastest_convolutions(torch.device("cuda")):
        assert CUDNN.benchmark
    assert not CUDNN.benchmark
    monkeypatch.setattr(CUDNN, "deterministic", True)
    with fastest_convolutions(torch.device("cuda")):
        assert not CUDNN.benchmark


def repeating() -> tuple:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        CUDNN.deterministic,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_algorithms_repeat_their_results_where_that_is_asked_for_and_then_as_before(monkeypatch, workspace):
    monkeypatch.setattr(CUDNN, "benchmark", False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if workspace:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    before = repeating()
    with deterministic(False):
        assert repeating() == before
    with pytest.raises(KeyError), deterministic(True), fastest_convolutions(torch.device("cuda")):
        assert repeating() == (True, False, False, True, workspace or ":4096:8")
        assert not CUDNN.benchmark, "its trials may end otherwise at the next start"
        raise KeyError
    assert repeating() == before
