"""UniGrad inside what people wrap models in: DDP, FSDP, averaged and copied models, scalers, checkpointing."""

from __future__ import annotations

import copy
import io
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from test_unigrad import views
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from unigrad_fast.objectives import ObjectiveOutput, UniGrad

IMAGES, WIDTH = 12, 8


class Model(nn.Module):
    """An encoder with the objective inside."""

    def __init__(self, process_group: dist.ProcessGroup | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, WIDTH, bias=False)).double()
        self.register_buffer("seen", torch.zeros(()))
        self.objective = UniGrad(WIDTH, process_group=process_group)

    def forward(self, views: list[Tensor]) -> ObjectiveOutput:
        online = [self.encoder(view) for view in views]
        return self.objective(online=online, target=[z.detach() for z in online])


def batch(seed: int) -> list[Tensor]:
    """This rank's part of a batch of all ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    part = slice(rank * IMAGES // ranks, (rank + 1) * IMAGES // ranks)
    return [view[part] for view in views(images=IMAGES, seed=seed)]


def train(model: nn.Module, steps: int = 3, accumulation: int = 2) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(0, steps * accumulation, accumulation):
        for micro in range(accumulation):
            last = micro == accumulation - 1
            with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                loss = model(batch(seed + micro)).loss
                loss /= accumulation
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def wrapped(kind: str) -> tuple[dict[str, Tensor], list[str]]:
    """The state of a wrapped model after some steps, and the buffers that its wrapper sends around."""
    if kind == "fsdp":
        model = Model()
        fully_shard(model.encoder)
        train(fully_shard(model))
        full = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(model, options=full)
        other = Model()
        fully_shard(fully_shard(other.encoder) and other)
        set_model_state_dict(other, copy.deepcopy(state), options=full)
        assert torch.equal(other.objective.correlation, model.objective.correlation) and other.objective.updates == 6
        return state, []
    unused = kind == "ddp that looks for unused parameters"
    model = train(DistributedDataParallel(Model(dist.group.WORLD), find_unused_parameters=unused))
    return model.module.state_dict(), [name for name, _ in model.module.named_buffers()]


@pytest.mark.parametrize("kind", ["ddp", "ddp that looks for unused parameters", "fsdp"])
def test_a_wrapped_model_with_the_objective_inside_trains_as_one_process_does(workers, kind):
    expected = train(Model()).state_dict()
    (first, buffers), (second, _) = workers(2).run(wrapped, kind)
    assert buffers in ([], ["seen"]) and first.keys() == second.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-12)


def copies_with_a_group() -> list[str]:
    model = train(Model(dist.group.WORLD), steps=1)
    copied = copy.deepcopy(model)
    assert copied.objective.process_group is dist.group.WORLD
    file = io.BytesIO()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.save(model, file)
    restored = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert restored.objective.process_group is None and model.objective.process_group is dist.group.WORLD
    states = [train(each, steps=1).state_dict() for each in (model, copied, restored)]
    assert all(torch.equal(states[0][name], state[name]) for state in states[1:] for name in state)
    return [str(each.message) for each in warned]


def test_a_model_with_a_process_group_is_copied_with_it_and_pickled_without(workers):
    for messages in workers(2).run(copies_with_a_group):
        assert len(messages) == 1 and "the loaded UniGrad has the default one" in messages[0]


def test_an_averaged_model_follows_the_weights_and_leaves_the_correlation_of_its_copy():
    model = Model()
    averaged = AveragedModel(model, avg_fn=lambda average, new, number: new.clone())
    train(model, steps=1)
    averaged.update_parameters(model)
    train(model, steps=1)
    averaged.update_parameters(model)
    assert torch.equal(averaged.module.encoder[0].weight, model.encoder[0].weight)
    assert averaged.module.objective.updates == 0 and model.objective.updates == 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_around_the_objective_is_refused_with_the_remedy(reentrant):
    model, inside = Model(), Model()
    view = [each.requires_grad_() for each in batch(0)]
    loss = checkpoint(lambda *views: model([*views]).loss, *view, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="twice; call the objective outside of torch"):
        loss.backward()
    assert model.objective.updates == 1
    online = [checkpoint(inside.encoder, each, use_reentrant=reentrant) for each in view]
    inside.objective(online=online, target=[z.detach() for z in online]).loss.backward()
    plain = Model()
    plain(batch(0)).loss.backward()
    torch.testing.assert_close(inside.encoder[0].weight.grad, plain.encoder[0].weight.grad)
    evaluated = checkpoint(lambda *views: model.eval()([*views]).loss, *view, use_reentrant=reentrant)
    evaluated.backward()  # F does not change in evaluation mode
    assert model.objective.updates == 1


def test_a_gradient_scaler_scales_and_drops_steps_as_with_any_loss():
    plain, scaled = Model(), Model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, scaled)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain(batch(0)).loss.backward()
    optimizers[0].step()
    scaler.scale(scaled(batch(0)).loss).backward()
    scaler.step(optimizers[1])
    scaler.update()
    for ours, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    before = scaled.encoder[0].weight.clone()
    scaler.scale(scaled(batch(1)).loss * torch.inf).backward()
    scaler.step(optimizers[1])
    scaler.update()
    assert torch.equal(scaled.encoder[0].weight, before) and scaler.get_scale() == 512
