"""The objective on the Triton path, against itself in float64, which torch computes."""

import copy
from dataclasses import dataclass

import pytest
import torch

from unigrad_fast.kernels import heuristics, unit_embeddings, update_correlation_
from unigrad_fast.kernels.reference import tail_rows
from unigrad_fast.objectives import UniGrad, ranks

GATES = {torch.float32: 1e-6, torch.float16: 1e-3}  # relative norm of the gradient's error


@dataclass
class Mixed:
    partner: torch.Tensor
    ratio: torch.Tensor


def views(count: int, images: int, width: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(images, width, generator=generator).requires_grad_() for _ in range(count)]


def mixed(images: int, seed: int) -> Mixed:
    generator = torch.Generator().manual_seed(seed)
    partner = torch.stack([torch.randperm(images, generator=generator) for _ in range(2)])
    return Mixed(partner, torch.rand(2, images, generator=generator))


def in_double(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


# Many views once for each dtype and each way, by default once: the interpreter takes long.
@pytest.mark.parametrize(
    ("dtype", "count", "mix"),
    [
        *((dtype, 2, mix) for dtype in (torch.float32, torch.float16) for mix in (False, True)),
        pytest.param(torch.float32, 8, False, marks=pytest.mark.slow),
        (torch.float16, 8, True),
    ],
)
def test_three_steps_agree_with_float64(dtype, count, mix):
    images, width = 5, 136
    objective, exact = UniGrad(width, compute_dtype=dtype), UniGrad(width)
    for step in range(3):
        online, target = views(count, images, width, step), views(2, images, width, step + 100)
        online64, target64 = in_double(online), in_double(target)
        with_mix = mixed(images, step) if mix else None
        output = objective(online=online, target=target, mix=with_mix)
        expected = exact(online=online64, target=target64, mix=with_mix)
        output.loss.backward()
        expected.loss.backward()
        gate = GATES[dtype]
        assert distance(torch.cat([z.grad for z in online]), torch.cat([z.grad for z in online64])) < gate
        assert output.loss.item() == pytest.approx(expected.loss.item(), rel=10 * gate, abs=gate)
        for name, value in expected.metrics.items():
            assert output.metrics[name].item() == pytest.approx(value.item(), rel=10 * gate, abs=gate), name
        assert output.nonfinite == 0
    assert objective.updates == exact.updates == 3
    assert torch.equal(objective.correlation, objective.correlation.T)
    assert distance(objective.correlation, exact.correlation) < gate


def test_the_correlation_is_whole_for_whoever_asks_and_the_next_step_sees_what_was_written_to_it():
    width = 2 * heuristics.TRIANGLE + 8
    first, second = UniGrad(width, compute_dtype=torch.float16), UniGrad(width, compute_dtype=torch.float16)
    for seed in range(2):
        first(online=views(2, 5, width, seed), target=views(2, 5, width, seed + 10))
    state = first.state_dict()
    assert torch.equal(state["average.correlation"], state["average.correlation"].T)
    assert torch.equal(copy.deepcopy(first).average.correlation, state["average.correlation"])

    second(online=views(2, 5, width, 7), target=views(2, 5, width, 8))  # has a working copy, of another F
    for name, tensor in second.state_dict().items():
        tensor.copy_(state[name])
    outputs = []
    for objective in (first, second):
        online = views(2, 5, width, 3)
        output = objective(online=online, target=views(2, 5, width, 13))
        output.loss.backward()
        outputs.append([output.loss, objective.correlation.clone(), *(z.grad for z in online)])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_all_ways_to_the_correlation_give_the_whole_of_it_again_and_again():
    width = 2 * heuristics.TRIANGLE
    objective = UniGrad(width, compute_dtype=torch.float16)
    for seed in range(2):
        objective(online=views(2, 5, width, seed), target=views(2, 5, width, seed + 10))
        for found in (objective.correlation, objective.to("cpu").average.correlation):
            assert torch.equal(found, found.T)
        # What moves F without the module's knowledge, as a replayed CUDA graph does.
        average, unit = objective.average, torch.nn.functional.normalize(torch.randn(4, width), dim=-1).half()
        update_correlation_(average.correlation, unit, decay=0.5, count=4, working=average._working)
        state = objective.state_dict()["average.correlation"]
        assert torch.equal(state, state.T)


def test_full_precision_between_two_steps_in_half_precision_changes_neither():
    one, two = UniGrad(40), UniGrad(40)
    for seed, dtype in enumerate((torch.float16, torch.float32, torch.float16)):
        batch = {"online": views(2, 5, 40, seed), "target": views(2, 5, 40, seed + 10)}
        one.compute_dtype = two.compute_dtype = dtype
        if dtype == torch.float32:
            one.eval()(**batch)
            one.train()
        else:
            losses = [each(**batch).loss for each in (one, two)]
    assert losses[0] == losses[1] and torch.equal(one.correlation, two.correlation)


def test_evaluation_uses_the_correlation_and_leaves_it():
    objective = UniGrad(40, compute_dtype=torch.float16)
    objective(online=views(2, 5, 40, 0), target=views(2, 5, 40, 1))
    before = objective.correlation.clone()
    loss = objective.eval()(online=views(2, 5, 40, 0), target=views(2, 5, 40, 1)).loss
    assert torch.equal(objective.correlation, before) and objective.updates == 1
    assert loss.item() == pytest.approx(objective(online=views(2, 5, 40, 0), target=views(2, 5, 40, 1)).loss.item())


@pytest.mark.parametrize("branch", ["online", "target"])
def test_a_non_finite_row_is_reported_and_a_target_row_holds_the_correlation(branch):
    objective = UniGrad(40, compute_dtype=torch.float16)
    objective(online=views(2, 5, 40, 0), target=views(2, 5, 40, 1))
    before = objective.correlation.clone()
    inputs = {"online": views(2, 5, 40, 2), "target": views(2, 5, 40, 3)}
    with torch.no_grad():
        inputs[branch][1][4, 3] = torch.inf
    output = objective(**inputs)
    output.loss.backward()
    assert output.nonfinite == 1 and torch.isfinite(output.loss)
    assert all(torch.isfinite(z.grad).all() for z in inputs["online"])
    assert torch.equal(objective.correlation, before) == (branch == "target")
    assert objective.updates == (1 if branch == "target" else 2)


def test_bf16_is_refused_by_the_interpreter():
    with pytest.raises(ValueError, match="interpreter cannot compute bf16; use fp16"):
        UniGrad(40, compute_dtype=torch.bfloat16)(online=views(2, 5, 40, 0), target=views(2, 5, 40, 1))


def test_autocast_decides_the_dtype_of_the_product():
    objective = UniGrad(40)
    with torch.autocast("cpu", torch.float16):
        online = views(2, 5, 40, 0)
        objective(online=online, target=[view.half() for view in views(2, 5, 40, 1)]).loss.backward()
    assert online[0].grad.dtype == torch.float32
    exact = in_double(views(2, 5, 40, 0))
    UniGrad(40)(online=exact, target=in_double([view.half() for view in views(2, 5, 40, 1)])).loss.backward()
    assert 1e-5 < distance(online[0].grad, exact[0].grad) < GATES[torch.float16]


def test_the_online_branch_decides_the_dtype_of_the_product():
    objective, online, target = UniGrad(40), views(2, 5, 40, 0), views(2, 5, 40, 1)
    objective(online=[view.half() for view in online], target=target)
    assert objective.average._working.dtype == torch.float16
    other = UniGrad(40)
    other(online=online, target=[view.half() for view in target])
    assert other.average._working is None


def test_a_rank_without_images_takes_those_of_the_others():
    objective = UniGrad(40, compute_dtype=torch.float16)
    objective(online=views(2, 5, 40, 0), target=views(2, 5, 40, 1))
    theirs, _ = unit_embeddings(
        views(2, 5, 40, 2), torch.float16, raised=torch.zeros(2, dtype=torch.int32), spare=tail_rows(40)
    )
    with pytest.MonkeyPatch.context() as patch:  # the other rank, which has five images
        patch.setattr(ranks, "size", lambda group: 2)
        patch.setattr(ranks, "agree_on_most_images", lambda *_: 5)
        patch.setattr(ranks, "begin_gather", lambda own, group, asynchronous: (torch.cat([own, theirs]), None))
        output = objective(online=views(2, 0, 40, 0), target=views(2, 0, 40, 1))
    assert objective.updates == 2 and output.loss == 0 and output.nonfinite == 0
    assert torch.isfinite(objective.correlation).all()
