"""Whether a configuration may go on with a run that was begun with another: which keys may differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from unigrad_fast.config import Config
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import World, gather
from unigrad_fast.runtime.trees import is_among
from unigrad_fast.runtime.validation import leaves, shown, validate

# What may change when a run is continued: it decides where and how fast, or what is reported, but not the result.
HARMLESS = (
    *("output", "recipe", "data.train", "data.val", "data.decode", "data.hw_decoder_load", "data.threads"),
    *("data.read_threads", "data.read_ahead", "data.read_timeout", "data.max_bad_fraction"),
    *("engine.device", "engine.timeout"),
    *("objective.placement", "engine.zero_stage", "engine.max_skipped_steps", "engine.target_stream"),
    *("engine.cuda_graph", "engine.recompute_projector", "engine.deterministic"),
    *("checkpoint", "evaluation", "telemetry"),
)
SHOWN = 10  # differences between ranks

# What ranks of one run may have each for itself; that they see the same images is compared by these.
OF_A_RANK = (
    *("data.train", "data.val", "data.decode", "data.hw_decoder_load", "data.threads"),
    *("data.read_threads", "data.read_ahead", "data.read_timeout"),
)


def contradictions(config: Config, saved: Mapping[str, Any], whose: str) -> list[str]:
    """What forbids to continue a run with this configuration, one line per key; empty when nothing does.

    Args:
        saved: the configuration that the run began with, as JSON values.
        whose: what `saved` belongs to, for the message.
    """
    before = dict(leaves(validate(Config, saved).model_dump(mode="json"), ""))
    now = dict(leaves(config.model_dump(mode="json"), ""))
    keys_of_result = [key for key in now if not is_among(key, HARMLESS)]
    return [
        f"{key[1:]} = {shown(now[key])}: {whose} has {shown(before[key])}"
        for key in keys_of_result
        if now[key] != before[key]
    ]


def require_same_run(config: Config) -> None:
    """Raises UserError when a run that has no checkpoint yet was begun in this folder with another configuration."""
    path = config.output / "config.yaml"
    if path.is_file():
        try:
            saved = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{path}: cannot be read ({error}); to start a new run, choose another --output") from None
        if not isinstance(saved, dict):
            raise UserError(f"{path}: is not the configuration of a run; to start a new run, choose another --output")
        if differing := contradictions(config, saved, f"the run in {config.output}"):
            raise UserError("\n".join([*differing, "to start a new run, choose another --output"]))


def require_same_everywhere(config: Config, world: World) -> None:
    """Raises UserError on all ranks where their settings are not those of one run; all call it together."""
    first, *others = gather(dict(leaves(config.model_dump(mode="json"), "")))
    differing = [
        f"{key[1:]} = {shown(value)} on rank {rank} ({world.hosts[rank]}): "
        f"rank 0 ({world.hosts[0]}) has {shown(first.get(key))}"
        for rank, settings in enumerate(others, start=1)
        for key, value in settings.items()
        if value != first.get(key) and not is_among(key, OF_A_RANK)
    ]
    if differing:
        raise UserError("\n".join([*differing[:SHOWN], "all ranks of a run are started with the same command"]))
