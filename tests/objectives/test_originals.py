"""The original losses: values of other people's code, ranks, targets, mixing, states, errors."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_unigrad import leaves, mixed, views
from torch import Tensor
from torch.nn.functional import normalize

from unigrad_fast.objectives import originals
from unigrad_fast.objectives.originals import (
    BYOL,
    DINO,
    TWIST,
    BarlowTwins,
    DirectPred,
    MoCo,
    SimCLR,
    SimSiam,
    SwAV,
    VICReg,
)

WIDTH = 16
CLUSTERING = [DINO, TWIST, SwAV]
EVERY = [MoCo, SimCLR, BYOL, SimSiam, DirectPred, BarlowTwins, VICReg, *CLUSTERING]
SHARING = [MoCo, SimCLR, BarlowTwins, VICReg]
NEEDS_WHOLE = [BarlowTwins, VICReg, TWIST]
SMALL = {DINO: {"prototypes": 10}, TWIST: {"prototypes": 10}, SwAV: {"prototypes": 10, "queue_size": 8}}


def made(kind: type, /, **settings) -> originals.MoCo:
    torch.manual_seed(0)
    if kind is not MoCo:
        return kind(width=WIDTH, **SMALL.get(kind, {}), **settings).double()
    objective = MoCo(width=WIDTH, bank_size=32, **settings)
    key = normalize(torch.randn(32, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(7)), dim=-1)
    objective.load_state_dict({**objective.state_dict(), "bank.keys": key, "bank.taken": torch.tensor(20)})
    return objective


def lightly(golden, name: str) -> dict[str, Tensor]:
    file = np.load(golden / f"lightly_{name}.npz")
    return {key: torch.tensor(file[key]) for key in file.files}


def check(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).norm() <= 1e-10 * expected.norm()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("simclr_weight_sharing", lambda w: SimCLR(24, temperature=w["temperature"].item(), target="weight_sharing")),
        ("barlow_twins", lambda w: BarlowTwins(24, balance=w["lambda_param"].item(), target="weight_sharing")),
        (
            "vicreg",
            lambda w: VICReg(
                24,
                **{name: w[name].item() for name in ("invariance", "variance", "covariance")},
                variance_epsilon=w["eps"].item(),
                target="weight_sharing",
            ),
        ),
    ],
)
def test_losses_with_shared_weights_are_lightlys(golden, name, make):
    witness = lightly(golden, name)
    online = leaves([witness["z1"], witness["z2"]])
    output = make(witness)(online=online, target=online)
    output.loss.backward()
    check(output.loss, witness["loss"])
    for z, key in zip(online, ("dz1", "dz2"), strict=True):
        check(z.grad, witness[key])


def test_moco_is_lightlys_and_its_bank_takes_unit_keys_from_the_first_place_on(golden):
    witness = lightly(golden, "moco_bank")
    objective = MoCo(24, temperature=witness["temperature"].item(), bank_size=80)
    state = objective.state_dict()
    objective.load_state_dict({**state, "bank.keys": witness["bank_before"], "bank.taken": torch.tensor(80)})
    z = witness["z1"].clone().requires_grad_()
    output = objective(online=[z, z], target=[witness["key"]] * 2)  # the loss of one view, twice
    output.loss.backward()
    check(output.loss, witness["loss"])
    check(z.grad, witness["dz1"])
    keys = objective.state_dict()["bank.keys"]
    check(keys[:16], witness["bank_after"][:16])
    assert torch.equal(keys[16:32], keys[:16]) and torch.equal(keys[32:], witness["bank_after"][32:])


def test_byol_of_predictions_is_the_negative_cosine(golden):
    witness = lightly(golden, "negative_cosine")
    z = witness["z1"].clone().requires_grad_()
    output = BYOL(24, predictor=False)(online=[z, z], target=[witness["z2"]] * 2)
    output.loss.backward()
    check(output.loss, witness["loss"])
    check(z.grad, witness["dz1"])


@pytest.mark.parametrize("kind", ["authors", "paper"])
@pytest.mark.parametrize("images", [6, 12])  # with 6, F of 12 targets has four eigenvalues of 0 among 16
def test_direct_pred_multiplies_with_the_roots_of_the_correlation(kind, images):
    """Of W_h its square is compared: √λ at λ = 0 makes of an error of 1e-17, as any LAPACK has, one of 3e-9."""
    online, target = views(images=images), views(images=images, seed=1)
    objective = made(DirectPred, epsilon=0.2, kind=kind)
    loss = objective(online=online, target=target).loss
    unit = normalize(torch.cat(target), dim=-1)
    correlation = unit.T @ unit / len(unit)
    largest = torch.linalg.matrix_norm(correlation, 2)
    lift, square = (0.2, correlation / largest) if kind == "authors" else (0.2 * largest, correlation)
    matrix = objective.direct.matrix
    root = matrix - lift * torch.eye(WIDTH, dtype=torch.float64)
    # Three products of C numbers of this size and the decomposition, each with an error of C roundings at most.
    tolerance = 2 * WIDTH * torch.finfo(torch.float64).eps * matrix.norm() ** 2  # eps is two roundings
    assert (root @ root - square).norm() < tolerance and (root - root.T).norm() < tolerance
    assert torch.linalg.eigvalsh(root).min() > -(tolerance**0.5)  # of the matrices with this square, the root
    cosine = [torch.cosine_similarity(z @ matrix, m, dim=-1).mean() for z, m in zip(online, target[::-1], strict=True)]
    assert loss.item() == pytest.approx(-sum(cosine).item() / 2, rel=1e-12)


def test_direct_pred_decomposes_every_few_steps_and_goes_on_so_after_loading():
    objective, seen = made(DirectPred, every=3), []
    for seed in range(5):
        if seed == 2:
            state, objective = copy.deepcopy(objective.state_dict()), made(DirectPred, every=3)
            objective.load_state_dict(state)
        objective(online=views(seed=seed), target=views(seed=seed + 50))
        seen.append(objective.direct.matrix.clone())
    same = [torch.equal(one, other) for one, other in itertools.pairwise(seen)]
    assert same == [True, True, False, True]


@pytest.mark.parametrize("kind", [kind for kind in EVERY if kind not in CLUSTERING])
def test_a_gradient_in_the_targets_is_that_of_shared_weights_alone(kind):
    for sharing in (False, True):
        if sharing and kind not in SHARING:
            with pytest.raises(ValueError, match=r"'weight_sharing' is refused for .*become one; use momentum"):
                made(kind, target="weight_sharing")
            continue
        objective = made(kind, **({"target": "weight_sharing"} if sharing else {}))
        online, target = leaves(views()), leaves(views(seed=1))
        objective(online=online, target=target).loss.backward()
        assert all((z.grad is not None) == sharing for z in target) and online[0].grad.norm() > 0


@pytest.mark.parametrize("kind", EVERY)
def test_local_crops_are_pulled_to_the_mean_of_the_targets_and_weigh_as_much_as_global_views(kind):
    objective = made(kind)
    first, second, local = leaves(views(3))
    target = views(seed=1)
    output = objective(online=[first, second, local], target=target)
    output.loss.backward()
    assert local.grad.norm() > 0
    if kind is VICReg:
        wanted = 25 * 2 * (local - (target[0] + target[1]) / 2) / (3 * local.numel())
        objective = made(kind, variance=0.0, covariance=0.0)
        local.grad = None
        objective(online=[first, second, local], target=target).loss.backward()
        torch.testing.assert_close(local.grad, wanted.detach())


@pytest.mark.parametrize("kind", EVERY)
def test_mixed_views_are_taken_or_refused_with_the_reason(kind):
    objective = made(kind)
    if kind in NEEDS_WHOLE:
        with pytest.raises(ValueError, match=f"CutMix is refused for {kind.__name__}: .*mixed images"):
            objective(online=views(), target=views(seed=1), mix=mixed())
        return
    online, alone, mix = leaves(views()), leaves(views()), mixed()
    objective(online=online, target=views(seed=1), mix=mix).loss.backward()
    mix.ratio = torch.ones_like(mix.ratio)
    whole = made(kind)(online=alone, target=views(seed=1), mix=mix).loss
    assert whole == made(kind)(online=alone, target=views(seed=1)).loss
    assert online[0].grad.isfinite().all()


@pytest.mark.parametrize("kind", EVERY)
def test_the_order_of_images_does_not_matter(kind):
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    plain, other = leaves(views(3, images=12)), leaves(views(3, images=12))
    made(kind)(online=plain, target=views(images=12, seed=1)).loss.backward()
    permuted = [z[order] for z in other], [m[order] for m in views(images=12, seed=1)]
    made(kind)(online=permuted[0], target=permuted[1]).loss.backward()
    for z, w in zip(plain, other, strict=True):
        torch.testing.assert_close(z.grad, w.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [MoCo, SimCLR, DirectPred, DINO, SwAV])
def test_the_length_of_embeddings_does_not_matter(kind):
    plain, longer = leaves(views()), leaves([3 * z for z in views()])
    losses = [made(kind)(online=z, target=views(seed=1)).loss for z in (plain, longer)]
    sum(losses).backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    torch.testing.assert_close(plain[0].grad, 3 * longer[0].grad, rtol=1e-10, atol=1e-14)


def steps_of_slice(name: str, settings: dict, unequal: bool = False) -> list[tuple[list[Tensor], Tensor]]:
    """Gradients of this rank's part of a batch of 12, as the engine's mean over ranks makes them, and the loss."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    bounds = [0, 5, 12] if unequal and size == 2 else [12 * place // size for place in range(size + 1)]
    part = slice(bounds[rank], bounds[rank + 1])
    share = (part.stop - part.start) / 12  # of the mean over all images
    objective, found = made(getattr(originals, name), **settings), []
    for seed in range(3):
        online = leaves([z[part] for z in views(3, images=12, seed=seed)])
        target = [z[part] for z in views(images=12, seed=seed + 50)]
        target = online[:2] if settings.get("target") == "weight_sharing" else target
        output = objective(online=online, target=target)
        output.loss.backward()
        scale = share if unequal else 1 / size
        found.append(([z.grad * scale for z in online], output.loss.detach() * scale))
    for key, value in objective.state_dict().items():
        found.append(([], value.double()) if "predictor" not in key or "running" in key else ([], value.new_zeros(())))
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("name", "settings"),
    [(kind.__name__, {}) for kind in EVERY] + [(kind.__name__, {"target": "weight_sharing"}) for kind in SHARING],
)
def test_on_several_ranks_gradients_and_state_are_those_of_one(workers, size, name, settings):
    compare(steps_of_slice(name, settings), workers(size).run(steps_of_slice, name, settings))


def head_gradients(name: str) -> list[Tensor]:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    objective, part = made(getattr(originals, name)), slice(12 * rank // size, 12 * (rank + 1) // size)
    target = [z[part] for z in views(images=12, seed=1)]
    objective(online=[z[part] for z in views(3, images=12)], target=target).loss.backward()
    return [parameter.grad / size for parameter in objective.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("kind", [BYOL, *CLUSTERING])
def test_a_heads_gradients_averaged_over_ranks_are_those_of_one(workers, kind):
    parts = workers(2).run(head_gradients, kind.__name__)
    for whole, *own in zip(head_gradients(kind.__name__), *parts, strict=True):
        torch.testing.assert_close(sum(own), whole, rtol=1e-10, atol=1e-13)
        assert whole.norm() > 0


@pytest.mark.parametrize("kind", EVERY)
def test_under_autocast_embeddings_in_bf16_have_the_gradient_of_exact_ones(kind):
    exact, low = made(kind), made(kind).float()
    if kind is MoCo:  # its bank takes the dtype of embeddings
        low.bank.keys = low.bank.keys.float()
    online = leaves(views(3, images=12, dtype=torch.bfloat16))
    target = views(images=12, seed=1, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        output = low(online=online, target=target)
        output.loss.backward()
    assert output.loss.dtype == torch.float32 and online[0].grad.dtype == torch.bfloat16
    same = leaves([z.detach().double() for z in online])
    exact(online=same, target=[m.double() for m in target]).loss.backward()
    found, expected = (torch.cat([z.grad.double() for z in branch]) for branch in (online, same))
    assert (found - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize("name", ["MoCo", "SimCLR", "DirectPred", "DINO", "SwAV"])
def test_ranks_may_have_different_numbers_of_images(workers, name):
    compare(steps_of_slice(name, {}), workers(2).run(steps_of_slice, name, {}, True))


def compare(whole: list, parts: list[list]) -> None:
    for number, (gradients, loss) in enumerate(whole):
        for view, gradient in enumerate(gradients):
            together = torch.cat([part[number][0][view] for part in parts])
            torch.testing.assert_close(together, gradient, rtol=1e-9, atol=1e-12)
        if gradients:
            torch.testing.assert_close(sum(part[number][1] for part in parts), loss, rtol=1e-9, atol=1e-12)
        else:
            for part in parts:
                torch.testing.assert_close(part[number][1], loss, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("branch", ["online", "target"])
def test_a_non_finite_embedding_is_reported_and_state_keeps_out_of_its_targets(kind, branch):
    objective = made(kind)
    objective(online=views(), target=views(seed=1))
    kept = {name: value.clone() for name, value in objective.state_dict().items() if "predictor" not in name}
    inputs = {"online": leaves(views(seed=2)), "target": views(seed=3)}
    with torch.no_grad():
        inputs[branch][1][4, 3] = torch.inf
    output = objective(**inputs)
    output.loss.backward()
    assert output.nonfinite == 1 and output.loss.isfinite()
    assert all(z.grad.isfinite().all() for z in inputs["online"])
    if branch == "target":
        for name, value in kept.items():
            if "direct" not in name:
                assert torch.equal(objective.state_dict()[name], value), name


@pytest.mark.parametrize("kind", EVERY)
def test_embeddings_too_long_for_a_length_in_fp32_are_reported(kind):
    objective = made(kind).float()
    online = leaves(views(dtype=torch.float32))
    with torch.no_grad():
        online[1][4] *= 1e25
    output = objective(online=online, target=views(seed=1, dtype=torch.float32))
    output.loss.backward()
    assert output.nonfinite == 1 and output.loss.isfinite()
    assert all(z.grad.isfinite().all() for z in online)
    assert all(tensor.isfinite().all() for tensor in objective.state_dict().values())


@pytest.mark.parametrize("kind", EVERY)
def test_evaluation_leaves_state_alone_and_a_state_dict_continues(kind):
    objective, other = made(kind), made(kind)
    objective(online=views(), target=views(seed=1))
    before = copy.deepcopy(objective.state_dict())
    for dtype in (torch.float64, torch.float32) if kind not in (BYOL, SimSiam, TWIST) else (torch.float64,):
        objective.eval()(online=views(seed=2, dtype=dtype), target=views(seed=3, dtype=dtype))
        assert all(torch.equal(before[name], value) for name, value in objective.state_dict().items())
    assert not [name for name, _ in objective.named_buffers()]
    other.load_state_dict(before)
    found = [each.train()(online=views(seed=4), target=views(seed=5)).loss for each in (objective, other)]
    assert torch.equal(*found)


def test_a_bank_smaller_than_a_batch_keeps_the_newest_keys():
    objective = MoCo(WIDTH, bank_size=7)
    for seed in range(3):
        objective(online=views(), target=views(seed=seed))
    keys = torch.cat([normalize(torch.cat(views(seed=seed)), dim=-1) for seed in range(3)])
    expected = torch.empty(7, WIDTH, dtype=torch.float64)
    for number, key in enumerate(keys):
        expected[number % 7] = key
    torch.testing.assert_close(objective.bank.keys, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MoCo(WIDTH, temperature=0.0), "temperature 0.0 is out of range; use more than 0"),
        (lambda: MoCo(WIDTH, bank_size=0), "bank_size 0 is too small; use 1 or more"),
        (lambda: SimCLR(WIDTH, target="own"), "target 'own' is unknown; use one of momentum"),
        (lambda: DirectPred(WIDTH, decay=1.0), "decay 1.0 is outside"),
        (lambda: DirectPred(WIDTH, kind="svd"), "kind 'svd' is unknown"),
        (lambda: BarlowTwins(WIDTH, balance=-1), "balance -1 is out of range; use 0 or more"),
    ],
)
def test_bad_settings_are_refused_with_their_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moco_has_no_gradient_while_its_bank_is_empty(dtype):
    online = [view.requires_grad_() for view in views(dtype=dtype)]
    output = MoCo(WIDTH, bank_size=40)(online=online, target=views(seed=1, dtype=dtype))
    output.loss.backward()
    assert output.loss == 0 and not any(z.grad.any() for z in online)
