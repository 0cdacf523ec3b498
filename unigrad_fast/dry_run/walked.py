"""Results of a walk."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from unigrad_fast.dry_run.cards import Card, Host, collective_seconds, sent

PARTS = (
    "convolution", "normalisation", "activation", "linear", "objective", "optimizer", "target", "casts", "other",
    "copies", "loader",
)  # fmt: skip
LAUNCHED_ALWAYS = ("data", "end")  # phases of a step that a replayed graph does not contain


@dataclass(frozen=True)
class Work:
    """What one operator has a card do.

    Attributes:
        part: one of `PARTS`; phase: the phase of the step.
        read, written: bytes from and to memory.
        convolves: the FLOPs are a convolution's.
        programs, resident, at_once: of a kernel of ours, its programs, how many of them fit on a multiprocessor, and
            the bytes that each has on their way at a time; 0 for others, which are taken to fill the card.
        merges: trips to memory at its end that wait for one another, while other programs have ended.
        own: seconds that do not follow from the rest.
    """

    part: str
    phase: str
    launches: int = 1
    flops: int = 0
    read: int = 0
    written: int = 0
    convolves: bool = False
    programs: int = 0
    resident: int = 0
    at_once: int = 0
    merges: int = 0
    own: float = 0.0

    def seconds(self, card: Card) -> float:
        """Expected seconds on a card: the longest of its launches, FLOPs and bytes, and the merging at its end."""
        memory = card.memory
        if self.programs:  # bytes on their way / the time that they take
            resident = min(self.programs, self.resident * card.multiprocessors)
            memory = min(memory, resident * self.at_once / card.latency)
        peak = card.convolution if self.convolves else card.product
        longest = max(self.launches * card.launch, self.flops / peak, (self.read + self.written) / memory)
        return longest + self.merges * card.latency + self.own


@dataclass
class Part:
    """Totals of the operators of one kind in a step: launches, FLOPs, bytes from and to memory, expected seconds."""

    launches: int = 0
    flops: int = 0
    read: int = 0
    written: int = 0
    seconds: float = 0.0

    def add(self, work: Work, card: Card) -> None:
        self.launches += work.launches
        self.flops += work.flops
        self.read += work.read
        self.written += work.written
        self.seconds += work.seconds(card)


@dataclass
class Collectives:
    """Collectives of one kind: how many, their bytes as `runtime.collectives` counts them, expected seconds."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Collective:
    """One collective: its kind, the bytes of everything gathered, reduced or exchanged, its owner and its phase.

    Owners are "norms", "objective" and "weights"; the last covers gradients, weights and the optimizer's exchanges.
    `bytes` are those of its largest operand.
    """

    kind: str
    size: int
    whose: str
    phase: str = ""
    bytes: int = 0


TRANSIENT = ("activations", "weights in half precision", "gathered", "gradients", "buckets", "temporaries")


@dataclass
class Walk:
    """What was counted in one step, and the times expected of `card`; its totals are of a step that has ended.

    Attributes:
        work: the operators one by one; each_collective: the collectives one by one.
        calls: by phase, how often the host makes a call of each kind of `Host`.
        peak: bytes in use at the peak, by kind.
        waits: calls that would have made the host wait.
        fullest: by phase of the step, transient bytes at the phase's peak, by kind of `TRANSIENT`.
        parameters, largest: elements of the online network, and of its largest tensor.
        features: width of the backbone's output.
        checkpoint: bytes of a checkpoint.
        placement: placement of F; empty for an objective without F.
    """

    card: Card
    ranks: int
    work: list[Work] = field(default_factory=list)
    each_collective: list[Collective] = field(default_factory=list)
    calls: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    peak: dict[str, int] = field(default_factory=dict)
    waits: list[str] = field(default_factory=list)
    fullest: dict[str, dict[str, int]] = field(default_factory=dict)
    parameters: int = 0
    largest: int = 0
    features: int = 0
    checkpoint: int = 0
    placement: str = ""

    def on(self, card: Card) -> Walk:
        """The same counts with the times of another card."""
        return replace(self, card=card)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """Totals by kind of operator."""
        found = {name: Part() for name in PARTS}
        for work in self.work:
            found[work.part].add(work, self.card)
        return found

    @cached_property
    def collectives(self) -> dict[str, Collectives]:
        """Totals by kind of collective; a kind without any is not in it."""
        found: dict[str, Collectives] = {}
        for each in self.each_collective:
            total = found.setdefault(each.kind, Collectives())
            total.count += 1
            total.bytes += each.bytes
            total.seconds += self._of_collective(each)
        return found

    @property
    def collective_count(self) -> int:
        """Number of collectives of all kinds."""
        return len(self.each_collective)

    @property
    def launches(self) -> int:
        """Kernels of a step, those of collectives included."""
        return sum(work.launches for work in self.work) + self.collective_count

    @property
    def card_by_phase(self) -> dict[str, float]:
        """Expected seconds of the card in each phase, one operator after the other."""
        found: dict[str, float] = defaultdict(float)
        for work in self.work:
            found[work.phase] += work.seconds(self.card)
        for each in self.each_collective:
            found[each.phase] += self._of_collective(each)
        return found

    def host_by_phase(self, host: Host, replayed: bool = False) -> dict[str, float]:
        """Expected seconds of the host in each phase.

        Args:
            replayed: the step is a graph but for the phases of `LAUNCHED_ALWAYS`.
        """
        found = {
            phase: host.seconds(calls)
            for phase, calls in self.calls.items()
            if not replayed or phase in LAUNCHED_ALWAYS
        }
        return {**found, "graph": host.graph} if replayed else found

    def seconds(self, host: Host, replayed: bool = False) -> float:
        """Expected seconds of a step: the card's or the host's, whichever are more, as they work side by side."""
        return max(self.of_card, self.of_host(host, replayed))

    @property
    def of_card(self) -> float:
        """Expected seconds of the card, all parts and collectives one after the other."""
        return sum(self.card_by_phase.values())

    def of_host(self, host: Host, replayed: bool = False) -> float:
        """Expected seconds of the host in a step."""
        return sum(self.host_by_phase(host, replayed).values())

    def _of_collective(self, each: Collective) -> float:
        return collective_seconds(each.kind, sent(each.kind, each.size, self.ranks), self.ranks, 1, self.card)

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        host = Host.expected()
        return {
            "parts": {name: asdict(part) for name, part in self.parts.items()},
            "collectives": {name: asdict(each) for name, each in self.collectives.items()},
            "peak": self.peak,
            "waits": self.waits,
            "card_seconds": _rounded(self.card_by_phase),
            "host_seconds": _rounded(self.host_by_phase(host)),
            "host_seconds_replayed": _rounded(self.host_by_phase(host, replayed=True)),
            "calls": {phase: dict(calls) for phase, calls in self.calls.items()},
            "seconds": self.seconds(host),
            "range": [self.on(card).seconds(host) for card in self.card.ends()],
        }


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {phase: round(each, 9) for phase, each in seconds.items()}
