"""The catalogue of methods: the settings of each form, with defaults and sources, and which settings conflict.

A method has up to three kinds of form: its gradient as the authors' code computes it, rows of the paper's table, and
the original loss. A form is named by its method, by its row's letter, or by "original " and its method. One declaration
per form at the end of this file drives the configuration, `build`, --help, the recipes and the table of keys. A
gradient form is computed by its row in `forms/rows.py`, an original form by its class in `originals/`. Nothing here
imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, create_model, model_validator

from unigrad_fast.objectives.checks import require_among, require_number, require_whole
from unigrad_fast.runtime.validation import Node, arms, shown

NAMES = ("method", "form", "row")  # the keys that choose a form
SILENT = ("none", "false", "auto")  # values that older configurations contain for keys of other methods
COLLAPSE = "with gradient in both branches and no negative samples all embeddings become one"
COPIED = "a teacher that copies its student at every step collapses (DINO paper)"
NO_CODES = "no gradient flows into codes, so this is stop_gradient"
TWINS = "both views have a gradient and there is no target branch"
MIXED = "its negative samples are online embeddings, which with CutMix come from mixed images"

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class Settings(Node):
    """All settings, each with its meaning and the source of its default; a form uses some of them."""

    balance: NotNegative | Literal["dynamic"]
    """Weight of the negative term (paper)."""
    decay: float = Field(ge=0, lt=1)
    """Share of the old correlation matrix kept at each micro-batch (paper)."""
    correlation_source: Literal["target", "online"]
    """Embeddings that the correlation matrix is computed from: target (authors' code), for rows online (paper)."""
    negative_target: Literal["target", "stop_gradient"]
    """Branch of the negative samples: target, or stop_gradient for the online one (paper: third row of its table)."""
    placement: Literal["auto", "replicated", "sharded"]
    """The correlation matrix whole on every rank, or sharded (wide projectors); auto: by memory and estimated time."""
    temperature: Positive
    """Temperature of the softmax (authors' code for simclr; DINO and SwAV papers)."""
    positive_factor: Positive
    """Factor of the positive term (paper's table); for row g the paper's text uses 0.1."""
    bank_size: int = Field(ge=1, le=2**24)
    """Number of keys in the bank (MoCo paper)."""
    both_terms: bool
    """With shared weights, add the gradient an image receives as other images' negative sample (paper's equation)."""
    epsilon: NotNegative
    """Added to the eigenvalues of the correlation matrix to lift small ones (authors' code)."""
    eigen_every: int = Field(ge=1)
    """Micro-batches between two decompositions of the correlation matrix (ours)."""
    eigen_predictor: Literal["paper", "full", "authors"]
    """How the predictor uses the eigenvalues: authors (their code), paper (default of row d), or full (exact)."""
    predictor_hidden: int | None = Field(ge=1, le=2**17)
    """Hidden channels of the predictor; null means a quarter of the width (SimSiam paper)."""
    predictor_rate: Literal["schedule", "constant"]
    """Learning rate of the predictor: follow the schedule, or stay constant at its peak (SimSiam paper: constant)."""
    invariance: NotNegative
    """Weight of the distance between views (VICReg paper)."""
    variance: NotNegative
    """Weight of the variance term (VICReg paper; for row i ours)."""
    covariance: NotNegative
    """Weight of the covariance term (VICReg paper)."""
    floor: NotNegative
    """Standard deviation below which a channel is penalised (VICReg paper)."""
    variance_epsilon: Positive
    """Added to a variance before its square root is taken (VICReg paper)."""
    prototypes: int = Field(ge=2, le=2**20)
    """Number of prototypes, or of twist's classes (DINO and SwAV papers; TWIST's code)."""
    freeze_epochs: NotNegative
    """First epochs, in which prototypes have no gradient (DINO's code: 1; SwAV's: 313 steps of 4096 images, also 1)."""
    teacher_temperature: Positive
    """Temperature of the teacher's softmax after its warm-up (DINO paper)."""
    first_teacher_temperature: Positive
    """The same in the first epoch; it rises by equal steps from epoch to epoch (DINO paper)."""
    teacher_warmup_epochs: NotNegative
    """Epochs of that rise (DINO paper)."""
    centre_momentum: float = Field(ge=0, lt=1)
    """Share of the old centre of the teacher's scores kept at each micro-batch (DINO paper)."""
    norm_last_layer: bool
    """Whether prototypes keep the length 1; otherwise their lengths are trained (DINO's code, for stability)."""
    sinkhorn_epsilon: Positive
    """Entropy of the codes: larger is softer (SwAV paper)."""
    sinkhorn_iterations: int = Field(ge=1, le=1000)
    """Iterations of Sinkhorn's algorithm (SwAV paper)."""
    queue_size: int | None = Field(ge=1, le=2**24)
    """Newest images that codes are balanced over besides the batch; null: none (SwAV's code, for 256 images)."""
    queue_start_epoch: NotNegative
    """Epochs before the queue is filled; it is used once it is full (SwAV's code)."""
    entropy: NotNegative
    """Weight of the mean entropy of an image's distribution, which makes it sharp (TWIST's code)."""
    diversity: NotNegative
    """Weight of the entropy of the mean distribution, which makes classes equally frequent (TWIST's code)."""


class Objective(Node):
    """A form of a method; validating this base class returns the form that `method`, `form` and `row` choose."""

    method: str
    """Method to train; each is one or more rows of the paper's table of methods, see docs/methods.md."""
    form: str
    """The method's gradient (paper) or its authors' loss with autograd; null: gradient, or original if it has none."""
    row: str | None
    """Row of the paper's table, following its equation; null follows the paper's authors' code."""
    target: Literal["momentum", "stop_gradient", "weight_sharing"]
    """Branch that targets come from: momentum (paper), stop_gradient (SimSiam, SwAV) or weight_sharing (TWIST)."""

    names: ClassVar[dict[str, Any]] = {}  # its `method`, `form` and `row`
    short: ClassVar[Mapping[str, Any]] = {}
    refused: ClassVar[Mapping[str, str]] = {}  # target branches that do not work, with the reason
    mixes_samples: ClassVar[bool] = False
    built_as: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_form(cls, given: Any, validated: Callable[[Any], Objective]) -> Objective:
        if not isinstance(given, Mapping):
            return validated(given)
        if cls is not Objective:
            own = {key: value for key, value in given.items() if value is not None or key not in cls.model_fields}
            own = with_source(own) if "correlation_source" in cls.model_fields else own
            return validated({**own, **cls.names})
        try:
            form = chosen(given)
        except ValueError:
            every_key().model_validate({key: given[key] for key in NAMES if key in given})  # an unknown name
            raise
        others = {key: given[key] for key in given if key in every_key().model_fields and key not in form.model_fields}
        wrong = [key for key, value in others.items() if str(value).lower() not in SILENT]
        if wrong:
            raise ValueError("\n".join(form.not_taken(key, given[key]) for key in wrong))
        return form.model_validate({key: value for key, value in given.items() if key not in others})

    def __reduce__(self) -> tuple[Any, ...]:
        return Objective.model_validate, (dict(self),)

    @classmethod
    def member(cls, tree: object = None) -> type[Node]:
        try:
            return chosen(tree) if isinstance(tree, Mapping) else every_key()
        except ValueError:
            return every_key()

    @classmethod
    def spoken(cls) -> str:
        """The form's name in messages."""
        if cls.names["row"]:
            return f"row {cls.names['row']}"
        return f"the original of {cls.names['method']}" if cls.names["form"] == "original" else cls.names["method"]

    @classmethod
    def settings(cls) -> list[str]:
        return [key for key in cls.model_fields if key not in Objective.model_fields]

    @classmethod
    def not_taken(cls, key: str, value: Any) -> str:
        """Message for a setting that only other forms take: names forms of the same method, or else other methods."""
        takers = [form.names for form in FORMS.values() if key in form.model_fields]
        own = [names for names in takers if names["method"] == cls.names["method"]]
        have = [f"objective.{'row' if n['row'] else 'form'} {n['row'] or n['form']} has it" for n in own]
        have = have or [f"{key} belongs to {', '.join(dict.fromkeys(names['method'] for names in takers))}"]
        reason = "; ".join([f"it takes {', '.join(sorted(cls.settings()))}", *have])
        return f"{key} = {shown(value)}: does not apply to {cls.spoken()}; leave it out ({reason})"

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that `build` takes: the given values checked by `require`, the defaults for the others."""
        for key in given.keys() - cls.built().keys():
            raise TypeError(f"{key} does not apply to {cls.spoken()}; it takes {', '.join(cls.built())}")
        return {**cls.built(), **require(given)}

    @classmethod
    def built(cls) -> dict[str, Any]:
        """The settings that `build` takes, by the names it uses, with their defaults."""
        own = [key for key in cls.settings() if key not in ("placement", "predictor_rate")]  # the trainer handles these
        return {cls.built_as.get(key, key): cls.model_fields[key].default for key in own}

    def arguments(self) -> dict[str, Any]:
        """The arguments of `build`, except the width and what depends on the run."""
        given = {self.built_as.get(key, key): value for key, value in self if value is not None}
        return {**self.names, "target": self.target, **{key: given[key] for key in self.built() if key in given}}

    def takes(self, key: str) -> bool:
        return key in type(self).model_fields

    def problems(self, mixing: float, has_local_crops: bool) -> Iterator[str]:
        """Conflicting settings, one line each with the remedy; `mixing` is the probability of CutMix."""
        given, named = dict(self), self.spoken()
        source, is_online = given.get("correlation_source"), given.get("negative_target") == "stop_gradient"
        if self.target in self.refused:
            yield f"objective.target = {self.target}: {refusal(self.method, self.target, self.refused)}"
        if is_online and source == "target":
            yield (
                "objective.correlation_source = target: with objective.negative_target stop_gradient the correlation "
                "must come from online embeddings; leave one of the two out"
            )
        if given.get("both_terms") and self.target == "momentum":
            yield "objective.both_terms = true: needs shared weights; use objective.target weight_sharing"
        if given.get("both_terms") and (has_local_crops or mixing):
            yield "objective.both_terms = true: needs two global views, unmixed; leave local crops and CutMix out"
        if self.row == "i" and given["balance"] == 0:
            yield "objective.balance = 0: row i divides by it; give a number above 0 (4e-5 in the paper)"
        if given.get("eigen_predictor") == "full" and self.form == "original":
            yield f"objective.eigen_predictor = full: {named} supports only authors and paper; use one of them"
        if given.get("balance") == "dynamic" and "eigen_predictor" not in given:
            yield f"objective.balance = dynamic: needs the predictor of byol_directpred; give a number for {named}"
        if mixing and self.mixes_samples:
            cutmix = f"data.cutmix.probability = {shown(mixing)}"
            yield f"{cutmix}: CutMix is refused with {named}: {MIXED}; leave CutMix out"
        elif mixing and is_online:
            yield (
                "objective.negative_target = stop_gradient: with CutMix the negative samples would be embeddings of "
                "mixed images; leave it out"
            )
        elif mixing and source == "online":
            yield (
                f"data.cutmix.probability = {shown(mixing)}: the correlation must come from unmixed images; with "
                "CutMix set objective.correlation_source to target"
            )


FORMS: dict[str, type[Objective]] = {}


def with_source(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Set `correlation_source` to online if the samples come from the online branch and it is not given."""
    source = {"correlation_source": "online"} if settings.get("negative_target") == "stop_gradient" else {}
    return {**source, **settings}


def require(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check settings, named as in `build`, and convert numbers to the declared type.

    Raises:
        TypeError, ValueError: a wrong type, an unknown name, or a number outside its declared range.
    """
    fields = {form.built_as.get(key, key): field for form in FORMS.values() for key, field in form.model_fields.items()}
    found = dict(settings)
    for name, value in settings.items():
        kinds = {*arms(fields[name].annotation)}
        if value is None and NoneType in kinds:
            continue
        if int in kinds:
            require_whole(name, value)
            found[name] = int(value)
        elif float in kinds:
            limits = fields[name].metadata
            below = next((limit.lt for limit in limits if hasattr(limit, "lt")), math.inf)
            require_number(name, value, exclusive=any(hasattr(limit, "gt") for limit in limits), below=below)
            found[name] = float(value)
        elif bool not in kinds:
            require_among(name, value, get_args(fields[name].annotation))
    return found


def require_target(name: str, target: str, refused: Mapping[str, str]) -> None:
    """Raise ValueError if the branch is unknown or refused."""
    require({"target": target})
    if target in refused:
        raise ValueError(f"target {target!r} is {refusal(name, target, refused)}")


def refusal(name: str, target: str, refused: Mapping[str, str]) -> str:
    others = [each for each in get_args(Objective.model_fields["target"].annotation) if each not in refused]
    return f"refused for {name}: {refused[target]}; use {' or '.join(others)}"


def declare(
    method: str,
    form: str = "gradient",
    row: str | None = None,
    *,
    target: str = "momentum",
    refused: Mapping[str, str] = {},
    mixes_samples: bool = False,
    short: Mapping[str, Any] = {},
    built_as: Mapping[str, str] = {},
    settings: type[Node] = Settings,
    **defaults: Any,
) -> type[Objective]:
    """Add a form of a method to `FORMS`.

    Args:
        method, form, row: the values that choose it.
        target: the default branch.
        refused: target branches that do not work, with the reason.
        mixes_samples: the negative samples are embeddings of the batch itself, which CutMix mixes.
        short: settings that replace the defaults in recipes of a thousand steps.
        built_as: names that `build` uses for settings, where they differ.
        settings: the class that describes the settings.
        defaults: the form's settings, each with its default.
    """
    known, fields = {**settings.model_fields, "target": Objective.model_fields["target"]}, {}
    for key, default in {"target": target, **defaults}.items():
        fields[key] = known[key].rebuild_annotation(), Field(default=default, description=known[key].description)
    declared = create_model("Objective", __base__=Objective, **fields)  # type: ignore[call-overload]
    declared.names = {"method": method, "form": form, "row": row}
    declared.refused, declared.mixes_samples = refused, mixes_samples
    declared.short, declared.built_as = short, built_as
    FORMS[name_of(declared.names)] = declared
    return declared


def methods() -> list[str]:
    """Names of the methods."""
    return list(dict.fromkeys(form.names["method"] for form in FORMS.values()))


def rows() -> dict[str, str]:
    """The method of each row of the paper's table."""
    return {name: form.names["method"] for name, form in sorted(FORMS.items()) if form.names["row"]}


def name_of(names: Mapping[str, Any]) -> str:
    """Name in `FORMS` of the form that `method`, `form` and `row` choose; it need not exist."""
    method, form, row = (names.get(key) for key in NAMES)
    if row is not None:
        return str(row)
    method = method or "unigrad"
    is_original = form == "original" or (form is None and f"original {method}" in FORMS and method not in FORMS)
    return f"original {method}" if is_original else str(method)


def _choices() -> dict[str, list[str]]:
    return {"method": methods(), "form": ["gradient", "original"], "row": list(rows())}


def chosen(names: Mapping[str, Any]) -> type[Objective]:
    """The form that `method`, `form` and `row` choose.

    Raises:
        ValueError: there is no such form; the message names the wrong key and the remedy.
    """
    method, form, row = (names.get(key) for key in NAMES)
    for key, known in _choices().items():
        if names.get(key) is not None and names[key] not in known:
            raise ValueError(f"{key} {names[key]!r} is unknown; use one of {', '.join(known)}")
    if row is not None and method not in (None, rows()[row]):
        raise ValueError(f"row = {row}: belongs to method {rows()[row]}, not {method}; leave one of the two out")
    if row is not None and form not in (None, FORMS[row].names["form"]):
        raise ValueError(f"form = {form}: row {row} exists only in the form {FORMS[row].names['form']}; leave form out")
    if name_of(names) not in FORMS:
        reason = "is defined by its gradient and has no original form" if form == "original" else "has no gradient form"
        raise ValueError(f"form = {form}: {method or 'unigrad'} {reason}; leave it out")
    return FORMS[name_of(names)]


def every_key() -> type[Node]:
    """The keys of all forms as one group; a key that not every form takes lists the default of each form that does."""
    return _every_key(tuple(FORMS.items()))


@cache
def _every_key(forms: tuple[tuple[str, type[Objective]], ...]) -> type[Node]:
    fields: dict[str, Any] = {}
    for key, known in _choices().items():
        about, default = Objective.model_fields[key].description, "unigrad" if key == "method" else None
        fields[key] = Literal[tuple(known)] | None, Field(default=default, description=about)
    for key in dict.fromkeys(key for _, form in forms for key in form.model_fields if key not in NAMES):
        takers = {name: form.model_fields[key] for name, form in forms if key in form.model_fields}
        first = next(iter(takers.values()))
        defaults: dict[str, list[str]] = {}
        for name, field in takers.items():
            defaults.setdefault(shown(field.default), []).append(name)
        listed = "; ".join(f"{default} for {', '.join(names)}" for default, names in defaults.items())
        about = f"{first.description} {listed}." if len(takers) < len(forms) else first.description
        fields[key] = first.rebuild_annotation(), Field(default=first.default, description=about)
    return create_model("Objective", __base__=Node, **fields)


# For a thousand steps of 128 images at width 512 instead of 100,000 steps of 1024 at width 2048. These are our choices,
# as in the recipes for UniGrad: the balance is scaled down by the same factor; decay and bank cover only a few steps.
SHORT = {"balance": 10.0, "decay": 0.8, "correlation_source": "online"}
# DINO's target moves fast, too: with a teacher less sharp or a slower centre, all distributions become the same.
FEW_KEYS, FEW_BATCHES, FEW_PROTOTYPES = {"bank_size": 1024}, {"decay": 0.8}, {"prototypes": 512}
EVERY = {"eigen_every": "every"}

# Settings that several forms share.
Shared = dict[str, Any]
COLLAPSES: Shared = {"refused": {"weight_sharing": COLLAPSE}}
BRANCH: Shared = {"negative_target": "target"}
UNIGRAD: Shared = {"balance": 100.0, "decay": 0.99, **BRANCH, "placement": "auto", "short": SHORT}
SOFTMAX: Shared = {"balance": 1.0, "temperature": 0.2, "positive_factor": 1.0, **BRANCH}
BANK: Shared = {"bank_size": 65536, "short": FEW_KEYS}
PREDICTOR: Shared = {"predictor_hidden": None, **COLLAPSES, "built_as": {"predictor_hidden": "hidden"}}
EIGEN: Shared = {"decay": 0.99, "epsilon": 0.3, "eigen_every": 1, **COLLAPSES, "short": FEW_BATCHES}
DIRECT: Shared = {"balance": "dynamic", **EIGEN, **BRANCH, "built_as": EVERY | {"eigen_predictor": "predictor"}}
PULL: Shared = {"positive_factor": 1.0, "mixes_samples": True}
HINGE: Shared = {"floor": 1.0, "variance_epsilon": 1e-4, "mixes_samples": True}

# The catalogue. For each method: its gradient as in the authors' code, its rows of the paper's table, its own loss.
declare("unigrad", **UNIGRAD, correlation_source="target")
declare("unigrad", row="e", **UNIGRAD, correlation_source="online")

declare("moco", **SOFTMAX, **BANK)  # the authors published no code for it: row a
declare("moco", row="a", **SOFTMAX, **BANK)
declare("moco", "original", temperature=0.2, **BANK)

declare("simclr", **SOFTMAX)
declare("simclr", row="b", **SOFTMAX, both_terms=False)
declare("simclr", "original", temperature=0.2)

declare("byol", "original", **PREDICTOR, predictor_rate="schedule")
declare("byol", "original", "c", **PREDICTOR, predictor_rate="schedule")

declare("simsiam", "original", **PREDICTOR, predictor_rate="constant", target="stop_gradient")

declare("byol_directpred", **DIRECT, eigen_predictor="authors", correlation_source="target")
declare("byol_directpred", row="d", **DIRECT, eigen_predictor="paper", correlation_source="online")
declare("byol_directpred", "original", **EIGEN, eigen_predictor="authors", built_as=EVERY | {"eigen_predictor": "kind"})

declare("barlow_twins", **PULL, **BRANCH, balance=50.0, short={"balance": 5.0})
declare("barlow_twins", row="f", **BRANCH, balance=5e-3, mixes_samples=True)
declare("barlow_twins", row="g", **PULL, **BRANCH, balance=5e-3)
declare("barlow_twins", row="h", **PULL, **BRANCH, balance=50.0, short={"balance": 5.0})
declare("barlow_twins", "original", balance=5e-3, mixes_samples=True)

declare("vicreg", **PULL, balance=25.0, short={"balance": 2.5})  # the authors published no code for it: row j
declare("vicreg", row="i", **HINGE, balance=4e-5, positive_factor=1.0, variance=1.0)
declare("vicreg", row="j", **PULL, balance=25.0, short={"balance": 2.5})
declare("vicreg", "original", **HINGE, invariance=25.0, variance=25.0, covariance=1.0)

declare(
    "dino",
    "original",
    prototypes=65536,
    freeze_epochs=1.0,
    norm_last_layer=True,
    temperature=0.1,
    teacher_temperature=0.07,
    first_teacher_temperature=0.04,
    teacher_warmup_epochs=30.0,
    centre_momentum=0.9,
    refused={"stop_gradient": COPIED, "weight_sharing": COPIED},
    short=FEW_PROTOTYPES | {"teacher_temperature": 0.02, "teacher_warmup_epochs": 0.0, "centre_momentum": 0.5},
)

declare(
    "twist",
    "original",
    prototypes=4096,
    entropy=1.0,
    diversity=1.0,
    target="weight_sharing",
    refused={"momentum": TWINS, "stop_gradient": TWINS},
    mixes_samples=True,
    short=FEW_PROTOTYPES,
)

declare(
    "swav",
    "original",
    prototypes=3000,
    freeze_epochs=1.0,
    temperature=0.1,
    sinkhorn_epsilon=0.05,
    sinkhorn_iterations=3,
    queue_size=3840,
    queue_start_epoch=15.0,
    target="stop_gradient",
    refused={"weight_sharing": NO_CODES},
    short=FEW_PROTOTYPES,
)
