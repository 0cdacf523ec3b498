"""DINO, TWIST and SwAV against their papers' formulas in NumPy, worked cases and other people's values; schedules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_originals import check, lightly
from test_unigrad import leaves, mixed, views
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unigrad_fast.objectives import build, originals
from unigrad_fast.objectives.originals import DINO, TWIST, SwAV

WIDTH, PROTOTYPES = 16, 10
EPSILON = 1e-5  # of batch norm


def made(kind: type, /, **settings) -> nn.Module:
    torch.manual_seed(1)
    objective = kind(WIDTH, prototypes=PROTOTYPES, **settings).double()
    objective.after_step(0.0)  # normalises in float64
    return objective


def cosines(rows: Tensor, objective: nn.Module, name: str = "head") -> np.ndarray:
    """Of embeddings with an objective's prototypes."""
    z, w = rows.detach().numpy(), getattr(objective, name).weight.detach().numpy()
    return (z / np.linalg.norm(z, axis=1)[:, None]) @ (w / np.linalg.norm(w, axis=1)[:, None]).T


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def mean_of_pairs(expected: list[np.ndarray], logits: list[np.ndarray]) -> float:
    """−Σ q·log p of each pair of a global and another view."""
    pairs = [(q, p) for q in range(2) for p in range(len(logits)) if p != q]
    return np.mean([-(expected[q] * np.log(softmax(logits[p]))).sum(1).mean() for q, p in pairs])


def test_dinos_loss_gradients_and_centre_are_lightlys(golden):
    witness = lightly(golden, "dino")
    objective = DINO(
        24,
        head=False,
        temperature=witness["student_temp"].item(),
        teacher_temperature=witness["teacher_temp"].item(),
        centre_momentum=witness["center_momentum"].item(),
    )
    for step in range(3):
        online = leaves([witness[f"step{step}_s{view}"] for view in (1, 2)])
        output = objective(online=online, target=[witness[f"step{step}_t{view}"] for view in (1, 2)])
        output.loss.backward()
        check(output.loss, witness[f"step{step}_loss"])
        for view in (1, 2):
            check(online[view - 1].grad, witness[f"step{step}_ds{view}"])
        check(objective.centre.mean, witness[f"step{step}_center_after"])


@pytest.mark.parametrize("number", [2, 5])
def test_dino_is_the_cross_entropy_of_centred_teacher_and_student_over_all_pairs(number):
    objective = made(DINO, teacher_temperature=0.05)
    centre = np.zeros(PROTOTYPES)
    for seed in range(3):
        online, target = views(number, seed=seed), views(seed=seed + 50)
        taught = [cosines(z, objective, "target_head") for z in target]
        teacher = [softmax((score - centre) / 0.05) for score in taught]
        expected = mean_of_pairs(teacher, [cosines(z, objective) / 0.1 for z in online])
        assert objective(online=online, target=target).loss.item() == pytest.approx(expected, rel=1e-12)
        centre = 0.9 * centre + 0.1 * np.concatenate(taught).mean(0)
        torch.testing.assert_close(objective.centre.mean, torch.from_numpy(centre))
        with torch.no_grad():
            objective.head.weight += torch.randn(PROTOTYPES, WIDTH, dtype=torch.float64)
        objective.after_step(0.75)


def test_a_teacher_that_is_sure_teaches_the_students_log_probability():
    """By hand: embeddings and prototypes along the axes; the teacher's temperature leaves one prototype."""
    objective = DINO(2, prototypes=2, teacher_temperature=1e-3).double()
    for head in (objective.head, objective.target_head):
        head.weight.data = torch.tensor([[3.0, 0.0], [0.0, 0.2]], dtype=torch.float64)
    view = torch.tensor([[5.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    loss = objective(online=[view, view], target=[view, view]).loss.item()
    assert loss == pytest.approx(math.log(1 + math.exp(-10)), rel=1e-12)  # student: softmax of (1, 0) / 0.1
    loss = objective(online=[view, view], target=[view.flip(0), view.flip(0)]).loss.item()
    assert loss == pytest.approx(math.log(1 + math.exp(10)), rel=1e-12)


def test_the_teachers_temperature_rises_from_epoch_to_epoch():
    objective = made(DINO, teacher_warmup_epochs=4.0)
    one = torch.ones((), dtype=torch.float64)
    found = []
    for epoch in (0, 0.9, 1, 2, 3, 3.5, 4, 100, math.inf):
        objective.epoch = epoch
        found.append(objective._teacher_temperature(one).item())
    assert found == pytest.approx([0.04, 0.04, 0.05, 0.06, 0.07, 0.07, 0.07, 0.07, 0.07])


@pytest.mark.parametrize("kind", [DINO, SwAV])
def test_prototypes_have_no_gradient_while_they_are_frozen(kind):
    settings = {"norm_last_layer": False} if kind is DINO else {}
    for epoch, moves in ((0, False), (1.5, False), (2, True), (math.inf, True)):
        objective, online = made(kind, freeze_epochs=2.0, **settings), leaves(views())
        objective.epoch = epoch
        objective(online=online, target=views(seed=1)).loss.backward()
        trained = list(objective.head.parameters())
        assert len(trained) == 1 + (kind is DINO)
        assert all(weight.grad.any() == moves for weight in trained) and online[0].grad.any()


def test_dinos_teacher_head_follows_the_head_unless_the_step_is_dropped():
    objective = made(DINO)
    before = objective.target_head.weight.clone()
    assert torch.equal(before, objective.head.weight) and not objective.target_head.weight.requires_grad
    with torch.no_grad():
        objective.head.weight += 1
    assert objective.after_step(torch.tensor(0.75, dtype=torch.float64), torch.ones(())) == []
    assert torch.equal(objective.target_head.weight, before)
    objective.after_step(torch.tensor(0.75, dtype=torch.float64), torch.zeros(()))
    torch.testing.assert_close(objective.target_head.weight, 0.75 * before + 0.25 * objective.head.weight)


def test_lengths_of_dinos_prototypes_count_only_if_they_are_trained():
    online, target = views(), views(seed=1)
    plain, trained = made(DINO), made(DINO, norm_last_layer=False)
    losses = [objective(online=online, target=target).loss for objective in (plain, trained)]
    with torch.no_grad():
        plain.head.weight *= 3
        trained.head.length *= 3
    again = [objective.eval()(online=online, target=target).loss for objective in (made(DINO), plain, trained)]
    torch.testing.assert_close(losses[0], losses[1])
    centred = [objective.centre.mean for objective in (plain, trained)]
    torch.testing.assert_close(*centred)
    assert not torch.isclose(again[2], again[1])
    plain.centre.mean.zero_()
    torch.testing.assert_close(plain(online=online, target=target).loss, again[0])


def codes(own: np.ndarray, queued: np.ndarray, epsilon: float, iterations: int) -> np.ndarray:
    """The SwAV paper's Q = Diag(u)·exp(C/ε)·Diag(v) whose prototypes have equal shares of all columns; own rows."""
    kernel = np.exp(np.concatenate([own, queued]).T / epsilon)
    prototypes, images = kernel.shape
    row, column = np.ones(prototypes), np.ones(images)
    for _ in range(iterations):
        row = 1 / prototypes / (kernel @ column)
        column = 1 / images / (kernel.T @ row)
    return (images * row[:, None] * kernel * column).T[: len(own)]


@pytest.mark.parametrize("number", [2, 5])
@pytest.mark.parametrize("queue", [None, 4, 8])
def test_swav_predicts_the_codes_of_the_other_view_balanced_over_batch_and_queue(number, queue):
    objective = made(SwAV, queue_size=queue, queue_start_epoch=1.0)
    empty = np.zeros((0, WIDTH))
    kept = [empty, empty]  # of each view, newest first
    for step in range(5):
        objective.epoch = float(step)
        online = views(number, seed=step)
        queued = kept if queue is not None and len(kept[0]) >= queue else [empty, empty]
        found = [
            codes(cosines(z, objective), cosines(torch.from_numpy(rows[:queue]), objective), 0.05, 3)
            for z, rows in zip(online[:2], queued, strict=True)
        ]
        expected = mean_of_pairs(found, [cosines(z, objective) / 0.1 for z in online])
        assert objective(online=online, target=online[:2]).loss.item() == pytest.approx(expected, rel=1e-11)
        if step >= 1:
            kept = [np.concatenate([z.numpy()[::-1], rows]) for z, rows in zip(online[:2], kept, strict=True)]
    if queue is not None:
        assert objective.queue.taken == 4 * len(online[0])


def test_codes_along_the_axes_are_those_worked_by_hand():
    objective = SwAV(2, prototypes=2, queue_size=None).double()
    objective.head.weight.data = torch.eye(2, dtype=torch.float64)
    view = torch.tensor([[5.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    other = math.exp(-1 / 0.05)  # exp(C/ε) is proportional to [[1, other], [other, 1]], whose rows are balanced already
    code, p = 1 / (1 + other), 1 / (1 + math.exp(-1 / 0.1))
    expected = -code * math.log(p) - (1 - code) * math.log(1 - p)
    assert objective(online=[view, view], target=[view, view]).loss.item() == pytest.approx(expected, rel=1e-12)


def test_codes_share_the_prototypes_equally_and_stay_finite_at_a_small_epsilon():
    for epsilon in (0.05, 1e-3):
        objective = made(SwAV, queue_size=None, sinkhorn_epsilon=epsilon, sinkhorn_iterations=300).float()
        share = objective._shares(torch.stack(views(images=40, dtype=torch.float32)))
        code = objective._balanced(share, share[:, :0])
        assert code.isfinite().all()
        torch.testing.assert_close(code.sum(-1), torch.ones(2, 40))
        if epsilon == 0.05:
            torch.testing.assert_close(code.mean(1), torch.full((2, PROTOTYPES), 1 / PROTOTYPES), rtol=1e-3, atol=0)


def test_prototypes_of_swav_have_length_one_after_a_step_unless_it_is_dropped():
    objective = made(SwAV)
    torch.testing.assert_close(objective.head.weight.norm(dim=1), torch.ones(PROTOTYPES, dtype=torch.float64))
    with torch.no_grad():
        objective.head.weight *= 2
    longer = objective.head.weight.clone()
    objective.after_step(0.9, torch.ones(()))
    assert torch.equal(objective.head.weight, longer)
    assert objective.after_step(0.9, torch.zeros(())) == [objective.head.weight]
    torch.testing.assert_close(objective.head.weight, longer / 2)


def test_an_inactive_queue_is_as_none():
    plain, queued = made(SwAV, queue_size=None), made(SwAV, queue_size=12)
    for seed in range(2):  # two batches of 6 fill it
        losses = [each(online=views(seed=seed), target=views(seed=seed)).loss for each in (plain, queued)]
        assert torch.equal(*losses)
    losses = [each(online=views(seed=3), target=views(seed=9)).loss for each in (plain, queued)]
    assert not torch.isclose(*losses)


@pytest.mark.parametrize("kind", [DINO, SwAV])
def test_a_mixed_view_learns_the_mixture_of_both_images_distributions(kind):
    settings = {"queue_size": None} if kind is SwAV else {"teacher_temperature": 0.05}
    objective, mix = made(kind, **settings).eval(), mixed()
    online, target = views(), views(seed=1)
    if kind is DINO:
        plain = [softmax(cosines(z, objective, "target_head") / 0.05) for z in target]
    else:
        plain = [codes(cosines(z, objective), np.zeros((0, PROTOTYPES)), 0.05, 3) for z in target]
    wanted = []
    for view, q in enumerate(reversed(plain)):
        share = mix.ratio[view].double().numpy()[:, None]
        wanted.insert(0, share * q + (1 - share) * q[mix.partner[view].numpy()])
    expected = mean_of_pairs(wanted, [cosines(z, objective) / 0.1 for z in online])
    assert objective(online=online, target=target, mix=mix).loss.item() == pytest.approx(expected, rel=1e-7)


def entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(p)).sum(-1)


@pytest.mark.parametrize("number", [2, 5])
def test_twist_is_the_mean_over_pairs_of_consistency_sharpness_and_diversity(number):
    objective, online = made(TWIST, entropy=0.7, diversity=1.3), views(number)
    logits = np.concatenate([z.numpy() for z in online]) @ objective.head.weight.detach().numpy().T
    logits = (logits - logits.mean(0)) / np.sqrt(logits.var(0) + EPSILON)
    p = np.split(softmax(logits), number)
    pairs = [(p[one], p[other]) for one in range(2) for other in range(one + 1, number)]
    losses = []
    for one, other in pairs:
        divergence = ((one * np.log(one / other)).sum(1) + (other * np.log(other / one)).sum(1)).mean() / 2
        sharpness = (entropy(one).mean() + entropy(other).mean()) / 2
        diversity = (entropy(one.mean(0)) + entropy(other.mean(0))) / 2
        losses.append(divergence + 0.7 * sharpness - 1.3 * diversity)
    assert len(pairs) == 1 + 2 * (number - 2)
    found = objective(online=online, target=online[:2]).loss.item()
    assert found == pytest.approx(np.mean(losses), rel=1e-12)


def test_two_images_of_two_classes_are_those_worked_by_hand():
    """Standardised, the scores of the first class are 1 and −1, but for ε; the second class's are the opposite."""
    objective = TWIST(2, prototypes=2).double()
    objective.head.weight.data = torch.eye(2, dtype=torch.float64)
    view = torch.tensor([[4.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    p = 1 / (1 + math.exp(-2 * 2 / math.sqrt(4 + EPSILON)))
    expected = -p * math.log(p) - (1 - p) * math.log(1 - p) - math.log(2)
    assert objective(online=[view, view], target=[view, view]).loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", [DINO, TWIST, SwAV])
def test_gradients_are_those_of_finite_differences(kind):
    """Of embeddings and of the trained head, on which SwAV's codes depend, too, without a gradient."""
    objective = made(kind, **({"queue_size": None} if kind is SwAV else {})).eval()

    def loss(weights: Tensor, *online: Tensor) -> Tensor:
        call = {"online": list(online), "target": target}
        return torch.func.functional_call(objective, {"head.weight": weights}, (), call).loss

    target, online = views(images=3, seed=1), leaves(views(3, images=3))
    if kind is SwAV:
        fixed = objective._balanced(share := objective._shares(torch.stack(target)).detach(), share[:, :0])
        objective._codes = lambda views: fixed
    assert torch.autograd.gradcheck(loss, (objective.head.weight, *online))


@pytest.mark.parametrize("kind", [DINO, TWIST, SwAV])
def test_a_head_may_be_ones_own_or_applied_before(kind):
    torch.manual_seed(2)
    own = nn.Linear(WIDTH, PROTOTYPES).double()
    settings = {"queue_size": None} if kind is SwAV else {}
    online, target = views(3), views(seed=1)
    with_module = made(kind, head=own, **settings)(online=online, target=target).loss
    without = kind(PROTOTYPES, head=False, **settings)
    assert not list(without.parameters())
    scores = [[own(z) for z in branch] for branch in (online, target)]
    torch.testing.assert_close(with_module, without(online=scores[0], target=scores[1]).loss)


class Encoder(nn.Module):
    """With the objective's head beside it, for DistributedDataParallel and the optimizer."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.layer, self.head = nn.Linear(8, WIDTH).double(), head

    def forward(self, *views: Tensor) -> list[Tensor]:
        return [self.layer(view) for view in views]


def head_beside_the_encoder(name: str) -> list[Tensor]:
    """Gradients of all weights, from this rank's part of the images."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    objective = made(getattr(originals, name))
    torch.manual_seed(3)
    encoder = Encoder(objective.head)
    model = DistributedDataParallel(encoder) if size > 1 else encoder
    part = slice(12 * rank // size, 12 * (rank + 1) // size)
    online = model(*(view[part] for view in views(3, images=12, width=8)))
    objective(online=online, target=[z[part] for z in views(images=12, seed=1)]).loss.backward()
    return [weight.grad for weight in encoder.parameters()]


@pytest.mark.parametrize("kind", [DINO, TWIST, SwAV])
def test_a_head_registered_beside_the_encoder_is_averaged_by_ddp(workers, kind):
    for found in workers(2).run(head_beside_the_encoder, kind.__name__):
        for gradient, expected in zip(found, head_beside_the_encoder(kind.__name__), strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"method": "dino", "target": "stop_gradient"}, "'stop_gradient' is refused for DINO: a teacher that copies"),
        ({"method": "twist", "target": "momentum"}, "'momentum' is refused for TWIST: .*; use weight_sharing"),
        ({"method": "swav", "target": "weight_sharing"}, "'weight_sharing' is refused for SwAV: .*; use momentum or"),
        ({"method": "swav", "form": "gradient"}, "form = gradient: swav has no gradient form; leave it out"),
        ({"method": "swav", "head": False}, "queue_size 3840 needs a head; use None, or head=True"),
        ({"method": "swav", "sinkhorn_epsilon": 0}, "sinkhorn_epsilon 0 is out of range"),
        ({"method": "dino", "centre_momentum": 1.0}, "centre_momentum 1.0 is outside"),
    ],
)
def test_what_does_not_work_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        build(width=8, **call)


def test_a_head_must_be_a_module():
    with pytest.raises(TypeError, match="head 'linear' is not a module; use True"):
        DINO(8, head="linear")
