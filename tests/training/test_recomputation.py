"""`engine.recompute_projector`: the same bits from less memory, without a further product or meeting of ranks."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from test_gate import nan_image
from thin import thin
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_state import batches, changed, make_trainer, small_config, state

from unigrad_fast.config import Model, Projector, resolve
from unigrad_fast.networks.encoder import Encoder, build_encoder
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.training.same_run import contradictions

MULTICROP = {"data__recipe": "multicrop", "data__local_views": {"size": 16}}
SPOILED = 1  # a step in which a rank has a NaN in an image


def trained(images: str, settings: dict) -> tuple[dict, list[Tensor]]:
    """What differs after two steps with the switch and without; the dropped steps of both."""
    states, dropped = [], []
    for on in (False, True):
        trainer = make_trainer(small_config(images, engine__recompute_projector=on, **settings), stages=1)
        stream = batches(trainer)
        for step in range(2):
            trainer.step(step, chain(nan_image(trainer, stream)[0], stream) if step == SPOILED else stream)
        states.append(state(trainer))
        dropped.append(trainer.gate.total)
    return changed(*states), dropped


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {"engine__precision": "bf16"} | MULTICROP),
        (2, {"engine__precision": "bf16", "engine__zero_stage": 2} | MULTICROP),
    ],
)
def test_a_run_is_the_same_bit_for_bit(images, workers, ranks, settings):
    for differing, dropped in workers(ranks).run(trained, str(images), settings):
        assert differing == {}
        assert dropped == [ranks - 1] * 2  # the NaN is rank 1's


class Products(TorchDispatchMode):
    """Names of products of matrices and of collectives, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator._schema.name
        if name in ("aten::mm", "aten::addmm") or name.startswith("c10d::"):
            self.names.append(name)
        return operator(*args, **(kwargs or {}))


def encoded(one_pass: bool, on: bool) -> tuple[list[str], list[Tensor]]:
    """Forward and backward over two sizes of views."""
    with thin():
        encoder = build_encoder(Model(backbone="resnet18", projector=Projector(width=24)), 0, torch.device("cpu"))
    encoder.one_pass = one_pass  # as on a GPU
    if on:
        encoder.recompute_projector()
    generator = torch.Generator().manual_seed(dist.get_rank())
    views = [torch.randn(3, 3, size, size, generator=generator) for size in (32, 32, 16, 16)]
    with Products() as products:
        torch.stack(encoder(views)).square().sum().backward()
    return products.names, [p.grad for p in encoder.parameters()] + list(encoder.buffers())


def both(one_pass: bool) -> tuple[bool, bool]:
    names, tensors = zip(*(encoded(one_pass, on) for on in (False, True)), strict=True)
    return names[0] == names[1], all(map(torch.equal, *tensors))


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_product_and_no_collective_is_done_twice(workers, ranks, one_pass):
    """Passes of several groups and of one follow each other, and their repetitions come in the other order."""
    assert workers(ranks).run(both, one_pass) == [(True, True)] * ranks


def kept(projector: torch.nn.Module, x: Tensor) -> int:
    """Bytes that a forward pass under autocast keeps for backward, parameters and buffers aside."""
    own = {t.untyped_storage().data_ptr() for t in chain(projector.parameters(), projector.buffers())}
    sizes: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            sizes[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        y = projector(x)
    assert y.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in sizes.values())


def test_kept_are_the_input_and_the_products_of_the_hidden_layers():
    M, D, C = 12, 128, 256
    with thin():
        encoder = Encoder(Model(backbone="resnet18", projector=Projector(width=C)))
    x = torch.randn(M, D, dtype=torch.bfloat16, requires_grad=True)
    without = kept(encoder.projector, x)
    encoder.recompute_projector()
    assert kept(encoder.projector, x) == 2 * M * (D + 2 * C)
    statistics = 4 * 2 * 2 * C  # mean and deviation of two norms
    assert without == 2 * M * (D + 4 * C) + 2 * (D * C + 2 * C**2) + statistics


def test_backward_may_come_twice():
    with thin():
        encoder = build_encoder(Model(backbone="resnet18", projector=Projector(width=8)), 0, torch.device("cpu"))
    encoder.recompute_projector()
    weights = list(encoder.projector.parameters())
    y = encoder([torch.randn(4, 3, 32, 32)])[0].square().sum()
    first = torch.autograd.grad(y, weights, retain_graph=True)
    buffers = [buffer.clone() for buffer in encoder.buffers()]
    assert all(map(torch.equal, first, torch.autograd.grad(y, weights)))
    assert all(map(torch.equal, buffers, encoder.buffers()))


def test_a_run_may_go_on_with_and_without():
    config = resolve(overrides={"engine": {"recompute_projector": True}})
    assert contradictions(config, resolve().model_dump(mode="json"), "the run") == []


def test_compiled_networks_are_refused():
    with pytest.raises(UserError, match=r"engine\.recompute_projector = true: does not work with engine\.compile true"):
        resolve(overrides={"engine": {"recompute_projector": True, "compile": True}})
