"""Where ZeRO keeps the pieces: they make up the network, and what would break that is refused."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.quiet import quiet_deepspeed
from unigrad_fast.training.fragments import PartitionedFragments, build_fragments
from unigrad_fast.training.optimizers import SGD


def build(zero: dict, **top) -> tuple:
    """Fragments of a small network with two parameter groups and tensors that no number of ranks divides."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5, 7), nn.Linear(7, 3))
    matrices, vectors = ([p for p in module.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    optimizer = SGD([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        **top,
    }
    engine, _, _, _ = quiet_deepspeed().initialize(model=module, optimizer=optimizer, config=settings)
    return engine, build_fragments(engine, optimizer)


def held(stage: int) -> dict[str, tuple[int, list[float]]]:
    _, fragments = build({"stage": stage})
    return {f.name: (f.start, f.tensor.reshape(-1).tolist()) for f in fragments.parameters()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_pieces_of_all_ranks_make_up_the_network(workers, stage, ranks):
    (whole,) = workers(1).run(held, 0)
    pieces = workers(ranks).run(held, stage)
    if stage == 0:
        assert pieces == [whole] * ranks
        return
    for name, (_, values) in whole.items():
        found = sorted(piece[name] for piece in pieces if name in piece)
        assert [value for _, part in found for value in part] == values


def refusal(zero: dict, top: dict) -> str:
    try:
        build(zero, **top)
    except UserError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("zero", "top", "said"),
    [
        ({"stage": 2, "round_robin_gradients": True}, {}, "round_robin_gradients is on: it reorders"),
        ({"stage": 1, "elastic_checkpoint": True}, {}, "elastic_checkpoint is on: it supports only Adam's state"),
        ({"stage": 1}, {"checkpoint": {"load_universal": True}}, "load_universal is on: it supports only Adam's state"),
    ],
)
def test_settings_that_move_the_pieces_are_refused_with_the_reason(workers, zero, top, said):
    for message in workers(2).run(refusal, zero, top):
        assert said in message


def shifted(stage: int) -> str:
    """What is said when a version of DeepSpeed keeps the pieces elsewhere, on one rank of two."""
    engine, fragments = build({"stage": stage})
    original = PartitionedFragments.parameters

    def wrong(self):
        for f in original(self):
            moved = torch.distributed.get_rank() == 1 and f.tensor.numel() > 1
            yield type(f)(f.name, f.shape, f.start, f.tensor.flip(0) if moved else f.tensor, f.replicated)

    with mock.patch.object(PartitionedFragments, "parameters", wrong):
        try:
            build_fragments(engine, fragments.optimizer)
        except UserError as error:
            return str(error)
    return "accepted"


def gone(stage: int) -> str:
    engine, fragments = build({"stage": stage})
    del engine.optimizer.single_partition_of_fp32_groups
    try:
        build_fragments(engine, fragments.optimizer)
    except UserError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(("change", "said"), [(shifted, "differs from the parameter"), (gone, "single_partition")])
def test_another_layout_of_deepspeed_is_refused_at_start_up_on_all_ranks(workers, change, said):
    for message in workers(2).run(change, 1):
        assert said in message and "install deepspeed==0.19.8" in message
