"""Gradient forms: values of the authors' code, originals that they are the gradient of, ranks, targets, states."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_unigrad import leaves, mixed, views
from torch import Tensor
from torch.nn.functional import normalize

from unigrad_fast.objectives import ROWS, GradientForm, build
from unigrad_fast.objectives.originals import MoCo

WIDTH, IMAGES = 16, 12
# DirectPred's W_h is √(F/λ_max) + 0.3. Of an error of C·eps in F/λ_max its root has C·eps/(2·√(λ/λ_max)): 2e-12 of the
# 0.3 for the smallest λ/λ_max here, 5e-5. The first F on one rank has λ = 0, which LAPACK finds as up to C·eps·λ_max.
PRECISION = {"simclr": 1e-12, "barlow_twins": 1e-12, "byol_directpred": 1e-11}
ROOT_AT_ZERO = (40 * torch.finfo(torch.float64).eps) ** 0.5 / 0.3
# Every way of computing: the rows, and what their names stand for.
EVERY = {
    **{letter: replace(row, bank_size=40) for letter, row in ROWS.items()},
    "authors' d": replace(ROWS["d"], predictor="authors", correlation_source="target"),
    "full d": replace(ROWS["d"], predictor="full"),
    "authors' b": replace(ROWS["b"], samples="batch"),
    "h without momentum": replace(ROWS["h"], negative_target="stop_gradient"),
    "batch norm, constant": replace(ROWS["e"], normalisation="batch_norm", balance=1.0),
}
TAKES_MIX = ("a", "b", "authors' b", "authors' d")
rows = pytest.mark.parametrize("name", EVERY)


def form(name: str, **settings) -> GradientForm:
    """Of a row, with a bank that holds keys already."""
    objective = GradientForm(WIDTH, EVERY[name], **settings)
    if objective.bank is not None:
        key = torch.randn(40, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
        state = {**objective.state_dict(), "bank.keys": normalize(key, dim=-1), "bank.taken": torch.tensor(30)}
        objective.load_state_dict(state)
    return objective


def gradients(objective, online: list[Tensor], target: list[Tensor], **more) -> Tensor:
    """Of the loss, with respect to all online embeddings."""
    online = leaves(online)
    objective(online=online, target=target, **more).loss.backward()
    return torch.cat([z.grad for z in online])


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def check_against_golden(folder: str, method: str, size: int, rank: int) -> None:
    golden, objective = np.load(f"{folder}/{method}_world{size}_rank{rank}.npz"), build(method, width=40)
    for step in range(3):
        online = leaves([torch.tensor(golden[f"step{step}_z{view}"]) for view in (1, 2)])
        output = objective(online=online, target=[torch.tensor(golden[f"step{step}_z{view}m"]) for view in (1, 2)])
        output.loss.backward()
        for view in (1, 2):
            found = error(online[view - 1].grad, torch.tensor(golden[f"step{step}_dz{view}"]))
            assert found < (ROOT_AT_ZERO if method == "byol_directpred" and step == 0 else PRECISION[method])
        for metric, key in (("surrogate", "loss"), ("positive_cosine", "pos_sim")):
            assert output.metrics[metric].item() == pytest.approx(  # DirectPred's u·g is 0; C·eps is 9e-15
                golden[f"step{step}_{key}"].item(), rel=1e-12, abs=1e-14
            )
        if objective.average is not None:
            assert error(objective.average.correlation, torch.tensor(golden[f"step{step}_F"])) < 1e-12


def check_own_rank(folder: str, method: str) -> None:
    check_against_golden(folder, method, 2, dist.get_rank())


@pytest.mark.parametrize("method", PRECISION)
def test_golden_values_on_one_rank(golden, method):
    check_against_golden(str(golden), method, 1, 0)


@pytest.mark.parametrize("method", PRECISION)
def test_golden_values_on_two_ranks(golden, workers, method):
    workers(2).run(check_own_rank, str(golden), method)


@rows
def test_the_order_of_images_does_not_matter(name):
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(3))
    online, target = views(3, images=IMAGES), views(images=IMAGES, seed=1)
    plain = gradients(form(name), online, target)
    permuted = gradients(form(name), [z[order] for z in online], [m[order] for m in target])
    assert error(permuted, torch.cat([part[order] for part in plain.chunk(3)])) < 1e-9


@pytest.mark.parametrize("name", [name for name, row in EVERY.items() if row.normalisation != "none"])
def test_the_length_of_embeddings_does_not_matter_where_they_are_normalised(name):
    online, target = [1e3 * z for z in views(images=IMAGES)], [1e3 * m for m in views(images=IMAGES, seed=1)]
    plain = gradients(form(name), online, target)
    longer = gradients(form(name), [3 * z for z in online], [5 * m for m in target])
    assert error(3 * longer, plain) < 1e-9


@rows
def test_no_gradient_flows_into_targets_and_a_scale_of_the_loss_scales_it(name):
    target = leaves(views(seed=1))
    online, again = leaves(views()), leaves(views())
    (2 * form(name)(online=online, target=target).loss).backward()
    assert all(m.grad is None for m in target)
    form(name)(online=again, target=target).loss.backward()
    torch.testing.assert_close(online[0].grad, 2 * again[0].grad)
    assert online[0].grad.norm() > 0


def steps_of_slice(name: str, unequal: bool, settings: dict) -> list[tuple[Tensor, Tensor, dict]]:
    """Gradients times this rank's share of the images, the loss, and state after each step."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    bounds = [0, 7, 12] if unequal and size == 2 else [12 * place // size for place in range(size + 1)]
    part, count = slice(bounds[rank], bounds[rank + 1]), settings.pop("count", 3)
    objective, found = form(name, **settings), []
    for seed in range(3):
        online = [z[part] for z in views(count, images=12, seed=seed)]
        output = objective(online=(leaf := leaves(online)), target=[z[part] for z in views(images=12, seed=seed + 50)])
        output.loss.backward()
        share = (part.stop - part.start) / 12
        assert output.nonfinite == 0
        state = {key: value.clone() for key, value in objective.state_dict().items()}
        found.append((torch.stack([z.grad for z in leaf]) * share, output.loss.detach() * share, state))
    return found


def compare(whole: list, parts: list[list], precision: float) -> None:
    for number, (gradient, loss, state) in enumerate(whole):
        assert error(torch.cat([part[number][0] for part in parts], dim=1), gradient) < precision
        assert sum(part[number][1] for part in parts).item() == pytest.approx(loss.item(), rel=precision)
        for part in parts:
            for key, value in state.items():
                assert torch.equal(part[number][2][key], parts[0][number][2][key]), key
                torch.testing.assert_close(part[number][2][key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [2, 3])
@rows
def test_on_several_ranks_gradients_losses_and_state_are_those_of_one(workers, size, name):
    compare(steps_of_slice(name, False, {}), workers(size).run(steps_of_slice, name, False, {}), 1e-9)


@rows
def test_ranks_may_have_different_numbers_of_images(workers, name):
    compare(steps_of_slice(name, True, {}), workers(2).run(steps_of_slice, name, True, {}), 1e-9)


def both_terms_of_slice(unequal: bool) -> list:
    EVERY["b with both terms"] = replace(ROWS["b"], both_terms=True)
    return steps_of_slice("b with both terms", unequal, {"target": "stop_gradient", "count": 2})


def test_both_terms_span_the_ranks(workers):
    for unequal in (False, True):
        compare(both_terms_of_slice(unequal), workers(2).run(both_terms_of_slice, unequal), 1e-9)


def test_both_terms_are_of_two_views_as_they_are_and_take_an_empty_batch():
    objective = build(row="b", width=WIDTH, target="weight_sharing", both_terms=True)
    assert objective(online=views(images=0), target=views(images=0)).loss == 0
    for more, found in (
        ({"online": views(3)}, "3 views; leave local crops"),
        ({"mix": mixed()}, "mixed ones; leave Cut"),
    ):
        with pytest.raises(ValueError, match=f"both_terms needs two unmixed global views, not {found}"):
            objective(**{"online": views(), "target": views(), **more})


def too_many_images() -> tuple[str, float]:
    rank = dist.get_rank()
    objective = GradientForm(WIDTH, ROWS["h"])
    objective(online=views(images=3), target=views(images=3))
    try:
        return "", objective(online=views(images=3 + rank), target=views(images=3 + rank)).nonfinite.item()
    except ValueError as refused:
        return str(refused), -1.0


def test_more_images_than_agreed_on_are_refused_and_the_other_ranks_drop_the_step(workers):
    (_, flag), (message, _) = workers(2).run(too_many_images)
    assert flag == 1 and "this rank has 4 images, more than 3" in message and "most_images=4" in message


@rows
def test_a_mixed_view_is_pulled_to_the_mixture_or_refused_with_the_reason(name):
    online, target, mix = views(3), views(seed=1), mixed()
    if name not in TAKES_MIX:
        remedy = ".*use correlation_source='target'" if EVERY[name].negative == "moving_average" else ""
        with pytest.raises(ValueError, match=f"CutMix is refused for negative .*from mixed images{remedy}"):
            form(name)(online=online, target=target, mix=mix)
        return
    found = gradients(form(name), online, target, mix=mix)
    mix.ratio = mix.ratio.float().double()  # kernels take ratios in fp32
    first, second = (normalize(view, dim=-1) for view in target)
    # What pulls views to a mixture is the mixture of what pulls them to its parts, where samples stay the same.
    if EVERY[name].samples == "batch":
        pulled = gradients(form(name), online, target)
        for view, other in enumerate((second, first)):
            u = normalize(online[view], dim=-1)
            change = (1 - mix.ratio[view])[:, None] * (other - other[mix.partner[view]]) / EVERY[name].temperature
            change = (change - u * (u * change).sum(-1, keepdim=True)) / online[view].norm(dim=-1, keepdim=True) / 18
            torch.testing.assert_close(found.chunk(3)[view] - pulled.chunk(3)[view], change, rtol=1e-6, atol=1e-8)


def test_a_mixed_batch_is_mocos():
    for seed in range(2):
        batch, mix = (views(3, seed=seed), views(seed=seed + 1)), mixed()
        mix.ratio = mix.ratio.float().double()
        found, expected = form("a"), MoCo(WIDTH, bank_size=40)
        expected.load_state_dict(found.state_dict())
        assert error(gradients(found, *batch, mix=mix), gradients(expected, *batch, mix=mix)) < 1e-7


@rows
@pytest.mark.parametrize("branch", ["online", "target"])
def test_a_non_finite_embedding_is_reported_and_kept_out_of_state(name, branch):
    objective = form(name)
    objective(online=views(), target=views(seed=1))
    kept = {key: value.clone() for key, value in objective.state_dict().items() if "direct" not in key}
    inputs = {"online": leaves(views(seed=2)), "target": views(seed=3)}
    with torch.no_grad():
        inputs[branch][1][4, 3] = torch.inf
    output = objective(**inputs)
    output.loss.backward()
    assert output.nonfinite == 1 and output.loss.isfinite()
    assert all(z.grad.isfinite().all() for z in inputs["online"])
    if branch == "target" or EVERY[name].source == "online":
        assert all(torch.equal(objective.state_dict()[key], value) for key, value in kept.items())
    else:
        assert kept == {} or not all(torch.equal(objective.state_dict()[key], value) for key, value in kept.items())


@rows
def test_evaluation_leaves_state_alone_and_a_state_dict_continues(name):
    objective, other = form(name), GradientForm(WIDTH, EVERY[name])
    objective(online=views(), target=views(seed=1))
    before = copy.deepcopy(objective.state_dict())
    for dtype in (torch.float64, torch.float32):
        objective.eval()(online=views(seed=2, dtype=dtype), target=views(seed=3, dtype=dtype))
        assert all(torch.equal(before[key], value) for key, value in objective.state_dict().items())
    assert not list(objective.buffers()) and not list(objective.parameters())
    other.load_state_dict(before)
    batches = [leaves(views(seed=4)) for _ in range(2)]
    for each, online in zip((objective, other), batches, strict=True):
        each.train()(online=online, target=views(seed=5)).loss.backward()
    assert torch.equal(batches[0][0].grad, batches[1][0].grad)


@rows
def test_an_empty_batch_and_rows_of_zeros_have_no_gradient(name):
    objective = form(name)
    objective(online=views(), target=views(seed=1))
    online = leaves(views(images=0))
    output = objective(online=online, target=views(images=0))
    output.loss.backward()
    assert output.loss.isfinite() and online[0].grad.shape == (0, WIDTH)
    if EVERY[name].normalisation == "l2":
        online = leaves(views())
        with torch.no_grad():
            online[0][2] = 0
        objective(online=online, target=views(seed=1)).loss.backward()
        assert not online[0].grad[2].any() and online[0].grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@rows
def test_low_precision_embeddings_have_the_gradient_of_exact_ones(name, dtype):
    batch = views(images=IMAGES, dtype=dtype), views(images=IMAGES, seed=1, dtype=dtype)
    exact = [z.double() for z in batch[0]], [m.double() for m in batch[1]]
    objective, other = form(name), form(name)
    found = gradients(objective, *batch)
    assert found.dtype == dtype
    expected = gradients(other, *exact)
    # The result is rounded once, by half a unit in the last place; before that there is fp32's own error. Of √λ, of
    # which W_h is made, an error of F that is small beside λ_max is larger by λ_max/2λ beside the smallest λ.
    arithmetic, rounding = 1e-6, {torch.bfloat16: 2**-8, torch.float32: 0.0}[dtype]
    if other.direct is not None:
        values = torch.linalg.eigvalsh(other.average.correlation)
        arithmetic *= (values[-1] / (2 * values[0])).item()
        assert arithmetic < 1e-4
    assert error(found.double(), expected) < rounding + arithmetic
