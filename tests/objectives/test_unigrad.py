"""The UniGrad objective: golden values, invariants, dtypes, autograd, errors."""

import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from unigrad_fast.benchmarks.harness.memory import peak_bytes
from unigrad_fast.kernels import functional
from unigrad_fast.objectives import UniGrad, build


def views(count: int = 2, images: int = 6, width: int = 16, seed: int = 0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(images, width, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def leaves(tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def check_against_golden(objective: UniGrad, golden: np.lib.npyio.NpzFile) -> None:
    """Three consecutive steps of the authors' code; gradients, F, u·g and the positive cosine to 1e-12."""
    for step in range(3):
        online = [torch.tensor(golden[f"step{step}_z{view}"], requires_grad=True) for view in (1, 2)]
        target = [torch.tensor(golden[f"step{step}_z{view}m"]) for view in (1, 2)]
        output = objective(online=online, target=target)
        output.loss.backward()
        for view in (1, 2):
            expected = torch.tensor(golden[f"step{step}_dz{view}"])
            error = (online[view - 1].grad - expected).norm() / expected.norm()
            assert error < 1e-12, f"step {step}, view {view}: relative error {error:.1e}"
        expected = torch.tensor(golden[f"step{step}_F"])
        assert (objective.correlation - expected).norm() / expected.norm() < 1e-12
        assert output.metrics["surrogate"].item() == pytest.approx(golden[f"step{step}_loss"].item(), rel=1e-12)
        assert output.metrics["positive_cosine"].item() == pytest.approx(
            golden[f"step{step}_pos_sim"].item(), rel=1e-12
        )


def check_own_rank_against_golden(folder: str) -> None:
    check_against_golden(UniGrad(width=40), np.load(f"{folder}/unigrad_world2_rank{dist.get_rank()}.npz"))


def test_golden_values_on_one_rank(golden):
    check_against_golden(UniGrad(width=40), np.load(golden / "unigrad_world1_rank0.npz"))


def test_golden_values_on_two_ranks(golden, workers):
    workers(2).run(check_own_rank_against_golden, str(golden))


def test_the_reported_loss_is_the_objective_of_the_paper():
    online, target = views(), views(seed=1)
    objective = UniGrad(width=16, balance=5.0)
    output = objective(online=leaves(online), target=target)
    unit = [torch.nn.functional.normalize(view, dim=-1) for view in online]
    towards = [torch.nn.functional.normalize(view, dim=-1) for view in reversed(target)]
    expected = sum(
        (-(u * m).sum(-1) + 2.5 * torch.einsum("ni,ij,nj->n", u, objective.correlation, u)).mean()
        for u, m in zip(unit, towards, strict=True)
    )
    assert output.loss.item() == pytest.approx(expected.item() / 2, rel=1e-12)


def test_the_backpropagated_gradient_is_g_and_not_the_losss_derivative():
    online, target = leaves(views()), views(seed=1)
    objective = UniGrad(width=16, balance=5.0)
    objective(online=online, target=target).loss.backward()
    unit = torch.nn.functional.normalize(online[0].detach(), dim=-1)
    positive = torch.nn.functional.normalize(target[1], dim=-1)
    g = -positive + 5.0 * unit @ objective.correlation
    norm = online[0].detach().norm(dim=-1, keepdim=True)
    expected = (g - unit * (unit * g).sum(-1, keepdim=True)) / (norm * 6) / 2
    torch.testing.assert_close(online[0].grad, expected, rtol=1e-12, atol=1e-15)


def test_a_local_crops_positive_is_the_mean_of_the_global_targets():
    online, target = leaves(views(4)), views(2, seed=1)
    UniGrad(width=16, balance=0.0)(online=online, target=target).loss.backward()
    first, second = (torch.nn.functional.normalize(view, dim=-1) for view in target)
    for number, positive in ((0, second), (1, first), (2, (first + second) / 2), (3, (first + second) / 2)):
        z = online[number].detach()
        unit = torch.nn.functional.normalize(z, dim=-1)
        g = -positive
        expected = (g - unit * (unit * g).sum(-1, keepdim=True)) / (z.norm(dim=-1, keepdim=True) * 6 * 4)
        torch.testing.assert_close(online[number].grad, expected, rtol=1e-12, atol=1e-15)


@dataclass
class Mixed:
    partner: torch.Tensor
    ratio: torch.Tensor


def mixed(images: int = 6, seed: int = 0) -> Mixed:
    generator = torch.Generator().manual_seed(seed)
    partner = torch.stack([torch.randperm(images, generator=generator) for _ in range(2)])
    return Mixed(partner, torch.rand(2, images, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("count", [2, 3])
def test_a_mixed_views_positive_is_the_mixture_of_the_other_global_views_targets(count):
    online, target, mix = leaves(views(count)), views(2, seed=1), mixed()
    UniGrad(width=16, balance=0.0)(online=online, target=target, mix=mix).loss.backward()
    first, second = (torch.nn.functional.normalize(view, dim=-1) for view in target)
    positives = [
        mix.ratio[number, :, None] * other + (1 - mix.ratio[number, :, None]) * other[mix.partner[number]]
        for number, other in enumerate((second, first))
    ]
    for view, positive in zip(online, [*positives, (first + second) / 2], strict=False):
        z = view.detach()
        unit = torch.nn.functional.normalize(z, dim=-1)
        expected = (unit * (unit * positive).sum(-1, keepdim=True) - positive) / (
            z.norm(dim=-1, keepdim=True) * 6 * count
        )
        torch.testing.assert_close(view.grad, expected, rtol=1e-6, atol=1e-9)  # ratios are fp32


def test_mixing_leaves_the_correlation_alone_and_takes_a_tensor_per_view():
    plain, mixing, apart = (UniGrad(width=16) for _ in range(3))
    mix = mixed()
    plain(online=views(), target=views(seed=1))
    first = mixing(online=views(), target=views(seed=1), mix=mix).loss
    second = apart(online=views(), target=views(seed=1), mix=Mixed([*mix.partner], [*mix.ratio])).loss
    assert torch.equal(plain.correlation, mixing.correlation) and first == second


def test_a_mix_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="correlation_source 'online' with CutMix"):
        UniGrad(width=16, correlation_source="online")(online=views(), target=views(), mix=mixed())
    whole = mixed()
    for partner, ratio, message in (
        (whole.partner[:, :5], whole.ratio, r"mix.partner is .*\[5\].*give int64 \[6\]"),
        (whole.partner[:1], whole.ratio, r"mix.partner is .*two global views"),
        (whole.partner.float(), whole.ratio, r"mix.partner is .*float32"),
        (whole.partner, whole.ratio.long(), r"mix.ratio is .*int64.*give floating"),
        (whole.partner + 1, whole.ratio, "mix.partner goes from 1 to 6; use 0 to 5"),
        (whole.partner, whole.ratio * torch.nan, "mix.ratio goes from nan"),
        (whole.partner, whole.ratio - 1, "mix.ratio goes from -"),
    ):
        objective = UniGrad(width=16)
        with pytest.raises(ValueError, match=message):
            objective(online=views(), target=views(), mix=Mixed(partner, ratio))
        assert not objective.correlation.any()


def test_an_empty_batch_leaves_the_correlation_alone():
    objective = UniGrad(width=16)
    objective(online=views(), target=views(seed=1))
    before = objective.correlation.clone()
    online = leaves(views(images=0))
    output = objective(online=online, target=views(images=0))
    output.loss.backward()
    assert output.loss == 0 and online[0].grad.shape == (0, 16)
    assert torch.equal(objective.correlation, before) and objective.updates == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_in_half_precision_stays_within_its_gate_and_leaves_the_correlation_exact(dtype):
    width = 300
    half, full = UniGrad(width, compute_dtype=dtype), UniGrad(width)
    for seed in range(3):
        batches = [leaves(views(width=width, images=20, seed=seed, dtype=torch.float32)) for _ in range(2)]
        target = views(width=width, images=20, seed=seed + 50, dtype=torch.float32)
        for objective, online in zip((half, full), batches, strict=True):
            objective(online=online, target=target).loss.backward()
    assert torch.equal(half.correlation, full.correlation) and half.correlation.dtype == torch.float32
    expected = torch.cat([z.grad for z in batches[1]])
    error = (torch.cat([z.grad for z in batches[0]]) - expected).norm() / expected.norm()
    assert 1e-6 < error < {torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_scale_of_the_loss_lifts_low_precision_gradients_before_they_are_rounded(dtype):
    width, images, scale = 2048, 64, 2.0**20
    online, target = (
        views(width=width, images=images, dtype=dtype),
        views(width=width, images=images, seed=1, dtype=dtype),
    )
    low, exact = leaves(online), leaves([z.double() for z in online])
    (UniGrad(width)(online=low, target=target).loss * scale).backward()
    UniGrad(width)(online=exact, target=[z.double() for z in target]).loss.backward()
    found = torch.cat([z.grad.double() for z in low]) / scale
    expected = torch.cat([z.grad for z in exact])
    assert (found - expected).norm() / expected.norm() < {torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]


def test_a_first_call_in_inference_mode_leaves_an_objective_that_trains():
    objective = UniGrad(width=16, compute_dtype=torch.bfloat16)
    with torch.inference_mode():
        objective.eval()(online=views(dtype=torch.float32), target=views(seed=1, dtype=torch.float32))
    objective.train()(
        online=leaves(views(dtype=torch.float32)), target=views(seed=1, dtype=torch.float32)
    ).loss.backward()
    assert objective.updates == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"] + ["inductor"] * (shutil.which("g++") is not None))
def test_a_compiled_objective_is_the_same(backend):
    torch.compiler.reset()
    plain, compiled = UniGrad(width=16), UniGrad(width=16)
    call = torch.compile(compiled, fullgraph=True, backend=backend)
    for seed in range(3):
        batches = [leaves(views(seed=seed, dtype=torch.float32)) for _ in range(2)]
        target = views(seed=seed + 50, dtype=torch.float32)
        for objective, online in zip((plain, call), batches, strict=True):
            output = objective(online=online, target=target)
            output.loss.backward()
        for expected, found in zip(*batches, strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-6, atol=1e-9)
        assert torch.isfinite(output.metrics["positive_cosine"]) and output.nonfinite == 0
    torch.testing.assert_close(compiled.correlation, plain.correlation, rtol=1e-6, atol=1e-9)
    assert compiled.updates == plain.updates == 3


def test_batches_before_and_after_the_process_group_are_weighed_by_their_ranks(workers):
    assert all(workers(2).run(correlation_across_the_start))


def correlation_across_the_start() -> bool:
    objective, other = UniGrad(width=16), UniGrad(width=16)
    objective.process_group = other.process_group = None
    objective._ranks = lambda: 1  # as before there is a process group
    objective(online=views(), target=views(seed=1))
    del objective._ranks
    other(online=views(), target=views(seed=1))
    for each in (objective, other):
        each(online=views(seed=2), target=views(seed=3))
    return torch.allclose(objective.correlation, other.correlation)


def test_what_is_written_to_the_correlation_counts_in_half_precision_too():
    width = 20
    objective, other = (UniGrad(width, compute_dtype=torch.bfloat16).eval() for _ in range(2))
    for each in (objective, other):
        each(online=views(width=width, dtype=torch.float32), target=views(width=width, dtype=torch.float32))
    objective.correlation.copy_(torch.eye(width))
    state = {**UniGrad(width).state_dict(), "average.correlation": torch.eye(width)}
    other.load_state_dict(state)
    batch = views(width=width, dtype=torch.float32), views(width=width, seed=1, dtype=torch.float32)
    losses = [each(online=batch[0], target=batch[1]) for each in (objective, other)]
    assert [out.metrics["negative_term"].item() for out in losses] == pytest.approx([1, 1], rel=1e-2)


def test_a_step_takes_no_more_memory_than_eight_arrays_of_the_batch():
    width, images = 1024, 256
    online = leaves(views(width=width, images=images, dtype=torch.float32))
    target = views(width=width, images=images, seed=1, dtype=torch.float32)
    objective = UniGrad(width)

    def release() -> None:
        for z in online:
            z.grad = None

    def step() -> None:
        release()
        objective(online=online, target=target).loss.backward()

    assert peak_bytes(step, release, torch.device("cpu")) <= 8 * images * width * 4


def test_the_correlation_comes_from_global_views_alone():
    online, target = views(3), views(seed=1)
    for source, expected in (("target", target), ("online", online[:2])):
        objective = UniGrad(width=16, correlation_source=source)
        objective(online=online, target=target)
        unit = torch.nn.functional.normalize(torch.cat(expected), dim=-1)
        torch.testing.assert_close(objective.correlation, unit.T @ unit / 12, rtol=1e-12, atol=1e-15)


def test_evaluation_mode_leaves_the_correlation_alone():
    objective = UniGrad(width=16)
    objective(online=views(), target=views(seed=1))
    before = objective.correlation.clone()
    objective.eval()(online=views(seed=2), target=views(seed=3))
    assert torch.equal(objective.correlation, before) and objective.updates == 1


def test_permuting_images_permutes_gradients():
    online, target = views(), views(seed=1)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3))
    first, second = leaves(online), leaves([view[order] for view in online])
    UniGrad(width=16)(online=first, target=target).loss.backward()
    UniGrad(width=16)(online=second, target=[view[order] for view in target]).loss.backward()
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a.grad[order], b.grad, rtol=1e-10, atol=1e-14)


def test_gradients_are_linear_in_grad_output_and_survive_repeated_backward():
    online = leaves(views())
    loss = UniGrad(width=16)(online=online, target=views(seed=1)).loss
    loss.backward(retain_graph=True)
    once = online[0].grad.clone()
    (3 * loss).backward()
    torch.testing.assert_close(online[0].grad, 4 * once)


def test_the_loss_and_the_metrics_can_be_worked_on_in_place_without_a_change_to_each_other():
    online, again = leaves(views()), leaves(views())
    output = UniGrad(width=16)(online=online, target=views(seed=1))
    numbers = {**output.metrics, "nonfinite": output.nonfinite, "loss": output.loss}
    before = {name: number.item() for name, number in numbers.items()}
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    product = weight * output.metrics["positive_cosine"]  # autograd notices what changes this metric
    output.loss /= 4
    output.loss += product
    output.metrics["objective"] += weight
    output.nonfinite += 1
    output.loss.backward()
    with torch.no_grad():
        output.loss.mul_(0)
    assert weight.grad == before["positive_cosine"]
    assert not output.metrics["negative_term"].requires_grad
    assert output.metrics["objective"].item() == pytest.approx(before["objective"] + 2)
    assert all(numbers[name].item() == before[name] for name in ("positive_cosine", "negative_term", "surrogate"))
    UniGrad(width=16)(online=again, target=views(seed=1)).loss.backward()
    for quarter, whole in zip(online, again, strict=True):
        torch.testing.assert_close(quarter.grad, whole.grad / 4)


def test_stride_zero_grad_output_is_handled():
    online = leaves(views())
    UniGrad(width=16)(online=online, target=views(seed=1)).loss.expand(3).sum().backward()
    again = leaves(views())
    UniGrad(width=16)(online=again, target=views(seed=1)).loss.backward()
    torch.testing.assert_close(online[0].grad, 3 * again[0].grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_embeddings_keep_fp32_correlation(dtype):
    online = leaves(views(dtype=dtype))
    objective = UniGrad(width=16)
    with torch.autocast("cpu", torch.bfloat16):
        objective(online=online, target=views(seed=1, dtype=dtype)).loss.backward()
    assert objective.correlation.dtype == torch.float32
    assert online[0].grad.dtype == dtype
    exact = [view.double().requires_grad_() for view in views(dtype=dtype)]
    UniGrad(width=16)(online=exact, target=[view.double() for view in views(seed=1, dtype=dtype)]).loss.backward()
    error = (online[0].grad.double() - exact[0].grad).norm() / exact[0].grad.norm()
    assert error < {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]


def test_no_gradient_flows_into_targets():
    target = leaves(views(seed=1))
    UniGrad(width=16)(online=leaves(views()), target=target).loss.backward()
    assert target[0].grad is None


def test_state_dict_restores_the_correlation_and_continues():
    objective, other = UniGrad(width=16), UniGrad(width=16)
    batches = [(views(seed=s, dtype=torch.float32), views(seed=s + 50, dtype=torch.float32)) for s in range(3)]
    for online, target in batches[:2]:
        objective(online=online, target=target)
    other.load_state_dict(objective.state_dict())
    for candidate in (objective, other):
        candidate(online=batches[2][0], target=batches[2][1])
    assert torch.equal(objective.correlation, other.correlation)


def test_feature_std_is_one_on_the_sphere_and_zero_at_collapse():
    spread = views(images=4000, width=16)
    one = [torch.ones(10, 16, dtype=torch.float64)] * 2
    objective = UniGrad(width=16)
    assert objective(online=spread, target=spread).feature_std().item() == pytest.approx(1, abs=0.02)
    assert objective(online=one, target=one).feature_std().item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("branch", ["online", "target"])
def test_a_non_finite_embedding_is_reported_and_kept_out_of_the_correlation(branch):
    objective = UniGrad(width=16)
    objective(online=views(), target=views(seed=1))
    before = objective.correlation.clone()
    inputs = {"online": leaves(views(seed=2)), "target": views(seed=3)}
    with torch.no_grad():
        inputs[branch][1][4, 3] = torch.inf
    output = objective(**inputs)
    output.loss.backward()
    assert output.nonfinite.item() == 1
    assert torch.isfinite(output.loss) and all(torch.isfinite(z.grad).all() for z in inputs["online"])
    if branch == "target":
        assert torch.equal(objective.correlation, before) and objective.updates == 1
    else:  # the targets are finite, and F keeps them
        assert torch.isfinite(objective.correlation).all() and objective.updates == 2


def nonfinite_on_one_rank() -> tuple[int, bool, int]:
    rank = dist.get_rank()
    objective = UniGrad(width=16)
    objective(online=views(seed=rank), target=views(seed=rank + 10))
    before = objective.correlation.clone()
    target = views(seed=rank + 20)
    if rank == 1:
        target[0][2, 2] = torch.nan
    output = objective(online=views(seed=rank + 30), target=target)
    return output.nonfinite.item(), torch.equal(objective.correlation, before), objective.updates.item()


def test_a_non_finite_target_on_one_rank_holds_the_correlation_on_all(workers):
    assert workers(2).run(nonfinite_on_one_rank) == [(1, True, 1)] * 2


def correlation_of_slice() -> torch.Tensor:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    objective = UniGrad(width=16)
    for seed in range(3):
        images = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks)
        online = [view[images] for view in views(images=12, seed=seed)]
        objective(online=online, target=[view[images] for view in views(images=12, seed=seed + 50)])
    return objective.correlation


def test_the_correlation_does_not_depend_on_the_number_of_ranks(workers):
    whole = correlation_of_slice()
    first, second = workers(2).run(correlation_of_slice)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 0}, "width 0"),
        ({"width": 4, "balance": -1.0}, "balance -1.0"),
        ({"width": 4, "balance": float("nan")}, "balance nan"),
        ({"width": 4, "decay": 1.0}, "decay 1.0"),
        ({"width": 4, "correlation_source": "both"}, "correlation_source 'both'"),
        ({"width": 4, "compute_dtype": torch.int8}, "compute_dtype torch.int8"),
    ],
)
def test_bad_settings_are_refused_with_their_value(settings, message):
    with pytest.raises(ValueError, match=message):
        UniGrad(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 4.0}, "width 4.0 is not an integer; use an int"),
        ({"width": "4"}, "width '4' is not an integer"),
        ({"width": 4, "balance": "100"}, "balance '100' is not a number"),
        ({"width": 4, "decay": None}, "decay None is not a number"),
        ({"width": 4, "most_images": 8.0}, "most_images 8.0 is not an integer"),
    ],
)
def test_settings_of_another_type_are_refused_with_their_value(settings, message):
    with pytest.raises(TypeError, match=message):
        UniGrad(**settings)


def test_what_is_no_tensor_is_refused_by_its_place():
    with pytest.raises(TypeError, match=r"target\[1\] is a ndarray; give a tensor \[N, 16\] for each view"):
        UniGrad(width=16)(online=views(), target=[views()[0], views()[1].numpy()])


@pytest.mark.parametrize("online", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32])
def test_on_a_gpu_the_online_branch_decides_the_dtype_of_the_product(online, target, monkeypatch):
    monkeypatch.setattr("unigrad_fast.objectives.layout.use_triton", lambda device: True)
    layout = UniGrad(width=16)._layout(views(dtype=online), views(dtype=target))
    assert (layout.unit_dtype, layout.product_dtype) == (online, online)
    exact = UniGrad(width=16)._layout(views(dtype=online), views())
    assert (exact.unit_dtype, exact.product_dtype) == (torch.float64, torch.float64)


def test_shapes_that_do_not_fit_are_refused():
    objective = UniGrad(width=16)
    with pytest.raises(ValueError, match=r"online\[1\] has shape \(5, 16\)"):
        objective(online=[views()[0], views(images=5)[0]], target=views())
    with pytest.raises(ValueError, match=r"target\[0\] has shape \(6, 8\)"):
        objective(online=views(), target=views(width=8))
    with pytest.raises(ValueError, match="1 online and 2 target"):
        objective(online=views(1), target=views())


def test_build_knows_unigrad_and_names_the_known_methods():
    assert build("unigrad", width=8, balance=3.0).balance == 3.0
    with pytest.raises(ValueError, match=r"unigrd.*unigrad"):
        build("unigrd", width=8)


def test_a_batch_like_an_earlier_one_is_looked_at_once_and_any_other_again(monkeypatch):
    """What is wrong after a good batch is refused as if it came first; what is right is computed alike."""
    looked = []
    unseen, checked = UniGrad(width=16), functional.unit_embeddings
    monkeypatch.setattr(functional, "unit_embeddings", lambda *call, **more: looked.append(1) or checked(*call, **more))
    objective = UniGrad(width=16)
    for seed in range(3):
        unseen._layouts.clear()
        losses = [each(online=views(seed=seed), target=views(seed=seed + 9)).loss for each in (objective, unseen)]
        assert losses[0] == losses[1]
    assert len(looked) == 1 + 3 and torch.equal(objective.correlation, unseen.correlation)
    for online, target, message in (
        (views(), [view.to("meta") for view in views()], "on cpu, not float64"),
        (views(dtype=torch.int64), views(), "not int64"),
        (views(images=5), views(), r"target\[0\] has shape \(6, 16\), expected \(5, 16\)"),
        (views(3), views(1), "3 online and 1 target"),
    ):
        with pytest.raises(ValueError, match=message):
            objective(online=online, target=target)
    assert objective.updates == 3
    objective.decay = 0.5  # counts from the next step on
    before = objective.correlation.clone()
    objective(online=views(), target=views(seed=1))
    fresh = UniGrad(width=16)
    fresh(online=views(), target=views(seed=1))
    torch.testing.assert_close(objective.correlation, (before + fresh.correlation) / 2)


def test_a_mode_sees_the_operators_of_a_batch_like_an_earlier_one_too():
    objective, seen = UniGrad(width=16), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
            seen.append(operator.name())
            return operator(*arguments, **(keywords or {}))

    for _ in range(2):
        seen.clear()
        with Watch():
            objective(online=leaves(views()), target=views(seed=1)).loss.backward()
        wanted = ["unit_embeddings", "update_correlation_", "unigrad_gradient"]
        assert [name for name in seen if "unigrad" in name] == [f"unigrad_fast::{name}" for name in wanted]
