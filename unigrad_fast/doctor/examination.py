"""Runs `unigrad-fast doctor`, from its first table to its last line."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from unigrad_fast.doctor import Finding, choices, first_line, machine, packages, parts, refuse
from unigrad_fast.runtime.console import fitted, new_console
from unigrad_fast.runtime.quiet import without_warnings

if TYPE_CHECKING:
    from unigrad_fast.runtime.process_group import World

STYLES = {"ok": "green", "note": "yellow", "skipped": "yellow"}


def examine(smoke: bool, verbose: bool) -> None:
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
        console.print(_table("Machine and versions", found))
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
            scene = parts.prepare(world, folder)
            used = choices.findings(scene, launch.launcher, unusable)
            console.print(_table("What a run will use", used))
            found += used
            if smoke:
                with console.status("Trying each part"):
                    tried = parts.attempt(scene, unusable, verbose)
                console.print(_table_of_parts(tried, world))
                found += tried
            refuse(found)
    tried = "and works" if smoke else "(not tested: --smoke false)"
    console.print(f"Ready: everything that pretrain needs is installed {tried}.")


def _table(title: str, found: Sequence[Finding]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for each in found:
        table.add_row(each.name, _text(each), _status(each))
    return table


def _table_of_parts(found: Sequence[Finding], world: World) -> Table:
    memory = f"{machine.gib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 1024)} of the process"
    if world.device.type == "cuda":
        import torch

        memory += f", {machine.gib(torch.cuda.max_memory_allocated(world.device))} of the GPU"
    table = Table(
        title=f"Each part tried, with {parts.IMAGES_PER_RANK} images per rank",
        title_justify="left",
        caption=f"Peak memory: {memory}",
        caption_justify="left",
    )
    table.add_column("part")
    table.add_column("first, ms", justify="right")
    table.add_column("again, ms", justify="right")
    table.add_column("result")
    for each in found:
        times = [f"{value:,.1f}" for value in each.times] or ["", ""]
        table.add_row(each.name, *times, Text("\n").join([_status(each), *([_text(each)] if each.found else [])]))
    return table


def _status(finding: Finding) -> Text:
    return Text(finding.status, style=STYLES.get(finding.status, "bold red"))


def _text(finding: Finding) -> Text:
    return Text(fitted("\n".join(filter(None, [finding.found, finding.remedy and f"→ {finding.remedy}"]))))
