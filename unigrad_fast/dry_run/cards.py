"""Expected speed of GPUs, and of collectives on many of them, from the figures in `cards.json`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from importlib import resources

from unigrad_fast.runtime.errors import UserError


@dataclass(frozen=True)
class Card:
    """Figures of a GPU, in FLOP/s, bytes, bytes/s and seconds; `cards.json` gives their sources."""

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
    def usable_memory(self) -> float:
        """Bytes that a step may take by our count; a tenth of the memory is reserved for what is not counted."""
        return 0.9 * self.size

    def with_memory(self, gib: float | None) -> Card:
        """A card as fast as this one with another memory; None changes nothing."""
        return self if gib is None else replace(self, name=f"{self.name} with {gib:g} GiB", size=2**30 * gib)

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
    """Least seconds of a collective of any size: its launch, and the hops between nodes as NCCL counts them.

    A gather's ring has as many hops as ranks, a reduction's tree grows with the logarithm of the nodes, and an
    exchange's sends run in parallel.
    """
    if nodes == 1:
        return card.collective
    if kind == "reduce":
        return card.collective + 2 * math.log2(nodes) * card.tree_hop
    if kind == "exchange":
        return card.collective + card.network_hop
    return card.collective + (nodes - 1) * ((ranks // nodes - 1) * card.ring_hop + card.network_hop)


def collective_seconds(kind: str, moved: float, ranks: int, nodes: int, card: Card) -> float:
    """Seconds of one collective: its latency, or its time on the bus or the network if that is longer."""
    _, between = inside_and_between(kind, moved, ranks, nodes)
    return max(latency(kind, ranks, nodes, card), moved / card.bus, between / card.network)
