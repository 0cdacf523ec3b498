"""The metrics of the paper's figures: formulas in float64, ranks, and that measuring changes nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_unigrad import leaves, views
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from unigrad_fast.objectives import ObjectiveOutput, build
from unigrad_fast.objectives.catalogue import FORMS, Objective
from unigrad_fast.objectives.metrics import METRICS, names_of

WIDTH, IMAGES = 16, 12
SMALL = {"bank_size": 40, "prototypes": 24, "queue_size": 24}
FIGURES = [name for name, metric in METRICS.items() if metric.place.startswith("figures.")]
NOT_OF_CALLS = {"effective_rank"}
NOT_OF_RUNS = {"surrogate"}


def configured(form: str, target: str | None = None) -> Objective:
    names = {key: value for key, value in FORMS[form].names.items() if value is not None}
    return Objective.model_validate({**names, **({} if target is None else {"target": target})})


def made(form: str, target: str | None = None, **settings):
    arguments = configured(form, target).arguments()
    arguments.pop("placement", None)
    small = {key: value for key, value in SMALL.items() if key in arguments}
    objective = build(width=WIDTH, **{**arguments, **small, **settings})
    objective.measures = True
    return objective.double()  # the weights of a predictor or head


def batch(target: str, count: int = 2) -> dict[str, list[Tensor]]:
    """Views of an image that are alike, as those of a trained encoder."""
    online = [view + views(images=IMAGES, seed=7)[0] for view in views(count, images=IMAGES)]
    other = [view + online[0] for view in views(images=IMAGES, seed=1)]
    return {"online": online, "target": other if target == "momentum" else online[:2]}


def targets(form: str) -> list[str]:
    return [each for each in ("momentum", "stop_gradient", "weight_sharing") if each not in FORMS[form].refused]


def measured(form: str, target: str = "momentum", count: int = 2, **settings) -> dict[str, float]:
    output = made(form, target, **settings)(**batch(target, count))
    return {name: value.item() for name, value in {**output.metrics, **output.figures()}.items()}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_measures_what_is_declared_of_the_form(form):
    for target in targets(form):
        declared = set(names_of(configured(form, target)))
        assert measured(form, target, count=3).keys() - NOT_OF_RUNS == declared - NOT_OF_CALLS


def test_the_negative_cosine_is_that_of_all_pairs_of_different_images():
    given = batch("momentum", 3)
    pairs = [
        cosine_similarity(u[i], m[j], dim=0)
        for u in given["online"][:2]
        for m in given["target"]
        for i in range(IMAGES)
        for j in range(IMAGES)
        if i != j
    ]
    expected = torch.stack(pairs).mean().item()
    for form in ("unigrad", "j", "original byol"):
        assert measured(form, count=3)["negative_cosine"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        ("d", {}),
        ("d", {"predictor": "full"}),
        ("byol_directpred", {}),
        ("original byol_directpred", {}),
        ("original byol_directpred", {"kind": "paper"}),
    ],
)
def test_the_terms_of_directpreds_gradient_are_those_of_the_eigenvalues(form, settings):
    objective, given = made(form, **settings), batch("momentum")
    output = objective(**given)
    unit, target = (torch.cat([normalize(view, dim=1) for view in given[branch]]) for branch in ("online", "target"))
    source = unit if form == "d" else target
    value, vector = torch.linalg.eigh(source.T @ source / len(source))
    is_paper = form == "d" or settings.get("kind") == "paper"
    largest = value.max() if is_paper else 1.0
    value = (value if is_paper else value / value.max()).clamp_min(0)
    terms = [
        (unit @ vector) * weights @ vector.T
        for weights in (value, 2 * 0.3 * largest * value.sqrt(), (0.3 * largest) ** 2 * torch.ones_like(value))
    ]
    positive = target.roll(IMAGES, 0)
    along = ((unit @ vector) * (value.sqrt() + 0.3 * largest) @ vector.T * positive).sum(1)
    expected = {
        **{
            name: term.norm(dim=1)
            for name, term in zip(("correlation_term", "root_term", "identity_term"), terms, strict=True)
        },
        "term_cosine": cosine_similarity(terms[0], terms[1]),
        "dynamic_balance": along / (unit * sum(terms)).sum(1),
    }
    found = output.figures()
    for name, rows in expected.items():
        # The root of an eigenvalue at 0 is known to √(C·eps), 6e-8, and counts 2·ε of it.
        assert found[name].item() == pytest.approx(rows.mean().item(), rel=1e-6), name


@pytest.mark.parametrize("form", ["barlow_twins", "f", "g", "original barlow_twins"])
def test_the_diagonal_is_that_of_the_correlation_of_batch_normalised_views(form):
    given = batch("momentum", 2 if form == "f" else 3)
    norm = torch.nn.BatchNorm1d(WIDTH, affine=False, dtype=torch.float64)
    pairs = zip(given["online"][:2], given["target"][::-1], strict=True)
    diagonals = torch.stack([torch.diag(norm(z).T @ norm(m)) / IMAGES for z, m in pairs])
    found = measured(form, count=len(given["online"]))
    assert found["least_diagonal"] == pytest.approx(diagonals.min().item(), rel=1e-12)
    assert found["greatest_diagonal"] == pytest.approx(diagonals.max().item(), rel=1e-12)
    assert diagonals.min() < diagonals.max()


def vicreg_gradient(view: Tensor, other: Tensor, first: float, second: float, floor: float, epsilon: float) -> Tensor:
    """Of the paper's loss of VICReg with respect to one view, by autograd."""
    (view,) = leaves([view])
    deviation = (view.var(0) + epsilon).sqrt()
    covariance = torch.cov(view.T)
    loss = (view - other).square().sum() / IMAGES
    loss = loss + first / WIDTH * (covariance.square().sum() - covariance.diag().square().sum())
    (loss + second / WIDTH * torch.relu(floor - deviation).sum()).backward()
    return view.grad


@pytest.mark.parametrize("scale", [0.3, 3.0])  # standard deviations below the floor, and above it
@pytest.mark.parametrize("form", ["i", "original vicreg"])
def test_the_neglected_term_is_what_vicregs_gradient_has_besides_the_others(form, scale):
    given = {branch: [scale * view for view in found] for branch, found in batch("momentum").items()}
    objective = made(form)
    if form == "i":
        weight = objective.row.balance
        first, second = weight * WIDTH * (IMAGES - 1) ** 2 / (2 * IMAGES**2), objective.row.variance
    else:  # its loss over invariance / C
        first, second = (each * WIDTH / objective.invariance for each in (2 * objective.covariance, objective.variance))
        weight = 2 * first * IMAGES**2 / (WIDTH * (IMAGES - 1) ** 2)
    cosines = []
    for view, other in zip(given["online"], given["target"][::-1], strict=True):
        gradient = vicreg_gradient(view, other, first, second, floor=1.0, epsilon=1e-4)
        centred = view - view.mean(0)
        negative = centred @ centred.T @ centred / IMAGES
        neglected = (IMAGES / 2 * gradient + other) / weight - negative
        cosines.append(cosine_similarity(neglected, negative))
    found = objective(**given).figures()["neglected_cosine"].item()
    # Row i's weight is 4e-5: what is left of the gradient, less the negative term, is known to 1/4e-5 times eps.
    assert found == pytest.approx(torch.cat(cosines).mean().item(), rel=1e-9)


@pytest.mark.parametrize("target", ["stop_gradient", "weight_sharing"])
@pytest.mark.parametrize("form", ["simclr", "b", "original simclr"])
def test_simclrs_second_term_is_the_gradient_that_comes_through_the_samples(form, target):
    unit = normalize(torch.cat(batch(target)["online"]), dim=1)

    def loss(query: Tensor, sample: Tensor) -> Tensor:
        logit = (query @ sample.T / 0.2).masked_fill(torch.eye(2 * IMAGES, dtype=torch.bool), -torch.inf)
        return torch.nn.functional.cross_entropy(logit, torch.arange(2 * IMAGES).roll(IMAGES), reduction="sum")

    gradients = []
    for through in (False, True):
        (query,) = leaves([unit])
        loss(query, query if through else query.detach()).backward()
        gradients.append(query.grad)
    first, second = gradients[0], gradients[1] - gradients[0]
    expected = (second.norm(dim=1).mean() / first.norm(dim=1).mean()).item()
    assert measured(form, target)["second_term_ratio"] == pytest.approx(expected, rel=1e-10)


def of_slice(forms: list[str], unequal: bool) -> list[dict[str, float]]:
    """The figures of this rank's slice of a batch."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    bounds = [0, 8, 12] if unequal and size > 1 else [IMAGES * place // size for place in range(size + 1)]
    found = []
    for form in forms:
        target = "stop_gradient" if "simclr" in form or form == "b" else "momentum"
        own = {
            branch: [view[bounds[rank] : bounds[rank + 1]] for view in given] for branch, given in batch(target).items()
        }
        objective = made(form, target)
        found.append({name: value.item() for name, value in objective(**own).figures().items()})
    return found


WITH_FIGURES = ["unigrad", "original byol", "d", "original byol_directpred", "barlow_twins", "f", "i", "b", "simclr"]
WITH_FIGURES += [f"original {method}" for method in ("barlow_twins", "vicreg", "simclr")]


@pytest.mark.parametrize("unequal", [False, True])
def test_two_ranks_measure_what_one_does(workers, unequal):
    together, (first, second) = of_slice(WITH_FIGURES, unequal), workers(2).run(of_slice, WITH_FIGURES, unequal)
    assert first == second
    for form, one, two in zip(WITH_FIGURES, together, first, strict=True):
        assert two == pytest.approx(one, rel=1e-6 if "byol_directpred" in form or form == "d" else 1e-9), form


def steps(form: str, target: str, measures: bool) -> list[Tensor]:
    """Everything that three steps give but the figures."""
    objective, found = made(form, target).float(), []
    objective.measures = measures
    for seed in range(3):
        online = leaves([view.float() for view in views(2, images=IMAGES, seed=seed)])
        other = online if target == "weight_sharing" else views(images=IMAGES, seed=seed + 9, dtype=torch.float32)
        output: ObjectiveOutput = objective(online=online, target=other)
        output.loss.backward()
        assert bool(output.sums) == measures
        found += [output.loss.detach(), output.feature_std(), *output.metrics.values(), *(z.grad for z in online)]
    return [*found, *objective.state_dict().values()]


@pytest.mark.parametrize("form", FORMS)
def test_measuring_changes_no_bit_of_anything_else(form):
    target = targets(form)[-1]
    torch.manual_seed(0)
    without = steps(form, target, measures=False)
    torch.manual_seed(0)
    for before, after in zip(without, steps(form, target, measures=True), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("form", ["unigrad", "d", "i", "f"])
def test_a_row_that_is_not_finite_leaves_the_figures_finite(form):
    given = batch("momentum")
    given["online"][0][3, 2] = torch.nan
    output = made(form)(**given)
    assert output.nonfinite == 1
    assert all(torch.isfinite(value) for value in output.figures().values())
