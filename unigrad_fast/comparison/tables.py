"""The tables of a comparison: Markdown laid out as the paper's, CSV with a line per setting, JSON with everything."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from unigrad_fast.comparison.figures import (
    CONFIDENCE,
    CONTRADICTS,
    FIGURES,
    LEAST_SEEDS,
    VERDICTS,
    Difference,
    Row,
    columns,
    differences,
    judging,
    missing,
)
from unigrad_fast.comparison.paper_values import LINEAR, PaperTable
from unigrad_fast.pipelines.scan.files import as_csv
from unigrad_fast.runtime.shell import own, typed
from unigrad_fast.runtime.wording import count

NOTHING = "–"
MOST_LISTED = 20  # differences in the Markdown table


@dataclass(frozen=True)
class Comparison:
    """What a table says.

    Attributes:
        title: what is compared.
        rows: its lines.
        paper: the table of the paper that it is laid out as, if any.
    """

    title: str
    rows: Sequence[Row]
    paper: PaperTable | None = None

    @property
    def reported(self) -> tuple[str, ...]:
        """The paper's figures."""
        if self.paper is not None:
            return self.paper.figures
        return (LINEAR,) if any(row.line.paper for row in self.rows) else ()

    @property
    def columns(self) -> list[str]:
        return columns(self.rows, self.reported)

    @property
    def judged_by(self) -> str:
        return judging(self.rows, self.reported)

    @property
    def ordered_by(self) -> str:
        """The paper's figure that is compared with `judged_by`."""
        return self.judged_by if self.judged_by in self.reported else next(iter(self.reported), LINEAR)

    def untrained(self) -> list[float]:
        """kNN accuracies of the members before their first step."""
        return [each.untrained for row in self.rows for each in row.ended.values() if each.untrained is not None]

    def differences(self) -> list[Difference]:
        return differences(self.rows, self.judged_by, self.ordered_by)


def contents(of: Comparison) -> dict[str, bytes]:
    """The files by ending: md, csv and json."""
    found = of.differences()
    return {"md": _markdown(of, found).encode(), "csv": _csv(of), "json": _json(of, found).encode()}


def _markdown(of: Comparison, found: Sequence[Difference]) -> str:
    blocks = [f"# {of.title}"]
    if any(row.line.column for row in of.rows):
        blocks.append(_two_dimensions(of))
    blocks.append(_table(of))
    blocks.append(
        "\n".join(f"    - {line.strip()}" if line.startswith(" ") else f"- {line}" for line in _foot(of, found))
    )
    if commands := _commands(of):
        blocks.append("Empty cells are filled by\n\n```sh\n" + "\n".join(commands) + "\n```")
    return "\n\n".join(blocks) + "\n"


def _table(of: Comparison) -> str:
    """A line for each setting."""
    figures = of.columns
    has_column = any(row.line.column for row in of.rows)
    titles = [f"{name} (paper)" if name in of.reported else name for name in figures]
    head = ["", *([""] * has_column), *titles, "seeds", "remark"]
    lines = []
    for row in of.rows:
        named = [row.line.row, *([row.line.column] * has_column)]
        seeds = f"{sum(at.done and at.failure is None for at in row.ended.values())} of {len(row.ended)}"
        cells = [_cell(row, name, name if name in of.reported else None) for name in figures]
        lines.append([*named, *cells, seeds if row.ended else NOTHING, _remark(row)])
    return _aligned(head, lines, texts=1 + has_column, remark=True)


def _two_dimensions(of: Comparison) -> str:
    """The figure that judges, by row and column."""
    names = list(dict.fromkeys(row.line.row for row in of.rows))
    titles = list(dict.fromkeys(row.line.column for row in of.rows))
    cells = {(row.line.row, row.line.column): row for row in of.rows}
    paper = of.ordered_by if of.reported else None
    head = [of.judged_by + (f" (paper: {paper})" if paper else ""), *titles]
    lines = [
        [
            name,
            *(
                _cell(cells[name, title], of.judged_by, paper) if (name, title) in cells else NOTHING
                for title in titles
            ),
        ]
        for name in names
    ]
    return _aligned(head, lines, texts=1)


def _cell(row: Row, figure: str, paper: str | None) -> str:
    """A figure over seeds, with the paper's in brackets."""
    return _shown(row, figure) + (f" ({_number(row.line.paper.get(paper), 1)})" if paper else "")


def _aligned(head: Sequence[str], lines: Sequence[Sequence[str]], texts: int, remark: bool = False) -> str:
    """A table in Markdown whose first columns, and the last with `remark`, are texts; the others are right-aligned."""
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in (head, *lines)]
    widths = [max(3, *(len(line[place]) for line in escaped)) for place in range(len(head))]
    is_text = [place < texts or (remark and place == len(head) - 1) for place in range(len(head))]
    rule = ["-" * width if text else "-" * (width - 1) + ":" for text, width in zip(is_text, widths, strict=True)]
    padded = [
        [
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, is_text, strict=True)
        ]
        for line in escaped
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (padded[0], rule, *padded[1:]))


def _foot(of: Comparison, found: Sequence[Difference]) -> list[str]:
    """What the numbers mean, and what they say; what is indented belongs to the line before."""
    return [*_about_figures(of), *_about_differences(of, found), *_about_orders(of, found)]


def _about_figures(of: Comparison) -> Iterator[str]:
    yield (
        "Accuracies in %, on the validation images: mean over seeds, ± standard deviation of a sample. kNN is the "
        "run's own last evaluation; linear, on frozen features, is by the paper's protocol. All members of a seed "
        "begin with the same backbone and see the same images in the same order."
    )
    if untrained := of.untrained():
        yield f"kNN of the untrained encoder: {fmean(untrained):.2f}."
    if of.reported:
        source = of.paper.label if of.paper is not None else "tab:methods_comparison and tab:effect_of_encoder"
        yield f"paper: on ImageNet, with ResNet-50; from the paper's {source}."


def _about_differences(of: Comparison, found: Sequence[Difference]) -> Iterator[str]:
    if not found:
        return
    most, judged = max(each.seeds for each in found), of.judged_by
    if most < LEAST_SEEDS:
        yield (
            f"Too few seeds: differences of {judged} can be told from those between seeds with at least {LEAST_SEEDS}; "
            "give --seeds 0,1,2."
        )
        return
    exceeding = sorted((each for each in found if each.exceeds), key=lambda each: -abs(each.mean))
    yield (
        f"Differences are of {judged}, between runs with the same seed. One exceeds those between seeds if its "
        f"{100 * CONFIDENCE:.0f} % interval by Student's t excludes 0: mean ± t·s/√n, with s the deviation of the n "
        f"paired differences. Of many pairs, {100 * (1 - CONFIDENCE):.0f} % do so by chance. Here {len(exceeding)} of "
        f"{count(len(found), 'pair')} do, over {count(most, 'seed')}{':' if exceeding else '.'}"
    )
    for each in exceeding[:MOST_LISTED]:
        yield f"  {_sentence(each)}"
    if len(exceeding) > MOST_LISTED:
        yield f"  {len(exceeding) - MOST_LISTED} more are in table.json"


def _about_orders(of: Comparison, found: Sequence[Difference]) -> Iterator[str]:
    """In how many pairs the order is the paper's."""
    ordered = [each for each in found if each.verdict is not None]
    if not ordered:
        return
    numbers = Counter(each.verdict for each in ordered)
    yield (
        f"The paper orders {count(len(ordered), 'pair')}, by {of.ordered_by}, without deviations. Of these, by "
        f"{of.judged_by}: " + ", ".join(f"{numbers[each]} {each}" for each in VERDICTS if numbers[each]) + "."
    )
    for each in ordered:
        if each.verdict == CONTRADICTS:
            yield f"  {_sentence(each)}; in the paper {each.paper:+.1f} for {each.one}"


def _sentence(each: Difference) -> str:
    one, other, mean = (each.one, each.other, each.mean) if each.mean >= 0 else (each.other, each.one, -each.mean)
    return f"{one} above {other} by {mean:.2f} ± {each.half:.2f}" if each.half is not None else f"{one} above {other}"


def _commands(of: Comparison) -> list[str]:
    """A loop of the shell for each evaluation that runs lack."""
    made: dict[tuple[str, ...], list[Path]] = {}
    for name in of.columns:
        figure = FIGURES.get(name)
        if figure is not None and figure.evaluation is not None and (runs := missing(of.rows, name)):
            made.setdefault(figure.evaluation, runs)
    loops = []
    for evaluation, runs in made.items():
        before, after = own("evaluate", *evaluation).split(" RUN", 1)
        loops.append(f'for run in {_named(runs, of)}; do\n    {before} "$run"{after}\ndone')
    return loops


def _named(runs: Sequence[Path], of: Comparison) -> str:
    """Runs as words of a shell."""
    every = {run for row in of.rows for run in row.runs.values()}
    folders = {run.parent for run in every}
    if set(runs) == every and len(every) > 1 and len(folders) == 1:
        return f"{typed(_relative(folders.pop()))}/*-seed-*"
    return typed(*map(_relative, runs))


def _relative(path: Path) -> Path:
    """A path as the user would type it here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _remark(row: Row) -> str:
    if row.line.keys is None:
        return "not trained here"
    failures = [f"seed {seed}: {reason}" for seed, reason in row.failures().items()]
    unfinished = row.unfinished()
    if unfinished:
        failures.append(f"not finished: seed {', '.join(map(str, unfinished))}")
    return "; ".join(failures)


def _shown(row: Row, figure: str) -> str:
    over = row.over(figure)
    return _number(over.mean, 2) + ("" if over.deviation is None else f" ± {over.deviation:.2f}")


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _csv(of: Comparison) -> bytes:
    figures = of.columns
    entries = [f"{name} {entry}" for name in figures for entry in ("mean", "deviation", "seeds")]
    lines = [["row", "column", *entries, *(f"paper {name}" for name in of.reported), "remark"]]
    for row in of.rows:
        over = [row.over(figure) for figure in figures]
        cells = [cell for each in over for cell in (each.mean, each.deviation, len(each.values))]
        lines.append([row.line.row, row.line.column, *cells, *map(row.line.paper.get, of.reported), _remark(row)])
    return as_csv(lines)


def _json(of: Comparison, found: Sequence[Difference]) -> str:
    rows = [
        {
            "row": row.line.row,
            "column": row.line.column or None,
            "keys": None if row.line.keys is None else dict(row.line.keys),
            "figures": {name: _over(row, name) for name in of.columns},
            "paper": dict(row.line.paper),
            "failed": {str(seed): reason for seed, reason in row.failures().items()},
            "not_finished": row.unfinished(),
        }
        for row in of.rows
    ]
    tree = {
        "title": of.title,
        "paper": of.paper and of.paper.label,
        "rows": rows,
        "judged_by": of.judged_by,
        "confidence": CONFIDENCE,
        "differences": [
            {
                "one": str(each.one),
                "other": str(each.other),
                "seeds": each.seeds,
                "mean": each.mean,
                "half_interval": each.half,
                "exceeds": each.exceeds,
                "paper": each.paper,
                "order": each.verdict,
            }
            for each in found
        ],
        "foot": [line.strip() for line in _foot(of, found)],
        "to_fill": _commands(of),
    }
    return json.dumps(tree, indent=2, ensure_ascii=False, default=str) + "\n"


def _over(row: Row, figure: str) -> Mapping[str, Any]:
    over = row.over(figure)
    return {
        "mean": over.mean,
        "deviation": over.deviation,
        "values": {str(seed): value for seed, value in over.values.items()},
    }
