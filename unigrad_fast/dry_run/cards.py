"""Expected speed of GPUs, of collectives on many of them and of the host, from the figures in `cards.json`."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal, TypeAlias, get_args

from unigrad_fast.runtime.errors import UserError

CardName: TypeAlias = Literal["h100", "h200", "b200", "a100", "l40s", "rtx5090", "rtx4090", "rtx3090", "t4"]


@dataclass(frozen=True)
class Card:
    """Figures of a GPU, in FLOP/s, bytes, bytes/s and seconds; `cards.json` gives their sources.

    Attributes:
        capability: compute capability; below 8.0 plain torch computes, as Triton does not support it.
        latency: from a load to its value.
        waiting: of a rank at a collective, for the slowest of the others.
        view: the loader's work on the card for a view of 224 pixels.
        slowest, fastest: the range of convolution and memory.
    """

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
    capability: tuple[int, int]
    multiprocessors: int
    latency: float
    waiting: float
    view: float
    slowest: tuple[float, float]
    fastest: tuple[float, float]

    @property
    def precision(self) -> str:
        """What `engine.precision auto` is on it."""
        return "bf16" if self.capability >= (8, 0) else "fp16"

    @property
    def usable_memory(self) -> float:
        """Bytes that a step may take by our count; a tenth of the memory is reserved for what is not counted."""
        return 0.9 * self.size

    def with_memory(self, gib: float | None) -> Card:
        """A card as fast as this one with another memory; None changes nothing."""
        return self if gib is None else replace(self, name=f"{self.name} with {gib:g} GiB", size=2**30 * gib)

    def ends(self) -> tuple[Card, Card]:
        """The same card at the slow and at the fast end of what is expected of it."""
        slow, fast = (replace(self, convolution=each[0], memory=each[1]) for each in (self.slowest, self.fastest))
        return slow, fast

    @classmethod
    def of(cls, key: str) -> Card:
        """Raises UserError for an unknown card."""
        if key not in (known := get_args(CardName)):
            raise UserError(f"card = {key}: unknown; use one of {', '.join(known)}")
        figures = _figures()["cards"][key]
        convolution, memory = figures["convolution_tflops"], figures["memory_tbs"]
        ends = [(1e12 * convolution[end], 1e12 * memory[end]) for end in (1, 2)]
        return cls(
            figures["name"],
            convolution=1e12 * convolution[0],
            product=1e12 * figures["product_tflops"][0],
            memory=1e12 * memory[0],
            collective=1e-6 * figures["collective_us"][0],
            bus=1e9 * figures["bus_gbs"][0],
            launch=1e-6 * figures["launch_us"][0],
            size=2**30 * figures["memory_gib"][0],
            network=1e9 * figures["network_gbs"][0],
            ring_hop=1e-6 * figures["ring_hop_us"][0],
            network_hop=1e-6 * figures["network_hop_us"][0],
            tree_hop=1e-6 * figures["tree_hop_us"][0],
            capability=tuple(figures["capability"][0]),
            multiprocessors=figures["multiprocessors"][0],
            latency=1e-6 * figures["latency_us"][0],
            waiting=1e-6 * figures["waiting_us"][0],
            view=1e-6 * figures["view_us"][0],
            slowest=ends[0],
            fastest=ends[1],
        )


@dataclass(frozen=True)
class Host:
    """Seconds of the host's calls by kind, and for the replay of a graph; `cards.json` gives their sources."""

    calls: Mapping[str, float]
    graph: float

    @classmethod
    def expected(cls) -> Host:
        """The host of `cards.json`: what was measured, times its factor, and what can only be named."""
        figures = _figures()["host"]
        factor = figures["factor"][0]
        measured = figures["measured_us"][0] | figures["measured_later_us"][0]
        measured = {kind: 1e-6 * factor * value for kind, value in measured.items()}
        named = {kind: 1e-6 * value for kind, (value, _) in figures["named_us"].items()}
        graph = named.pop("graph")
        return cls({**measured, **named}, graph)

    def seconds(self, calls: Mapping[str, int]) -> float:
        """Expected seconds of so many calls of each kind."""
        return sum(count * self.calls[kind] for kind, count in calls.items())


@functools.cache
def _figures() -> dict[str, Any]:
    return json.loads(resources.files("unigrad_fast").joinpath("cards.json").read_text(encoding="utf-8"))


def sent(kind: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends in a ring or all-to-all collective whose largest tensor takes `size` bytes."""
    return size * (ranks - 1) / ranks * (2 if kind == "reduce" else 1)


def inside_and_between(kind: str, moved: float, ranks: int, nodes: int) -> tuple[float, float]:
    """Split the bytes that a rank sends: those inside its node, and its share of what the node sends to others.

    A ring visits one node after the other, so only one card per node sends to another node; in an all-to-all exchange
    each card sends to all.
    """
    if nodes == 1:
        return moved, 0.0
    cards = ranks // nodes
    between = moved * (ranks - cards) / (ranks - 1) if kind == "exchange" else moved / cards
    return moved - between, between


def latency(kind: str, ranks: int, nodes: int, card: Card) -> float:
    """Least seconds of a collective of any size: waiting for the slowest rank, the collective inside a node, and the
    hops between nodes as NCCL counts them.

    A gather's ring has as many hops as ranks, a reduction's tree grows with the logarithm of the nodes, and an
    exchange's sends run in parallel.
    """
    least = card.collective + (card.waiting if ranks > 1 else 0)
    if nodes == 1:
        return least
    if kind == "reduce":
        return least + 2 * math.log2(nodes) * card.tree_hop
    if kind == "exchange":
        return least + card.network_hop
    return least + (nodes - 1) * ((ranks // nodes - 1) * card.ring_hop + card.network_hop)


def collective_seconds(kind: str, moved: float, ranks: int, nodes: int, card: Card) -> float:
    """Seconds of one collective: its latency, or its time on the bus or the network if that is longer."""
    _, between = inside_and_between(kind, moved, ranks, nodes)
    return max(latency(kind, ranks, nodes, card), moved / card.bus, between / card.network)
