"""Counts the operators of a step one by one, and the memory that they take."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.flop_counter import flop_registry

from unigrad_fast.dry_run.walked import TRANSIENT, Collective, Walk, Work
from unigrad_fast.kernels import heuristics
from unigrad_fast.kernels.batch_norm_reference import pooled_size
from unigrad_fast.networks import batch_norm, lockstep
from unigrad_fast.objectives import ranks as objective_ranks
from unigrad_fast.runtime.collectives import counted
from unigrad_fast.runtime.torch_private import TorchDispatchMode, tree_leaves
from unigrad_fast.training import checkpoint, engine
from unigrad_fast.training.deepspeed_private import gradient_parts
from unigrad_fast.training.telemetry.phases import PHASES, PhaseClock
from unigrad_fast.training.trainer import Trainer

# Operators that launch no kernel: views, allocations, and queries about a tensor.
VIEWS = {
    "alias", "as_strided", "as_strided_", "chunk", "detach", "expand", "permute", "promote_types", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    "_unsafe_view", "_is_mkldnn_fp16_supported", "empty", "empty_like", "new_empty", "new_empty_strided",
    "empty_strided", "set_", "lift_fresh", "_reshape_alias", "is_same_size",
}  # fmt: skip
ATTRIBUTES = {"device", "numel", "sym_size"}  # operators for tensors without content alone

# Functions that communicate, by the owner of their collectives; all others are of weights and gradients.
EXCHANGES = {
    "objective": (objective_ranks, "begin_gather", "exchange_columns"),
    "norms": (batch_norm, "gathered", "summed_"),
}

# Functions that take the host's time besides the calls of other kinds inside them, by the kind that this is.
AROUND = {
    "norm": (batch_norm.GroupedBatchNorm, "_train"),
    "norm of backward": (batch_norm._GroupedBatchNorm, "backward"),
    "gather in lockstep": (lockstep, "_gather"),
}


class Count(TorchDispatchMode):
    """Counts every operator that is dispatched inside."""

    def __init__(self, found: Walk, trainer: Trainer):
        super().__init__()
        self.found, self.ranks = found, found.ranks
        self.phase = "data"
        self.trainer, self.persistent = trainer, _persistent(trainer)
        self.memory = Memory(self.persistent)
        self._exchanging = "", "weights"  # the function of EXCHANGES that is running, and its owner
        parameters = list(trainer.online.module.parameters())
        self._weights = {key_of(p) for p in parameters}
        buckets = trainer.reduction.buckets if trainer.reduction else ()
        self._sizes = {p.numel() for p in parameters} | {bucket.numel for bucket in buckets}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._name_gradient)
        found.parameters = sum(p.numel() for p in parameters)
        found.largest = max(p.numel() for p in parameters)
        found.features = trainer.online.module.backbone.feature_dim
        found.checkpoint = checkpoint.size(trainer)
        found.placement = getattr(trainer.objective, "placement", "")

    @property
    def _calls_of_phase(self) -> Counter[str]:
        """How often the host has made each kind of call in the current phase."""
        return self.found.calls[self.phase]

    def __enter__(self):
        following = dict(itertools.pairwise(("start", *PHASES, "end")))

        def mark(clock: PhaseClock, phase: str) -> None:
            if phase == "backward":
                for tensor in tree_leaves(gradient_parts(self.trainer.online.optimizer)):
                    self.memory.name(tensor, "gradients")
            self.phase = following[phase]

        def noted(function: Callable[..., Any], whose: str) -> Callable[..., Any]:
            def call(*arguments: Any, **keywords: Any) -> Any:
                before, self._exchanging = self._exchanging, (function.__name__, whose)
                try:
                    return function(*arguments, **keywords)
                finally:
                    self._exchanging = before

            return call

        apply = vars(torch.autograd.Function)["apply"]

        def applied(function: type, *arguments: Any, **keywords: Any) -> Any:
            result = apply.__get__(None, function)(*arguments, **keywords)
            self._calls_of_phase["function"] += 1
            if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tree_leaves(arguments)):
                self.found.calls["backward"]["function of backward"] += 1
            return result

        self._patches = contextlib.ExitStack()
        self._patches.enter_context(mock.patch.object(PhaseClock, "mark", mark))
        self._patches.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(applied)))
        for kind, (holder, name) in AROUND.items():
            self._patches.enter_context(mock.patch.object(holder, name, self._noting(kind, vars(holder)[name])))
        called = register_module_forward_pre_hook(lambda *_: self._calls_of_phase.update(module=1))
        self._patches.callback(called.remove)
        for whose, (module, *names) in EXCHANGES.items():
            for name in names:
                call = noted(getattr(module, name), whose)
                self._patches.enter_context(mock.patch.object(module, name, call))
        return super().__enter__()

    def __exit__(self, *error: object):
        self._patches.close()
        self.found.fullest = self.memory.fullest
        sizes = {kind: stored(tensors) for kind, tensors in self.persistent.items()}
        self.found.peak = {**sizes, "activations, gradients and what passes": self.memory.most}
        return super().__exit__(*error)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        name = operator._schema.name
        short = name.partition("::")[2]
        self.memory.take(result, functools.partial(self._kind_of, short, args), self.phase)
        if short in ATTRIBUTES:
            return result
        if short in VIEWS:
            self._calls_of_phase["view"] += 1
            return result
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if name.startswith("c10d::"):
            self._collective(operands, short)
        else:
            self._operator(operator, name, short, operands, results, args, kwargs, result)
        return result

    def _collective(self, operands: list[Tensor], short: str) -> None:
        kind, size = counted(short, operands)
        # A gather into a list has the results as operands, then this rank's part.
        whole = _bytes(operands[-1]) * self.ranks if short == "allgather_" else size
        self._calls_of_phase["collective"] += 1
        self._calls_of_phase["enqueue"] += 1
        self.found.each_collective.append(Collective(kind, whole, self._exchanging[1], self.phase, size))
        if short == "allgather_":  # NCCL gathers into one tensor, from which each rank's part is copied
            self._add(Work("copies", self.phase, self.ranks, read=whole, written=whole))
            self._calls_of_phase["operator"] += self.ranks

    def _add(self, work: Work) -> None:
        self.found.work.append(work)
        self._calls_of_phase["launch"] += work.launches

    def _kind_of(self, short: str, args: tuple[Any, ...], result: Tensor) -> str:
        """The kind of an operator's result, as far as known by now; gradients of activations count as activations."""
        if self._exchanging[0] == "begin_gather":
            return "gathered"
        if short in ("_to_copy", "to") and key_of(args[0]) in self._weights:
            return "weights in half precision"
        if self.trainer.fragments.sharded and result.numel() == engine.BUCKET:
            return "buckets"
        if self.phase == "backward" and result.ndim > 1 and result.numel() not in self._sizes:
            return "activations"  # parts of parameter gradients are flat
        return "activations" if self.phase in ("target", "online", "objective") else "temporaries"

    def _noting(self, kind: str, function: Any) -> Any:
        """A function or static method that counts its calls."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            self._calls_of_phase[kind] += 1
            return getattr(function, "__func__", function)(*arguments, **keywords)

        return staticmethod(call) if isinstance(function, staticmethod) else call

    def _name_gradient(self, parameter: Tensor) -> None:
        """Relabel a parameter's gradient, unless it is in one of DeepSpeed's buckets.

        When this hook runs, the gradient is in its final memory: its own, a bucket of `reduction`, or DeepSpeed's.
        """
        self._calls_of_phase["hook"] += len(parameter._post_accumulate_grad_hooks) - 1  # but this one
        if parameter.grad is not None and self.memory.kind(parameter.grad) != "buckets":
            self.memory.name(parameter.grad, "gradients")

    def _operator(self, operator, name, short, operands, results, args, kwargs, result) -> None:
        changed = {id(t) for t in _changed(operator, args, kwargs)}
        read = sum(_bytes(t) for t in operands)
        written = sum(_bytes(t) for t in results if id(t) not in changed)
        written += sum(_bytes(t) for t in operands if id(t) in changed)
        if short in ("copy_", "fill_", "zero_", "new_zeros", "zeros", "ones", "full"):
            read = _bytes(args[1]) if short == "copy_" and isinstance(args[1], Tensor) else 0
        elif name == "unigrad_fast::lerp_":  # copies are written, not read
            read -= sum(map(_bytes, args[2]))
        packet = operator.overloadpacket
        flops = 0
        if short == "convolution_backward":  # per pass those of the forward convolution; torch's count ignores groups
            gradient, weight = args[0], args[2]
            flops = sum(args[10][:2]) * 2 * (gradient.numel() // gradient.shape[1]) * weight.numel()
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
        elif name == "unigrad_fast::update_correlation_":
            matrix, rows = operands[0], operands[1].shape[0]
            if matrix.shape[0] == matrix.shape[1]:
                flops = rows * matrix.shape[1] * (matrix.shape[1] + 128)
                read, written = read // 2, written // 2
            else:  # the rows of a shard are not symmetric, so all are computed
                flops = 2 * rows * matrix.numel()
        elif name == "unigrad_fast::correlation_product":
            flops = 2 * operands[0].shape[0] * operands[1].numel()
        elif name == "unigrad_fast::norm_product":
            flops = 2 * (operands[0].numel() // operands[0].shape[1]) * operands[1].numel()
        elif name == "unigrad_fast::unigrad_gradient":
            flops = 2 * operands[0].shape[0] * operands[0].shape[1] ** 2
        passes = _tensors_apart(args) if short.startswith("_foreach_") else 1
        if name == "unigrad_fast::lars_" and args[7]:  # a first pass computes the norms
            passes = 2
            read += sum(map(_bytes, (*args[0], *args[1])))
        if short == "convolution_backward":  # one pass each for the input and the weight
            passes = sum(args[10][:2])
            read += _bytes(args[0])
        convolves = short.startswith("convolution") or short == "norm_product"
        if short.startswith("convolution") or packet in flop_registry:
            self._calls_of_phase["library"] += passes
        own = name.startswith("unigrad_fast::")
        self._calls_of_phase[
            "kernel" if own else "operator of backward" if self.phase == "backward" else "operator"
        ] += 1
        if short == "norm_product":
            grid, parts = _product_grid(*args[:4], self.found.card.capability)
            read, written = read + parts, written + parts
        else:
            grid = _grid(name.removeprefix("unigrad_fast::batch_norm_"), args)
        part = self._part(name, short)
        if short.startswith("convolution"):
            self._convert_weight(short, args)
        self._add(Work(part, self.phase, passes, int(flops), read, written, convolves, **grid))

    def _convert_weight(self, short: str, args: tuple[Any, ...]) -> None:
        """Count what cuDNN's convolutions of channels-last images do with a weight in another layout.

        The weight is converted forward, and again backward for the gradient of the images. Autograd converts the
        weight's own gradient, which the walk sees.
        """
        images, weight = (args[1], args[2]) if short == "convolution_backward" else (args[0], args[1])
        last = torch.channels_last
        if not images.is_contiguous(memory_format=last) or weight.is_contiguous(memory_format=last):
            return
        if short != "convolution_backward" or args[10][0]:
            self._add(Work("copies", self.phase, 1, read=_bytes(weight), written=_bytes(weight)))

    def _part(self, name: str, short: str) -> str:
        if short.startswith("convolution") or short == "norm_product":
            return "convolution"
        if name.startswith("unigrad_fast::batch_norm"):
            return "normalisation"
        if self.phase in ("step", "target_update"):
            return {"step": "optimizer", "target_update": "target"}[self.phase]
        if self.phase == "objective" or name.startswith("unigrad_fast::"):
            return "objective"
        if short in ("mm", "addmm", "linear"):
            return "linear"
        if short in ("relu", "relu_", "threshold_backward") or "max_pool" in short:
            return "activation"
        if short in ("_to_copy", "to"):
            return "casts"
        return "other"


def _tensors_apart(args: tuple[Any, ...]) -> int:
    """Launches of one of torch's operators over lists: one, or one per tensor if shapes or layouts differ in a row."""
    lists = [each for each in args if isinstance(each, list | tuple) and each and isinstance(each[0], Tensor)]
    rows = list(zip(*lists, strict=True))
    return 1 if all(len(set(map(_layout, row))) == 1 for row in rows) else len(rows)


def _layout(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Sizes and strides, except those strides of dimensions of size 1: a fake tensor's may not be the real one's."""
    return tuple((size, 0 if size == 1 else by) for size, by in zip(tensor.shape, tensor.stride(), strict=True))


def _grid(kernel: str, args: tuple[Any, ...]) -> dict[str, int]:
    """How one of batch norm's kernels fills a card; empty for other kernels."""
    kernel = kernel.removesuffix("_")
    if kernel not in heuristics.NORM_KERNELS:
        return {}
    pooled = any(isinstance(each, Tensor) and each.dtype == torch.uint8 for each in args)
    settings = heuristics.NORM_KERNELS[kernel + "_pool" * pooled]
    backward = kernel in ("sums", "gradient")
    x = args[1 if backward else 0]
    groups = args[1] if kernel == "statistics" else args[2 if backward else 1].shape[0]
    positions = math.prod(pooled_size(x)) * len(x) if kernel == "pool" else x.numel() // x.shape[1]
    cut = heuristics.cut(positions // groups, groups, x.shape[1], settings)
    merges = 2 * cut.levels  # a ticket and a load
    if kernel == "sums":  # for the parameters, those of all groups
        merges += 1 + groups
    images = sum(isinstance(each, Tensor) and each.shape == x.shape for each in args)
    images *= 4 if kernel == "pool" else 1  # positions for each of y
    at_once = images * cut.rows * cut.columns * x.element_size()
    return {"programs": math.prod(cut.grid), "resident": settings.resident, "at_once": at_once, "merges": merges}


def _product_grid(
    x: Tensor, matrix_CK: Tensor, groups: int, mean_GK: Tensor | None, capability: tuple[int, int]
) -> tuple[dict[str, int], int]:
    """How a product between two norms fills a card, and the bytes of its tiles' statistics."""
    settings = heuristics.norm_product_for(heuristics.architecture(capability), mean_GK is not None)
    rows, tile = x.numel() // (x.shape[1] * groups), settings.tile
    cuts = heuristics.tiled(rows, groups, len(matrix_CK), settings)
    merged = min(cuts.grid[0], settings.bunch), cuts.bunches
    grid = {
        "programs": math.prod(cuts.grid),
        "resident": settings.resident,
        "at_once": tile.rows * min(x.shape[1], (tile.stages - 1) * tile.depth) * x.element_size(),
        "merges": cuts.levels + sum(heuristics.blocks(each, settings.parts) for each in merged if each > 1),
    }
    return grid, cuts.grid[0] * groups * 2 * len(matrix_CK) * 8


class Memory:
    """Transient bytes in use: now, at their peak, and by kind at the peak of each phase."""

    def __init__(self, persistent: Mapping[str, list[Tensor]]):
        self.now = self.most = 0
        self.fullest: dict[str, dict[str, int]] = {}
        self._known = {key_of(t) for tensors in persistent.values() for t in tensors}
        self._kinds: dict[int, str] = {}
        self._by_kind = dict.fromkeys(TRANSIENT, 0)
        self._most_of: dict[str, int] = {}

    def take(self, result: object, kind_of: Callable[[Tensor], str], phase: str) -> None:
        """Count an operator's results."""
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            self._known.add(key)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            kind = self._kinds[key] = kind_of(tensor)
            self._by_kind[kind] += storage.nbytes()
            if self.now > self._most_of.get(phase, 0):
                self._most_of[phase] = self.now
                self.fullest[phase] = dict(self._by_kind)
            weakref.finalize(storage, self._give_back, key, storage.nbytes())

    def kind(self, tensor: Tensor) -> str | None:
        """The kind of a tensor's memory; None if it is persistent."""
        return self._kinds.get(key_of(tensor))

    def name(self, tensor: object, kind: str) -> None:
        """Change the kind of memory in use, once it is known."""
        if not isinstance(tensor, Tensor) or (key := key_of(tensor)) not in self._kinds:
            return
        size = tensor.untyped_storage().nbytes()
        self._by_kind[self._kinds[key]] -= size
        self._by_kind[kind] += size
        self._kinds[key] = kind

    def _give_back(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
        self._by_kind[self._kinds.pop(key)] -= size


def stored(tensors: list[Tensor]) -> int:
    """Bytes of the tensors' storages, counting a shared storage once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def key_of(tensor: Tensor) -> int:
    """Identifies a tensor's storage."""
    return tensor.untyped_storage()._cdata


def _persistent(trainer: Trainer) -> dict[str, list[Tensor]]:
    """Tensors that exist before and after a step, by kind."""
    moved = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    partition = {"master weights": moved} if trainer.fragments.sharded else {}
    return {
        "weights": list(trainer.online.module.parameters()),
        **partition,
        "momentum": [t for p in moved for t in trainer.optimizer.state[p].values() if isinstance(t, Tensor)],
        "target": [*trainer.target.parameters(), *(p for p in trainer.objective.parameters() if not p.requires_grad)],
        "the target's weights in half precision": list(trainer.target_copies.values()),
        "running statistics": [flat for buffers in trainer.gate.buffers for flat in (*buffers.flats, *buffers.kept)],
        "correlation": [
            t for part in trainer.objective.modules() for t in vars(part).values() if isinstance(t, Tensor)
        ],
    }


def _changed(operator, args, kwargs) -> list[Tensor]:
    """The operands that an operator writes to."""
    changed = []
    for number, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            changed += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return changed


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
