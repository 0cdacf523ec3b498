"""Results of a walk."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

PARTS = ("convolution", "normalisation", "activation", "linear", "objective", "optimizer", "target", "casts", "other")


@dataclass
class Part:
    """Totals of the operators of one kind in a step: launches, FLOPs, bytes from and to memory, expected seconds."""

    launches: int = 0
    flops: int = 0
    read: int = 0
    written: int = 0
    seconds: float = 0.0


@dataclass
class Collectives:
    """Collectives of one kind: how many, their bytes as `runtime.collectives` counts them, expected seconds."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Collective:
    """One collective: its kind, the bytes of everything gathered, reduced or exchanged, and its owner.

    Owners are "norms", "objective" and "weights"; the last covers gradients, weights and the optimizer's exchanges.
    """

    kind: str
    size: int
    whose: str


TRANSIENT = ("activations", "weights in bf16", "gathered", "gradients", "buckets", "temporaries")


@dataclass
class Walk:
    """What was counted in one step.

    Attributes:
        parts: totals by kind of operator; collectives: totals by kind of collective.
        peak: bytes in use at the peak, by kind.
        waits: calls that would have made the host wait.
        each_collective: the collectives one by one.
        fullest: by phase of the step, transient bytes at the phase's peak, by kind of `TRANSIENT`.
        parameters, largest: elements of the online network, and of its largest tensor.
        features: width of the backbone's output.
        checkpoint: bytes of a checkpoint.
        placement: placement of F; empty for an objective without F.
    """

    parts: dict[str, Part] = field(default_factory=lambda: {name: Part() for name in PARTS})
    collectives: dict[str, Collectives] = field(default_factory=lambda: defaultdict(Collectives))
    peak: dict[str, int] = field(default_factory=dict)
    waits: list[str] = field(default_factory=list)
    each_collective: list[Collective] = field(default_factory=list)
    fullest: dict[str, dict[str, int]] = field(default_factory=dict)
    parameters: int = 0
    largest: int = 0
    features: int = 0
    checkpoint: int = 0
    placement: str = ""

    @property
    def collective_count(self) -> int:
        """Number of collectives of all kinds."""
        return sum(each.count for each in self.collectives.values())

    @property
    def seconds(self) -> float:
        """Expected seconds of all parts and collectives, one after the other."""
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
