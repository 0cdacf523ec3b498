"""What a walk finds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

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
