"""The paper's table of methods as data: gradient = scale · (−positive + balance · negative), for one view.

N is the number of images on all ranks; no scale contains the 1/N of the mean over images. Sums run over the samples v:

    positive   identity        f·m⁺                        f is `positive_factor`
               diagonal        A·m⁺                        A = I − (1−λ)·diag(W), W = uᵀm⁺/N
               predictor       W_h·m⁺                      W_h from the eigenvectors of F
    balance    a number        λ
               dynamic         λ = u·W_h·m⁺ / u·G·u        G is the matrix of the negative
    negative   softmax         Σ s_v·v                     s = softmax(u·v/τ)
               moving_average  Σ ρ_v·(u·v)·v = F·u         with W_h: G·u, see `predictor`
               cross_batch     Σ (m⁺·m⁺_v)/N·v
               own_batch       Σ (u·v)/N·v                 with `centred`, ũ and ṽ for u and v, plus u/λ − B·ũ
    scale      temperature     1/τ
               predictor       1/‖W_h·u‖
               two, one        2, 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args, get_type_hints

from unigrad_fast.objectives.catalogue import FORMS, require
from unigrad_fast.objectives.checks import require_among

PARTS = ("normalisation", "positive", "negative", "samples", "scale")
SAMPLES = {
    "softmax": ("batch", "batch_without_self", "bank"),
    "moving_average": ("all",),
    "cross_batch": ("batch",),
    "own_batch": ("batch",),
}


@dataclass(frozen=True)
class Row:
    """A row of the table; another method is simply another value of this class.

    Attributes:
        normalisation: applied to both branches; batch norm uses the images of all ranks.
        positive, balance, negative, scale: as above.
        samples: the samples in the sums. "batch": targets of both global views on all ranks (for `cross_batch` and
            `own_batch` the same view on all ranks); "batch_without_self": the same without the row's own target;
            "bank": the positive and a bank of targets; "all": the moving average F.
        temperature: τ.
        bank_size: number of keys in the bank.
        decay: ρ of F.
        correlation_source: branch F is computed from, "online" (the paper's formula) or "target" (the authors' code).
        epsilon: ε, which lifts small eigenvalues.
        predictor: "paper": W_h = U(√Λ + ε·λ_max)Uᵀ, G = F + ε²·λ_max²·I; "full": G = W_h·W_h, without approximation;
            "authors": W_h = U(√(Λ/λ_max) + ε)Uᵀ, G = F/λ_max + ε²·I.
        every: number of steps between decompositions of F; W_h and G belong to the F that was decomposed last.
        positive_factor: f.
        centred: whether `own_batch` subtracts the mean from samples and adds the terms of VICReg that ℓ2 normalisation
            makes unnecessary.
        variance, floor, variance_epsilon: VICReg's λ₂, γ, and ε under the square root.
        both_terms: for `batch_without_self` with shared weights: also add the gradient that a row receives as other
            rows' sample.
        negative_target: "target", or "stop_gradient": samples come from the online branch, positives from the target.

    Raises:
        ValueError, TypeError: parts that do not fit together, an unknown name, a number out of range.
    """

    normalisation: Literal["l2", "batch_norm", "none"]
    positive: Literal["identity", "diagonal", "predictor"]
    balance: float | Literal["dynamic"]
    negative: Literal["softmax", "moving_average", "cross_batch", "own_batch"]
    samples: Literal["batch", "batch_without_self", "bank", "all"]
    scale: Literal["temperature", "predictor", "two", "one"]
    temperature: float = 0.2
    bank_size: int = 65536
    decay: float = 0.99
    correlation_source: Literal["online", "target"] = "online"
    epsilon: float = 0.3
    predictor: Literal["paper", "full", "authors"] = "paper"
    every: int = 1
    positive_factor: float = 1.0
    centred: bool = False
    variance: float = 1.0
    floor: float = 1.0
    variance_epsilon: float = 1e-4
    both_terms: bool = False
    negative_target: Literal["target", "stop_gradient"] = "target"

    def __post_init__(self) -> None:
        if isinstance(self.balance, str) and self.balance != "dynamic":
            raise ValueError(f"balance {self.balance!r} is unknown; use a number, or 'dynamic' with a predictor")
        hints = get_type_hints(type(self))
        for name in PARTS:
            require_among(name, getattr(self, name), get_args(hints[name]))
        apart = (*PARTS, "centred", *(["balance"] if self.balance == "dynamic" else []))
        require({key: value for key, value in vars(self).items() if key not in apart})
        if self.samples not in SAMPLES[self.negative]:
            known = " or ".join(SAMPLES[self.negative])
            raise ValueError(f"samples {self.samples!r} does not fit: negative {self.negative!r} takes {known}")
        if self.positive == "predictor" and self.negative != "moving_average":
            raise ValueError("positive 'predictor' does not fit: W_h is computed from F; use negative 'moving_average'")
        if self.positive == "diagonal" and self.negative != "cross_batch":
            raise ValueError("positive 'diagonal' does not fit: A is computed from W; use negative 'cross_batch'")
        if self.balance == "dynamic" and self.positive != "predictor":
            raise ValueError("balance 'dynamic' does not fit: it needs W_h; use positive 'predictor', or a number")
        if self.scale == "predictor" and self.positive != "predictor":
            raise ValueError("scale 'predictor' does not fit: it is 1/‖W_h·u‖; use positive 'predictor'")
        if self.centred and (self.negative != "own_batch" or self.balance == 0):
            raise ValueError("centred does not fit: use negative 'own_batch' with a balance above 0")
        if self.both_terms and self.samples != "batch_without_self":
            raise ValueError("both_terms does not fit: use samples 'batch_without_self'")
        online = self.negative == "moving_average" and self.negative_target == "stop_gradient"
        if online and self.correlation_source == "target":
            raise ValueError(
                "correlation_source 'target' does not fit: with negative_target 'stop_gradient' F comes from online "
                "embeddings; leave one of the two out"
            )

    @property
    def weight(self) -> float:
        """λ if it is a number, else 0."""
        return 0.0 if self.balance == "dynamic" else float(self.balance)

    @property
    def source(self) -> str:
        """Branch that the samples come from, "online" or "target"."""
        if self.negative == "own_batch" or self.negative_target == "stop_gradient":
            return "online"
        return self.correlation_source if self.negative == "moving_average" else "target"


def _row(form: str, normalisation: Any, positive: Any, negative: Any, samples: Any, scale: Any, **more: Any) -> Row:
    """A row with these parts and the settings that the catalogue declares for the form."""
    settings = {**FORMS[form].built(), **more}
    return Row(normalisation, positive, negative=negative, samples=samples, scale=scale, **settings)


#                normalisation positive     negative          samples               scale; λ and the rest: the catalogue
ROWS: Mapping[str, Row] = MappingProxyType({
    "a": _row("a", "l2",         "identity",  "softmax",        "bank",               "temperature"),
    "b": _row("b", "l2",         "identity",  "softmax",        "batch_without_self", "temperature"),
    "d": _row("d", "l2",         "predictor", "moving_average", "all",                "predictor"),
    "e": _row("e", "l2",         "identity",  "moving_average", "all",                "one"),
    "f": _row("f", "batch_norm", "diagonal",  "cross_batch",    "batch",              "two"),
    "g": _row("g", "batch_norm", "identity",  "cross_batch",    "batch",              "two"),
    "h": _row("h", "l2",         "identity",  "cross_batch",    "batch",              "two"),
    "i": _row("i", "none",       "identity",  "own_batch",      "batch",              "two", centred=True),
    "j": _row("j", "l2",         "identity",  "own_batch",      "batch",              "two"),
})  # fmt: skip

# The rows again, and the gradient form of each method by its name.
GRADIENTS: Mapping[str, Row] = MappingProxyType({
    **ROWS,
    "unigrad": replace(ROWS["e"], **FORMS["unigrad"].built()),
    "moco": ROWS["a"],
    "simclr": replace(ROWS["b"], samples="batch"),
    "byol_directpred": replace(ROWS["d"], **FORMS["byol_directpred"].built()),
    "barlow_twins": ROWS["h"],
    "vicreg": ROWS["j"],
})  # fmt: skip
