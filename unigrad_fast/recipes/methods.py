"""The methods of the unified framework as settings: what each takes, with its defaults, and what does not fit together.

A method has a gradient form as the authors' code has it, rows of the paper's table, and an original form. Each is named
here by its row's letter, its method, or "original " and its method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from unigrad_fast.runtime.validation import shown

CONTRASTIVE = {"balance": 1.0, "temperature": 0.2, "positive_factor": 1.0, "negative_target": "target"}
MOCO = {**CONTRASTIVE, "bank_size": 65536}
EIGEN = {"decay": 0.99, "epsilon": 0.3, "eigen_every": 1}
DIRECTPRED = {**EIGEN, "balance": "dynamic", "negative_target": "target"}
CROSS_BATCH = {"balance": 5e-3, "positive_factor": 1.0, "negative_target": "target"}
PREDICTOR = {"predictor_hidden": None, "predictor_rate": "schedule"}
HINGE = {"floor": 1.0, "variance_epsilon": 1e-4}

# What each form takes, beside `target`, with the defaults of `objectives.build`.
SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "unigrad": {"balance": 100.0, "decay": 0.99, "correlation_source": "target", "negative_target": "target"},
        "moco": MOCO,
        "simclr": CONTRASTIVE,
        "byol_directpred": {**DIRECTPRED, "eigen_predictor": "authors", "correlation_source": "target"},
        "barlow_twins": {**CROSS_BATCH, "balance": 50.0},
        "vicreg": {"balance": 25.0, "positive_factor": 1.0},
        "a": MOCO,
        "b": {**CONTRASTIVE, "both_terms": False},
        "d": {**DIRECTPRED, "eigen_predictor": "paper", "correlation_source": "online"},
        "e": {"balance": 100.0, "decay": 0.99, "correlation_source": "online", "negative_target": "target"},
        "f": {"balance": 5e-3, "negative_target": "target"},
        "g": CROSS_BATCH,
        "h": {**CROSS_BATCH, "balance": 50.0},
        "i": {"balance": 4e-5, "positive_factor": 1.0, "variance": 1.0, **HINGE},
        "j": {"balance": 25.0, "positive_factor": 1.0},
        "original moco": {"temperature": 0.2, "bank_size": 65536},
        "original simclr": {"temperature": 0.2},
        "original byol": PREDICTOR,
        "original simsiam": {**PREDICTOR, "predictor_rate": "constant"},
        "original byol_directpred": {**EIGEN, "eigen_predictor": "authors"},
        "original barlow_twins": {"balance": 5e-3},
        "original vicreg": {"invariance": 25.0, "variance": 25.0, "covariance": 1.0, **HINGE},
    }
)
METHODS = ("unigrad", "moco", "simclr", "byol", "simsiam", "byol_directpred", "barlow_twins", "vicreg")
METHOD_OF = {"a": "moco", "b": "simclr", "c": "byol", "d": "byol_directpred", "e": "unigrad"}
METHOD_OF |= {**dict.fromkeys("fgh", "barlow_twins"), **dict.fromkeys("ij", "vicreg")}
COLLAPSING = ("byol", "simsiam", "byol_directpred")  # where both branches are trained and nothing pulls apart
# Whose samples are the embeddings of the batch itself, which CutMix mixes.
SAMPLES_ARE_MIXED = ("barlow_twins", "vicreg", *"fghij", "original barlow_twins", "original vicreg")

# For a thousand steps of 128 images at width 512, in place of 100,000 of 1024 at 2048. Ours, as the recipes' values for
# UniGrad are: the balance as theirs is to the paper's, memories of a few steps.
SHORT_UNIGRAD = MappingProxyType({"balance": 10.0, "decay": 0.8, "correlation_source": "online"})
SHORT: Mapping[str, Mapping[str, Any]] = {
    "unigrad": SHORT_UNIGRAD,
    "e": SHORT_UNIGRAD,
    **{named: {"bank_size": 1024} for named in ("moco", "a", "original moco")},
    **{named: {"decay": 0.8} for named in ("byol_directpred", "d", "original byol_directpred")},
    **{named: {"balance": 5.0} for named in ("barlow_twins", "h")},
    **{named: {"balance": 2.5} for named in ("vicreg", "j")},
}
# What a method has in place of its defaults, by the recipe.
FITTED = {"cifar_subset": SHORT, "quickstart": SHORT}
# Recipes that have one beside them for every other method, the method's name behind theirs.
BASES = ("imagenet_100ep", "cifar_subset")
DERIVED = {f"{base}_{method}": (base, method) for base in BASES for method in METHODS if method != "unigrad"}


def kind(objective: Mapping[str, Any]) -> str:
    """Which of the forms an objective's `method`, `form` and `row` name; it need not exist."""
    method, row, form = (objective.get(key) for key in ("method", "row", "form"))
    if row is not None and row != "c":
        return str(row)
    method = method or METHOD_OF.get(row, "unigrad")
    is_original = form == "original" or (form is None and f"original {method}" in SETTINGS and method not in SETTINGS)
    return f"original {method}" if is_original else str(method)


def completed(objective: Mapping[str, Any]) -> dict[str, Any]:
    """The objective with what its method takes and was not given."""
    given = {key: value for key, value in objective.items() if value is not None}
    named, settings = kind(given), {}
    if isinstance(given.get("row"), str) and given["row"] in METHOD_OF:
        given.setdefault("method", METHOD_OF[given["row"]])
    if named in SETTINGS:
        settings = dict(SETTINGS[named])
        given.setdefault("method", named.removeprefix("original "))
        given.setdefault("form", "original" if named.startswith("original ") else "gradient")
        settings["target"] = "stop_gradient" if given["method"] == "simsiam" else "momentum"
        if given.get("negative_target") == "stop_gradient" and "correlation_source" in settings:
            settings["correlation_source"] = "online"
    return {**settings, **given}


def exchanged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe over which a tree is laid: with the settings of the tree's method, where its own is another."""
    own, over = (tree.get("objective") for tree in (base, top))
    own = own if isinstance(own, Mapping) else {}
    if not isinstance(over, Mapping):
        return dict(base)
    if over.get("negative_target") == "stop_gradient" and "correlation_source" in own:  # it says where F comes from
        own = {key: value for key, value in own.items() if key != "correlation_source"}
        base = {**base, "objective": own}
    if not {"method", "form", "row"} & over.keys():
        return dict(base)
    named = {key: over[key] for key in ("method", "form", "row") if isinstance(over.get(key), str)}
    if not {"method", "row"} & named.keys():
        named["method"] = own.get("method") or METHOD_OF.get(own.get("row"), "unigrad")
        if own.get("row") and not {"form", "row"} & over.keys():
            named["row"] = own["row"]
    if kind(named) == kind(own):
        return dict(base)
    return {**base, "objective": fitted(str(base.get("recipe")), named)}


def fitted(recipe: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """The objective that a recipe has for a method, form or row."""
    base, _ = DERIVED.get(recipe, (recipe, None))
    return {**named, **FITTED.get(base, {}).get(kind(named), {})}


def problems(objective: Mapping[str, Any], mixing: float, has_local_crops: bool) -> Iterator[str]:
    """What is wrong with a completed objective, one line each with its remedy.

    Args:
        mixing: probability of CutMix.
    """
    method, form, row = objective["method"], objective["form"], objective["row"]
    named = kind(objective)
    if row is not None and METHOD_OF[row] != method:
        yield f"objective.row = {row}: is of method {METHOD_OF[row]}, not of {method}; leave one of the two out"
        return
    if row is not None and (form == "original") != (row == "c"):
        yield f"objective.form = {form}: row {row} is the other form; leave objective.form or objective.row out"
        return
    if named not in SETTINGS:
        reason = "is a gradient and has no original form" if method == "unigrad" else "has no gradient form"
        yield f"objective.form = {form}: {method} {reason}; leave objective.form out"
        return
    taken = SETTINGS[named]
    for key in sorted({key for settings in SETTINGS.values() for key in settings} - taken.keys()):
        if objective[key] is not None and objective[key] is not False:
            others = [f"{_chosen_by(other)} has it" for other in _forms_of(method) if key in SETTINGS[other]]
            takes = f"it takes {', '.join(sorted(taken))}"
            yield (
                f"objective.{key} = {shown(objective[key])}: does not apply to {spoken(named)}; leave it out "
                f"({'; '.join([takes, *others])})"
            )
    yield from _branch_problems(objective, named)
    if objective["both_terms"]:
        if objective["target"] == "momentum":
            yield "objective.both_terms = true: is the gradient of shared weights; use objective.target weight_sharing"
        if has_local_crops or mixing:
            yield "objective.both_terms = true: is of two global views as they are; leave local crops and CutMix out"
    if named == "i" and objective["balance"] == 0:
        yield "objective.balance = 0: row i divides by it; give a number above 0 (4e-5 in the paper)"
    if named == "original byol_directpred" and objective["eigen_predictor"] == "full":
        yield "objective.eigen_predictor = full: the original of byol_directpred has authors and paper; use one of them"
    if objective["balance"] == "dynamic" and "eigen_predictor" not in taken:
        yield f"objective.balance = dynamic: is a ratio with byol_directpred's W_h; give a number for {spoken(named)}"
    if mixing and named in SAMPLES_ARE_MIXED:
        yield (
            f"data.cutmix.probability = {shown(mixing)}: CutMix is refused with {spoken(named)}, whose negative "
            "gradient comes from the online embeddings, those of mixed images; leave CutMix out"
        )
    elif mixing and objective["negative_target"] == "stop_gradient":
        yield (
            "objective.negative_target = stop_gradient: with CutMix samples would be embeddings of mixed images; leave "
            "it out"
        )


def _forms_of(method: str) -> list[str]:
    """What a method may be trained as."""
    names = [method, *(row for row, of in METHOD_OF.items() if of == method), f"original {method}"]
    return [named for named in names if named in SETTINGS]


def _chosen_by(named: str) -> str:
    """The option that chooses one of a method's forms."""
    if len(named) == 1:
        return f"objective.row {named}"
    return f"objective.form {'original' if named.startswith('original ') else 'gradient'}"


def _branch_problems(objective: Mapping[str, Any], named: str) -> Iterator[str]:
    if objective["target"] == "weight_sharing" and objective["method"] in COLLAPSING:
        yield (
            f"objective.target = weight_sharing: refused for {objective['method']}: with gradient in both branches and "
            "no negative samples all embeddings become one; use momentum or stop_gradient"
        )
    if objective["negative_target"] == "stop_gradient" and objective["correlation_source"] == "target":
        yield (
            "objective.correlation_source = target: objective.negative_target stop_gradient takes the correlation from "
            "online embeddings; leave one of the two out"
        )
    if objective["placement"] == "sharded" and named not in ("unigrad", "e"):
        yield "objective.placement = sharded: only unigrad's correlation matrix lies in shards; use auto"


def spoken(named: str) -> str:
    """A form as people say it."""
    if len(named) == 1:
        return f"row {named}"
    return f"the original of {named.removeprefix('original ')}" if named.startswith("original ") else named


# How a setting is called in `objectives.build`, where the names differ; of a row, and of an original loss.
BUILT_AS = {"eigen_every": "every", "predictor_hidden": "hidden", "eigen_predictor": "predictor"}


def build_arguments(objective: Mapping[str, Any]) -> dict[str, Any]:
    """What `objectives.build` is called with for a completed objective: all but the width and what belongs to a run."""
    named = kind(objective)
    given = {key: objective[key] for key in SETTINGS[named] if key != "predictor_rate" and objective[key] is not None}
    if named in ("unigrad", "e"):  # `correlation_source` says the same
        del given["negative_target"]
    arguments = {BUILT_AS.get(key, key): value for key, value in given.items()}
    if named == "original byol_directpred":
        arguments["kind"] = arguments.pop("predictor")
    which = {"method": objective["method"], "form": objective["form"], "row": objective["row"]}
    return {**which, "target": objective["target"], **arguments}
