"""The members of a comparison: which runs are trained, as data, and the command that trains each.

A line of the comparison is a set of keys; it is trained with every seed. Lines come from a table of the paper, or are
the product of axes: methods and their forms, target branches, and the values of swept keys.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unigrad_fast.comparison.paper_values import ROWS, TABLES, Line, of_form, of_method, of_target, trained
from unigrad_fast.config import Config, resolve
from unigrad_fast.objectives.catalogue import FORMS, methods
from unigrad_fast.recipes import current_names, recipe_names
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.trees import BARE, nested
from unigrad_fast.runtime.validation import absolute, leaves, shown

OWN = {"seed": "--seeds", "output": "FOLDER"}  # keys of a run that a comparison sets, and what sets them


@dataclass(frozen=True)
class Member:
    """One run of a comparison.

    Attributes:
        line: what it is a run of.
        seed: its seed.
        config: its whole configuration; `config.output` is its folder.
        words: what follows `unigrad-fast` in the command that trains it.
    """

    line: Line
    seed: int
    config: Config
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.config.output.name


@dataclass(frozen=True)
class Asked:
    """What is compared.

    Attributes:
        methods: names of methods, letters of rows, or "all".
        forms: forms of the methods; empty for each method's own.
        targets: target branches; empty for each method's own.
        sweep: swept keys, dotted, with their values.
        table: a table of the paper in place of these.
        seeds: every line is trained with each of them.
        common: keys of all members, as a tree.
    """

    methods: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    sweep: Mapping[str, Sequence[Any]] | None = None
    table: str | None = None
    seeds: tuple[int, ...] = (0,)
    common: Mapping[str, Any] | None = None

    def lines(self) -> list[Line]:
        """The lines in the order of the table; raises UserError if they cannot be made."""
        given = {"methods": self.methods, "forms": self.forms, "targets": self.targets, "sweep": self.sweep}
        named = [key for key, value in given.items() if value]
        for key in ("methods", "forms", "targets", "seeds"):
            _require_once(key, getattr(self, key))
        if self.table is not None:
            if named:
                raise UserError(f"table = {self.table}: says what is compared; leave {', '.join(named)} out")
            common = flat(current_names(nested(self.common or {})))
            size = common.get("data.image_size") or resolve(common.get("recipe")).data.image_size
            return [line.at(int(size)) for line in TABLES[self.table].lines]
        if not named:
            raise UserError(
                "nothing to compare; give --methods, --targets, --sweep.KEY VALUES, or --table NAME, which is one of "
                + ", ".join(TABLES)
            )
        return list(_grid(self))

    def members(self, folder: Path) -> list[Member]:
        """The members, seed by seed; raises UserError for all of them together.

        Args:
            folder: the folder of the comparison, with a folder for each member.
        """
        lines = trained(self.lines())
        names = [line.name for line in lines]
        if double := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"two lines of the comparison would be called {double}; give one of them less")
        common = current_names(nested(self.common or {}))
        for key, instead in OWN.items():
            if key in common:
                raise UserError(f"{key} = {shown(common[key])}: a comparison sets it; use {instead}")
        given, found, problems = flat(common), [], dict[str, list[str]]()
        for line in lines:
            try:
                _refuse_double(given, line)
                config = resolve(overrides={**given, **line.keys})
            except UserError as error:
                for problem in str(error).split("\n"):
                    problems.setdefault(problem, []).append(line.name)
                continue
            shared = {**written(common, config), **line.keys}
            for seed in self.seeds:
                output = folder / f"{line.name}-seed-{seed}"
                keys = {**shared, "seed": seed, "output": output}
                words = [word for key, value in keys.items() for word in (f"--{key}", as_typed(value))]
                own = config.model_copy(update={"seed": seed, "output": output})
                found.append(Member(line, seed, own, ("pretrain", *words)))
        if problems:
            raise UserError("\n".join(f"{problem} (in {some(names)})" for problem, names in problems.items()))
        return sorted(found, key=lambda member: self.seeds.index(member.seed))


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a tree by dotted key."""
    return dict(leaves(tree)) if tree else {}


def written(common: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Keys given to all members with checked values: whole paths and numbers, so that they mean the same elsewhere."""
    resolved = dict(leaves(config))
    found = {key: resolved.get(key, value) for key, value in flat(common).items()}
    if (recipe := common.get("recipe")) is not None:
        found["recipe"] = recipe if recipe in recipe_names() else str(absolute(Path(recipe)))
    return found


def as_typed(value: Any) -> str:
    """A value of a key as a word of a command."""
    if value is None or isinstance(value, bool) or value is BARE:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return ",".join(map(as_typed, value))
    return str(value)


def swept(tree: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values of each swept key, of a tree with lists or comma-separated texts.

    Raises:
        UserError: a key without values, or with one of them twice.
    """
    found = {}
    for key, given in flat(nested(tree)).items():
        values = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else [given]
        if values == [""] or any(value is BARE for value in values):
            raise UserError(f"--sweep.{key}: values are missing; give them as --sweep.{key} 1,2,3")
        _require_once(f"sweep.{key}", [as_typed(value) for value in values])
        if key in OWN:
            raise UserError(f"sweep.{key}: a comparison sets it; use {OWN[key]}")
        found[key] = values
    return found


def _grid(asked: Asked) -> Iterator[Line]:
    """The product of the axes; with two axes or more, the last one gives the columns."""
    sweep = asked.sweep or {}
    forms, targets = _methods(asked.methods, asked.forms), asked.targets or (None,)
    last = [key.rpartition(".")[2] for key in sweep]
    short = [key if last.count(name) > 1 else name for key, name in zip(sweep, last, strict=True)]
    axes = [forms, targets, *sweep.values()]
    several = [place for place, axis in enumerate(axes) if len(axis) > 1]
    across = several[-1] if len(several) > 1 else None
    for form, target, *values in itertools.product(*axes):
        keys = {**(of_form(form) if form else {}), **(_of_target(target, form, asked) if target else {})}
        if double := next((key for key in sweep if key in keys), None):
            raise UserError(f"sweep.{double}: is also set by --methods or --targets; leave one of the two out")
        keys |= dict(zip(sweep, values, strict=True))
        settings = [f"{name} {as_typed(value)}" for name, value in zip(short, values, strict=True)]
        words = [form and _spoken(form), target, *settings]
        yield Line(
            ", ".join(word for place, word in enumerate(words) if word and place != across),
            "-".join(re.sub(r"[ /]", "-", word) for word in words if word),
            keys,
            of_method(form, target) if form and not sweep else {},
            "" if across is None else words[across],
        )


def _of_target(target: str, form: str | None, asked: Asked) -> dict[str, Any]:
    try:
        return of_target(target, FORMS[form] if form else type(resolve(overrides=asked.common or {}).objective))
    except ValueError as error:
        raise UserError(str(error)) from None


def _methods(names: Sequence[str], forms: Sequence[str]) -> Sequence[str | None]:
    """Names of the catalogue's forms; None for that of the recipe."""
    if not names:
        if forms:
            raise UserError(
                f"forms = {','.join(forms)}: applies only with --methods; leave it out, or add --methods all"
            )
        return (None,)
    found: list[str] = []
    for name in methods() if "all" in names else names:
        if name in ROWS:
            found.append(name)
            continue
        own = [form for form in (name, f"original {name}") if form in FORMS]
        of_forms = [form for form in own if FORMS[form].names["form"] in forms] if forms else own[:1]
        if not of_forms and "all" not in names:
            raise UserError(f"forms = {','.join(forms)}: {name} has only the form {FORMS[own[0]].names['form']}")
        found += of_forms
    if "all" in names and len(names) > 1:
        raise UserError(f"methods = {','.join(names)}: all contains every method; leave the others out")
    return found


def _spoken(form: str) -> str:
    """The name of a form in tables and folders."""
    names = FORMS[form].names
    if names["row"]:
        return f"row {names['row']}"
    is_choice = form.startswith("original ") and names["method"] in FORMS
    return f"{names['method']} original" if is_choice else names["method"]


def _refuse_double(common: Mapping[str, Any], line: Line) -> None:
    for key in line.keys or {}:
        if key in common and as_typed(common[key]) != as_typed(line.keys[key]):
            raise UserError(f"{key} = {shown(common[key])}: the comparison sets it itself; leave it out")


def _require_once(key: str, values: Sequence[Any]) -> None:
    double = next((value for value in values if list(values).count(value) > 1), None)
    if double is not None:
        raise UserError(f"{key} = {','.join(map(str, values))}: {double} is given twice; give it once")


def some(names: Sequence[str]) -> str:
    """The first of several names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
