"""`unigrad-fast evaluate finetune`: the accuracy of a run's encoder after fine-tuning on few labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

import numpy as np
import torch

from unigrad_fast.evaluation import finetune_protocols, samples
from unigrad_fast.evaluation.classes import without_unused
from unigrad_fast.evaluation.crop_training import few_steps
from unigrad_fast.evaluation.finetune import fine_tune, fitted, judge
from unigrad_fast.evaluation.finetune_protocols import CLASSIFIER, PROTOCOLS, PUBLISHED, Settings, is_like, nearest
from unigrad_fast.evaluation.linear import WAS_FITTED, FrozenEncoder
from unigrad_fast.evaluation.linear_sweep import without_held_out
from unigrad_fast.evaluation.results import folder_of, printed, write_result
from unigrad_fast.evaluation.runs import Asked, Opened, opened, print_table
from unigrad_fast.evaluation.unfinished import Series, Unfinished
from unigrad_fast.images.manifests import evaluated
from unigrad_fast.pipelines.manifest import part
from unigrad_fast.runtime.files import write_whole
from unigrad_fast.runtime.outputs import Written
from unigrad_fast.runtime.process_group import on_first
from unigrad_fast.runtime.wording import percent

Row: TypeAlias = "dict[str, Any]"  # seed, rates, accuracy, top5 and number of validation images of one training
FINISHED = "the finished trainings are"


@dataclass(frozen=True)
class FewLabels:
    """Options of a fine-tuning.

    Attributes:
        protocol: a name of `PROTOCOLS`.
        fraction: of the training images, for a balanced sample; None with `subset`, a file that lists them.
        changes: other values of `Settings`.
        search: choose the rates from `PUBLISHED`.
        choose: images on which they are chosen: "train" for a held-out tenth of the labelled images, or "val".
        seeds: number of trainings, with the run's seed and the next ones.
    """

    protocol: str
    fraction: float | None
    subset: Path | None
    changes: Mapping[str, int | float]
    search: bool
    choose: str
    seeds: int


def evaluate_finetune(run: Path | None, few: FewLabels, asked: Asked) -> Written:
    """Print the accuracy of a run's online backbone, fine-tuned on few labels.

    Write it to RUN/evaluation/finetune-PROTOCOL-FRACTION-epochE.json, the network of the last seed to a .safetensors
    file next to it, and the sample, if one was drawn, to a list of names.

    Args:
        run: the run folder; None with `asked.weights`.
        asked: checkpoint and images that override the run's.

    Raises:
        UserError: the run has no weights, labels or validation images, the sample, the protocol and the batch do not
            fit each other and the ranks, or the disk has no room.
        RunStopped: the loss is not finite, too many images cannot be used, or the result cannot be written.
        Preempted: after saving.
    """
    folder = folder_of(run, asked.output)
    with opened(run, asked, "fine-tuning", WAS_FITTED) as this:
        with this.preemption.nothing_to_save("nothing was computed yet"):
            train, val, _ = without_unused(this.train, this.val)
            positions = on_first(lambda: _positions(replace(this, train=train), few))
            labelled = part(train, positions, train.labels[positions], train.classes)
            fraction = few.fraction or len(labelled) / len(train)
            settings = finetune_protocols.settings(few.protocol, fraction, few.changes, few.search)
            most = this.config.evaluation.batch_size
            batch_size, parts = fitted(settings.batch_size, len(labelled), this.world.size, most)
            listed = {**this.listed, "training": len(labelled)}
            encoder = replace(this, train=labelled, val=val, listed=listed)
            searched = (without_held_out(encoder) if few.choose == "train" else encoder) if few.search else None
        about = {
            "protocol": f"fine-tuning, {few.protocol}",
            **this.settings,
            "fraction": fraction,
            "settings_of_fraction": nearest(fraction),
            **asdict(settings),
            "batch_size": batch_size,
            "batch_norm": {"mode": "training", "images": batch_size // parts},
            "labelled": len(labelled),
            "classes": len(labelled.classes),
            "sample": evaluated(labelled),
            "sample_seed": this.config.seed if few.subset is None else None,
            "seeds": [(this.config.seed + number) % 2**32 for number in range(few.seeds)],
            "search": {"grid": [list(pair) for pair in PUBLISHED], "choose": few.choose} if few.search else None,
        }
        told = _told(few, fraction, settings, len(labelled), batch_size, parts)
        for line in told:
            this.say(line)
        stem = this.stem(f"finetune-{few.protocol}-{fraction:.3g}")
        unfinished = Unfinished(folder, stem, about, this.say)
        series = Series(unfinished)
        if len(series.done) < few.seeds + few.search * len(PUBLISHED):
            on_first(partial(unfinished.require_room, _room(encoder)))
        candidates: list[Row] = []
        if searched is not None:
            settings, candidates = _searched(searched, settings, few.choose, series, this)
        rows = []
        for number, seed in enumerate(about["seeds"], start=len(candidates)):
            seeded = replace(encoder, config=this.config.model_copy(update={"seed": seed}))
            rows.append(_trained(seeded, settings, series, number, this))
        figures = {key: _over_seeds([row[key] for row in rows]) for key in ("accuracy", "top5")}
        protocol = finetune_protocols.described(few.protocol, fraction, few.changes, few.search)
        title = (
            f"fine-tuning, {this.settings['branch']}: {protocol}, "
            f"{len(labelled):,} of {len(train):,} labels, {rows[0]['images']:,} validation images"
        )
        name = f"trained encoder, {this.name}"
        print_table(this.console, title, [(name, *(percent(*each) for each in figures.values()))])
        of_weights = {**rows[-1], "branch": "fine-tuned", "classes": labelled.classes}
        with printed(unfinished.kept(FINISHED)):
            names = few.subset
            if names is None and len(labelled) < len(train):
                names = folder / f"finetune-{fraction:.3g}-{about['sample'][:8]}.txt"
                folder.mkdir(parents=True, exist_ok=True)
                on_first(partial(write_whole, names, samples.as_list(labelled)))
                this.say(f"the labelled images are listed in {names}; --subset {names} takes the same ones")
            written = on_first(
                lambda: write_result(
                    folder,
                    stem,
                    {**about, "images": rows[0]["images"]},
                    {
                        **this.paths,
                        "counts": encoder.counts(),
                        "data": {**this.paths["data"], "labelled": None if names is None else str(names)},
                        **{key: mean for key, (mean, _) in figures.items()},
                        "deviation": {key: deviation for key, (_, deviation) in figures.items()},
                        "chosen": {"backbone_lr": settings.backbone_lr, "head_lr": settings.head_lr},
                        "candidates": candidates,
                        "results": rows,
                        "remarks": told,
                    },
                    series.weights or None,
                    of_weights,
                )
            )
            on_first(unfinished.delete)
        this.say(written.line)
        return written


def _positions(encoder: FrozenEncoder, few: FewLabels) -> np.ndarray:
    """Positions of the labelled images."""
    if few.subset is not None:
        return samples.listed(encoder.train, few.subset)
    assert few.fraction is not None and encoder.train.labels is not None
    return samples.balanced(encoder.train.labels, few.fraction, encoder.config.seed)


def _room(encoder: FrozenEncoder) -> int:
    """Bytes of what a training saves: weights and momentum, and as much again while the file is replaced."""
    classifier = (encoder.width() + 1) * len(encoder.train.classes) * torch.float32.itemsize
    return 4 * (classifier + sum(tensor.nbytes for tensor in encoder.backbone.state_dict().values()))


def _told(few: FewLabels, fraction: float, settings: Settings, labels: int, batch_size: int, parts: int) -> list[str]:
    """Lines for the user about what a protocol leaves open, or what differs from it."""
    nearer, remark = nearest(fraction), PROTOCOLS[few.protocol].remark
    told = [
        f"batch norm is in training mode, with the statistics of {batch_size // parts} images over all ranks; "
        f"{CLASSIFIER}; all weights are trained, and the last epoch counts"
    ]
    if not is_like(fraction, nearer):
        told.append(
            f"the settings are those for {100 * nearer:g} % of the labels, the nearer to {100 * fraction:.3g} %"
        )
    if batch_size < settings.batch_size:
        told.append(
            f"batch_size = {settings.batch_size}: there are only {labels:,} labelled images, so {batch_size} are used "
            "per step; the rates stay as they are"
        )
    return [*told, *few_steps(labels, batch_size, settings.epochs), *filter(None, [remark])]


def _searched(
    encoder: FrozenEncoder, settings: Settings, choose: str, series: Series, this: Opened
) -> tuple[Settings, list[Row]]:
    """The settings with the rates that are best on the validation images of `encoder`, and the rows of all rates."""
    tried = [replace(settings, backbone_lr=backbone, head_lr=head) for backbone, head in PUBLISHED]
    rows = [_trained(encoder, each, series, number, this) for number, each in enumerate(tried)]
    best = max(range(len(tried)), key=lambda number: rows[number]["accuracy"])
    this.say(
        f"best of {len(tried)} pairs of rates, chosen on {rows[best]['images']:,} "
        f"{'validation' if choose == 'val' else 'held-out training'} images: {tried[best].backbone_lr:g} of the "
        f"backbone and {tried[best].head_lr:g} of the classifier, {rows[best]['accuracy']:.2f} %"
    )
    return tried[best], rows


def _trained(encoder: FrozenEncoder, settings: Settings, series: Series, number: int, this: Opened) -> Row:
    """A row of one training of a series."""
    if number < len(series.done):
        return series.done[number]
    seed, backbone_lr, head_lr = encoder.config.seed, settings.backbone_lr, settings.head_lr
    this.say(f"seed {seed}, rates {backbone_lr:g} and {head_lr:g}, {len(encoder.train):,} labelled images:")
    network = fine_tune(encoder, settings, series, this.preemption)
    with this.preemption.nothing_to_save(f"{series.unfinished.kept(FINISHED)}; repeat the command to continue"):
        accuracy, top5, images = judge(encoder, network)
    figures = {"accuracy": accuracy, "top5": top5, "images": images}
    rates = {"backbone_lr": backbone_lr, "head_lr": head_lr}
    series.end({"seed": seed, **rates, **figures}, network.named_weights())
    return series.done[number]


def _over_seeds(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean, and standard deviation of a sample; None where there is none."""
    known = [value for value in values if value is not None]
    return (fmean(known) if known else None), (stdev(known) if len(known) > 1 else None)
