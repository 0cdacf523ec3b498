"""`unigrad-fast evaluate retrieve`: images with their nearest neighbours among others, as a picture and a table."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.table import Table

from unigrad_fast.evaluation.feature_files import UNLABELLED, finding, kind_of
from unigrad_fast.evaluation.knn import neighbours
from unigrad_fast.evaluation.passes import read_features
from unigrad_fast.evaluation.results import folder_beside, write_result
from unigrad_fast.evaluation.rows import Features
from unigrad_fast.evaluation.runs import NOTHING_KEPT, Asked, Opened, opened_on
from unigrad_fast.evaluation.shares import Share, rounded, share_of
from unigrad_fast.images import neighbour_sheet
from unigrad_fast.images.neighbour_sheet import OTHER, SAME, UNKNOWN, Tile
from unigrad_fast.pipelines import Manifest
from unigrad_fast.pipelines.files.headers import read_size, reason
from unigrad_fast.pipelines.manifest import part
from unigrad_fast.pipelines.reading.damage import decoded, defects
from unigrad_fast.pipelines.storage import Files
from unigrad_fast.runtime.console import fitted
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.fallback import harmless
from unigrad_fast.runtime.outputs import Written
from unigrad_fast.runtime.process_group import gather, on_all_ranks, on_first
from unigrad_fast.runtime.wording import brief, count

PROTOCOL = "nearest neighbours"
MOST_QUERIES = 100  # of one picture
LEGEND = (
    "Left: an image. Right: the most similar ones by the cosine of their features, with class, similarity and file. "
    "Whole images are shown; the encoder sees their centre crops."
)


@dataclass(frozen=True)
class Query:
    """An image and its nearest neighbours.

    Attributes:
        place: among the images that are searched; None if it is not one of them.
        label: name of its class, which is that of its folder if it is not one of them; None if unknown.
        neighbours: positions among the images that are searched, the most similar first.
        similarity: cosine of each.
    """

    path: Path
    place: int | None
    label: str | None
    neighbours: Sequence[int] = ()
    similarity: Sequence[float] = ()


def retrieve(run: Path | None, images: Sequence[Path], among: Path | None, k: int, asked: Asked) -> Written:
    """Draw images with their nearest neighbours to retrieve-epochE.png in RUN/evaluation, print and write a table.

    An image that is one of those that are searched does not find itself, unless it is the only one.

    Args:
        run: the run folder; None with `asked.weights`.
        images: image files.
        among: images that are searched; None takes the training images of the run.
        k: neighbours of each.
        asked: the encoder, whether its features are kept, and the folder of the results.

    Raises:
        UserError: an image cannot be decoded, there are fewer images than k, or no weights.
        RunStopped: a feature is not finite, or too many images cannot be used.
    """
    if len(images) > MOST_QUERIES:
        raise UserError(f"images: {len(images):,} given; one picture shows at most {MOST_QUERIES}, so give fewer")
    find = finding(among, "train", "--among")
    with opened_on(run, asked, find) as this, this.preemption.nothing_to_save(NOTHING_KEPT):
        searched = among or this.config.data.train
        folder = folder_beside(run, asked.output, {"among": searched})
        if k > len(this.train):
            raise UserError(f"k = {k}: exceeds the {count(len(this.train), 'image')} in {searched}; give fewer")
        listed = on_all_ranks(lambda: _listed(images))
        keeper = this.keeper(folder, asked)
        found = read_features(this, this.train, kind_of(this.config, searched), keeper)
        this.leave_out("searched", found.left_out)
        if k > (usable := len(found.usable())):
            raise UserError(f"k = {k}: exceeds the {count(usable, 'usable image')} in {searched}; give fewer")
        queries = search(this, found, [_query(this.train, path) for path in images], listed, k)
        title = f"{PROTOCOL}, {this.settings['branch']}, {this.name}: among {usable:,} images in {brief(searched)}"
        this.console.print(_table(title, this.train, queries))
        written = on_first(
            lambda: write_result(
                folder,
                this.stem("retrieve"),
                this.settings_of_images() | {"protocol": PROTOCOL, "k": k, "queries": [str(path) for path in images]},
                {"among": str(searched), "results": [_figures(this.train, query) for query in queries]},
                picture=_picture(title, this.train, listed, queries),
            )
        )
        this.say(written.line)
        this.tell(keeper)
        return written


def search(this: Opened, found: Features, queries: Sequence[Query], listed: Manifest, k: int) -> list[Query]:
    """Queries with their neighbours; all ranks call this together.

    Args:
        found: features of the images that are searched, `this.train`. A query that is one of them needs no pass.
        listed: the queries' files.
    """
    world = this.world
    bank = share_of(found, np.arange(len(this.train)), world)  # the "labels" of a search are what it finds: positions
    inside = {n: q.place for n, q in enumerate(queries) if q.place is not None and q.place not in found.failed}
    outside = np.array([number for number in range(len(queries)) if number not in inside], np.int64)
    own = [number for number, place in inside.items() if place % world.size == world.rank]
    places = np.array([inside[number] for number in own], np.int64)
    parts = [(rounded(found.rows(places)[:, :-1]), torch.tensor(own, dtype=torch.int64))]
    if len(outside):
        files = part(listed, outside, listed.labels[outside], [])
        made = share_of(read_features(this, files, "given"), outside, world)
        parts.append((made.rows.cpu(), made.labels))
    rows, numbers = (torch.cat(each) for each in zip(*parts, strict=True))
    asked = Share(rows, numbers, bank.left_out)
    most = min(k + 1, len(found.usable()))  # one of them may be the query
    results: dict[int, tuple[list[int], list[float]]] = {}
    for similarity, position, number in neighbours(bank, asked, world, most):
        for near, at, query in zip(similarity.numpy(), position.numpy(), number.tolist(), strict=True):
            order = np.lexsort((at, -near))
            if len(order) > 1:
                order = order[at[order] != (-1 if queries[query].place is None else queries[query].place)]
            results[query] = at[order][:k].tolist(), near[order][:k].tolist()
    everywhere = {query: result for each in gather(results) for query, result in each.items()}
    return [
        replace(query, neighbours=everywhere[number][0], similarity=everywhere[number][1])
        for number, query in enumerate(queries)
    ]


def _listed(images: Sequence[Path]) -> Manifest:
    """The files that are given. Raises UserError if one of them cannot be decoded."""
    for path in images:
        try:
            read_size(os.fsencode(path))
            (why,) = defects([np.frombuffer(path.read_bytes(), np.uint8)])
        except OSError as error:
            why = reason(error)
        if why is not None:
            raise UserError(f"images = {path}: {why}; leave it out, or repair it")
    manifest = Manifest.from_files(images)
    return replace(manifest, labels=np.full(len(manifest), UNLABELLED))


def _query(searched: Manifest, path: Path) -> Query:
    place = place_of(searched, path)
    if place is not None:
        return Query(path, place, _label(searched, place))
    known = set(searched.classes)
    return Query(path, None, next((folder.name for folder in path.parents if folder.name in known), None))


def place_of(manifest: Manifest, path: Path) -> int | None:
    """Position of a file among images; None if it is not one of them, or they are in shards."""
    if not isinstance(manifest.storage, Files):
        return None
    names = manifest.names.tobytes()
    ways = [(path, Path(manifest.root)), (Path(os.path.realpath(path)), Path(os.path.realpath(manifest.root)))]
    for file, root in ways:
        for name in {os.fsencode(os.path.relpath(file, root)), os.fsencode(file)}:
            at = names.find(name)
            while at >= 0:
                place = int(np.searchsorted(manifest.offsets, at))
                if manifest.offsets[place] == at and manifest.offsets[place + 1] == at + len(name):
                    return place
                at = names.find(name, at + 1)
    return None


def _label(manifest: Manifest, place: int) -> str | None:
    label = int(manifest.labels[place])
    return None if label == UNLABELLED else manifest.classes[label]


def _name(manifest: Manifest, place: int) -> str:
    return os.path.relpath(manifest.path(place), manifest.root)


def _figures(manifest: Manifest, query: Query) -> dict[str, Any]:
    return {
        "file": str(query.path),
        "label": query.label,
        "neighbours": [
            {"file": _name(manifest, place), "label": _label(manifest, place), "similarity": similarity}
            for place, similarity in zip(query.neighbours, query.similarity, strict=True)
        ],
    }


def _table(title: str, manifest: Manifest, queries: Sequence[Query]) -> Table:
    table = Table(title=fitted(harmless(title)), title_justify="left")
    for column in ("image", "similarity", "class", "neighbour"):
        table.add_column(column, justify="right" if column == "similarity" else "left", overflow="fold")
    for query in queries:
        first = f"{query.path.name}\n{query.label or ''}".strip()
        for place, similarity in zip(query.neighbours, query.similarity, strict=True):
            texts = (first, f"{similarity:.3f}", _label(manifest, place) or "–", _name(manifest, place))
            table.add_row(*(fitted(harmless(text)) for text in texts))
            first = ""
        table.add_section()
    return table


def _picture(title: str, manifest: Manifest, listed: Manifest, queries: Sequence[Query]) -> bytes:
    shown = _pictures(manifest, [place for query in queries for place in query.neighbours])
    given, rows = _pictures(listed, range(len(queries))), []
    for query in queries:
        near = [
            Tile(
                next(shown),
                [_label(manifest, place) or "no class", f"{similarity:.3f}", os.path.basename(_name(manifest, place))],
                _colour(query.label, _label(manifest, place)),
            )
            for place, similarity in zip(query.neighbours, query.similarity, strict=True)
        ]
        rows.append((Tile(next(given), [query.label or "no class", query.path.name], UNKNOWN), near))
    legend = LEGEND
    if any(query.label is not None for query in queries):
        legend += " Frame: blue where the class is that of the image at the left, orange where it is another."
    file = io.BytesIO()
    neighbour_sheet.draw(rows, title, legend).save(file, "PNG", optimize=True)
    return file.getvalue()


def _pictures(manifest: Manifest, places: Iterable[int]) -> Iterator[Image.Image]:
    return map(neighbour_sheet.reduced, decoded(np.frombuffer(manifest.read(place), np.uint8) for place in places))


def _colour(query: str | None, label: str | None) -> str:
    if query is None or label is None:
        return UNKNOWN
    return SAME if label == query else OTHER
