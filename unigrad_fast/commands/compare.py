"""`unigrad-fast compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from unigrad_fast.commands.requirements import require_dali, require_folders
from unigrad_fast.comparison.members import Asked, Member, as_typed, swept
from unigrad_fast.comparison.paper_values import ROWS, TABLES
from unigrad_fast.objectives.catalogue import methods
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.trees import merge
from unigrad_fast.runtime.validation import AbsolutePath, Node, absolute, validate

Compared = Literal[("all", *ROWS, *methods())]  # type: ignore[valid-type]
MACHINE = ("jobs", "slurm", "dry_run", "tables_only")  # options that do not say what is compared


class Sweep(Node):
    """Swept keys; any key of pretrain."""

    model_config = ConfigDict(extra="allow")


class Compare(Node):
    """Train methods or settings alike, and compare them in the paper's tables; takes the keys of pretrain, too."""

    model_config = ConfigDict(extra="allow")
    positional: ClassVar[tuple[str, ...]] = ("folder",)

    folder: AbsolutePath | None = None
    """Folder of the comparison, which is continued if there is one; null is runs/compare, or runs/compare-TABLE."""
    table: Literal[tuple(TABLES)] | None = None  # type: ignore[valid-type]
    """What a table of the paper compares, in place of methods, targets and sweep."""
    methods: tuple[Compared, ...] | None = None
    """Methods, or rows of the paper's table; null is the recipe's."""
    forms: tuple[Literal["gradient", "original"], ...] | None = None
    """Forms of each method; null is its own, the gradient if it has one."""
    targets: tuple[Literal["momentum", "stop_gradient", "weight_sharing", "mixed"], ...] | None = None
    """Target branches; mixed takes positives from the momentum branch and negatives without; null is each method's."""
    sweep: Sweep = Sweep()
    """Values of any key of pretrain, as in --sweep.model.projector.depth 1,2,3; of several keys all combinations."""
    seeds: tuple[Annotated[int, Field(ge=0, le=2**32 - 1)], ...] = (0,)
    """Seeds with which each is trained."""
    jobs: int = Field(default=1, ge=1, le=1024)
    """Members trained side by side: on the CPU, or each on a GPU of its own."""
    slurm: AbsolutePath | None = None
    """Only write a script for sbatch to this file, which trains the members as an array."""
    dry_run: bool = False
    """Only list the members and their commands, with the time of each by three measured steps."""
    tables_only: bool = False
    """Only write tables and pictures, of what has ended."""

    @model_validator(mode="after")
    def _members(self) -> Compare:
        """Checks all members, unless they are those of the folder."""
        if self.names_members():
            self.asked().members(Path("/"))
        return self

    def names_members(self) -> bool:
        """Whether it says what is compared; otherwise that is what the folder's comparison does."""
        return bool(self.model_fields_set - {"folder", "seeds", *MACHINE}) or bool(self.model_extra)

    def asked(self) -> Asked:
        return Asked(
            methods=self.methods or (),
            forms=self.forms or (),
            targets=self.targets or (),
            sweep=swept(self.sweep.model_extra or {}),
            table=self.table,
            seeds=self.seeds,
            common=self.model_extra or {},
        )

    def kept(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """The options that say what is compared, as they are kept in the folder.

        Args:
            common: the keys of all members.
        """
        asked = self.asked()
        axes = {"table": asked.table, "methods": asked.methods, "forms": asked.forms, "targets": asked.targets}
        given = {key: list(value) if isinstance(value, tuple) else value for key, value in axes.items() if value}
        if asked.sweep:
            given["sweep"] = {key: [as_typed(value) for value in values] for key, values in asked.sweep.items()}
        return {**given, "seeds": list(asked.seeds), **common}


def compare(options: Compare) -> None:
    from unigrad_fast.comparison import session

    where = options.folder or absolute(Path("runs", f"compare-{options.table}" if options.table else "compare"))
    before = session.recorded(where)
    if before is None and options.tables_only:
        raise UserError(f"tables_only = true: no comparison in {where}; leave it out")
    if not options.names_members():
        if before is None:
            raise UserError(
                f"folder = {where}: no comparison there; say what to compare with --methods, --targets, --sweep.KEY "
                f"VALUES or --table, which is one of {', '.join(TABLES)}"
            )
        given = {key: getattr(options, key) for key in options.model_fields_set if key != "folder"}
        options = validate(Compare, merge(before, given))
    asked = options.asked()
    members = asked.members(where)
    if not options.tables_only:
        _require_startable(members)
    earlier = None if before is None else validate(Compare, before).asked().members(where)
    this = session.Session(where, asked, members, options.jobs)
    this.require_same(earlier)
    if options.dry_run:
        this.show_plan()
    elif options.slurm is not None:
        this.write_script(options.slurm, options.kept)
    elif options.tables_only:
        this.write_tables()
    else:
        this.train(options.kept, before)


def _require_startable(members: Sequence[Member]) -> None:
    """Raises UserError unless every member could start here."""
    told = dict[str, None]()
    for config in (member.config for member in members):
        try:
            require_folders(config)
            config.check_world(1)
            if config.data.val is None:
                raise UserError(
                    "data.val = null: a comparison needs labelled validation images; give --data.val IMAGES"
                )
        except UserError as error:
            told |= dict.fromkeys(str(error).split("\n"))
    if told:
        raise UserError("\n".join(told))
    require_dali()
