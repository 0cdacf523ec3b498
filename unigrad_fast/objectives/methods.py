"""`build`: the objective of a method, in its original or gradient form, or of a row of the paper's table."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from torch import nn

from unigrad_fast.objectives import catalogue
from unigrad_fast.objectives.forms import GRADIENTS, GradientForm, Row
from unigrad_fast.objectives.originals import ORIGINALS
from unigrad_fast.objectives.unigrad import UniGrad

MODULE = ("target", "process_group", "most_images")  # settings of the module, not of a row


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
        method: one of `catalogue.methods()`; optional if `row` is given.
        width: C, the embedding width.
        form: "gradient", as in the authors' code (for methods they published no code for, the row they are unified to),
            or "original", the loss with autograd. None is the gradient form if the method has one.
        row: "a" to "j", for that row's equation in the paper; or a `Row` of your own.
        settings: keyword arguments of the objective, and settings of the row.

    Raises:
        ValueError: an unknown name, with the known ones; arguments that do not fit together.
        TypeError: a setting that the objective does not take, with those it takes; a missing width.
    """
    if width is None:
        raise TypeError("build needs the width of the embeddings; give width=C")
    if isinstance(row, Row):
        if method is not None or form == "original":
            raise ValueError("a row of your own has neither a method nor an original form; leave method and form out")
        return _of_row(row, width, [field.name for field in fields(row)], "this row", settings)
    if method is None and row is None:
        known = ", ".join(catalogue.methods())
        raise TypeError(f"build needs a method or a row; give one of {known}, or row='a' to 'j'")
    chosen = catalogue.chosen({"method": method, "form": form, "row": row})
    name = chosen.spoken()
    if chosen.names["form"] == "original":
        return _made(ORIGINALS[chosen.names["method"]], width, name, settings, chosen.built())
    value = GRADIENTS[catalogue.name_of(chosen.names)]
    if chosen.names["method"] != "unigrad":
        return _of_row(value, width, sorted(chosen.built()), name, settings)
    catalogue.require_target(name, settings.get("target", "momentum"), refused={})
    branches: dict[str, Any] = {
        key: settings[key] for key in ("negative_target", "correlation_source") if key in settings
    }
    others = {key: settings[key] for key in settings if key not in ("target", *branches)}
    return _made(UniGrad, width, name, {**others, "correlation_source": _changed(value, branches).source})


def _of_row(row: Row, width: int, taken: Iterable[str], name: str, settings: dict[str, Any]) -> nn.Module:
    _require_known(settings, (*taken, *MODULE), name)
    options = {key: value for key, value in settings.items() if key not in MODULE}
    others = {key: value for key, value in settings.items() if key in MODULE}
    return GradientForm(width, _changed(row, options), **others)


def _changed(row: Row, options: dict[str, Any]) -> Row:
    return replace(row, **(catalogue.with_source(options) if row.negative == "moving_average" else options))


def _made(
    kind: type[nn.Module], width: int, name: str, settings: dict[str, Any], taken: Iterable[str] = ()
) -> nn.Module:
    own = [key for key in inspect.signature(kind).parameters if key not in ("width", "settings", *MODULE)]
    _require_known(settings, dict.fromkeys([*own, *taken, *MODULE]), name)
    return kind(width=width, **settings)


def _require_known(settings: dict[str, Any], taken: Iterable[str], name: str) -> None:
    for key in settings:
        if key not in taken:
            raise TypeError(f"{key} does not apply to {name}; it takes {', '.join(taken)}")
