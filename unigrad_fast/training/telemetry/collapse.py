"""Signs that the embeddings collapse, which the loss alone does not show."""

from __future__ import annotations

from collections.abc import Mapping

# sqrt(C) times the mean per-channel deviation of unit embeddings is 1 when they spread evenly over the sphere
# and 0 when all of them are identical.
COLLAPSED_FEATURE_STD = 0.1
# The participation ratio trace(F)² / ‖F‖² counts the directions that embeddings use: C at best, 1 when they
# lie on one line. It can collapse while the deviation stays healthy, as two opposite vectors show.
COLLAPSED_EFFECTIVE_RANK = 2.0

COLLAPSING = "the embeddings are collapsing"


class CollapseWatch:
    """Tells once when the embeddings have collapsed.

    Args:
        warmup_steps: steps at the start without warnings, because an untrained projector may look collapsed.
        has_balance: whether the method has a negative term with a weight, objective.balance.
    """

    def __init__(self, warmup_steps: int, has_balance: bool = True) -> None:
        self.warmup_steps = warmup_steps
        self.remedy = "raise objective.balance or lower optimizer.base_lr" if has_balance else "lower optimizer.base_lr"
        self.warned = False

    def check(self, step: int, metrics: Mapping[str, float | None]) -> str | None:
        """The warning, the first time that `feature_std` or `effective_rank` is too low, else None."""
        if self.warned or step <= self.warmup_steps:
            return None
        limits = {"feature_std": COLLAPSED_FEATURE_STD, "effective_rank": COLLAPSED_EFFECTIVE_RANK}
        signs = [
            f"{name} is {metrics[name]:.3g}, below {limit:g}"
            for name, limit in limits.items()
            if metrics.get(name) is not None and metrics[name] < limit
        ]
        if not signs:
            return None
        self.warned = True
        return (
            f"{COLLAPSING}: {' and '.join(signs)}. The encoder maps all images to nearly "
            f"the same embedding and learns nothing; {self.remedy}"
        )

    def remember(self, warning: str) -> None:
        """Take note of an earlier process's warning, so that collapse is not reported twice."""
        self.warned |= warning.startswith(COLLAPSING)
