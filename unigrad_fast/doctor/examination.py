"""Runs `unigrad-fast doctor`, from its first table to its last line."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from pathlib import Path

from unigrad_fast.doctor import choices, machine, packages, parts, tables
from unigrad_fast.doctor.finding import Finding, first_line, refuse
from unigrad_fast.doctor.scene import prepare
from unigrad_fast.runtime.console import new_console
from unigrad_fast.runtime.quiet import without_warnings


def examine(smoke: bool = True, verbose: bool = False) -> None:
    """Print the tables, on rank 0, and try each part.

    Args:
        smoke: try the parts.
        verbose: show tracebacks of parts that fail, and messages of the libraries.

    Raises:
        UserError: something is missing or does not work; one line per problem, with the remedy.
    """
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    console = new_console(quiet=rank != "0")
    with contextlib.nullcontext() if verbose else without_warnings():
        found = [*packages.findings(), *machine.findings()]
        console.print(tables.of_findings("Machine and versions", found))
        unusable = {finding.name for finding in found if finding.status in ("missing", "broken")}
        if unusable - packages.OPTIONAL:
            refuse(found)

        from unigrad_fast.runtime import process_group
        from unigrad_fast.runtime.processors import compute_threads

        with contextlib.ExitStack() as stack:
            unusable_gpu = any(each.name == "GPU" and each.is_problem for each in found)  # a run would refuse it
            launch = process_group.launch_environment(os.environ)
            if launch.size > 1:
                refuse(found)  # before the other ranks wait for this one
                console.print(f"Waiting for {launch.size} ranks at {launch.address}:{launch.port}")
            try:
                world = stack.enter_context(process_group.session("cpu" if unusable_gpu else "auto"))
            except Exception as error:
                if verbose:
                    traceback.print_exc()
                found.append(Finding("process group", first_line(error), "failed", parts.NETWORK))
                refuse(found)
            stack.enter_context(compute_threads(world.device))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unigrad-doctor-")))
            scene = prepare(world, folder)
            used = choices.findings(scene, launch.launcher, unusable)
            console.print(tables.of_findings("What a run will use", used))
            found += used
            if smoke:
                with console.status("Trying each part"):
                    tried = parts.attempt(scene, unusable, verbose)
                console.print(tables.of_parts(tried, world))
                found += tried
            refuse(found)
    tried = "and works" if smoke else "(not tested: --smoke false)"
    console.print(f"Ready: everything that pretrain needs is installed {tried}.")
