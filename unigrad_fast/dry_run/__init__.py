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

from unigrad_fast.dry_run.cards import Card, inside_and_between, latency, meeting_seconds, sent
from unigrad_fast.dry_run.walked import Collectives, Meeting, Part, Walk
from unigrad_fast.dry_run.walking import walk

__all__ = [
    "Card",
    "Collectives",
    "Meeting",
    "Part",
    "Walk",
    "inside_and_between",
    "latency",
    "meeting_seconds",
    "sent",
    "walk",
]
