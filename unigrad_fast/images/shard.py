"""`unigrad-fast data shard`: packs images into tar shards, or verifies shards."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from unigrad_fast.pipelines import Manifest
from unigrad_fast.pipelines.cores import usable_cores
from unigrad_fast.pipelines.shards import packing, verification
from unigrad_fast.pipelines.shards.index import INDEX
from unigrad_fast.runtime.console import new_console
from unigrad_fast.runtime.errors import RunStopped, UserError
from unigrad_fast.runtime.files import require_folder
from unigrad_fast.runtime.outputs import within_images
from unigrad_fast.runtime.wording import count

SHOWN = 10  # images or problems to print; the others are only counted


def shard(
    source: Path,
    folder: Path,
    options: packing.Packing,
    threads: int | None,
    verify: bool,
    read_timeout: float,
) -> None:
    """Pack missing shards, print a summary, and with `verify` compare all shards with their digests.

    Files that do not answer within `read_timeout` seconds are left out.

    Raises:
        UserError: the folder is inside the folder of the images, or cannot be written.
        DataError: the source or the folder cannot be used.
        RunStopped: shards differ from what was written.
    """
    threads = threads or usable_cores()
    console = new_console(soft_wrap=True)
    if problem := within_images(folder, {"source": source}):
        raise UserError(f"folder = {folder}: {problem}")
    finished = "index" in packing.read_description(folder)
    if not finished:
        require_folder(folder, "folder")
    if not (verify and finished):  # verifying does not need the source
        _pack(source, folder, options, threads, console, read_timeout)
    if verify:
        _verify(folder, threads, console)


def _pack(source: Path, folder: Path, options: packing.Packing, threads: int, console: Console, timeout: float) -> None:
    with console.status("listing images"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        manifest = Manifest.open(source)
    for warning in caught:
        console.print(f"warning: {warning.message}")
    with _bar(console, MofNCompleteColumn()) as bar, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # about unusual but decodable images
        task = bar.add_task("images", total=len(manifest))
        packed = packing.pack(
            manifest, os.fspath(source), folder, options, threads, lambda images: bar.advance(task, images), timeout
        )
    labels = f"of {count(manifest.used_classes, 'class')}" if manifest.has_labels else "without labels"
    console.print(f"{packed.images:,} images {labels} in {count(packed.shards, 'shard')} in {folder}")
    if packed.left_out:
        _say_left_out(folder, packed.left_out, console)
    if options.short_side:
        before, after = packed.bytes_before / 2**20, packed.bytes_after / 2**20
        console.print(
            f"{packed.encoded_again:,} images were shrunk to a short side of {options.short_side} pixels, with Lanczos "
            f"and JPEG quality {options.quality}: {before:,.1f} MiB before, {after:,.1f} MiB after. Published numbers "
            "come from the original pixels, and small crops of the shrunk images have less detail."
        )
    else:
        console.print(f"{packed.bytes_after / 2**20:,.1f} MiB of images, copied unchanged")


def _say_left_out(folder: Path, left_out: int, console: Console) -> None:
    console.print(
        f"{count(left_out, 'image')} left out because they cannot be read or decoded ({folder / packing.LEFT_OUT}):"
    )
    with open(folder / packing.LEFT_OUT, encoding="utf-8", errors="replace") as file:
        for line, _ in zip(file, range(SHOWN), strict=False):
            console.print("  " + ": ".join(line.rstrip("\n").rsplit("\t", 1)))
    if left_out > SHOWN:
        console.print(f"  and {left_out - SHOWN:,} more")


def _verify(folder: Path, threads: int, console: Console) -> None:
    with _bar(console, DownloadColumn()) as bar:
        total = sum(file.stat().st_size for file in folder.glob("*.tar"))
        task = bar.add_task("comparing", total=total)
        problems = verification.verify(folder, threads, lambda size: bar.advance(task, size))
    if problems:
        more = f"\nand {len(problems) - SHOWN:,} more" if len(problems) > SHOWN else ""
        remedy = "copy the shards again, or pack them into a new folder"
        raise RunStopped("\n".join(problems[:SHOWN]) + f"{more}\n{remedy}")
    console.print(f"{folder}: all shards match their digests ({INDEX})")


def _bar(console: Console, amount: MofNCompleteColumn | DownloadColumn) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn(), console=console, transient=True
    )
