"""`unigrad-fast data scan`: decodes every image once, and reports which ones training cannot use."""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Generator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from unigrad_fast.pipelines import Manifest
from unigrad_fast.pipelines.reading.supply import FEW
from unigrad_fast.pipelines.scan import files, scanning, summary
from unigrad_fast.runtime.console import new_console
from unigrad_fast.runtime.wording import count

PLAIN_SECONDS = 10.0  # least time between two lines without a terminal
REFRESH_SECONDS = 0.1  # and between two states of the bar on a terminal


def scan(path: Path, output: Path | None = None, threads: int | None = None, read_timeout: float = 60.0) -> None:
    """Scan the images at a path, or continue an earlier scan, and print a summary.

    Args:
        path: the images.
        output: folder of the rows; None for `scan-NAME` in the current folder.
        threads: number of decoding processes; None for one per core.
        read_timeout: seconds after which a file that does not answer counts as bad.

    Raises:
        DataError: no images there, a folder that cannot be written or holds something else, or storage that stops
            answering.
        KeyboardInterrupt: after printing how to continue.
    """
    if output is None:
        output = Path("-".join(["scan", *re.findall(r"[\w.]+", path.name)])).absolute()
    console = new_console()
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: console.print(f"warning: {message}", style="yellow")
        warnings.simplefilter("always", UserWarning)
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about tags in the images
        console.print(f"reading the headers of the images in {path}")
        manifest = Manifest.open(path)
        console.print(f"scanning {len(manifest):,} images into {output}", soft_wrap=True)
        begun = time.monotonic()
        images = _run(console, manifest, output, scanning.scan(manifest, output, threads, path, read_timeout))
    seconds = time.monotonic() - begun
    found = summary.summarize(manifest, output)
    if found.bad:
        # Training tries again to read images that could not be read now.
        manifest.mark_unusable(sorted({*found.bad} - {*found.unread}))
    _report(console, found, output, images, seconds)


def _run(console: Console, manifest: Manifest, output: Path, steps: Generator[scanning.Progress, None, None]) -> int:
    """Scans with a progress bar, or lines without a terminal; returns how many images were decoded now."""
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f}  {task.fields[speed]:,.0f} images/s"),
        TextColumn("{task.fields[bad]:,} bad  left"),
        TimeRemainingColumn(),
    )
    # No refresh thread, because the workers are forked.
    bar = Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal, transient=True)
    before = done = 0
    begun = shown = time.monotonic()
    try:
        with bar:
            for progress in steps:
                now = time.monotonic()
                if not bar.task_ids:
                    before = progress.done
                    bar.add_task("", total=progress.total, completed=before, speed=0, bad=progress.bad)
                    if before:
                        again = f"; remove {output} to scan again" if before == progress.total else ""
                        console.print(f"{before:,} of them were scanned before{again}", soft_wrap=True)
                    begun = now
                done = progress.done
                speed = (done - before) / max(now - begun, 1e-9)
                bar.update(bar.task_ids[0], completed=done, speed=speed, bad=progress.bad)
                if now - shown < (REFRESH_SECONDS if console.is_terminal else PLAIN_SECONDS):
                    continue
                shown = now
                bar.refresh()
                if not console.is_terminal:
                    left = f"{(progress.total - done) / speed:,.0f} s" if speed else "unknown"
                    console.print(
                        f"{done:,} of {progress.total:,}  {speed:,.0f} images/s  {progress.bad:,} bad  left {left}"
                    )
    except KeyboardInterrupt:
        steps.close()
        print(f"{done:,} of {len(manifest):,} images are scanned; repeat the command to continue", file=sys.stderr)
        raise
    return done - before


def _report(console: Console, found: summary.Summary, output: Path, images: int, seconds: float) -> None:
    bad = len(found.bad)
    rows = {
        "images": f"{found.images:,}, {_size(found.bytes)}",
        "bad": f"{bad:,}" + (f" ({bad / found.images:.2%}): {_counts(found.reasons)}" if bad else ""),
        "usable, but odd": _counts(found.notes) or "none",
        "duplicates of others": f"{found.duplicates:,}",
        "formats": _counts(found.formats),
        "colour modes": _counts(found.colours),
        "smallest, median, largest": ", ".join(f"{width}x{height}" for width, height in found.sizes),
    }
    if images:
        rows["scanned now"] = f"{count(images, 'image')} in {seconds:,.0f} s, {images / seconds:,.0f} images/s"
    rows["files"] = "\n".join([f"{output}/", *(f"  {name}" for name in files.FILES)])
    table = Table(title="Scan finished", title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    for path, reason in found.first:
        path = path.encode(errors="surrogateescape").decode(errors="replace")  # a name need not be text
        console.print(f"bad: {path}: {reason}", soft_wrap=True)
    if bad > len(found.first):
        console.print(f"and {bad - len(found.first):,} more in {output}/bad.csv", soft_wrap=True)
    if bad:
        console.print(
            "Training replaces bad images by others, as long as their share is at most data.max_bad_fraction, or at "
            f"most {FEW} images of a small set are bad. You can remove or repair them, or leave them."
        )
    else:
        console.print("Every image decodes.")


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.most_common())


def _size(size: int) -> str:
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:,} bytes"
