"""Synchronised batch norm on the CPU: several ranks do what one process does with the whole batch."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from worker_group import WorkerError

from unigrad_fast.kernels.batch_norm_reference import statistics
from unigrad_fast.networks import batch_norm
from unigrad_fast.networks.batch_norm import GroupedBatchNorm, convert

SPLITS = {2: (6, 4), 3: (5, 1, 4)}  # rows of each rank


def network(dimensions: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(5) if dimensions == 4 else nn.BatchNorm1d(5)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
        norm.bias.normal_()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    return norm.to(dtype)


def grouped(norm: nn.Module, groups: int = 1) -> nn.Module:
    norm = copy.deepcopy(norm)
    convert(norm).count = groups
    return norm


def run(norm: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Two training steps; outputs and gradients of the second, and all state."""
    norm(x)
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = norm(x)
    y.backward(dy)
    state = {name: value.clone() for name, value in norm.named_buffers()}
    return {"y": y.detach(), "dx": x.grad, "dweight": norm.weight.grad, "dbias": norm.bias.grad, **state}


def on_each_rank(norm: nn.Module, x: Tensor, dy: Tensor, rows: tuple[int, ...]) -> dict[str, Tensor]:
    rank = dist.get_rank()
    return run(grouped(norm), x.split(rows)[rank], dy.split(rows)[rank])


def combine(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The ranks' results as those of one process."""
    whole = {name: torch.cat([each[name] for each in results]) for name in ("y", "dx")}
    whole |= {name: sum(each[name] for each in results) for name in ("dweight", "dbias")}
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert all(torch.equal(each[name], results[0][name]) for each in results), f"{name} differs by rank"
        whole[name] = results[0][name]
    return whole


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shape", [(10, 5), (10, 5, 4, 3)])
def test_ranks_match_full_batch_in_float64(workers, size, shape):
    norm = network(len(shape), torch.float64)
    x, dy = torch.randn(2, *shape, dtype=torch.float64)
    results = combine(workers(size).run(on_each_rank, norm, x, dy, SPLITS[size]))
    for name, expected in run(norm, x, dy).items():
        torch.testing.assert_close(results[name], expected, rtol=1e-12, atol=1e-12, msg=name)


def test_rank_without_rows_takes_part(workers):
    norm = network(2, torch.float64)
    x, dy = torch.randn(2, 10, 5, dtype=torch.float64)
    results = combine(workers(2).run(on_each_rank, norm, x, dy, (10, 0)))
    for name, expected in run(norm, x, dy).items():
        torch.testing.assert_close(results[name], expected, rtol=1e-12, atol=1e-12, msg=name)


def test_large_mean_in_fp32_keeps_the_deviation(workers):
    norm = network(4, torch.float32)
    x = (torch.randn(10, 5, 64, 64) + 1e4).contiguous(memory_format=torch.channels_last)
    dy = torch.randn_like(x)
    results = combine(workers(2).run(on_each_rank, norm, x, dy, (6, 4)))
    expected = run(copy.deepcopy(norm).double(), x.double(), dy.double())
    # fp32 holds the mean, 1e4, to 5e-4 and the normalised values little better; torch errs more.
    tolerances = {"y": 3e-3, "dx": 2e-4, "dweight": 0.5, "dbias": 5e-3, "running_mean": 5e-4}
    for name, tolerance in tolerances.items():
        torch.testing.assert_close(results[name].double(), expected[name], rtol=0, atol=tolerance, msg=name)
    torch.testing.assert_close(results["running_var"].double(), expected["running_var"], rtol=5e-6, atol=0)


@pytest.mark.parametrize("channels_last", [True, False])
def test_local_statistics_are_exact_far_from_zero(channels_last):
    x = torch.randn(16, 64, 32, 32) + 1e4
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    variance, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    own_mean, squares, count = statistics(x, groups=1)[0].split([64, 64, 1])
    assert count == 16 * 32 * 32
    torch.testing.assert_close(own_mean, mean, rtol=1e-10, atol=0)
    torch.testing.assert_close(squares / count, variance, rtol=5e-6, atol=0)


def autocast_step(norm: nn.Module, x: Tensor, dy: Tensor) -> dict:
    rank, rows = dist.get_rank(), 5
    norm = grouped(norm)
    x = x.split(rows)[rank].contiguous(memory_format=torch.channels_last).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    y.backward(dy.split(rows)[rank])
    return {
        "y": y.detach(),
        "dx": x.grad,
        "running_var": norm.running_var,
        "layout": y.is_contiguous(memory_format=torch.channels_last)
        and x.grad.is_contiguous(memory_format=torch.channels_last),
        "dtypes": (y.dtype, x.grad.dtype, norm.weight.grad.dtype, norm.running_var.dtype),
    }


def test_bf16_input_under_autocast_keeps_dtype_layout_and_fp32_statistics(workers):
    norm = network(4, torch.float32)
    x, dy = torch.randn(2, 10, 5, 8, 8).bfloat16()
    results = workers(2).run(autocast_step, norm, x, dy)
    for each in results:
        assert each["dtypes"] == (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
        assert each["layout"]
    wide = copy.deepcopy(norm).double()
    x64 = x.double().requires_grad_()
    y64 = wide(x64)
    y64.backward(dy.double())
    torch.testing.assert_close(results[0]["running_var"].double(), wide.running_var, rtol=1e-6, atol=0)
    for name, expected in (("y", y64.detach()), ("dx", x64.grad)):
        own = torch.cat([each[name] for each in results]).double()
        torch.testing.assert_close(own, expected, rtol=2**-7, atol=2**-7, msg=name)


def forward(norm: nn.Module, x: Tensor) -> tuple[Tensor, dict]:
    norm = grouped(norm)
    y = norm(x[dist.get_rank()])
    return y.detach(), norm.state_dict()


def test_one_value_over_all_ranks_is_refused(workers):
    with pytest.raises(WorkerError, match=r"ValueError: .*more than 1 value per channel over all ranks.*got 1"):
        workers(2).run(on_each_rank, network(2, torch.float32), torch.randn(1, 5), torch.randn(1, 5), (1, 0))


def test_one_value_on_each_rank_is_enough(workers):
    norm = network(2, torch.float64)
    x = torch.randn(2, 1, 5, dtype=torch.float64)
    results = workers(2).run(forward, norm, x)
    torch.testing.assert_close(torch.cat([y for y, _ in results]), norm(x.flatten(0, 1)))


def test_evaluation_uses_running_buffers_and_leaves_them(workers):
    norm = network(4, torch.float64).eval()
    x = torch.randn(2, 3, 5, 4, 4, dtype=torch.float64)
    for rank, (y, state) in enumerate(workers(2).run(forward, norm, x)):
        assert torch.equal(y, norm(x[rank]))
        assert all(torch.equal(state[name], value) for name, value in norm.state_dict().items())


@pytest.mark.parametrize(
    "options", [{"momentum": None}, {"momentum": 0.3}, {"affine": False}, {"track_running_stats": False}]
)
def test_options_mean_what_torch_says(workers, options):
    norm = nn.BatchNorm2d(5, **options).double()
    x = torch.randn(2, 3, 5, 4, 4, dtype=torch.float64)
    results = workers(2).run(forward, norm, x)
    expected = norm(x.flatten(0, 1))
    torch.testing.assert_close(torch.cat([y for y, _ in results]), expected, rtol=1e-12, atol=1e-12)
    for name, value in norm.state_dict().items():
        torch.testing.assert_close(results[0][1][name], value, msg=name)


def in_place(norm: nn.Module, x: Tensor) -> Tensor:
    norm = grouped(norm)
    flat = torch.cat([norm.running_mean, norm.running_var])
    norm.running_mean, norm.running_var = flat[:5], flat[5:]
    norm(x[dist.get_rank()])
    return flat - torch.cat([norm.running_mean, norm.running_var])


def test_running_buffers_may_be_views_of_the_callers_tensor(workers):
    norm = network(2, torch.float64)
    for difference in workers(2).run(in_place, norm, torch.randn(2, 4, 5, dtype=torch.float64)):
        assert torch.equal(difference, torch.zeros(10, dtype=torch.float64))


def nan_on_one_rank(norm: nn.Module, x: Tensor) -> bool:
    norm = grouped(norm)
    x = x[dist.get_rank()]
    if dist.get_rank() == 1:
        x[0, 0] = float("nan")
    y = norm(x)
    return bool(y[:, 0].isnan().all() and y[:, 1:].isfinite().all())


def test_nan_reaches_its_channel_on_all_ranks_and_no_other(workers):
    assert all(workers(2).run(nan_on_one_rank, network(2, torch.float32), torch.randn(2, 4, 5)))


def test_conversion_keeps_modules_tensors_and_names():
    module = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), nn.Sequential(nn.BatchNorm1d(5)))
    norms, before = [module[1], module[2][0]], {name: value.data_ptr() for name, value in module.state_dict().items()}
    parameters = list(module.parameters())
    groups = convert(module)
    assert {name: value.data_ptr() for name, value in module.state_dict().items()} == before
    assert all(mine is theirs for mine, theirs in zip(module.parameters(), parameters, strict=True))
    assert [module[1], module[2][0]] == norms and all(type(norm) is GroupedBatchNorm for norm in norms)
    assert all(norm.groups is groups for norm in norms)


def test_single_process_is_torchs_batch_norm_bit_for_bit():
    norm = network(4, torch.float32)
    x, dy = torch.randn(2, 6, 5, 4, 4)
    own = run(grouped(norm), x, dy)
    for name, expected in run(norm, x, dy).items():
        assert torch.equal(own[name], expected), name


def separately(norm: nn.Module, x: Tensor, dy: Tensor, groups: int) -> dict[str, Tensor]:
    """`run` with each group by itself."""
    norm = copy.deepcopy(norm)
    for part in x.chunk(groups):
        norm(part)
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = torch.cat([norm(part) for part in x.chunk(groups)])
    y.backward(dy)
    state = {name: value.clone() for name, value in norm.named_buffers()}
    return {"y": y.detach(), "dx": x.grad, "dweight": norm.weight.grad, "dbias": norm.bias.grad, **state}


def groups_on_each_rank(norm: nn.Module, x: Tensor, dy: Tensor, rows: tuple[int, ...], groups: int, alone: bool):
    """Each rank has its rows of every group."""
    with mock.patch.object(batch_norm, "is_alone", return_value=alone):
        rank, size = dist.get_rank(), (groups, sum(rows))
        own = [torch.cat([g.split(rows)[rank] for g in t.unflatten(0, size)]) for t in (x, dy)]
        return run(grouped(norm, groups), *own)


@pytest.mark.parametrize("rows", [(5,), (3, 2), (4, 1, 0)], ids=["1_rank", "2_ranks", "3_ranks"])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("shape", [(5,), (5, 4, 3), (5, 1, 1)])
def test_groups_that_pass_together_give_what_each_gives_alone(workers, rows, groups, shape):
    norm = network(len(shape) + 1, torch.float64)
    x, dy = torch.randn(2, groups * sum(rows), *shape, dtype=torch.float64)
    x[:, 3] = 7.25  # a constant channel
    expected = separately(norm, x, dy, groups)
    results = workers(len(rows)).run(groups_on_each_rank, norm, x, dy, rows, groups, False)
    for name in ("y", "dx"):
        parts = [each[name].unflatten(0, (groups, -1)) for each in results if len(each[name])]
        found = torch.cat(parts, dim=1).flatten(0, 1)
        # A constant channel has a factor of 1/sqrt(eps), 316, on what rounding leaves of x - mean.
        torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=1e-11, msg=name)
    for name in ("dweight", "dbias"):
        torch.testing.assert_close(sum(each[name] for each in results), expected[name], rtol=1e-12, atol=1e-11)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert all(torch.equal(each[name], results[0][name]) for each in results), f"{name} differs by rank"
        torch.testing.assert_close(results[0][name], expected[name], rtol=1e-12, atol=1e-12, msg=name)


def test_one_process_takes_groups_one_by_one():
    norm = network(4, torch.float32)
    x, dy = torch.randn(2, 6, 5, 4, 4)
    found, expected = run(grouped(norm, 3), x, dy), separately(norm, x, dy, 3)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
