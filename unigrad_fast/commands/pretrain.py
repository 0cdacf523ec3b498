"""`unigrad-fast pretrain`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from unigrad_fast.commands.requirements import require_dali, require_folders, require_name
from unigrad_fast.config import Config, to_yaml
from unigrad_fast.recipes import DEFAULT_RECIPE
from unigrad_fast.runtime.errors import RunStopped, UserError
from unigrad_fast.runtime.out_of_memory import ran_out
from unigrad_fast.runtime.validation import absolute

if TYPE_CHECKING:
    from unigrad_fast.training.telemetry.callbacks import Callbacks


class Pretrain(Config):
    """Pretrain an encoder on a folder of images."""

    name: str = DEFAULT_RECIPE
    """Name of the run's folder if output is null; by default that of the recipe or its YAML file."""
    print_config: bool = False
    """Only print the resolved configuration as YAML, which --recipe accepts."""
    verbose: bool = False
    """Show messages of DeepSpeed and the other libraries."""
    fresh: bool = False
    """Refuse an output folder that contains a run, instead of continuing it."""
    fall_back: bool = False
    """If the newest checkpoint is damaged, resume from the newest intact one."""


def pretrain(options: Pretrain, callbacks: Callbacks | None = None) -> Path | None:
    """Pretrains; returns the run's folder, None if only the configuration was printed."""
    config = Config(**{key: getattr(options, key) for key in Config.model_fields})
    if options.print_config:
        print(to_yaml(config), end="")
        return None
    numbered = config.output is None
    if numbered:
        for variable, whose in (("TORCHELASTIC_MAX_RESTARTS", "torchrun"), ("SLURM_RESTART_COUNT", "SLURM")):
            if os.environ.get(variable, "").strip() not in (
                "",
                "0",
            ):  # a restarted command must find the run that it began
                raise UserError(
                    f"output = null: {whose} may restart this command ({variable} is {os.environ[variable]}), and each "
                    "start would take a new folder; give --output FOLDER"
                )
        require_name(options.name)
        config = config.model_copy(update={"output": absolute(Path("runs", options.name))})
    require_folders(config, options.fresh, numbered)
    require_dali()
    from unigrad_fast.runtime.process_group import launch_environment

    ranks = launch_environment(os.environ).size
    config.check_world(ranks)
    from unigrad_fast.training import loop

    try:
        how = {"verbose": options.verbose, "fall_back": options.fall_back, "numbered": numbered}
        return loop.pretrain(config, **how, callbacks=callbacks)
    except (UserError, RunStopped) as error:
        if ran_out(error):
            _advise(config, ranks)
        raise


def _advise(config: Config, ranks: int) -> None:
    """Prints the planner's advice for a step that ran out of memory."""
    import torch

    from unigrad_fast.planning import advice_here

    try:
        size = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
        for line in advice_here(config, ranks, size):
            print(f"plan: {line}", flush=True)
    except Exception as error:  # the run's own error and its status matter more
        print(f"plan: the step could not be counted: {error}", flush=True)
