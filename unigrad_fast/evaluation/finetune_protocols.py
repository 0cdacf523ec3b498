"""Published settings of fine-tuning on few labels.

All train backbone and classifier together, with momentum 0.9, no weight decay, and batch norm in training mode. Sources
are the published code of TWIST, Barlow Twins, VICReg, SwAV (its script for few labels) and SimCLR, and from SimCLR's
second paper. All but SimCLR report the epoch that is best on the validation images; here it is always the last one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from unigrad_fast.optimization.schedules import learning_rate
from unigrad_fast.runtime.errors import UserError

FRACTIONS = (0.01, 0.1)  # of the labels, for which the sources have settings
ALIKE = 0.05  # fractions whose ratio differs by less from 1 are taken for the same, as of SimCLR's lists
CLASSIFIER = "classifier from a normal distribution with deviation 0.01"


@dataclass(frozen=True)
class Settings:
    """How a network is fine-tuned.

    Attributes:
        epochs, batch_size: as in training; images over all ranks.
        backbone_lr, head_lr: largest learning rates, not scaled by the batch; None if a search chooses them.
        optimizer: "lars" adapts the rates of the backbone's convolutions only, as SimCLR's code does.
        schedule: "cosine_by_epoch" changes the rates after each epoch, "cosine" after each step; "steps" multiplies
            them by 0.2 after 60 % and after 80 % of the epochs.
    """

    epochs: int
    batch_size: int
    backbone_lr: float | None
    head_lr: float | None
    optimizer: Literal["sgd", "lars"] = "sgd"
    schedule: Literal["cosine_by_epoch", "cosine", "steps"] = "cosine_by_epoch"

    def share(self, step: int, steps_per_epoch: int) -> float:
        """The share of the largest rates that a step takes."""
        epoch = step // steps_per_epoch
        if self.schedule == "steps":
            return 0.2 ** ((5 * epoch >= 3 * self.epochs) + (5 * epoch >= 4 * self.epochs))
        done = (epoch, self.epochs) if self.schedule == "cosine_by_epoch" else (step, steps_per_epoch * self.epochs)
        return learning_rate(*done, peak=1.0, warmup_steps=0, kind="official", min_fraction=0.0)


@dataclass(frozen=True)
class Protocol:
    """The settings of one source.

    Attributes:
        source: says where they are from.
        settings: by fraction of the labels, for which the source has them.
        remark: what differs from the source.
    """

    source: str
    settings: Mapping[float, Settings]
    remark: str | None = None


def usual(backbone_lr: float, head_lr: float) -> Settings:
    return Settings(20, 256, backbone_lr, head_lr)


def swav(backbone_lr: float, head_lr: float) -> Settings:
    return replace(usual(backbone_lr, head_lr), schedule="steps")


SIMCLR_RATE = 0.005 * math.sqrt(1024)  # the rate of one image times the square root of the batch
SIMCLR = Settings(60, 1024, SIMCLR_RATE, SIMCLR_RATE, "lars", "cosine")
PROTOCOLS = {
    "twist": Protocol(
        "TWIST's, the likeliest source of the paper's numbers", {0.01: usual(0.04, 0.2), 0.1: usual(0.02, 0.2)}
    ),
    "barlow_twins": Protocol("Barlow Twins'", {0.01: usual(0.005, 0.5)}),
    "vicreg": Protocol("VICReg's", {0.01: usual(0.03, 0.08), 0.1: usual(0.01, 0.1)}),
    "swav": Protocol("SwAV's", {0.01: swav(0.02, 5.0), 0.1: swav(0.01, 0.2)}),
    "simclr_v2": Protocol(
        "SimCLRv2's",
        {0.01: SIMCLR, 0.1: replace(SIMCLR, epochs=30)},
        "SimCLRv2 keeps the first layer of the projector, which this does not",
    ),
}
NAMES = tuple(PROTOCOLS)
# The grid of a search: all pairs of rates, of backbone and classifier, that a source has for SGD.
_BY_SGD = [each for one in PROTOCOLS.values() for each in one.settings.values() if each.optimizer == "sgd"]
PUBLISHED = tuple(sorted({(each.backbone_lr, each.head_lr) for each in _BY_SGD}))


def nearest(fraction: float) -> float:
    """The fraction with published settings whose ratio to this one is nearest to 1."""
    return min(FRACTIONS, key=lambda each: abs(math.log(each / fraction)))


def is_like(fraction: float, other: float) -> bool:
    return abs(fraction / other - 1) < ALIKE


def settings(name: str, fraction: float, changes: Mapping[str, int | float], search: bool) -> Settings:
    """A protocol's settings for a fraction of the labels, with changes to them.

    Args:
        changes: other values of `Settings`.
        search: the rates are searched for.

    Raises UserError if the source has no rates, and the changes have none either.
    """
    protocol, at = PROTOCOLS[name], nearest(fraction)
    found = protocol.settings.get(at)
    if found is None:
        if not search and not {"backbone_lr", "head_lr"} <= changes.keys():
            raise UserError(
                f"protocol = {name}: its source has no rates for {100 * at:g} % of the labels; use --protocol twist, "
                "--search true, or rates of your own with --backbone_lr and --head_lr"
            )
        (found,) = protocol.settings.values()
    if search:
        if found.optimizer == "lars":
            raise UserError(f"protocol = {name}: the grid of rates is for SGD, not for LARS; leave out search")
        found = replace(found, backbone_lr=None, head_lr=None)
    return replace(found, **changes)


def described(name: str, fraction: float, changes: Mapping[str, int | float], search: bool) -> str:
    """A protocol with its settings, and those that differ from the source's."""
    published, found = PROTOCOLS[name].settings.get(nearest(fraction)), settings(name, fraction, changes, search)
    optimizer = {"sgd": "SGD", "lars": "LARS"}[found.optimizer]
    schedule = {
        "cosine_by_epoch": "cosine by epoch",
        "cosine": "cosine",
        "steps": "times 0.2 after 60 % and 80 % of the epochs",
    }[found.schedule]
    rates = (
        f"rates from a grid of {len(PUBLISHED)} published pairs"
        if search
        else f"rates {found.backbone_lr:g} of the backbone and {found.head_lr:g} of the classifier"
    )
    differing = ", ".join(
        f"{key} {value:g}" for key, value in changes.items() if value != getattr(published, key, None)
    )
    return (
        f"{name} protocol ({PROTOCOLS[name].source}: {found.epochs} epochs of batch {found.batch_size}, "
        f"{optimizer}, {rates}, {schedule})" + (f", but {differing}" if differing else "")
    )
