"""Compiles the kernels that the checks launch into Triton's cache, in a process per core, before anything is timed.

The steps are walked on tensors without content (see `dry_run`). Every call of one of our operators is noted, with the
shapes of its arguments, and its launcher then compiles, for the GPU's architecture, what a launch would have compiled.
What is not noted is compiled when a check first launches it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import pkgutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple, TypeAlias
from unittest import mock

import torch
from torch import Tensor, nn

from unigrad_fast import kernels as package
from unigrad_fast.benchmarks.device_check import graph, kernels, norm, product
from unigrad_fast.benchmarks.device_check.engine import available_engine
from unigrad_fast.benchmarks.device_check.step import ON_A_GPU, Size
from unigrad_fast.kernels.declaration import Operator
from unigrad_fast.kernels.dispatch import as_on_cuda
from unigrad_fast.runtime.torch_private import FakeTensorMode, TorchDispatchMode, tree_map

CPU = torch.device("cpu")
Walk: TypeAlias = "partial[None]"


class Shape(NamedTuple):
    """A tensor without content."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class Call(NamedTuple):
    """A call of one of our operators, with a `Shape` for each tensor."""

    operator: str
    arguments: tuple
    keywords: dict


class Noted(TorchDispatchMode):
    """Notes the calls of our operators that are dispatched inside, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[bytes, Call] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        space, _, name = operator._schema.name.partition("::")
        if space == "unigrad_fast":
            call = Call(name, *tree_map(shape_of, (args, kwargs or {})))
            self.calls.setdefault(pickle.dumps(call), call)
        return operator(*args, **(kwargs or {}))


def shape_of(leaf: object) -> object:
    return Shape(tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


@contextmanager
def noted() -> Iterator[Noted]:
    """A context in which nothing is computed, CPU tensors stand for a GPU's, and calls are noted."""
    stays = mock.patch.object(nn.Module, "to", lambda module, *_, **__: module)  # a parameter here cannot be replaced
    with stays, as_on_cuda(), FakeTensorMode(allow_non_fake_inputs=True), Noted() as mode:
        yield mode


def training_step(size: Size, stem: str = "imagenet", precision: str = "bf16") -> None:
    """Two steps of a trainer."""
    from unigrad_fast.dry_run.walking import prepared

    config = graph.configured(size, stem, cuda_graph=False, precision=precision)
    with available_engine(), prepared(config, 1) as (trainer, batches):
        for step in range(2):
            trainer.step(step, iter(batches))


def kernels_once(arithmetic: str, views: int, images: int, width: int) -> None:
    kernels.kernels_once(kernels.embeddings(CPU, views, images, width, torch.float32), arithmetic)


def objective(images: int, width: int) -> None:
    z = kernels.embeddings(CPU, 2, images, width, torch.bfloat16)
    kernels.steps(kernels.fresh_objective(CPU, width, "bf16"), z, 2)


def layer(case: norm.Case, shape: norm.Shape, dtype: torch.dtype = torch.bfloat16) -> None:
    inputs = norm.drawn(case, shape, dtype, CPU)
    module, _ = norm.norms(inputs.x.shape[1], CPU)
    norm.step(norm.ours, module, inputs)


def walks() -> list[Walk]:
    """What the checks of a GPU launch, the longest first."""
    return [
        *(partial(training_step, size) for size in ON_A_GPU),
        partial(training_step, ON_A_GPU[0], precision="fp16"),
        partial(training_step, graph.SMALL, "small"),
        *(partial(kernels_once, name, *size) for name in kernels.GATES for size in kernels.SIZES_ON_A_GPU),
        *(partial(objective, images, width) for width, images in kernels.SHAPES),
        *(partial(layer, *each) for each in norm.TIMED),
        *(partial(product.compute, each, product.IMAGES, CPU) for each in product.RESNET50),
        *(partial(product.compute, each, 16, CPU, dtype) for each in product.CHECKED for dtype in norm.DTYPES_ON_A_GPU),
        *(partial(layer, case, norm.CHECKED, dtype) for case in norm.CASES for dtype in norm.DTYPES_ON_A_GPU),
    ]


def calls_of(walk: Walk) -> list[Call]:
    with noted() as mode:
        walk()
    return list(mode.calls.values())


@cache
def operators() -> dict[str, Operator]:
    """Our operators by name."""
    modules = [
        importlib.import_module(f"{package.__name__}.{each.name}")
        for each in pkgutil.iter_modules(package.__path__)
        if each.name.endswith("ops")
    ]
    found = [each for module in modules for each in vars(module).values() if isinstance(each, Operator)]
    return {operator.registered.__name__: operator for operator in found}


def compile_call(call: Call, architecture: int) -> str:
    """Compile what the call would launch; returns why it could not, or nothing."""
    from unigrad_fast.benchmarks.counts.compiled import compiling_for

    operator = operators()[call.operator]
    if operator.kernel is None:
        return ""
    arguments, keywords = tree_map(
        lambda leaf: leaf.tensor() if isinstance(leaf, Shape) else leaf,
        (call.arguments, call.keywords),
        is_leaf=lambda leaf: isinstance(leaf, Shape),
    )
    try:
        with as_on_cuda(), torch.no_grad(), compiling_for(architecture):
            operator.compute(*arguments, **keywords)
    except Exception as error:
        return shown(call.operator, error)
    return ""


def fill(architecture: int, processes: int, chosen: list[Walk] | None = None) -> tuple[int, list[str]]:
    """Fill Triton's cache; returns the number of calls, and what went wrong.

    Args:
        architecture: 90 is sm_90.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=prepare) as pool:
        walked = list(pool.map(attempted, walks() if chosen is None else chosen))
        calls = {pickle.dumps(call): call for found, _ in walked for call in found}
        errors = pool.map(partial(compile_call, architecture=architecture), calls.values())
        return len(calls), [error for error in (*(error for _, error in walked), *errors) if error]


def attempted(walk: Walk) -> tuple[list[Call], str]:
    """A walk's calls, or none and why."""
    try:
        return calls_of(walk), ""
    except Exception as error:
        return [], shown(walk.func.__name__, error)


def shown(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {error}".replace("\n", " ")[:200]


def prepare() -> None:
    """In each process: compile, whatever this process does; and leave the cores to the others."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.pop("UNIGRAD_KERNELS", None)
    torch.set_num_threads(1)
