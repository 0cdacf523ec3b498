"""Whether a run may continue with a changed configuration: which keys may differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unigrad_fast.config import Config, Scope, scope_of
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import World, gather
from unigrad_fast.runtime.run_folder import NEW_RUN, RunFolder
from unigrad_fast.runtime.validation import leaves, shown, validate

SHOWN = 10  # differences between ranks


def contradictions(config: Config, saved: Mapping[str, Any], whose: str) -> list[str]:
    """Why a run cannot continue with this configuration, one line per key; empty when it can.

    Args:
        saved: the configuration that the run began with, as JSON values.
        whose: what `saved` belongs to, for the message.
    """
    before, now, unused = dict(leaves(validate(Config, saved))), leaves(config), config.unused()
    return [
        f"{key} = {shown(value)}: {whose} has {shown(before.get(key))}"
        for key, value in now
        if value != before.get(key) and key not in unused and Scope.MACHINE not in scope_of(key)
    ]


def require_same_run(config: Config) -> None:
    """Raises UserError when the folder holds a run without a checkpoint that was begun with another configuration."""
    run = RunFolder(config.output)
    saved = run.saved_configuration()
    if saved is not None and (differing := contradictions(config, saved, f"the run in {run}")):
        raise UserError("\n".join([*differing, NEW_RUN]))


def require_same_everywhere(config: Config, world: World) -> None:
    """Raises UserError on all ranks when their settings differ; all ranks call it together."""
    first, *others = gather(dict(leaves(config)))
    differing = [
        f"{key} = {shown(value)} on rank {rank} ({world.hosts[rank]}): "
        f"rank 0 ({world.hosts[0]}) has {shown(first.get(key))}"
        for rank, settings in enumerate(others, start=1)
        for key, value in settings.items()
        if value != first.get(key) and Scope.RANK not in scope_of(key)
    ]
    if differing:
        raise UserError("\n".join([*differing[:SHOWN], "start all ranks of a run with the same command"]))
