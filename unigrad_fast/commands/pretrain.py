"""`unigrad-fast pretrain`."""

from __future__ import annotations

import os

from unigrad_fast.commands.requirements import fresh_output, require_dali, require_folders, require_named_output
from unigrad_fast.config import Config, to_yaml
from unigrad_fast.runtime.errors import Preempted
from unigrad_fast.runtime.shell import typed


class Pretrain(Config):
    """Pretrain an encoder on a folder of images."""

    print_config: bool = False
    """Print the resolved configuration as YAML, which --recipe accepts, and do nothing else."""
    verbose: bool = False
    """Show what DeepSpeed and the other libraries say."""
    fresh: bool = False
    """Refuse an output folder that holds a run, instead of going on with it."""
    fall_back: bool = False
    """Where the newest checkpoint is damaged, go on from the newest intact one."""


def pretrain(options: Pretrain) -> None:
    config = Config(**{key: getattr(options, key) for key in Config.model_fields})
    if options.print_config:
        print(to_yaml(config), end="")
        return
    named = config.output is not None
    if not named:
        require_named_output(os.environ)
        # All ranks find the same free name, because rank 0 creates the folder only after all have met.
        config = config.model_copy(update={"output": fresh_output(config.recipe)})
    require_folders(config, options.fresh)
    require_dali()
    from unigrad_fast.runtime.process_group import launch_environment

    config.check_world(launch_environment(os.environ).size)
    from unigrad_fast.training import loop

    try:
        loop.pretrain(config, verbose=options.verbose, fall_back=options.fall_back)
    except Preempted as error:
        if named:
            raise
        raise Preempted(f"{error}, with {typed('--output', config.output)}", error.status) from None
