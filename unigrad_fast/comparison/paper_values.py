"""The paper's tables as data: what each line trains, and what the paper reports for it, with the table's label.

All accuracies are in percent, on ImageNet with ResNet-50. A line without keys is one that we cannot train, or that the
paper took from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unigrad_fast.objectives.catalogue import FORMS, Objective

LOCAL_SIZE = "data.local_views.size"
LINEAR = "linear"  # figures of a member; see `figures.py`
FEW = ("1 % top-1", "1 % top-5", "10 % top-1", "10 % top-5")
DETECTION = (
    *("VOC AP", "VOC AP50", "VOC AP75", "COCO box AP", "COCO box AP50", "COCO box AP75"),
    *("COCO mask AP", "COCO mask AP50", "COCO mask AP75"),
)


@dataclass(frozen=True)
class Line:
    """One setting of a comparison, which is trained with every seed.

    Attributes:
        row: what the table calls it.
        name: the start of its folders' names.
        keys: the configuration keys that make it, with their values; None if nothing is trained.
        paper: the paper's figures.
        column: of a table in two dimensions; there the row alone does not name it.
    """

    row: str
    name: str = ""
    keys: Mapping[str, Any] | None = None
    paper: Mapping[str, float] = field(default_factory=dict)
    column: str = ""

    def __str__(self) -> str:
        return f"{self.row}, {self.column}" if self.column else self.row

    @property
    def setting(self) -> tuple[tuple[str, str], ...]:
        """What it trains: the same for lines with the same keys, in whichever order and type."""
        return tuple(sorted((key, str(value)) for key, value in (self.keys or {}).items()))

    def at(self, image_size: int) -> Line:
        """The line for global views of another size than the paper's 224 pixels, with local views in proportion."""
        if self.keys is None or LOCAL_SIZE not in self.keys:
            return self
        size = max(16, round(self.keys[LOCAL_SIZE] * image_size / 224))
        return replace(self, keys={**self.keys, LOCAL_SIZE: size})


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper.

    Attributes:
        label: its LaTeX label, the source of its figures.
        title: what it shows.
        lines: its lines, in its order.
        figures: the figures that it reports.
    """

    label: str
    title: str
    lines: tuple[Line, ...]
    figures: tuple[str, ...] = (LINEAR,)


def _linear(value: float) -> dict[str, float]:
    return {LINEAR: value}


ROWS = {  # tab:methods_comparison, whose asterisk marks a momentum target that the method itself does not have
    "a": ("MoCo", 70.0),
    "b": ("SimCLR*", 70.0),
    "c": ("BYOL", 70.3),
    "d": ("BYOL (DirectPred)", 70.2),
    "e": ("UniGrad", 70.3),
    "f": ("Barlow Twins*", 69.0),
    "g": ("Barlow Twins without A", 69.7),
    "h": ("Barlow Twins without A, with l2", 70.0),
    "i": ("VICReg*", 70.0),
    "j": ("VICReg's first term, with l2", 69.8),
}
TARGETS = {  # tab:effect_of_encoder: the rows b, e and j by target branch
    "stop_gradient": {"b": 67.6, "e": 67.9, "j": 67.6},
    "momentum": {"b": 70.0, "e": 70.2, "j": 69.8},
    "mixed": {"b": 70.1, "e": 70.3, "j": 69.8},
}
BRANCHES = {"stop_gradient": "stop gradient", "momentum": "momentum", "mixed": "momentum, negatives stop gradient"}
KINDS = {"b": "(b) contrastive", "e": "(e) asymmetric", "j": "(j) decorrelation"}
ORIGINALS = {  # whose row of the table has the gradient of which original loss
    "moco": "a",
    "simclr": "b",
    "byol": "c",
    "byol_directpred": "d",
    "barlow_twins": "f",
    "vicreg": "i",
}
GRADIENTS = {"moco": "a", "simclr": "b", "byol_directpred": "d", "unigrad": "e", "barlow_twins": "h", "vicreg": "j"}


def row_of(form: str) -> str | None:
    """The row of the paper's table that a form of the catalogue has; None if there is none."""
    if form in ROWS:
        return form
    return ORIGINALS.get(form.removeprefix("original ")) if form.startswith("original ") else GRADIENTS.get(form)


def of_method(form: str, target: str | None) -> dict[str, float]:
    """The paper's figures for a form of the catalogue; none if it has not tried this.

    Args:
        target: a target branch, as of `of_target`; None is the paper's for its table of methods.
    """
    row = row_of(form)
    if row is None:
        return {}
    if target is not None and not form.startswith("original ") and row in TARGETS["mixed"]:
        value = TARGETS.get(target, {}).get(row)
    else:
        value = ROWS[row][1] if target in (None, "momentum") else None
    return {} if value is None else _linear(value)


def of_target(target: str, form: type[Objective]) -> dict[str, Any]:
    """The keys that choose a target branch for a form of the catalogue.

    "momentum" takes positives and negatives from the momentum branch, F too; "mixed" takes only the positives from it,
    and the negatives from the online branch. Gradient forms that do not take `objective.negative_target` have them from
    the online branch in any case.

    Raises:
        ValueError: "mixed" with an original loss, which has no separate negatives.
    """
    keys = {"objective.target": "momentum" if target == "mixed" else target}
    if target == "mixed" and form.names["form"] == "original":
        raise ValueError(f"targets = mixed: {form.spoken()} has no separate negative samples; leave one of the two out")
    if target == "mixed" and "negative_target" in form.model_fields:
        keys["objective.negative_target"] = "stop_gradient"
    if target == "momentum" and "correlation_source" in form.model_fields:
        keys["objective.correlation_source"] = "target"
    return keys


def of_form(form: str) -> dict[str, Any]:
    """The keys that choose a form of the catalogue."""
    names = FORMS[form].names
    chosen = {"method": names["method"], "row": names["row"]} if names["row"] else names
    return {f"objective.{key}": value for key, value in chosen.items() if value is not None}


def _published(method: str, row: str, paper: Mapping[str, float], **keys: Any) -> Line:
    """A method with its authors' own loss."""
    original = {"objective.form": "original"} if f"original {method}" in FORMS else {}
    return Line(row, method, {"objective.method": method, **original, **keys}, paper)


SHARED = {"objective.target": "weight_sharing"}  # as the methods were published
CROPS = {"data.preset": "multicrop", LOCAL_SIZE: 96}
MIXED = {"data.cutmix.probability": 1.0}
UNMIXED = {"objective.method": "unigrad", "objective.correlation_source": "target"}  # F from unmixed images


def _sweep(key: str, short: str, figures: Mapping[int, float]) -> tuple[Line, ...]:
    unigrad = {"objective.method": "unigrad"}
    return tuple(
        Line(f"{short} {value}", f"{short}-{value}", {**unigrad, key: value}, _linear(figure))
        for value, figure in figures.items()
    )


def _few(*figures: float) -> dict[str, float]:
    return dict(zip(FEW, figures, strict=True))


def _detection(*figures: float) -> dict[str, float]:
    return dict(zip(DETECTION, figures, strict=True))


def _full(name: str, row: str, paper: float, form: str, **keys: Any) -> Line:
    return Line(
        row, name, {**of_form(form), **{f"objective.{key}": value for key, value in keys.items()}}, _linear(paper)
    )


TABLES: dict[str, PaperTable] = {
    "methods": PaperTable(
        "tab:methods_comparison",
        "methods, as rows of the paper's table",
        tuple(Line(f"({row}) {title}", f"row-{row}", of_form(row), _linear(v)) for row, (title, v) in ROWS.items()),
    ),
    "originals": PaperTable(
        "tab:methods_comparison",
        "methods, with their authors' losses and a momentum target",
        tuple(
            Line(f"({row}) {ROWS[row][0]}", f"{method}-original", of_form(f"original {method}"), _linear(ROWS[row][1]))
            for method, row in ORIGINALS.items()
        ),
    ),
    "target": PaperTable(
        "tab:effect_of_encoder",
        "target branch",
        tuple(
            Line(
                BRANCHES[target],
                f"row-{row}-{target}",
                {**of_form(row), **of_target(target, FORMS[row])},
                _linear(value),
                KINDS[row],
            )
            for target, values in TARGETS.items()
            for row, value in values.items()
        ),
    ),
    "simplified": PaperTable(
        "tab:grad_sim",
        "simplified gradients of SimCLR and DirectPred",
        (
            _full("simclr-both", "SimCLR, both terms", 67.5, "b", target="weight_sharing", both_terms=True),
            _full("simclr-one", "SimCLR, first term", 67.6, "b", target="weight_sharing", both_terms=False),
            _full("directpred-full", "DirectPred, exact", 70.2, "d", eigen_predictor="full"),
            _full("directpred-paper", "DirectPred, without F^1/2", 70.2, "d", eigen_predictor="paper"),
        ),
    ),
    "augmentation": PaperTable(
        "tab:ablation",
        "CutMix and multi-crop",
        (
            Line("UniGrad", "unigrad", UNMIXED, _linear(70.3)),
            Line("UniGrad + CutMix", "cutmix", {**UNMIXED, **MIXED}, _linear(71.2)),
            Line("UniGrad + multi-crop", "multicrop", {**UNMIXED, **CROPS}, _linear(71.7)),
            Line("UniGrad + CutMix + multi-crop", "both", {**UNMIXED, **MIXED, **CROPS}, _linear(72.3)),
        ),
    ),
    "long": PaperTable(
        "tab:sota",
        "long training, published methods; the paper's are of 800 or 1000 epochs",
        (
            _published("moco", "MoCov2", _linear(71.1)),
            _published("simclr", "SimCLR", _linear(69.3), **SHARED),
            _published("byol", "BYOL", _linear(74.3)),
            _published("simsiam", "SimSiam", _linear(71.3)),
            _published("barlow_twins", "Barlow Twins", _linear(73.2), **SHARED),
            _published("vicreg", "VICReg", _linear(73.2), **SHARED),
            _published("dino", "DINO (+multi-crop)", _linear(75.3), **CROPS),
            _published("twist", "TWIST (+multi-crop)", _linear(75.5), **CROPS),
            Line("UniGrad + CutMix", "cutmix", {**UNMIXED, **MIXED}, _linear(74.9)),
            Line("UniGrad + CutMix + multi-crop", "both", {**UNMIXED, **MIXED, **CROPS}, _linear(75.5)),
        ),
    ),
    "depth": PaperTable(
        "tab:pr_layers",
        "projector depth, UniGrad",
        _sweep("model.projector.depth", "depth", {1: 60.7, 2: 65.2, 3: 70.3, 4: 70.0, 5: 69.8}),
    ),
    "width": PaperTable(
        "tab:pr_dims",
        "projector width, UniGrad",
        _sweep("model.projector.width", "width", {1024: 68.3, 2048: 70.3, 4096: 70.5, 8192: 70.9, 16384: 71.2}),
    ),
    "few_labels": PaperTable(
        "tab:semisup",
        "fine-tuning on few labels",
        (
            Line("Supervised", paper=_few(25.4, 48.4, 56.4, 80.4)),
            _published("simclr", "SimCLR", _few(48.3, 75.5, 65.6, 87.8), **SHARED),
            _published("byol", "BYOL", _few(53.2, 78.4, 68.8, 89.0)),
            _published("barlow_twins", "Barlow Twins", _few(55.0, 79.2, 69.7, 89.3), **SHARED),
            _published("dino", "DINO", _few(52.2, 78.2, 68.2, 89.1), **CROPS),
            _published("twist", "TWIST", _few(61.2, 84.2, 71.7, 91.0), **CROPS),
            Line("UniGrad", "both", {**UNMIXED, **MIXED, **CROPS}, _few(60.8, 83.8, 71.5, 90.6)),
        ),
        FEW,
    ),
    "detection": PaperTable(
        "tab:det",
        "detection and segmentation",
        (
            Line("Supervised", paper=_detection(54.7, 84.5, 60.8, 38.9, 59.6, 42.7, 35.4, 56.5, 38.1)),
            _published("moco", "MoCov2", _detection(56.4, 81.6, 62.4, 39.8, 59.8, 43.6, 36.1, 56.9, 38.7)),
            _published("simclr", "SimCLR", _detection(58.2, 83.8, 65.1, 41.6, 61.8, 45.6, 37.6, 59.0, 40.5), **SHARED),
            _published("dino", "DINO", _detection(57.2, 83.5, 63.7, 41.4, 62.2, 45.3, 37.5, 58.8, 40.2), **CROPS),
            _published("twist", "TWIST", _detection(58.1, 84.2, 65.4, 41.9, 62.6, 45.7, 37.9, 59.7, 40.6), **CROPS),
            Line(
                "UniGrad",
                "both",
                {**UNMIXED, **MIXED, **CROPS},
                _detection(57.8, 84.0, 64.9, 42.0, 62.6, 45.7, 37.9, 59.7, 40.7),
            ),
        ),
        DETECTION,
    ),
}


def trained(lines: Sequence[Line]) -> list[Line]:
    """The lines that are trained; of several with the same keys the first."""
    found: dict[tuple, Line] = {}
    for line in lines:
        if line.keys is not None:
            found.setdefault(line.setting, line)
    return list(found.values())
