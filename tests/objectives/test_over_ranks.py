"""UniGrad on several ranks: unequal batches, evaluation on one rank, more images than agreed on, feature deviation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_unigrad import leaves, views

from unigrad_fast.objectives import ObjectiveOutput, UniGrad

SPLITS = [(6, 6), (6, 3), (0, 6), (4, 0), (0, 0), (1, 2)]  # images of rank 0 and 1, step by step


def step(objective: UniGrad, seed: int, images: slice, spoiled: bool = False) -> tuple[ObjectiveOutput, torch.Tensor]:
    """The output for some images of a batch of 12, and the gradient of the first view times the images."""
    online = leaves([view[images] for view in views(images=12, seed=seed)])
    target = [view[images] for view in views(images=12, seed=seed + 50)]
    if spoiled:
        target[0][0, 0] = torch.nan
    output = objective(online=online, target=target)
    output.loss.backward()
    return output, online[0].grad * len(online[0])


def unequal_steps(source: str) -> list[tuple[torch.Tensor, ...]]:
    """F, updates, gradient, feature deviation after each step, and the loss of an evaluation on rank 0 alone."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    objective, found = UniGrad(width=16, correlation_source=source), []
    for seed, (first, second) in enumerate(SPLITS):
        own = [slice(0, first), slice(first, first + second)][rank] if ranks > 1 else slice(0, first + second)
        output, gradient = step(objective, seed, own)
        std = output.feature_std() if first + second else torch.zeros(())
        assert output.nonfinite == 0
        found.append((objective.correlation.clone(), objective.updates.clone(), gradient, std))
        if rank == 0:  # the others are elsewhere
            evaluated, _ = step(objective.eval(), seed + 20, slice(0, 5))
            found[-1] += (evaluated.loss.detach(), evaluated.feature_std())
            assert torch.equal(objective.correlation, found[-1][0])
            objective.train()
    return found


@pytest.mark.parametrize("source", ["target", "online"])
def test_ranks_may_differ_in_images_and_one_may_evaluate_alone(workers, source):
    together, (first, second) = unequal_steps(source), workers(2).run(unequal_steps, source)
    assert [number.item() for _, number, *_ in first] == [1, 2, 3, 4, 4, 5]
    for whole, one, other in zip(together, first, second, strict=True):
        assert torch.equal(one[0], other[0]) and one[1] == other[1] == whole[1]
        torch.testing.assert_close(one[0], whole[0], rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(torch.cat([one[2], other[2]]), whole[2], rtol=1e-10, atol=1e-14)
        assert one[3] == other[3] and one[3].item() == pytest.approx(whole[3].item(), rel=1e-6)
        assert [each.item() for each in one[4:]] == pytest.approx([each.item() for each in whole[4:]], rel=1e-10)


def too_many_images() -> tuple[str, float, bool, int]:
    rank, message = dist.get_rank(), ""
    objective = UniGrad(width=16)
    step(objective, 0, slice(0, 4 + rank))  # 5 is the most
    before, nonfinite = objective.correlation.clone(), -1.0
    try:
        nonfinite = step(objective, 1, slice(0, 5 + rank))[0].nonfinite.item()
    except ValueError as error:
        message = str(error)
    unchanged = torch.equal(objective.correlation, before)
    step(objective, 2, slice(0, 5))  # all ranks go on together
    other = UniGrad(width=16, most_images=6)
    step(other, 0, slice(0, 4 + rank))
    step(other, 1, slice(0, 5 + rank))
    assert other.updates == 2
    return message, nonfinite, unchanged, objective.updates.item()


def test_more_images_than_agreed_on_are_refused_and_the_other_ranks_drop_the_step(workers):
    (_, flag, *rest), (message, *others) = workers(2).run(too_many_images)
    assert flag == 1 and rest == [True, 2] and others[1:] == [True, 2]
    assert "this rank has 6 images, more than 5" in message and "UniGrad(most_images=6)" in message


def state_on_one_rank() -> str:
    objective, other = UniGrad(width=16), UniGrad(width=16)
    step(other, 0, slice(0, 3))
    if dist.get_rank() == 0:
        objective.load_state_dict(other.state_dict())
    with pytest.raises(ValueError) as refused:
        step(objective, 1, slice(0, 3))
    return str(refused.value)


def test_a_state_dict_that_only_one_rank_loaded_is_refused_on_all(workers):
    for message in workers(2).run(state_on_one_rank):
        assert "differs between ranks: updated with [1, 0] batches" in message
        assert "load its state dict on every rank" in message


def compiled_steps() -> torch.Tensor:
    plain, cold = UniGrad(width=16), UniGrad(width=16, most_images=6)
    with pytest.raises(Exception, match="most_images"):
        torch.compile(UniGrad(width=16), fullgraph=True, backend="eager")(online=views(), target=views(seed=1))
    torch.compiler.reset()
    call = torch.compile(cold, fullgraph=True, backend="eager")
    rank = dist.get_rank()
    for seed in range(2):
        batch = {"online": views(seed=seed + rank), "target": views(seed=seed + rank + 10)}
        expected, found = plain(**batch), call(**batch)
        assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
        torch.testing.assert_close(found.feature_std(), expected.feature_std())
    torch.testing.assert_close(cold.correlation, plain.correlation, rtol=1e-12, atol=1e-15)
    return cold.correlation


def test_a_compiled_objective_takes_the_batches_of_all_ranks(workers):
    first, second = workers(2).run(compiled_steps)
    assert torch.equal(first, second)
