"""Plans a run before the job is submitted: its memory, traffic, time and storage on a cluster, and how to need less.

One walk of the dry run counts the step as configured. Everything else is arithmetic on that walk: other stages,
placements, batches and numbers of cards. A `Plan` says which of the two it is: memory, collectives and bytes are
"counted" for the step that was walked, and "expected" for any other; times are always expected, from the figures of
`cards.json`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from unigrad_fast.config import Config
from unigrad_fast.dry_run.cards import Card, Host, collective_seconds, inside_and_between, latency, sent
from unigrad_fast.dry_run.walked import Collective, Walk
from unigrad_fast.dry_run.walking import walk
from unigrad_fast.objectives.placement import choose, compute_seconds, exchanged
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.wording import byte_size
from unigrad_fast.training import engine

WIDTHS, CARDS = (2048, 4096, 8192, 16384, 32768, 65536), (8, 16, 32, 64, 128, 256, 512)
BUCKET = 4 * engine.BUCKET  # bytes
PROCESS = 5 << 30  # host bytes of a rank: torch, CUDA context, DALI's queues, files read ahead; assumed, not measured
# Share of the step; chosen so that ResNet-50 on 8 H100 is latency-bound below 96 images (0.144; 0.155 at 88), the limit
# below which a run warns.
LATENCY_BOUND = 0.15
PER_IMAGE = (
    "convolution",
    "normalisation",
    "activation",
    "linear",
    "other",
    "loader",
)  # parts proportional to the images


@dataclass(frozen=True)
class Setting:
    """The settings of a step that the arithmetic can change.

    Attributes:
        nodes: number of nodes, with equally many ranks each.
        images: images per rank and micro-batch; accumulation: micro-batches.
    """

    ranks: int
    nodes: int
    stage: int
    placement: str
    images: int
    accumulation: int

    @property
    def batch(self) -> int:
        """`data.batch_size`."""
        return self.images * self.accumulation * self.ranks


@dataclass(frozen=True)
class Plan:
    """A step on a cluster.

    Attributes:
        origin: whether memory, collectives and bytes are "counted" or "expected".
        memory: bytes of a rank at its peak, by kind; most: bytes of each kind at that kind's own peak.
        seconds: the card's expected, by part, including collectives; nothing overlaps.
        host: the host's expected seconds, at the stage that was walked; DeepSpeed makes more calls at stages 1 and 2.
        inside, between: bytes that a rank sends inside its node, and its share of what the node sends to others.
        waiting: the part of the seconds that does not depend on the images: launches and latency of collectives.
    """

    setting: Setting
    origin: str
    memory: dict[str, int]
    most: dict[str, int]
    seconds: dict[str, float]
    host: float
    inside: float
    between: float
    collective_count: int
    waiting: float

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        """Expected seconds per step: the card's or the host's, whichever are more."""
        return max(sum(self.seconds.values()), self.host)

    @property
    def images_per_second(self) -> float:
        return self.setting.batch / self.step

    @property
    def bound_by(self) -> str:
        """What decides the time of the step: "host", "latency" or "work"."""
        if self.host > sum(self.seconds.values()):
            return "host"
        return "latency" if self.waiting > LATENCY_BOUND * self.step else "work"

    def hours(self, images: int, epochs: int) -> float:
        """Expected hours for epochs over so many images, without evaluations."""
        return epochs * (images // self.setting.batch) * self.step / 3600

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self.setting),
            "batch_size": self.setting.batch,
            "memory, sent, meetings": self.origin,
            "memory": self.memory,
            "most": self.most,
            "peak": self.peak,
            "inside": round(self.inside),
            "between": round(self.between),
            "meetings": self.collective_count,
            "times": "expected",
            "seconds": self.seconds,
            "host_seconds": self.host,
            "step_seconds": self.step,
            "images_per_second": self.images_per_second,
            "waiting_seconds": self.waiting,
            "bound_by": self.bound_by,
        }


@dataclass(frozen=True)
class Counted:
    """A walk, with the configuration that it was made for."""

    config: Config
    found: Walk

    @classmethod
    def of(cls, config: Config, ranks: int, card: Card, as_cuda: bool = True) -> Counted:
        """Walks a step; see `dry_run.walk`.

        Raises:
            UserError: as `walk` does.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cls(config, walk(config, ranks, card, as_cuda))

    @property
    def ranks(self) -> int:
        return self.found.ranks

    @property
    def card(self) -> Card:
        return self.found.card

    @property
    def views(self) -> int:
        return len(self.config.data.views())

    def ends(self, plan: Plan) -> tuple[Plan, Plan]:
        """The same plan at the slow and at the fast end of what is expected of the card."""
        slow, fast = (replace(self, found=self.found.on(card)) for card in self.card.ends())
        if plan.origin == "counted":
            return slow.plan(plan.setting.nodes), fast.plan(plan.setting.nodes)
        return slow.changed(plan.setting), fast.changed(plan.setting)

    @property
    def width(self) -> int:
        return self.config.model.projector.width

    @property
    def has_correlation(self) -> bool:
        """Whether the method keeps F; the arithmetic of other settings is known only for these methods."""
        return bool(self.found.placement)

    def setting(self, nodes: int = 1) -> Setting:
        settings, images = self.config.engine, self.config.images_at_once(self.ranks)
        stage, accumulation = settings.zero_stage, settings.accumulation_steps
        return Setting(self.ranks, nodes, stage, self.found.placement, images, accumulation)

    def plan(self, nodes: int = 1) -> Plan:
        """The plan of the step that was walked."""
        transient = list(self.found.fullest.values())
        return self._plan(self.setting(nodes), "counted", self.found.peak, transient, self.found.each_collective)

    def changed(self, setting: Setting) -> Plan:
        """The plan of the same networks in another setting, by arithmetic; the stage must not be lower.

        Only for a method with F.
        """
        base = self.setting()
        persistent = self._persistent(base, setting)
        transient = [self._transient(phase, kinds, base, setting) for phase, kinds in self.found.fullest.items()]
        return self._plan(setting, "expected", persistent, transient, list(self._collectives_in(base, setting)))

    def remedies(self, plan: Plan, usable: float) -> Iterator[tuple[str, Plan]]:
        """Changes of the configuration that make the plan fit, as text and as plans, the cheapest first.

        Tried are the stages and the placement alone, then together; then the smallest accumulation that fits, alone
        and with these; finally the largest batch that fits, alone or else with these. None for a method without F.
        """
        if not self.has_correlation:
            return
        base, width = plan.setting, self.width
        stages = [stage for stage in (1, 2) if stage > base.stage and base.ranks > 1]
        placements = ["sharded"] if base.placement == "replicated" and 1 < base.ranks <= width else []
        keys = [({"stage": stage}, f"engine.zero_stage {stage}") for stage in stages]
        keys += [({"placement": each}, f"objective.placement {each}") for each in placements]
        if stages and placements:
            keys.append(({"stage": 2, "placement": "sharded"}, "engine.zero_stage 2 and objective.placement sharded"))
        starts = [(base, "")]
        if keys:
            starts.append((replace(base, **keys[-1][0]), f"{keys[-1][1]} and "))
        accumulations = set()
        for start, also in starts:
            smaller = next((each for each in self._accumulated(start) if self.changed(each).peak <= usable), None)
            if smaller is not None and smaller.accumulation not in accumulations:
                accumulations.add(smaller.accumulation)
                keys.append((asdict(smaller), f"{also}engine.accumulation_steps {smaller.accumulation}"))
        for start, also in starts:
            smaller = next((each for each in self._smaller(start) if self.changed(each).peak <= usable), None)
            if smaller is not None:
                keys.append((asdict(smaller), f"{also}data.batch_size {smaller.batch}"))
                break
        for change, key in keys:
            found = self.changed(replace(base, **change))
            if found.peak <= usable and found.peak < plan.peak:
                yield key, found

    def without_remedy(self) -> str:
        """What else may make a plan fit, when there are no remedies."""
        untried = "" if self.has_correlation else "a larger engine.accumulation_steps, a smaller data.batch_size, "
        return f"{untried}a smaller model.projector.width, or more GPUs"

    def _accumulated(self, start: Setting) -> Iterator[Setting]:
        """The same batch in more and more micro-batches."""
        for parts in range(2, start.images // 2 + 1):
            if start.images % parts == 0 and self._divides(start.images // parts):
                yield replace(start, images=start.images // parts, accumulation=start.accumulation * parts)

    def _smaller(self, start: Setting) -> Iterator[Setting]:
        """Smaller and smaller batches; above 16 images per rank, in steps of 8."""
        for images in range(start.images - 1, 1, -1):
            if (images % 8 == 0 or images < 8 or start.images <= 16) and self._divides(images):
                yield replace(start, images=images)

    def around(self, plan: Plan, images: int, image_bytes: float) -> dict[str, float]:
        """Further needs of the run: bytes on hosts, on disk and, during kNN evaluation, on a card; reads per second.

        The size of a checkpoint is counted; the rest is expected.
        """
        ranks, nodes = plan.setting.ranks, plan.setting.nodes
        bank = 2 * math.ceil(images / ranks) * self.found.features if self.config.evaluation.every else 0
        keep, every = self.config.checkpoint.keep, self.config.checkpoint.keep_every
        kept_for_good = self.config.schedule.epochs // every if every else 0
        reads, checkpoint = plan.images_per_second, self.found.checkpoint
        return {
            "checkpoint": checkpoint,
            "disk": checkpoint * (keep + 1 + kept_for_good),  # a new one is written before the oldest is deleted
            "host_per_node": ranks // nodes * (PROCESS + checkpoint / ranks),
            "bank": bank,  # a rank's share, in half precision
            "reads": reads,
            "reads_per_node": reads / nodes,
            "read_bytes": reads * image_bytes,
        }

    def _divides(self, images: int) -> bool:
        """Whether a rank's micro-batch may have so many images."""
        cutmix = self.config.data.cutmix
        return not cutmix.probability or images % cutmix.group == 0

    def _persistent(self, base: Setting, new: Setting) -> dict[str, float]:
        """`Walk.peak` in another setting."""
        peak = dict(self.found.peak)
        share = (base.ranks if base.stage else 1) / (new.ranks if new.stage else 1)
        whole = base.ranks if base.placement == "sharded" else 1
        peak["momentum"] *= share
        peak["correlation"] *= whole / (new.ranks if new.placement == "sharded" else 1)
        if new.stage:
            peak["master weights"] = peak["weights"] / new.ranks
        return peak

    def _transient(self, phase: str, kinds: Mapping[str, int], base: Setting, new: Setting) -> dict[str, float]:
        """`Walk.fullest` of a phase in another setting."""
        images = new.images / base.images
        found: dict[str, float] = dict(kinds)
        found["activations"] *= images
        had, has = (sum(self._gathered(phase, each)) for each in (base, new))
        found["gathered"] = has * kinds["gathered"] / had if had and kinds["gathered"] else has
        if phase == "backward" and new.stage > base.stage:
            # Fitted to walks of ResNet-50 at widths 16384 to 65536 on 8 cards, not derived: if a gradient is larger
            # than a bucket, stage 1 saves half of it compared with stage 0; stage 2 saves all of it but needs a second
            # bucket.
            large = 4 * self.found.largest if 4 * self.found.largest > BUCKET else 0
            buckets = (BUCKET * (stage if large else min(stage, 1)) for stage in (new.stage, base.stage))
            found["buckets"] += next(buckets) - next(buckets)
            found["temporaries"] = max(0.0, found["temporaries"] - (new.stage - base.stage) / 2 * large)
        if new.accumulation > 1 and phase in ("target", "online", "objective", "backward"):
            whole = 4 * self.found.parameters / (new.ranks if new.stage == 2 else 1)
            found["gradients"] = max(found["gradients"], whole)
        return found

    def _gathered(self, phase: str, setting: Setting) -> list[int]:
        """Bytes of each tensor gathered by the objective that exists in a phase, without the exchanged columns."""
        sizes = exchanged(setting.placement, self.width, setting.images, self.views, setting.ranks)
        gathers = [size for kind, size in sizes if kind == "gather"]
        ahead = setting.placement == "sharded"  # its update with the targets begins before the online branch
        return {"objective": gathers, "online": gathers[:1] if ahead else []}.get(phase, [])

    def _collectives_in(self, base: Setting, new: Setting) -> Iterator[Collective]:
        """`Walk.each_collective` in another setting."""
        times = new.accumulation // base.accumulation
        for each in self.found.each_collective:
            if each.whose == "norms":
                size = each.size * new.ranks // base.ranks if each.kind == "gather" else each.size
                yield from [replace(each, size=size)] * times
            elif each.whose == "weights":
                yield each
        for kind, size in exchanged(new.placement, self.width, new.images, self.views, new.ranks):
            yield from [Collective(kind, size, "objective")] * new.accumulation
        if new.stage and not base.stage:  # the updated weights
            yield Collective("gather", 4 * self.found.parameters, "weights")

    def _plan(
        self,
        setting: Setting,
        origin: str,
        persistent: Mapping[str, float],
        phases: Sequence[Mapping[str, float]],
        collectives: Sequence[Collective],
    ) -> Plan:
        ranks, nodes, card = setting.ranks, setting.nodes, self.card
        memory = [_by_kind(persistent, transient) for transient in phases]
        fullest = max(memory, key=lambda kinds: sum(kinds.values()))
        most = {kind: max(kinds[kind] for kinds in memory) for kind in fullest}
        seconds = self._seconds(setting)
        launches = self.found.launches - self.found.collective_count
        floor, inside, between = launches * card.launch, 0.0, 0.0
        for each in collectives:
            moved = sent(each.kind, each.size, ranks)
            within, without = inside_and_between(each.kind, moved, ranks, nodes)
            inside, between = inside + within, between + without
            floor += latency(each.kind, ranks, nodes, card)
            name = f"collectives: {each.kind}"
            seconds[name] = seconds.get(name, 0.0) + collective_seconds(each.kind, moved, ranks, nodes, card)
        host = self._host(setting)
        return Plan(setting, origin, fullest, most, seconds, host, inside, between, len(collectives), floor)

    def _host(self, new: Setting) -> float:
        """Expected seconds of the host, which grow with the micro-batches only."""
        times = new.accumulation / self.setting().accumulation
        once = ("step", "target_update", "end")
        by_phase = self.found.host_by_phase(Host.expected())
        return sum(seconds * (1 if phase in once else times) for phase, seconds in by_phase.items())

    def _seconds(self, new: Setting) -> dict[str, float]:
        """Expected seconds of each part; those of the walk if the setting is unchanged."""
        base = self.setting()
        images = new.images / base.images
        times = new.accumulation / base.accumulation
        seconds = {}
        for name, part in self.found.parts.items():
            seconds[name] = part.seconds
            if name in PER_IMAGE:
                seconds[name] = times * max(images * part.seconds, part.launches * self.card.launch)
            elif name == "casts":
                seconds[name] *= times
            elif name == "copies":  # one of each rank's part
                seconds[name] *= times * new.ranks / base.ranks
        if new.stage:
            seconds["optimizer"] *= (base.ranks if base.stage else 1) / new.ranks
        if not self.has_correlation:
            return seconds
        # Gathered tensors cross memory about three times: fitted to walks of width 16384 on 64 and 512 cards.
        had, has = (
            each.accumulation * compute_seconds(each.placement, self.width, each.images, self.views, each.ranks)
            + 3 * each.accumulation * sum(self._gathered("objective", each)) / self.card.memory
            for each in (base, new)
        )
        seconds["objective"] = max(seconds["objective"] + has - had, has)
        return seconds


def _by_kind(persistent: Mapping[str, float], transient: Mapping[str, float]) -> dict[str, int]:
    """`Plan.memory` from persistent memory, by the kinds of `Walk.peak`, and transient, by those of `TRANSIENT`."""
    kinds = {
        "parameters": persistent["weights"],
        "master weights": persistent.get("master weights", 0),
        "momentum": persistent["momentum"],
        "gradients": transient["gradients"],
        "target": persistent["target"] + persistent["the target's weights in half precision"],
        "F": persistent["correlation"],
        "activations": transient["activations"] + transient["gathered"],
        "buckets": transient["buckets"],
        "other": persistent["running statistics"] + transient["weights in half precision"] + transient["temporaries"],
    }
    return {kind: round(size) for kind, size in kinds.items()}


def require_cluster(ranks: int, nodes: int) -> None:
    """Raises UserError unless all nodes have the same number of cards."""
    if ranks % nodes:
        candidates = dict.fromkeys(max(nodes, each) for each in (ranks // nodes * nodes, (ranks // nodes + 1) * nodes))
        raise UserError(
            f"gpus = {ranks}: does not divide over {nodes} nodes; use {' or '.join(str(each) for each in candidates)}"
        )


def sweep(
    config: Config, widths: Sequence[int], cards: Sequence[int], images: int, card: Card, per_node: int
) -> Iterator[tuple[int, Plan, bool]]:
    """Plans each width on each number of cards, with so many images per card; yields width, plan and whether it fits.

    Each width is walked once, on one node's cards at stage 0; the rest is arithmetic. The stage is the lowest that
    fits, or the highest. F is placed as `objective.placement` says; "auto" is decided for each width and number of
    cards.

    Raises:
        UserError: the method is not UniGrad.
    """
    if config.objective.method != "unigrad":
        raise UserError(f"objective.method = {config.objective.method}: a sweep covers UniGrad only; leave out --sweep")
    walked_on = max(2, per_node)
    for width in widths:
        model = config.model.model_copy(
            update={"projector": config.model.projector.model_copy(update={"width": width})}
        )
        walked = config.model_copy(
            update={
                "model": model,
                "data": config.data.model_copy(update={"batch_size": images * walked_on}),
                "engine": config.engine.model_copy(update={"zero_stage": 0, "accumulation_steps": 1}),
            }
        )
        counted = Counted.of(walked, walked_on, card)
        for ranks in cards:
            nodes = math.ceil(ranks / per_node)
            placement = config.objective.placement
            if placement == "auto":
                placement = choose(width, images, counted.views, ranks)
            plans = [
                counted.changed(Setting(ranks, nodes, stage, placement, images, 1))
                for stage in ((0,) if ranks == 1 else (0, 1, 2))
            ]
            fitting = [plan for plan in plans if plan.peak <= card.usable_memory]
            yield width, (fitting or plans[-1:])[0], bool(fitting)


def advice_here(config: Config, ranks: int, size: float | None) -> Iterator[str]:
    """Advice for a run that ran out of memory: the memory of its step by kind, and changes that need less.

    Args:
        size: bytes of the card that it ran on; None for a CPU, whose memory is unknown.
    """
    counted = Counted.of(config, ranks, replace(Card.of("h100"), size=math.inf if size is None else size))
    plan = counted.plan()
    kinds = ", ".join(f"{kind} {byte_size(size)}" for kind, size in plan.memory.items() if 100 * size > plan.peak)
    yield f"counted for a GPU, peak memory of a rank: {byte_size(plan.peak)}; {kinds}"
    # If the card has more than that, something else was in its memory too.
    usable = min(counted.card.usable_memory, 0.8 * plan.peak)
    remedies = [f"{key} ({byte_size(found.peak)})" for key, found in counted.remedies(plan, usable)]
    yield f"expected to fit: {'; '.join(remedies) or counted.without_remedy()}"
