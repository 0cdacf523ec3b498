"""Objectives by name: a method, in its original or its gradient form, or a row of the paper's table."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from torch import nn

from unigrad_fast.objectives.forms import AUTHORS, ROWS, GradientForm, Row
from unigrad_fast.objectives.losses import BYOL, BarlowTwins, DirectPred, MoCo, SimCLR, SimSiam, VICReg
from unigrad_fast.objectives.targets import require_target
from unigrad_fast.objectives.unigrad import UniGrad

FORMS = ("gradient", "original")
ORIGINALS: dict[str, type[nn.Module]] = {
    "moco": MoCo,
    "simclr": SimCLR,
    "byol": BYOL,
    "simsiam": SimSiam,
    "byol_directpred": DirectPred,
    "barlow_twins": BarlowTwins,
    "vicreg": VICReg,
}
METHODS = ("unigrad", *ORIGINALS)
# Which method a row of the table belongs to.
METHOD_OF = {
    "a": "moco",
    "b": "simclr",
    "c": "byol",
    "d": "byol_directpred",
    "e": "unigrad",
    **dict.fromkeys("fgh", "barlow_twins"),
    **dict.fromkeys("ij", "vicreg"),
}
MODULE = ("target", "process_group", "most_images")  # settings that are no row's


def build(
    method: str | None = None,
    width: int | None = None,
    *,
    form: str | None = None,
    row: str | Row | None = None,
    **settings: Any,
) -> nn.Module:
    """The objective of a method by its name, or of a row of the paper's table.

    Args:
        method: one of `METHODS`; it may be left out where `row` is given.
        width: C, the embedding width.
        form: "gradient", as the authors' code has it (and, where they published none, as the row that they unify to),
            or "original", the loss with autograd. None is the gradient form, where the method has one.
        row: "a" to "j", the paper's equation of that row; or a `Row` of your own.
        settings: keyword arguments of the objective and options of the row.

    Raises:
        ValueError: an unknown name, with the known ones; what does not fit together.
        TypeError: a setting that the objective does not take, with those it takes; no width.
    """
    if width is None:
        raise TypeError("build needs the width of the embeddings; give width=C")
    if method is None and row is None:
        raise TypeError(f"build needs a method or a row; give one of {', '.join(METHODS)}, or row='a' to 'j'")
    if form not in (None, *FORMS):
        raise ValueError(f"form {form!r} is unknown; use one of {', '.join(FORMS)}")
    if isinstance(row, Row):
        if method is not None or form == "original":
            raise ValueError("a row of your own has neither a method nor an original form; leave method and form out")
        return _of_row(row, width, "this row", settings)
    if row is not None:
        if row not in METHOD_OF:
            raise ValueError(f"row {row!r} is unknown; use one of {', '.join(METHOD_OF)}")
        if method not in (None, METHOD_OF[row]):
            raise ValueError(f"row {row!r} is of method {METHOD_OF[row]!r}, not of {method!r}; leave one of them out")
        method = METHOD_OF[row]
        if form == "original" and row != "c":
            raise ValueError(f"row {row!r} is a gradient form; leave the row out for the original of {method}")
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; use one of {', '.join(METHODS)}")
    if method == "unigrad":
        return _unigrad(width, form, row, settings)
    if form == "original" or (form is None and method not in AUTHORS):
        return _made(ORIGINALS[method], width, f"the original of {method}", settings)
    if method not in AUTHORS:
        raise ValueError(f"{method} has no gradient form: its predictor is trained; use form='original'")
    value = AUTHORS[method] if row is None else ROWS[row]
    return _of_row(value, width, f"row {row!r}" if row else f"the gradient form of {method}", settings)


def _unigrad(width: int, form: str | None, row: str | None, settings: dict[str, Any]) -> nn.Module:
    if form == "original":
        raise ValueError("unigrad is a gradient and has no original form; leave form out")
    settings = dict(settings)
    require_target("unigrad", settings.pop("target", "momentum"), collapses=False)
    value = ROWS["e"] if row is not None else replace(ROWS["e"], correlation_source="target")
    branches: dict[str, Any] = {
        key: settings.pop(key) for key in ("negative_target", "correlation_source") if key in settings
    }
    settings["correlation_source"] = _changed(value, branches).source
    return _made(UniGrad, width, "unigrad", settings)


def _of_row(row: Row, width: int, name: str, settings: dict[str, Any]) -> nn.Module:
    options = {key: value for key, value in settings.items() if key not in MODULE}
    _require_known(options, row.options, (*sorted(row.options), *MODULE), name)
    others = {key: value for key, value in settings.items() if key in MODULE}
    return GradientForm(width, _changed(row, options), **others)


def _changed(row: Row, options: dict[str, Any]) -> Row:
    """The row with options; samples of the online branch are what F is made of, where nothing else is said of it."""
    if options.get("negative_target") == "stop_gradient" and row.negative == "moving_average":
        options = {"correlation_source": "online", **options}
    return replace(row, **options)


def _made(kind: type[nn.Module], width: int, name: str, settings: dict[str, Any]) -> nn.Module:
    taken = [key for key in inspect.signature(kind).parameters if key != "width"]
    _require_known(settings, taken, taken, name)
    return kind(width=width, **settings)


def _require_known(settings: dict[str, Any], known: Any, shown: Any, name: str) -> None:
    for key in settings:
        if key not in known:
            raise TypeError(f"{key} does not apply to {name}; it takes {', '.join(shown)}")
