"""`unigrad-fast plan`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from unigrad_fast.commands.requirements import refuse_unused, require_name
from unigrad_fast.config import Config
from unigrad_fast.dry_run.cards import CardName
from unigrad_fast.recipes import DEFAULT_RECIPE
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.files import require_folder
from unigrad_fast.runtime.outputs import require_file, require_free, write_files
from unigrad_fast.runtime.plotting import plotting
from unigrad_fast.runtime.validation import AbsolutePath
from unigrad_fast.runtime.wording import byte_size, count

if TYPE_CHECKING:
    from unigrad_fast.dry_run.cards import Card
    from unigrad_fast.planning import Counted
    from unigrad_fast.planning import Plan as Planned

CARDS_OF_A_NODE = 8


class Plan(Config):
    """Estimate memory, traffic and time on GPUs you need not have; takes the keys of pretrain."""

    name: str = DEFAULT_RECIPE
    """Name in the title and the files; by default that of the recipe or its YAML file."""
    recipe: str = DEFAULT_RECIPE
    """Recipe, as for pretrain."""
    gpus: int = Field(default=8, ge=1, le=4096)
    """Total number of GPUs."""
    nodes: int = Field(default=1, ge=1, le=4096)
    """Number of machines, with equally many GPUs in each."""
    card: CardName = "h100"
    """GPU type; figures and sources in cards.json."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Memory of each GPU in GiB, as fast as the card; null is the card's."""
    images: int | None = Field(default=None, ge=2, le=2**16)
    """Images at once on each GPU; replaces data.batch_size; null follows from data.batch_size."""
    dataset_images: int = Field(default=1_281_167, ge=1)
    """Number of training images (ImageNet's)."""
    image_kilobytes: float = Field(default=110.0, gt=0)
    """Mean size of an image file (ImageNet's)."""
    sweep: bool = False
    """Instead, a table and a plot of widths 2048 to 65536 on 8 to 512 GPUs, 8 in a machine."""
    output: AbsolutePath = Path("plan")
    """Folder for the JSON file, and for the table and the plot of a sweep."""
    overwrite: bool = False
    """Replace existing files."""


def plan(options: Plan) -> None:
    if options.sweep:
        refuse_unused(options, ("gpus", "nodes"), "not used with sweep true")
    tree = {key: getattr(options, key) for key in Config.model_fields if key != "output"}
    if options.images is not None:
        batch = options.images * options.gpus * options.engine.accumulation_steps
        tree["data"] = options.data.model_copy(update={"batch_size": batch})
    config = Config(**tree)
    require_name(options.name)
    require_folder(options.output)
    files = _files(config, options)
    for file in files:
        require_file(file)
    require_free(files, options.overwrite)
    contents, problem = _sweep(config, options) if options.sweep else _single(config, options)
    options.output.mkdir(parents=True, exist_ok=True)
    write_files(dict(zip(files, contents, strict=True)), options.overwrite)
    print(f"written: {', '.join(map(str, files))}")
    if problem:
        raise UserError(problem)


def _files(config: Config, options: Plan) -> list[Path]:
    """Files named by what is planned."""
    engine = config.engine
    name = f"{options.name}-{options.card}"
    if options.memory_gib is not None:
        name += f"-{options.memory_gib:g}gib"
    if options.sweep:
        name += "-sweep"
    else:
        name += f"-{options.gpus}x{config.images_at_once(options.gpus)}"
        name += f"-nodes{options.nodes}" if options.nodes > 1 else ""
        name += f"-width{config.model.projector.width}-stage{engine.zero_stage}-accumulation{engine.accumulation_steps}"
    precision = _card(options).precision if engine.precision == "auto" else engine.precision  # as it is walked
    endings = (".json", ".md", ".png") if options.sweep else (".json",)
    return [options.output / f"{name}-{precision}{ending}" for ending in endings]


def _card(options: Plan) -> Card:
    from unigrad_fast.dry_run.cards import Card

    return Card.of(options.card).with_memory(options.memory_gib)


def _usable(card: Card) -> str:
    return f"{card.usable_memory / 2**30:.4g} GiB, nine tenths of a {card.name}"


def _single(config: Config, options: Plan) -> tuple[list[bytes], str | None]:
    """The file's content, and why nothing fits, if so."""
    from unigrad_fast.planning import Counted, require_cluster
    from unigrad_fast.runtime.console import new_console

    require_cluster(options.gpus, options.nodes)
    if options.dataset_images < config.data.batch_size:
        raise UserError(
            f"dataset_images = {options.dataset_images}: cannot fill a batch of {config.data.batch_size}; "
            "use a smaller data.batch_size"
        )
    counted = Counted.of(config, options.gpus, _card(options))
    found = counted.plan(options.nodes)
    around = counted.around(found, options.dataset_images, 1e3 * options.image_kilobytes)
    usable = counted.card.usable_memory
    remedies = [] if found.peak <= usable else list(counted.remedies(found, usable))
    console = new_console(soft_wrap=True)
    for table in _tables(options.name, counted, found):
        console.print(table)
    for line in (*_said(counted, found, around, options), *_verdict(counted, found, remedies)):
        console.print(line)
    content: dict[str, Any] = {
        "name": options.name,
        "recipe": config.recipe,
        "width": counted.width,
        "card": options.card,
        **found.as_json(),
        "usable_memory": usable,
        "fits": found.peak <= usable,
        "epochs": config.schedule.epochs,
        "hours": found.hours(options.dataset_images, config.schedule.epochs),
        "checkpoint, counted": around.pop("checkpoint"),
        "around, expected": around,
        "would_fit": [{"change": key, **each.as_json()} for key, each in remedies],
    }
    if found.peak <= usable or remedies:
        return [_json(content)], None
    tried = "no stage, placement, batch or accumulation fits into" if counted.has_correlation else "does not fit into"
    return [_json(content)], f"{tried} {_usable(counted.card)}; use {counted.without_remedy()}"


def _tables(name: str, counted: Counted, found: Planned) -> Iterator[Any]:
    from unigrad_fast.runtime.console import table_of_figures

    setting, card = found.setting, counted.card
    title = (
        f"{name}, width {counted.width}: {setting.ranks} x {card.name} in "
        f"{count(setting.nodes, 'node')}, {setting.images} images at once on each, batch {setting.batch}, "
        f"ZeRO stage {setting.stage}, "
        + (f"F {setting.placement}" if counted.has_correlation else counted.config.objective.method)
    )
    headers = ("memory of a rank, counted", "at the peak of all, GiB", "each kind's own peak, GiB")
    memory = table_of_figures(*headers, title=title, title_justify="left")
    for kind, size in found.memory.items():
        memory.add_row(kind, f"{size / 2**30:.2f}", f"{found.most[kind] / 2**30:.2f}")
    memory.add_section()
    memory.add_row("peak", f"{found.peak / 2**30:.2f}", "", style="bold")
    yield memory
    time = table_of_figures("time of a step, expected", "ms")
    for part, seconds in found.seconds.items():
        time.add_row(part, f"{1e3 * seconds:.2f}")
    time.add_section()
    time.add_row("card, nothing overlaps", f"{1e3 * sum(found.seconds.values()):.2f}")
    time.add_row("host, beside it", f"{1e3 * found.host:.2f}")
    time.add_section()
    time.add_row("step", f"{1e3 * found.step:.2f}", style="bold")
    yield time


def _said(counted: Counted, found: Planned, around: dict[str, float], options: Plan) -> Iterator[str]:
    yield (
        f"counted: {found.collective_count} collectives; a rank sends {found.inside / 1e9:.3f} GB per step inside "
        f"its node, and {found.between / 1e9:.3f} GB to other nodes"
    )
    epochs = counted.config.schedule.epochs
    hours, (slow, fast) = found.hours(options.dataset_images, epochs), counted.ends(found)
    yield (
        f"expected: {found.images_per_second:,.0f} images/s ({slow.images_per_second:,.0f} to "
        f"{fast.images_per_second:,.0f}); {hours:.1f} hours for {count(epochs, 'epoch')} of "
        f"{options.dataset_images:,} images" + (", all with full-size views" if counted.config.data.growth() else "")
    )
    yield (
        f"counted: a checkpoint of {byte_size(around['checkpoint'])}; expected: {byte_size(around['disk'])} of disk "
        f"for those that are kept, {byte_size(around['host_per_node'])} of host memory on each node"
    )
    if around["bank"]:
        yield (
            f"expected for kNN: every {count(options.evaluation.every, 'epoch')} it reads all images once more, and "
            f"meanwhile each GPU holds {byte_size(around['bank'])} of features"
        )
    yield (
        f"expected from the storage: {around['reads']:,.0f} reads/s, {around['reads_per_node']:,.0f} from each node, "
        f"{around['read_bytes'] / 1e9:.2f} GB/s"
    )
    if found.bound_by == "host":
        yield (
            f"WARNING: bound by the host, which needs {1e3 * found.host:.0f} ms to launch a step, however few images "
            "there are (expected); use more images on each GPU, or engine.cuda_graph true"
        )
    if found.bound_by == "latency":
        share = found.waiting / found.step
        yield (
            f"WARNING: bound by latency: launches and {found.collective_count} collectives take {100 * share:.0f} % of "
            "the step, however few images there are (expected); use fewer GPUs, or more images on each"
        )


def _verdict(counted: Counted, found: Planned, remedies: Sequence[tuple[str, Planned]]) -> Iterator[str]:
    usable = _usable(counted.card)
    if found.peak <= counted.card.usable_memory:
        yield f"fits: {found.peak / 2**30:.2f} of {usable}"
        return
    yield f"does not fit: {found.peak / 2**30:.2f} GiB, but there are {usable}"
    for key, each in remedies:
        yield f"would fit: {key}: {each.peak / 2**30:.2f} GiB and {1e3 * each.step:.0f} ms, expected"


def header(epochs: int) -> str:
    """The first row of a sweep's table."""
    return (
        "| C | GPUs | ZeRO stage | F | GiB of a rank | fits | GB inside a node | GB between nodes | ms | images/s "
        f"| hours for {count(epochs, 'epoch')} | bound by |"
    )


def _sweep(config: Config, options: Plan) -> tuple[list[bytes], str | None]:
    """The files' contents, and why nothing fits, if so."""
    from unigrad_fast.planning import CARDS, WIDTHS, sweep

    images = options.images or config.images_at_once(CARDS_OF_A_NODE)
    card, epochs = _card(options), config.schedule.epochs
    first, rows = header(epochs), []
    lines = [first, "|" + "---|" * (first.count("|") - 1)]
    print("\n".join(lines))
    for width, found, fits in sweep(config, WIDTHS, CARDS, images, card, CARDS_OF_A_NODE):
        hours = found.hours(options.dataset_images, epochs)
        rows.append({"width": width, "fits": fits, "epochs": epochs, "hours": hours, **found.as_json()})
        lines.append(row(width, found, fits, hours))
        print(lines[-1], flush=True)
    contents = [_json(rows), "\n".join([*lines, ""]).encode(), _plot(rows, card.usable_memory)]
    fits = any(row["fits"] for row in rows)
    return contents, None if fits else f"no width fits into {_usable(card)}; use fewer --images"


def row(width: int, found: Planned, fits: bool, hours: float) -> str:
    """A row of a sweep's table."""
    setting = found.setting
    cells = (
        f"{width}",
        f"{setting.ranks}",
        f"{setting.stage}",
        setting.placement,
        f"{found.peak / 2**30:.1f}",
        "yes" if fits else "no",
        f"{found.inside / 1e9:.2f}",
        f"{found.between / 1e9:.2f}",
        f"{1e3 * found.step:.0f}",
        f"{found.images_per_second:,.0f}",
        f"{hours:.1f}",
        found.bound_by,
    )
    return f"| {' | '.join(cells)} |"


@plotting()
def _plot(rows: Sequence[dict[str, Any]], usable_memory: float) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=130, layout="constrained")
    memory, speed = figure.subplots(1, 2)
    for number, width in enumerate(dict.fromkeys(row["width"] for row in rows)):
        chosen = [row for row in rows if row["width"] == width]
        cards = [row["ranks"] for row in chosen]
        memory.plot(cards, [row["peak"] / 2**30 for row in chosen], "o-", color=f"C{number}", label=f"C = {width}")
        speed.plot(cards, [row["images_per_second"] for row in chosen], "o-", color=f"C{number}")
    for axes, title in ((memory, "GiB of a rank, by arithmetic on a walk"), (speed, "images/s, expected")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(cards, [str(each) for each in cards])
        axes.set_xlabel("GPUs")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    memory.axhline(usable_memory / 2**30, color="#777777", linestyle="--", label="usable memory")
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=8)
    content = io.BytesIO()
    FigureCanvasAgg(figure).print_png(content)
    return content.getvalue()


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
