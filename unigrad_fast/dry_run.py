"""The real training step on tensors without content: what it launches, moves, computes and sends, without a card.

`Trainer.step` runs on fake tensors of the CPU that take the branches of a GPU's (`kernels.dispatch.as_on_cuda`), in a
process group without peers. Whoever reads a value there ends the walk: a step that passes makes no host wait. What
waits without reading (`synchronize`, copies from pageable memory) is watched for.

Not walked, because it is no part of a step or cannot be done on such tensors: the loader, DeepSpeed's broadcast and
the self-check of `fragments`, the conversion of weights to channels-last, reading metrics. DeepSpeed's optimizer of
ZeRO stages 1 and 2 is walked as it is, on its ways of the CPU.

Times are expected, not measured: for each operator the larger of FLOPs / peak and bytes / bandwidth, but no less than
a launch takes, with the figures of `cards.json`; nothing overlaps. Bytes are every operand once. Memory is what
operators return and what lasts; what a kernel takes for itself while it runs is not seen.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from unigrad_fast.config import Config
from unigrad_fast.kernels.dispatch import as_on_cuda
from unigrad_fast.networks import batch_norm
from unigrad_fast.networks.encoder import build_encoder
from unigrad_fast.objectives import ranks as objective_ranks
from unigrad_fast.optimization.gated import Gated
from unigrad_fast.pipelines import Batch
from unigrad_fast.pipelines.cutmix import Mix
from unigrad_fast.runtime import process_group
from unigrad_fast.runtime.collectives import counted
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training import branches, checkpoint, engine
from unigrad_fast.training import trainer as training
from unigrad_fast.training.fragments import Fragments, PartitionedFragments, WholeFragments
from unigrad_fast.training.telemetry.phases import PhaseClock

PARTS = ("convolution", "normalisation", "activation", "linear", "objective", "optimizer", "target", "casts", "other")


@dataclass
class Part:
    """What the operators of one kind do in a step: launches, FLOPs, bytes from and to memory, expected seconds."""

    launches: int = 0
    flops: int = 0
    read: int = 0
    written: int = 0
    seconds: float = 0.0


@dataclass
class Collectives:
    """Those of one kind: how many, and their bytes as `runtime.collectives` counts them."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Meeting:
    """One collective: its kind, the bytes of all that is gathered, reduced or exchanged, and whose it is: "norms",
    "objective" or "weights", that is gradients, weights and what the optimizer exchanges."""

    kind: str
    size: int
    whose: str


PASSING = ("activations", "weights in bf16", "gathered", "gradients", "buckets", "temporaries")


@dataclass
class Walk:
    """One step.

    Attributes:
        parts, collectives: by name.
        peak: bytes in use at the fullest moment, by kind.
        waits: what would have made the host wait.
        met: the collectives one by one.
        fullest: by phase of the step what passes at its fullest moment, bytes by kind of `PASSING`.
        parameters, largest: elements of the online network, and of its largest tensor.
        features: width of the backbone's output.
        checkpoint: bytes of one.
        placement: of F; empty for an objective that places none.
    """

    parts: dict[str, Part] = field(default_factory=lambda: {name: Part() for name in PARTS})
    collectives: dict[str, Collectives] = field(default_factory=lambda: defaultdict(Collectives))
    peak: dict[str, int] = field(default_factory=dict)
    waits: list[str] = field(default_factory=list)
    met: list[Meeting] = field(default_factory=list)
    fullest: dict[str, dict[str, int]] = field(default_factory=dict)
    parameters: int = 0
    largest: int = 0
    features: int = 0
    checkpoint: int = 0
    placement: str = ""

    @property
    def meetings(self) -> int:
        """Collectives of all kinds."""
        return sum(each.count for each in self.collectives.values())

    @property
    def seconds(self) -> float:
        """Of all of it, one after the other."""
        return sum(each.seconds for each in (*self.parts.values(), *self.collectives.values()))

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "parts": {name: asdict(part) for name, part in self.parts.items()},
            "collectives": {name: asdict(each) for name, each in self.collectives.items()},
            "peak": self.peak,
            "waits": self.waits,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Card:
    """Figures of a GPU, in FLOP/s, bytes, bytes/s and seconds; their sources stand in `cards.json`."""

    name: str
    convolution: float
    product: float
    memory: float
    collective: float
    bus: float
    launch: float
    size: float
    network: float
    ring_hop: float
    network_hop: float
    tree_hop: float

    @property
    def room(self) -> float:
        """Bytes that a step may take as it is counted: a tenth of the memory is left for what is not."""
        return 0.9 * self.size

    @classmethod
    def of(cls, key: str) -> Card:
        """Raises UserError for an unknown card."""
        known = json.loads(resources.files("unigrad_fast").joinpath("cards.json").read_text(encoding="utf-8"))
        if key not in known:
            raise UserError(f"card = {key}: unknown; use one of {', '.join(known)}")
        figures = known[key]
        return cls(
            figures["name"],
            convolution=1e12 * figures["convolution_tflops"][0],
            product=1e12 * figures["product_tflops"][0],
            memory=1e12 * figures["memory_tbs"][0],
            collective=1e-6 * figures["collective_us"][0],
            bus=1e9 * figures["bus_gbs"][0],
            launch=1e-6 * figures["launch_us"][0],
            size=2**30 * figures["memory_gib"][0],
            network=1e9 * figures["network_gbs"][0],
            ring_hop=1e-6 * figures["ring_hop_us"][0],
            network_hop=1e-6 * figures["network_hop_us"][0],
            tree_hop=1e-6 * figures["tree_hop_us"][0],
        )


def sent(kind: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends in a collective whose largest tensor takes `size`: a ring's, or each to each."""
    return size * (ranks - 1) / ranks * (2 if kind == "reduce" else 1)


def inside_and_between(kind: str, moved: float, ranks: int, nodes: int) -> tuple[float, float]:
    """Of the bytes that a rank sends those to its own node, and its part of what the node sends to others.

    A ring goes through the nodes one after the other, so of a node's cards one sends outwards; in an exchange each
    sends to all.
    """
    if nodes == 1:
        return moved, 0.0
    cards = ranks // nodes
    between = moved * (ranks - cards) / (ranks - 1) if kind == "exchange" else moved / cards
    return moved - between, between


def latency(kind: str, ranks: int, nodes: int, card: Card) -> float:
    """Seconds of a collective however small it is: its start, and the hops between nodes as NCCL counts them.

    A gather's ring has as many hops as ranks, a reduction's tree grows with the logarithm of the nodes, and an
    exchange's sends lie beside each other.
    """
    if nodes == 1:
        return card.collective
    if kind == "reduce":
        return card.collective + 2 * math.log2(nodes) * card.tree_hop
    if kind == "exchange":
        return card.collective + card.network_hop
    return card.collective + (nodes - 1) * ((ranks // nodes - 1) * card.ring_hop + card.network_hop)


def meeting_seconds(kind: str, moved: float, ranks: int, nodes: int, card: Card) -> float:
    """Of one collective: its latency, or its bytes over the bus or the network where that is more."""
    _, between = inside_and_between(kind, moved, ranks, nodes)
    return max(latency(kind, ranks, nodes, card), moved / card.bus, between / card.network)


def require_walkable(config: Config, ranks: int) -> None:
    """Raises UserError where the batch does not divide over the ranks, or for a setting that is not walked."""
    if config.engine.target_stream:
        raise UserError("engine.target_stream = true: the dry run lets nothing overlap; leave it out")
    if config.engine.cuda_graph:
        raise UserError("engine.cuda_graph = true: the dry run walks the step that is recorded; leave it out")
    if config.engine.compile:
        raise UserError("engine.compile = true: the dry run walks the step as it is written; leave it out")
    if config.objective.epsilon is not None:
        raise UserError(
            "objective.method = byol_directpred: the host waits for its eigenvectors, which the dry run cannot walk; "
            "use another method"
        )
    config.check_world(ranks)


def walk(config: Config, ranks: int, card: Card, as_cuda: bool = True) -> Walk:
    """The second step of a run on so many cards, as rank 0 sees it; in the first, memory is made that stays.

    Args:
        as_cuda: take the branches of a GPU, else those of the CPU, which compute the same in plain torch.

    Raises:
        UserError: see `require_walkable`.
        RuntimeError: the step reads a value; or there is a process group already.
    """
    require_walkable(config, ranks)
    found = Walk()
    device = as_on_cuda() if as_cuda else mock.patch.object(batch_norm, "host_may_read", lambda tensor: False)
    fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    with device, fake, _Fused(), prepared(config, ranks) as (trainer, batches):
        try:
            with _spies(found):
                trainer.step(0, iter(batches))
                found.waits.clear()
                with _Count(found, trainer, card, ranks):
                    trainer.step(1, iter(batches))
        except DataDependentOutputException as error:
            raise RuntimeError(f"the step reads a value ({error.func}), for which the host waits") from error
    return found


@contextlib.contextmanager
def prepared(config: Config, ranks: int) -> Iterator[tuple[training.Trainer, list[Batch]]]:
    """Rank 0's trainer in a process group without peers, and the batches of a step."""
    with _process_group(ranks):
        trainer = _trainer(config, World(0, ranks, 0, ranks, torch.device("cpu"), "gloo"))
        yield trainer, [_batch(config, ranks) for _ in range(config.engine.accumulation_steps)]


@contextlib.contextmanager
def _process_group(ranks: int) -> Iterator[None]:
    """A process group whose collectives have no peers."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with mock.patch.dict(os.environ, variables):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            yield
        finally:
            process_group.stop()  # DeepSpeed's, too


def _trainer(config: Config, world: World) -> training.Trainer:
    """The trainer of a run without images."""

    def make_target(online: nn.Module) -> nn.Module:  # a fake tensor cannot be copied deeply
        target = build_encoder(config.model, config.seed, world.device)
        return target.requires_grad_(False).train()

    def build_fragments(engine, optimizer: Gated) -> Fragments:  # their self-check reads values
        return (PartitionedFragments if engine.zero_optimization_stage() else WholeFragments)(engine, optimizer)

    loader = types.SimpleNamespace(steps_per_epoch=1000 * config.engine.accumulation_steps)
    with (
        mock.patch.object(training, "BadImages"),
        mock.patch.object(training, "identity"),
        mock.patch.object(training, "build_loader", return_value=loader),
        mock.patch.object(branches, "make_target", make_target),
        mock.patch.object(process_group, "limit"),  # there is nobody to wait for
        mock.patch.object(training, "build_fragments", build_fragments),
        mock.patch.object(nn.Module, "to", lambda module, *_, **__: module),
    ):
        return training.Trainer(config, world, None)


def _batch(config: Config, ranks: int) -> Batch:
    """A rank's micro-batch, as the loader hands it over on a GPU."""
    images = config.images_at_once(ranks)
    views = [
        torch.empty(images, 3, view.size, view.size).contiguous(memory_format=torch.channels_last)
        for view in config.data.views()
    ]
    mix = None
    if config.data.cutmix.probability:
        partner, ratio = torch.zeros(2, images, dtype=torch.int64), torch.zeros(2, images)
        mix = Mix(partner=partner, ratio=ratio, box=torch.zeros(2, images, 4, dtype=torch.int64))
    nothing = torch.zeros(images, dtype=torch.int64)
    return Batch(views, index=nothing, label=nothing, step=0, replaced=nothing.bool(), mix=mix)


@contextlib.contextmanager
def _spies(found: Walk) -> Iterator[None]:
    """Notes calls that wait for the device without reading a value."""

    def spy(name: str) -> Callable[..., None]:
        def call(*_: object, **__: object) -> None:
            found.waits.append(name)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name, shown in (
            (torch.cuda, "synchronize", "torch.cuda.synchronize"),
            (torch.cuda.Event, "synchronize", "Event.synchronize"),
            (torch.cuda.Stream, "synchronize", "Stream.synchronize"),
            (Tensor, "cpu", "Tensor.cpu"),
            (Tensor, "numpy", "Tensor.numpy"),
        ):
            stack.enter_context(mock.patch.object(owner, name, spy(shown)))
        yield


# What launches nothing: views, and questions about a tensor.
VIEWS = {
    "alias", "as_strided", "as_strided_", "chunk", "detach", "device", "expand", "permute", "promote_types", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    "_unsafe_view", "_is_mkldnn_fp16_supported", "empty", "empty_like", "new_empty", "new_empty_strided",
    "empty_strided", "set_", "lift_fresh", "_reshape_alias", "is_same_size", "numel", "sym_size",
}  # fmt: skip
NORMALISATION = "unigrad_fast::batch_norm"


class _Fused(TorchDispatchMode):
    """Torch's fused optimizers, which change their operands and return nothing.

    Without it fake tensors would have them computed on zeros, for which the memory of a wide network is not there.
    """

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket in (torch.ops.aten._fused_sgd_, torch.ops.aten._fused_adamw_):
            return None
        return operator(*args, **(kwargs or {}))


class _Count(TorchDispatchMode):
    """Counts what passes."""

    def __init__(self, found: Walk, trainer: training.Trainer, card: Card, ranks: int):
        super().__init__()
        self.found, self.card, self.ranks = found, card, ranks
        self.phase = "data"
        self.trainer, self.lasting = trainer, _lasting(trainer)
        self.memory = _Memory(self.lasting)
        self._exchanging = ""  # what the objective does now
        parameters = list(trainer.online.module.parameters())
        self._weights = {_key(p) for p in parameters}
        buckets = trainer.reduction.buckets if trainer.reduction else ()
        self._sizes = {p.numel() for p in parameters} | {bucket.numel for bucket in buckets}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._name_gradient)
        found.parameters = sum(p.numel() for p in parameters)
        found.largest = max(p.numel() for p in parameters)
        found.features = trainer.online.module.backbone.feature_dim
        found.checkpoint = checkpoint.size(trainer)
        found.placement = getattr(trainer.objective, "placement", "")

    def __enter__(self):
        def mark(clock: PhaseClock, phase: str) -> None:
            order = ["target", "online", "objective", "backward", "step", "target_update", "end"]
            following = {"start": "data", "data": "target"} | dict(itertools.pairwise(order))
            if phase == "backward":
                for tensor in tree_leaves(getattr(self.trainer.online.optimizer, "averaged_gradients", {})):
                    self.memory.name(tensor, "gradients")
            self.phase = following[phase]

        def noted(name: str) -> Callable[..., Any]:
            function = getattr(objective_ranks, name)

            def call(*arguments: Any, **keywords: Any) -> Any:
                self._exchanging = name
                try:
                    return function(*arguments, **keywords)
                finally:
                    self._exchanging = ""

            return call

        self._patches = contextlib.ExitStack()
        self._patches.enter_context(mock.patch.object(PhaseClock, "mark", mark))
        for name in ("begin_gather", "exchange_columns"):
            self._patches.enter_context(mock.patch.object(objective_ranks, name, noted(name)))
        return super().__enter__()

    def __exit__(self, *error: object):
        self._patches.close()
        self.found.fullest = self.memory.fullest
        sizes = {kind: _stored(tensors) for kind, tensors in self.lasting.items()}
        self.found.peak = {**sizes, "activations, gradients and what passes": self.memory.most}
        return super().__exit__(*error)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        name = operator._schema.name
        short = name.partition("::")[2]
        self.memory.take(result, functools.partial(self._passing, short, args), self.phase)
        if short in VIEWS:
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
        each = self.found.collectives[kind]
        # Of a gather into a list: the results, then what each rank gives.
        whole = _bytes(operands[-1]) * self.ranks if short == "allgather_" else size
        each.count += 1
        each.bytes += size
        each.seconds += meeting_seconds(kind, sent(kind, whole, self.ranks), self.ranks, 1, self.card)
        of_norm = short == "allgather_" or (kind == "reduce" and operands[0].ndim == 3)  # [G, 2, C]; others are flat
        whose = "objective" if self._exchanging else "norms" if of_norm else "weights"
        self.found.met.append(Meeting(kind, whole, whose))

    def _passing(self, short: str, args: tuple[Any, ...], result: Tensor) -> str:
        """The kind of what an operator returns, as far as that is known now; to activations belong their gradients."""
        if self._exchanging == "begin_gather":
            return "gathered"
        if short in ("_to_copy", "to") and _key(args[0]) in self._weights:
            return "weights in bf16"
        if self.trainer.fragments.sharded and result.numel() == engine.BUCKET:
            return "buckets"
        if self.phase == "backward" and result.ndim > 1 and result.numel() not in self._sizes:
            return "activations"  # pieces of gradients are flat
        return "activations" if self.phase in ("target", "online", "objective") else "temporaries"

    def _name_gradient(self, parameter: Tensor) -> None:
        """After backward gave it, it lies where it stays: alone, in a bucket of `reduction`, or in DeepSpeed's."""
        if parameter.grad is not None and self.memory.kind(parameter.grad) != "buckets":
            self.memory.name(parameter.grad, "gradients")

    def _operator(self, operator, name, short, operands, results, args, kwargs, result) -> None:
        part = self.found.parts[self._part(name, short)]
        changed = {id(t) for t in _changed(operator, args, kwargs)}
        read = sum(_bytes(t) for t in operands)
        written = sum(_bytes(t) for t in results if id(t) not in changed)
        written += sum(_bytes(t) for t in operands if id(t) in changed)
        if short in ("copy_", "fill_", "zero_", "new_zeros", "zeros", "ones", "full"):
            read = _bytes(args[1]) if short == "copy_" and isinstance(args[1], Tensor) else 0
        elif name == "unigrad_fast::lerp_":  # the copies are only written
            read -= sum(map(_bytes, args[2]))
        packet = operator.overloadpacket
        flops = 0
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
        elif name == "unigrad_fast::update_correlation_":
            matrix, rows = operands[0], operands[1].shape[0]
            if matrix.shape[0] == matrix.shape[1]:
                flops = rows * matrix.shape[1] * (matrix.shape[1] + 128)
                read, written = read // 2, written // 2
            else:  # rows of a sharded F have no mirror image there
                flops = 2 * rows * matrix.numel()
        elif name == "unigrad_fast::correlation_product":
            flops = 2 * operands[0].shape[0] * operands[1].numel()
        elif name == "unigrad_fast::unigrad_gradient":
            flops = 2 * operands[0].shape[0] * operands[0].shape[1] ** 2
        passes = 1
        if name == "unigrad_fast::lars_" and args[7]:  # the norms are found first
            passes = 2
            read += sum(map(_bytes, (*args[0], *args[1])))
        if short == "convolution_backward":  # for the input and for the weight
            passes = sum(args[10][:2])
            read += _bytes(args[0])
        peak = self.card.convolution if short.startswith("convolution") else self.card.product
        part.launches += passes
        part.flops += int(flops)
        part.read += read
        part.written += written
        part.seconds += max(passes * self.card.launch, flops / peak, (read + written) / self.card.memory)

    def _part(self, name: str, short: str) -> str:
        if short.startswith("convolution"):
            return "convolution"
        if name.startswith(NORMALISATION):
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


def _lasting(trainer: training.Trainer) -> dict[str, list[Tensor]]:
    """What is there before and after a step, by kind."""
    moved = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    partition = {"master weights": moved} if trainer.fragments.sharded else {}
    return {
        "weights": list(trainer.online.module.parameters()),
        **partition,
        "momentum": [t for p in moved for t in trainer.optimizer.state[p].values() if isinstance(t, Tensor)],
        "target": list(trainer.target.parameters()),
        "the target's weights in bf16": list(trainer.target_copies.values()),
        "running statistics": [flat for buffers in trainer.gate.buffers for flat in (*buffers.flats, *buffers.kept)],
        "correlation": [
            t for part in trainer.objective.modules() for t in vars(part).values() if isinstance(t, Tensor)
        ],
    }


class _Memory:
    """Bytes in use that were not there before, now and at most, and by kind at the fullest moment of each phase."""

    def __init__(self, lasting: Mapping[str, list[Tensor]]):
        self.now = self.most = 0
        self.fullest: dict[str, dict[str, int]] = {}
        self._known = {_key(t) for tensors in lasting.values() for t in tensors}
        self._kinds: dict[int, str] = {}
        self._by_kind = dict.fromkeys(PASSING, 0)
        self._most_of: dict[str, int] = {}

    def take(self, result: object, kind_of: Callable[[Tensor], str], phase: str) -> None:
        """An operator's results."""
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
        """Of memory in use; None of what lasts."""
        return self._kinds.get(_key(tensor))

    def name(self, tensor: object, kind: str) -> None:
        """What is known later of memory that is in use."""
        if not isinstance(tensor, Tensor) or (key := _key(tensor)) not in self._kinds:
            return
        size = tensor.untyped_storage().nbytes()
        self._by_kind[self._kinds[key]] -= size
        self._by_kind[kind] += size
        self._kinds[key] = kind

    def _give_back(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
        self._by_kind[self._kinds.pop(key)] -= size


def _changed(operator, args, kwargs) -> list[Tensor]:
    """The operands that an operator writes to."""
    changed = []
    for number, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            changed += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return changed


def _stored(tensors: list[Tensor]) -> int:
    """Bytes of the memory in which they lie."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _key(tensor: Tensor) -> int:
    """Of the memory in which it lies."""
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
