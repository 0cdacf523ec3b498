"""Each row of the table against the original loss that it is, or was made from, the gradient of, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_forms import WIDTH, error, gradients
from test_unigrad import leaves, views
from torch import Tensor
from torch.nn.functional import normalize

from unigrad_fast.objectives import ROWS, GradientForm, Row, UniGrad, build
from unigrad_fast.objectives.originals import BarlowTwins, DirectPred, MoCo, SimCLR, VICReg

IMAGES = 12


def before_normalising(row: Row, **settings) -> GradientForm:
    """The row without its normalisation: its gradient is that with respect to u."""
    return GradientForm(WIDTH, replace(row, normalisation="none"), **settings)


def unit_views(count: int = 2, seed: int = 0) -> list[Tensor]:
    return [normalize(view, dim=-1) for view in views(count, images=IMAGES, seed=seed)]


@pytest.mark.parametrize("count", [2, 4])
def test_row_a_is_the_gradient_of_mocos_loss_step_by_step(count):
    found, expected = build(row="a", width=WIDTH, bank_size=40), MoCo(WIDTH, bank_size=40)
    for seed in range(3):
        batch = views(count, images=IMAGES, seed=seed), views(images=IMAGES, seed=seed + 50)
        if seed:
            assert error(gradients(found, *batch), gradients(expected, *batch)) < 1e-12
        losses = [each.eval()(online=batch[0], target=batch[1]).loss.item() for each in (found, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
        for each in (found, expected):
            each.train()(online=batch[0], target=batch[1])
    assert torch.equal(found.bank.keys, expected.bank.keys)


def test_row_b_is_the_gradient_of_simclrs_loss_with_both_terms_and_without_gradient_in_the_targets_with_one():
    online = views(images=IMAGES)
    for settings, target in (
        ({"target": "weight_sharing", "both_terms": True}, "weight_sharing"),
        ({"target": "weight_sharing"}, "stop_gradient"),
    ):
        found = gradients(build(row="b", width=WIDTH, **settings), online, online)
        shared = leaves(online)
        output = SimCLR(WIDTH, target=target)(online=shared, target=shared)
        output.loss.backward()
        assert error(found, torch.cat([z.grad for z in shared])) < 1e-12
    momentum = views(images=IMAGES, seed=1)
    found, expected = (
        make(online=online, target=momentum).loss for make in (build(row="b", width=WIDTH), SimCLR(WIDTH))
    )
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


def test_row_d_with_nothing_dropped_is_the_gradient_of_direct_preds_loss():
    row = replace(ROWS["d"], predictor="full", correlation_source="target")
    found, expected = GradientForm(WIDTH, row), DirectPred(WIDTH, kind="paper")
    for seed in range(2):
        batch = views(3, images=IMAGES, seed=seed), views(images=IMAGES, seed=seed + 50)
        assert error(gradients(found, *batch), gradients(expected, *batch)) < 1e-9
    losses = [each.eval()(online=batch[0], target=batch[1]).loss.item() for each in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("kind", ["paper", "authors"])
def test_row_d_is_the_exact_gradient_less_the_root_of_the_correlation(kind):
    online, target = views(images=IMAGES), views(images=IMAGES, seed=1)
    original = DirectPred(WIDTH, kind=kind)
    exact = gradients(original, online, target)
    found = gradients(
        GradientForm(WIDTH, replace(ROWS["d"], predictor=kind, correlation_source="target")), online, target
    )
    correlation, matrix = original.average.correlation, original.direct.matrix
    value, vector = torch.linalg.eigh(correlation)
    largest = value.max()
    scaled, lift = (correlation / largest, 0.3) if kind == "authors" else (correlation, 0.3 * largest)
    root = vector @ (value / largest if kind == "authors" else value).clamp_min(0).sqrt().diag() @ vector.T
    kept = scaled + lift**2 * torch.eye(WIDTH, dtype=torch.float64)
    for product, gradient in ((kept + 2 * lift * root, exact), (kept, found)):
        for number, (z, m) in enumerate(zip(online, target[::-1], strict=True)):
            u, m = normalize(z, dim=-1), normalize(m, dim=-1)
            balance = (u @ matrix * m).sum(-1, keepdim=True) / (u @ product * u).sum(-1, keepdim=True)
            g = (balance * u @ product - m @ matrix) / (u @ matrix).norm(dim=-1, keepdim=True)
            dz = (g - u * (u * g).sum(-1, keepdim=True)) / z.norm(dim=-1, keepdim=True) / (2 * IMAGES)
            assert error(gradient.chunk(2)[number], dz) < 1e-9


@pytest.mark.parametrize("source", ["online", "target"])
def test_row_e_is_unigrad_and_so_is_its_composition(source):
    fused, composed = (
        build(row="e", width=WIDTH, correlation_source=source),
        GradientForm(WIDTH, replace(ROWS["e"], correlation_source=source)),
    )
    assert isinstance(fused, UniGrad) and build(row="e", width=WIDTH).correlation_source == "online"
    for seed in range(3):
        batch = views(3, images=IMAGES, seed=seed), views(images=IMAGES, seed=seed + 50)
        assert error(gradients(composed, *batch), gradients(fused, *batch)) < 1e-12
    outputs = [each.eval()(online=batch[0], target=batch[1]) for each in (fused, composed)]
    for name, value in outputs[0].metrics.items():
        assert outputs[1].metrics[name].item() == pytest.approx(value.item(), rel=1e-12)
    torch.testing.assert_close(composed.average.correlation, fused.correlation, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("count", [2, 4])
def test_row_f_is_the_gradient_of_barlow_twins_loss_through_batch_norm(count):
    online, target = views(count, images=IMAGES), views(images=IMAGES, seed=1)
    found, expected = build(row="f", width=WIDTH, balance=0.3), BarlowTwins(WIDTH, balance=0.3)
    assert error(gradients(found, online, target), gradients(expected, online, target)) < 1e-11
    losses = [each(online=online, target=target).loss.item() for each in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_row_g_is_row_f_with_identity_in_place_of_a_and_a_factor_where_it_is_asked_for():
    online, target = unit_views(), unit_views(seed=1)
    shrunk, plain = (gradients(before_normalising(ROWS[row]), online, target).chunk(2) for row in "fg")
    tenth = gradients(before_normalising(replace(ROWS["g"], positive_factor=0.1)), online, target).chunk(2)
    for number, (u, m) in enumerate(zip(online, target[::-1], strict=True)):
        diagonal = 1 - (1 - 5e-3) * (u * m).mean(0)
        torch.testing.assert_close(shrunk[number] - plain[number], (m - diagonal * m) * 2 / (2 * IMAGES))
        torch.testing.assert_close(tenth[number] - plain[number], 0.9 * m * 2 / (2 * IMAGES))


def test_row_i_is_the_gradient_of_vicregs_loss_in_the_papers_form():
    online, target = views(3, images=IMAGES), views(images=IMAGES, seed=1)
    balance, variance = 0.2, 0.7
    covariance = balance * WIDTH * (IMAGES - 1) ** 2 / (2 * IMAGES**2)  # the paper's λ₁
    found = build(row="i", width=WIDTH, balance=balance, variance=variance, floor=1.2)
    expected = VICReg(WIDTH, invariance=WIDTH, variance=variance, covariance=covariance / 2, floor=1.2)
    assert error(gradients(found, online, target), gradients(expected, online, target)) < 1e-12
    losses = [each(online=online, target=target).loss.item() for each in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_row_j_is_row_i_less_the_mean_and_what_l2_makes_needless():
    online, target = unit_views(), unit_views(seed=1)
    found = gradients(before_normalising(ROWS["j"]), online, target).chunk(2)
    for number, (u, m) in enumerate(zip(online, target[::-1], strict=True)):
        expected = 2 * (-m + 25 * u @ (u.T @ u) / IMAGES) / (2 * IMAGES)
        torch.testing.assert_close(found[number], expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("letter", "settings"),
    [*((letter, {}) for letter in "beghj"), ("i", {"balance": 0.2}), ("i", {"positive_factor": 0.5})],
)
def test_the_reported_loss_has_the_rows_gradient(letter, settings):
    """Of the views together, what is held constant held constant: differences along a direction."""
    objective = before_normalising(replace(ROWS[letter], **settings))
    online, target = unit_views(), unit_views(seed=1)
    objective(online=online, target=target)
    objective.eval()
    g = gradients(objective, online, target)
    direction = torch.cat(views(images=IMAGES, seed=9))
    losses = [
        objective(online=list((torch.cat(online) + step * direction).chunk(2)), target=target).loss
        for step in (1e-5, -1e-5)
    ]
    assert ((losses[0] - losses[1]) / 2e-5).item() == pytest.approx((g * direction).sum().item(), rel=1e-6)


def test_the_order_of_products_does_not_matter():
    """(q·kᵀ)·v for a batch smaller than the width, q·(kᵀ·v) for a larger one."""
    for images in (3, 40):
        online, target = views(images=images), views(images=images, seed=1)
        found = gradients(GradientForm(WIDTH, ROWS["h"]), online, target).chunk(2)
        for number, (z, m) in enumerate(zip(online, target[::-1], strict=True)):
            u, m = normalize(z, dim=-1), normalize(m, dim=-1)
            g = 2 * (-m + 50 * m @ (m.T @ u) / images)
            dz = (g - u * (u * g).sum(-1, keepdim=True)) / z.norm(dim=-1, keepdim=True) / (2 * images)
            assert error(found[number], dz) < 1e-12


def test_momentum_may_be_for_the_positive_alone():
    """The third row of the paper's table of target branches: samples are the online branch's, without gradient."""
    online, target = views(images=IMAGES), views(images=IMAGES, seed=1)
    found = gradients(build(row="b", width=WIDTH, negative_target="stop_gradient"), online, target)
    unit = normalize(torch.cat(leaf := leaves(online)), dim=-1)
    logit = (unit @ unit.detach().T / 0.2).masked_fill(torch.eye(2 * IMAGES, dtype=torch.bool), -torch.inf)
    positive = normalize(torch.cat(target[::-1]), dim=-1)
    (logit.logsumexp(-1) - (unit * positive).sum(-1) / 0.2).mean().backward()
    assert error(found, torch.cat([z.grad for z in leaf])) < 1e-12
    moving = build("unigrad", width=WIDTH, negative_target="stop_gradient")
    moving(online=online, target=target)
    torch.testing.assert_close(moving.correlation, unit.detach().T @ unit.detach() / (2 * IMAGES))
