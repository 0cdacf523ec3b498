"""`unigrad-fast checkpoint`: shows the content of a checkpoint, and verifies it."""

from __future__ import annotations

import math
from pathlib import Path

from rich.table import Table

from unigrad_fast.checkpoints.files import DESCRIPTION, Damaged, Reader, latest, none_intact, remedy
from unigrad_fast.runtime.console import new_console
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.wording import byte_size, count


def show(path: Path) -> None:
    """Print the content of a checkpoint; for a run folder, of its newest.

    Raises:
        UserError: no checkpoint there, or its description is damaged.
    """
    reader = Reader(path) if (path / DESCRIPTION).exists() else _newest(path)
    folder = reader.folder
    about = reader.about
    rows = {"folder": str(folder), "written": about["written"]}
    place = f" of {about['total_steps']:,}" if "total_steps" in about else ""
    rows["step, epoch"] = f"{about['step']:,}{place}, {about['epoch']:g}"
    stage = f", ZeRO stage {about['zero_stage']}" if "zero_stage" in about else ""
    rows["written by"] = count(about["ranks"], "rank") + stage
    if "learning_rate" in about:
        rows["learning rate"] = f"{about['learning_rate']:.6g}"
        rows["target momentum"] = f"{about['target_momentum']:.6g}"
    model = about["config"]["model"]
    rows["model"] = f"{model['backbone']}, projector {model['projector']['depth']} x {model['projector']['width']}"
    rows["versions"] = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    for group, (tensors, elements, size) in _groups(reader).items():
        rows[group] = f"{tensors} tensors, {elements:,} elements, {byte_size(size)}"
    rows["files"] = f"{len(about['files'])}, {byte_size(sum(file['bytes'] for file in about['files'].values()))}"
    if path != folder:
        rows["checkpoints of the run"] = ", ".join(each.name for each in RunFolder(path).complete_checkpoints())
    table = Table(title="Checkpoint", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # break a long path instead of cutting it
    for name, value in rows.items():
        table.add_row(name, value)
    new_console().print(table)


def _newest(run: Path) -> Reader:
    try:
        folder = latest(run)
        if folder is not None:
            return Reader(folder)
    except Damaged as error:
        raise UserError(
            f"{error}; {remedy(run, lambda it: f'the newest intact one is {it.folder}; give it')}"
        ) from None
    raise UserError(_nothing(run))


def verify(path: Path) -> None:
    """Compare every file of a checkpoint, or of all checkpoints of a run folder, with its digest.

    Raises:
        UserError: no checkpoint there, or files are damaged or missing; names all of them.
    """
    folders = [path] if (path / DESCRIPTION).exists() else RunFolder(path).complete_checkpoints()
    if not folders:
        raise UserError(_nothing(path))
    damaged: list[str] = []
    intact: list[Reader] = []
    for folder in folders:
        try:
            reader = Reader(folder)
            reader.verify()
        except UserError as error:
            damaged.append(str(error))
        else:
            intact.append(reader)
            print(f"{folder}: intact, {len(reader.names)} tensors in {count(len(reader.about['files']), 'file')}")
    if folders != [path] and folders[-1] not in [reader.folder for reader in intact]:
        damaged.append(_remedy(intact[-1]) if intact else none_intact(path))
    if damaged:
        raise UserError("\n".join(damaged))


def _remedy(intact: Reader) -> str:
    step = intact.about["step"]
    return (
        f"the newest intact checkpoint is that of step {step}: `pretrain --fall_back` resumes from it, and `evaluate` "
        f"and `export` take it with --checkpoint {step}"
    )


def _nothing(path: Path) -> str:
    return f"path = {path}: no checkpoint there; give a run folder, or a folder in its checkpoints/"


def _groups(reader: Reader) -> dict[str, tuple[int, int, int]]:
    """Numbers of tensors, elements and bytes, by the first part of the name."""
    groups: dict[str, tuple[int, int, int]] = {}
    for name in reader.names:
        elements, group = math.prod(reader.shape(name)), name.partition(".")[0]
        tensors, before, size = groups.get(group, (0, 0, 0))
        groups[group] = tensors + 1, before + elements, size + elements * reader.dtype(name).itemsize
    return groups
