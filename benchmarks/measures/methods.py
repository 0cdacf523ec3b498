"""Speed and memory of the objectives of the paper's framework, forward and backward, against plain torch.

    unigrad-fast bench methods [--methods moco,vicreg] [--width C] [--images N] [--bank K] [--output FOLDER]

Plain torch is `peers.methods`: the method in a straightforward implementation, with whole-matrix expressions and
autograd, in eager mode. It is compared with the method's gradient form, its rows and its original form; the rows (g),
(h) and (j), whose loss differs from the method's, have their own plain versions. All use the same fp32 embeddings of
two views; MoCo's bank is full. DirectPred's W_h is given: its eigendecomposition, which is the same for all and takes
seconds, is not measured.

A method's objectives and its plain version take turns, one block of steps each per round; ratios are taken within a
round. Memory is a step's peak beyond what it starts with, including gradients; persistent tensors such as banks and F
are not included. Rows are appended to OUTPUT/methods.jsonl.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from unigrad_fast.benchmarks.counts.roofline import float32_products
from unigrad_fast.benchmarks.harness.memory import free_bytes
from unigrad_fast.benchmarks.harness.processes import require_one_process
from unigrad_fast.benchmarks.harness.record import append, make_folder
from unigrad_fast.benchmarks.harness.timed import Timed, time_in_turns
from unigrad_fast.benchmarks.harness.turns import median_and_range, ratio_row, spread
from unigrad_fast.benchmarks.measures.objective import draw_embeddings
from unigrad_fast.benchmarks.peers.methods import PLAIN
from unigrad_fast.benchmarks.peers.objective import release
from unigrad_fast.objectives import build
from unigrad_fast.runtime.console import new_console, table_of_figures
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.files import require_folder
from unigrad_fast.runtime.wording import byte_size

WIDTHS, IMAGES = (2048, 8192), (128, 512)
NEVER = 2**31  # steps between decompositions, so large that there are none
# By plain version: the objectives compared with it, by name, with the arguments of `build`.
GROUPS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "moco": {"moco": {"method": "moco"}, "moco, original": {"method": "moco", "form": "original"}},
    "simclr": {
        "simclr": {"method": "simclr"},
        "row b": {"row": "b"},
        "simclr, original": {"method": "simclr", "form": "original"},
    },
    "byol": {"byol, original": {"method": "byol"}, "simsiam, original": {"method": "simsiam"}},
    "byol_directpred": {
        "byol_directpred": {"method": "byol_directpred", "every": NEVER},
        "row d": {"row": "d", "every": NEVER},
        "byol_directpred, original": {"method": "byol_directpred", "form": "original", "every": NEVER},
    },
    "unigrad": {"unigrad": {"method": "unigrad"}, "row e": {"row": "e"}},
    "barlow_twins": {"row f": {"row": "f"}, "barlow_twins, original": {"method": "barlow_twins", "form": "original"}},
    "row g": {"row g": {"row": "g"}},
    "row h": {"barlow_twins": {"method": "barlow_twins"}},
    "vicreg": {"row i": {"row": "i"}, "vicreg, original": {"method": "vicreg", "form": "original"}},
    "row j": {"vicreg": {"method": "vicreg"}},
}
METHOD_OF = {"row g": "barlow_twins", "row h": "barlow_twins", "row j": "vicreg"}


def objectives(group: str, width: int, bank: int, device: torch.device) -> dict[str, nn.Module]:
    """The plain version and the objectives compared with it, by name, with state as in the middle of a run."""
    plain, ours = ({"bank": bank}, {"bank_size": bank}) if group == "moco" else ({}, {})
    made = {f"plain {group}": PLAIN[group](width, **plain)}
    made |= {name: build(width=width, **arguments, **ours) for name, arguments in GROUPS[group].items()}
    for objective in made.values():
        fill_(objective.to(device))
    return made


@torch.no_grad()
def fill_(objective: nn.Module) -> None:
    """Fill an objective's bank or set its W_h, to the same values for all."""
    generator = torch.Generator().manual_seed(1)
    if (bank := getattr(objective, "bank", None)) is not None:
        bank.keys.copy_(_units(bank.keys.shape, generator))
        bank.taken.fill_(len(bank.keys))
    elif hasattr(objective, "queue"):
        objective.queue.copy_(_units(objective.queue.shape, generator))
    elif (direct := getattr(objective, "direct", None)) is not None:
        direct.matrix.copy_(_predictor(len(direct.matrix), generator))
        direct.largest.fill_(1.0)
        objective.average.updates.fill_(1)  # otherwise the first batch would decompose it
    elif hasattr(objective, "matrix"):
        objective.matrix.copy_(_predictor(len(objective.matrix), generator))


def _units(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    keys = torch.randn(*shape, generator=generator)
    return keys.div_(torch.linalg.vector_norm(keys, dim=-1, keepdim=True))


def _predictor(width: int, generator: torch.Generator) -> torch.Tensor:
    factor = torch.randn(width, 16, generator=generator)
    return (factor @ factor.T / width).add_(torch.eye(width), alpha=0.3)


def needed_bytes(group: str, images: int, width: int, bank: int) -> int:
    """Approximate memory of a group: banks, a clone and similarities, or matrices of F's size."""
    if group == "moco":
        return 4 * ((len(GROUPS[group]) + 2) * bank * width + 10 * images * bank)
    return 4 * (3 * (len(GROUPS[group]) + 1) * width**2 + 30 * images * width)


def measure(
    group: str,
    images: int,
    width: int,
    bank: int,
    device: torch.device,
    repetitions: int,
    block_seconds: float,
    most_seconds: float,
    report: Callable[[str], object],
) -> list[Timed]:
    """Measure a group; the plain version is first."""
    online, target = draw_embeddings(images, width, device, torch.float32)
    timed = []
    for name, objective in objectives(group, width, bank, device).items():
        parameters = [*objective.parameters()]

        def release_all(parameters: Sequence[torch.Tensor] = parameters) -> None:
            release([*online, *parameters])

        def step(objective: nn.Module = objective, release_all: Callable[[], None] = release_all) -> None:
            release_all()
            found = objective(online=online, target=target)
            (found if isinstance(found, torch.Tensor) else found.loss).backward()

        timed.append(Timed(name, step, release_all, device))
    shape = f"C = {width}, N = {images}"
    with float32_products("fp32"):
        for each in timed:
            report(f"{shape}: preparing {each}")
            each.take_memory()
            each.plan_block(block_seconds)
        time_in_turns(timed, repetitions, most_seconds, lambda what: report(f"{shape}: {what}"))
    return timed


def rows_of(timed: Sequence[Timed]) -> list[dict[str, Any]]:
    """A row per objective, and ratios to plain torch; above 1 ours is faster, or needs less memory."""
    plain, *ours = timed
    rows = [
        {"what": str(each), "unit": "ms", **spread(each.milliseconds), "memory_mib": each.memory / 2**20}
        for each in timed
    ]
    for each in ours:
        memory = {"memory_ratio": plain.memory / each.memory}
        rows.append(ratio_row(f"{each} / {plain}", plain.milliseconds, each.milliseconds, **memory))
    return rows


def show(console: Console, title: str, groups: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    headers = ("ms of a step", "median", "least to most", "MiB", "times as fast", "least to most", "MiB, times less")
    table = table_of_figures(*headers, title=title, title_justify="left")
    for rows in groups:
        table.add_section()
        ratios = {row["what"].partition(" / ")[0]: row for row in rows if row["unit"] == "ratio"}
        for row in (row for row in rows if row["unit"] == "ms"):
            cells = [row["what"], *median_and_range(row, digits=2), f"{row['memory_mib']:,.1f}"]
            if ratio := ratios.get(row["what"]):
                cells += [*median_and_range(ratio, digits=2), f"{ratio['memory_ratio']:.2f}"]
            table.add_row(*cells)
    console.print(table)


def main(
    methods: Sequence[str] | None,
    width: int | None,
    images: int | None,
    bank: int,
    repetitions: int,
    block_seconds: float,
    most_seconds: float,
    output: Path,
) -> None:
    """Measure, print the tables and append the rows, with the options of `unigrad-fast bench methods`.

    Raises:
        UserError: the environment says that this is one of several processes; `output` is a file; memory is too small.
    """
    require_one_process("bench methods")
    require_folder(output)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [group for group in GROUPS if methods is None or METHOD_OF.get(group, group) in methods]
    shapes = list(itertools.product([images] if images else IMAGES, [width] if width else WIDTHS))
    free = free_bytes()
    for group, (N, C) in itertools.product(chosen, shapes):
        if (needed := needed_bytes(group, N, C, bank)) > free:
            raise UserError(
                f"{group} at width = {C}, images = {N}{f', bank = {bank}' if group == 'moco' else ''} takes about "
                f"{byte_size(needed)}, but {byte_size(free)} are free; give smaller values, or other methods"
            )
    make_folder(output)
    console = new_console()
    setting = {"device": device.type, "threads": torch.get_num_threads(), "precision": "fp32"}
    turns = {"repetitions": repetitions, "block_seconds": block_seconds, "most_seconds": most_seconds}
    with console.status("starting") as status:
        for N, C in shapes:
            found = []
            for group in chosen:
                timed = measure(group, N, C, bank, device, **turns, report=status.update)
                where = {**setting, "method": METHOD_OF.get(group, group), "width": C, "images": N}
                where |= {"bank": bank if group == "moco" else None, "rounds": len(timed[0].milliseconds)}
                found.append([{**where, **row} for row in rows_of(timed)])
                path = append(output, "methods", found[-1])
                del timed  # frees its banks before the next ones are made
            show(console, f"C = {C}, N = {N}", found)
    console.print(f"rows appended to {path}")
