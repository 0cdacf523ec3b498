"""A checkpoint on disk: pieces of named tensors in files per rank, and one description of all of them.

    RUN/checkpoints/
        latest                  name of the newest complete checkpoint, replaced as a whole
        step-00000744/
            checkpoint.json     step, configuration, the pieces of every tensor, the digest of every file
            rank-00000.pt ...   {tensor's name: elements of its piece}, which torch loads with `weights_only`;
                                after a quarter of a GiB, rank-00000-1.pt, -2, ... follow

A piece is a range of a tensor's elements in row-major order, so that a reader can read what it needs for any number of
ranks that wrote it, and a writer copies only one file's elements to the host at a time. A folder is written under
another name, flushed to the disk and then renamed, so a folder with its final name is complete. This module does not
know what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

import unigrad_fast
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.files import naming, utf8_path, write_whole
from unigrad_fast.runtime.process_group import gather, on_all_ranks, on_first
from unigrad_fast.runtime.run_folder import CHECKPOINT as DESCRIPTION
from unigrad_fast.runtime.run_folder import RunFolder

FORMAT = 1
UNFINISHED, REMOVED = ".unfinished-", ".removed-"  # prefixes of folders that are being written or deleted
FILE_BYTES = 1 << 28  # of tensors per file: a rank holds one or two copies of these in addition
MAPPED_BYTES = 1 << 28  # to read from a mapped file before unmapping it: pages that were read count as memory in use


class Damaged(UserError):
    """A file of a checkpoint is missing or damaged; the message names it, and lacks the remedy of the command."""


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + len(values)) of the tensor `name` of shape `shape`, in row-major order.

    `values` is one-dimensional, on any device.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor


def write(run: Path, step: int, pieces: Iterable[Piece], about: Mapping[str, Any], rank: int = 0) -> Path:
    """Write RUN/checkpoints/step-N and point `latest` to it; all ranks call this together.

    Existing checkpoints are never changed, whatever happens.

    Args:
        run: the run folder, which exists.
        step: optimizer steps done.
        pieces: this rank's pieces; all ranks together cover every tensor exactly once.
        about: JSON values that describe the checkpoint; only rank 0's are used.

    Returns:
        The folder, the same on all ranks.

    Raises:
        OSError: on all ranks, if one of them cannot write a file.
    """
    root = RunFolder(run).checkpoints
    unfinished = root / f"{UNFINISHED}{_folder_name(step)}-{on_first(lambda: uuid.uuid4().hex[:8])}"
    try:
        on_first(lambda: unfinished.mkdir(parents=True))
        records = gather(on_all_ranks(lambda: _write_pieces(unfinished / f"rank-{rank:05}", pieces)))
        return on_first(lambda: _complete(unfinished, step, records, about))
    except BaseException:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_weights(run: Path, tensors: Mapping[str, Tensor], step: int, epoch: float, config: Mapping[str, Any]) -> Path:
    """Write whole tensors as a checkpoint of one process; enough to evaluate and export, not to resume training."""
    pieces = [Piece(name, tuple(t.shape), 0, t.detach().reshape(-1)) for name, t in tensors.items()]
    return write(run, step, pieces, {"epoch": epoch, "config": dict(config)})


def _write_pieces(stem: Path, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """Write one rank's files; returns the entries of the description."""
    records: list[dict[str, Any]] = []
    for part in _by_file(pieces):
        suffix = f"-{len(records)}.pt" if records else ".pt"
        records.append(_write_file(stem.with_name(stem.name + suffix), part))
    return records


def _by_file(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Distributes pieces over files, at least one; a piece that does not fit continues in the next file."""
    part: list[Piece] = []
    free = FILE_BYTES
    for piece in pieces:
        rest, start = piece.values, piece.start
        while rest.nbytes > free:
            fits = free // rest.element_size()
            if fits:
                part.append(Piece(piece.name, piece.shape, start, rest[:fits]))
            yield part
            rest, start, part, free = rest[fits:], start + fits, [], FILE_BYTES
        part.append(Piece(piece.name, piece.shape, start, rest))
        free -= rest.nbytes
    yield part


def _write_file(path: Path, pieces: list[Piece]) -> dict[str, Any]:
    with open(path, "wb") as file:
        digesting = _DigestingFile(file)
        # Copies, because torch would write the whole storage of a view.
        content = {piece.name: piece.values.detach().to("cpu", copy=True) for piece in pieces}
        try:
            torch.save(content, digesting)
        except RuntimeError:  # torch's translation of an error in `write`
            raise digesting.error or RuntimeError(f"{path}: cannot be written") from None
        if digesting.error is not None:
            raise digesting.error
        with naming(path):
            file.flush()
            os.fsync(file.fileno())
    return {
        "file": path.name,
        "bytes": digesting.bytes,
        "sha256": digesting.digest.hexdigest(),
        "pieces": [
            (p.name, list(p.shape), str(p.values.dtype).removeprefix("torch."), p.start, p.values.numel())
            for p in pieces
        ],
    }


class _DigestingFile:
    """A writable file that computes its digest, and keeps an error that torch would translate."""

    def __init__(self, file: IO[bytes]):
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            written = self.file.write(data)
        except OSError as error:
            error.filename = error.filename or self.file.name
            self.error = error
            raise
        self.digest.update(data)
        self.bytes += written
        return written

    def flush(self) -> None:
        self.file.flush()


def _complete(unfinished: Path, step: int, ranks: list[list[dict[str, Any]]], about: Mapping[str, Any]) -> Path:
    """Add the description to a folder that holds all ranks' files, and give the folder its final name."""
    tensors: dict[str, dict[str, Any]] = {}
    records = [record for rank in ranks for record in rank]
    for record in records:
        for name, shape, dtype, start, numel in record["pieces"]:
            entry = tensors.setdefault(name, {"shape": shape, "dtype": dtype, "pieces": []})  # [file, start, numel]
            entry["pieces"].append([record["file"], start, numel])
    description = {
        "format": FORMAT,
        "step": step,
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"unigrad_fast": unigrad_fast.__version__, "torch": str(torch.__version__)},
        "ranks": len(ranks),
        **about,
        "files": {record["file"]: {key: record[key] for key in ("bytes", "sha256")} for record in records},
        "tensors": tensors,
    }
    for name, entry in tensors.items():
        _require_cover(unfinished / name, entry)
    description["digest"] = _digest_of(description)
    root, final = unfinished.parent, unfinished.parent / _folder_name(step)
    write_whole(unfinished / DESCRIPTION, json.dumps(description).encode())
    _sync_folder(unfinished)
    if final.exists():  # of the same step, from before the run went back to an older checkpoint
        remove(final)
    os.rename(unfinished, final)
    _sync_folder(root)
    write_whole(root / "latest", f"{final.name}\n".encode())
    _sync_folder(root)
    return final


def remove(folder: Path) -> None:
    """Delete a checkpoint, after renaming it, so that a partly deleted one is not taken for complete."""
    doomed = folder.with_name(f"{REMOVED}{folder.name}-{uuid.uuid4().hex[:8]}")
    with suppress(FileNotFoundError):  # the user was faster
        os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(run: Path) -> None:
    """Delete files that a killed process left partly written or partly deleted."""
    for prefix in (UNFINISHED, REMOVED):
        for folder in RunFolder(run).checkpoints.glob(f"{prefix}*"):
            shutil.rmtree(folder, ignore_errors=True)
    for file in RunFolder(run).checkpoints.glob(".latest.*"):
        file.unlink(missing_ok=True)


def latest(run: Path) -> Path | None:
    """The checkpoint that the run would resume from; None if it has none.

    Raises:
        Damaged: `latest` is missing although there are checkpoints, or names one that does not exist.
    """
    root, complete = RunFolder(run).checkpoints, RunFolder(run).complete_checkpoints()
    pointer = root / "latest"
    if not pointer.is_file():
        if not complete:
            return None
        raise Damaged(f"{pointer}: no such file, but {complete[-1]} exists")
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    folder = root / name
    if folder not in complete and not (name.startswith("step-") and folder.is_dir()):  # it may be a user's copy
        raise Damaged(f"{pointer}: names {name or 'nothing'}, which does not exist")
    return folder


class Reader:
    """Reads tensors of a checkpoint, or ranges of them, into memory of the caller.

    In addition, at most a quarter of a GiB of a file is mapped into memory at a time.

    Args:
        folder: folder of one checkpoint.

    Attributes:
        about: the description: `step`, `epoch`, `config` and the other values of the writer.

    Raises:
        Damaged: no checkpoint there, or its description is damaged.
        UserError: another version of this package wrote it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        path = folder / DESCRIPTION
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            if about.get("digest") != _digest_of(about):
                raise ValueError("its content does not match the digest in it")
        except FileNotFoundError:
            raise Damaged(f"{path}: no such file") from None
        except (ValueError, AttributeError) as error:
            raise Damaged(f"{path}: damaged ({str(error).splitlines()[0]})") from None
        if about["format"] != FORMAT:
            wrote = about.get("versions", {}).get("unigrad_fast", "another version")
            raise UserError(
                f"{path}: has format {about['format']}, but this version reads format {FORMAT}; use unigrad-fast "
                f"{wrote}, which wrote it"
            )
        self.about: dict[str, Any] = about
        self._open: dict[str, dict[str, Tensor]] = {}
        self._mapped = 0

    @property
    def names(self) -> list[str]:
        return list(self.about["tensors"])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.about["tensors"][name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self.about["tensors"][name]["dtype"])

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Compare every `ranks`-th file, starting at number `rank`, with its digest in the description.

        Raises:
            Damaged: a file, which is named, is missing, too short or damaged.
        """
        for name, expected in list(self.about["files"].items())[rank::ranks]:
            path = self.folder / name
            try:
                if (found := path.stat().st_size) != expected["bytes"]:
                    problem = f"has {found} bytes instead of {expected['bytes']}"
                elif digest_of_file(path) != expected["sha256"]:
                    problem = "damaged, its content does not match its digest"
                else:
                    continue
            except FileNotFoundError:
                problem = "no such file"
            except OSError as error:
                problem = f"cannot be read: {error.strerror}"
            raise Damaged(f"{path}: {problem}")

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        flat = torch.empty(math.prod(self.shape(name)), dtype=self.dtype(name))
        self.read(name, 0, flat)
        return flat.view(self.shape(name))

    @torch.no_grad()
    def read(self, name: str, start: int, values: Tensor) -> None:
        """Copy elements of a tensor, starting at `start`, into the one-dimensional `values` on any device."""
        stop = start + values.numel()
        for file, place, numel in self.about["tensors"][name]["pieces"]:
            first, last = max(start, place), min(stop, place + numel)
            step = max(1, MAPPED_BYTES // values.element_size())
            for begin in range(first, last, step):
                end = min(begin + step, last)
                part = self._content(file, (end - begin) * values.element_size())[name][begin - place : end - place]
                values[begin - start : end - start].copy_(part)

    def _content(self, file: str, size: int) -> dict[str, Tensor]:
        """The mapped tensors of a file, of which the caller reads `size` bytes; unmaps earlier files when needed."""
        if self._mapped + size > MAPPED_BYTES:
            self._open.clear()
            self._mapped = 0
        if file not in self._open:
            path = self.folder / file
            try:
                with utf8_path(path) as name:
                    self._open[file] = torch.load(name, mmap=True, weights_only=True, map_location="cpu")
            except (OSError, RuntimeError) as error:
                reason = str(error).splitlines()[0]
                raise Damaged(f"{path}: cannot be read ({reason})") from None
        self._mapped += size
        return self._open[file]


def newest_intact(run: Path) -> Reader | None:
    """The newest checkpoint of a run whose files all have their digests; None if there is none."""
    for folder in reversed(RunFolder(run).complete_checkpoints()):
        with suppress(UserError):
            reader = Reader(folder)
            reader.verify()
            return reader
    return None


def remedy(run: Path, intact: Callable[[Reader], str]) -> str:
    """What to do about a damaged checkpoint: what `intact` says of the newest intact one, or that there is none."""
    found = newest_intact(run)
    return none_intact(run) if found is None else intact(found)


def none_intact(run: Path) -> str:
    return f"no checkpoint of {run} is intact, so train it again, into another folder"


def _require_cover(where: Path, entry: Mapping[str, Any]) -> None:
    """Asserts that the pieces of a tensor cover it from its first element to its last."""
    place = 0
    for _, start, numel in sorted(entry["pieces"], key=lambda piece: piece[1:]):
        if start != place:
            raise AssertionError(f"{where}: elements {place} to {start} are missing or written twice")
        place += numel
    if place != math.prod(entry["shape"]):
        raise AssertionError(f"{where}: {place} of {math.prod(entry['shape'])} elements are written")


def _folder_name(step: int) -> str:
    return f"step-{step:08}"


def _digest_of(description: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in description.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
