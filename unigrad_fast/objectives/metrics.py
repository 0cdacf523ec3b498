"""The metrics of a step that judge the objective: one declaration each. Nothing here imports torch.

docs/method.md has them as a table. "Trajectories" and "justifications" are the paper's figures "Learning trajectory for
different methods" and "Justifications for simplifications".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unigrad_fast.objectives.catalogue import Objective


@dataclass(frozen=True)
class Metric:
    """What a metric is.

    Attributes:
        meaning: with the paper's figure or equation, if it has one.
        owners: the methods that have it, in words.
        place: the function that computes it.
        has: whether a configured form has it.
    """

    meaning: str
    owners: str
    place: str
    has: Callable[[Objective], bool]


def names_of(objective: Objective) -> list[str]:
    """The names of the metrics that a configured form has."""
    return [name for name, metric in METRICS.items() if metric.has(objective)]


EVERYONE = ("all", lambda objective: True)
GRADIENT_FORMS = ("gradient forms", lambda objective: objective.form == "gradient")
WITH_CORRELATION = ("those with F", lambda objective: objective.takes("decay"))
DIRECT_PRED = ("`byol_directpred`", lambda objective: objective.method == "byol_directpred")
BARLOW_TWINS = ("`barlow_twins`", lambda objective: objective.method == "barlow_twins")
VICREG = ("`vicreg`: original, row i", lambda objective: objective.method == "vicreg" and objective.takes("floor"))
SIMCLR = (
    "`simclr` without momentum target",
    lambda objective: objective.method == "simclr" and objective.target != "momentum",
)

METRICS: dict[str, Metric] = {}


def _declare(owners: tuple[str, Callable[[Objective], bool]], place: str, /, **meanings: str) -> None:
    METRICS.update({name: Metric(meaning, owners[0], place, owners[1]) for name, meaning in meanings.items()})


_declare(
    EVERYONE,
    "the method",
    objective="The loss; `loss` in files",
    positive_cosine="Mean u·m⁺ (trajectories, a)",
)
_declare(GRADIENT_FORMS, "the method", negative_term="Mean u·(negative gradient); u·F·uᵀ for UniGrad")
_declare(EVERYONE, "figures.of_pairs", negative_cosine="Mean u·m with the targets of other images (trajectories, b)")
_declare(EVERYONE, "figures.of_spread", feature_std="See [collapse](#collapse)")
_declare(WITH_CORRELATION, "kernels.effective_rank", effective_rank="See [collapse](#collapse)")
_declare(
    DIRECT_PRED,
    "figures.of_predictor",
    correlation_term="Mean length of F·u, the first of the terms that λ_d scales (justifications, a)",
    root_term="Mean length of 2·ε·λ_max·F^½·u, the second (justifications, a)",
    identity_term="Mean length of ε²·λ_max²·u, the third (justifications, a)",
    term_cosine="Mean cosine of the first two (justifications, a)",
    dynamic_balance="Mean λ_d = u·W_h·m⁺ / ‖W_h·u‖² (justifications, b)",
)
_declare(
    BARLOW_TWINS,
    "figures.of_channels",
    least_diagonal="Least element of diag(W), W from batch-normalised embeddings (justifications, c)",
    greatest_diagonal="Greatest element of it (justifications, c)",
)
_declare(
    VICREG,
    "figures.of_neglected",
    neglected_cosine="Mean cosine of the neglected term u/λ − B·ũ and the negative Σ (ũ·ṽ)/N·ṽ (justifications, d)",
)
_declare(
    SIMCLR,
    "figures.of_shared_samples",
    second_term_ratio="Mean length of the second term of SimCLR's gradient, which the paper drops, over the first's",
)
