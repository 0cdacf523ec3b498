"""Formats numbers and paths for messages; needs no library."""

from pathlib import Path


def count(number: int, noun: str) -> str:
    ending = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}" + ("" if number == 1 else ending)


def brief(path: Path | str) -> str:
    """The last two parts of a path: data/train and data2/train are both named train."""
    return str(Path(*Path(path).parts[-2:]))


def percent(figure: float | None, deviation: float | None = None) -> str:
    """An accuracy in percent, and its deviation if there is one; None, where there is no accuracy, as "–"."""
    if figure is None:
        return "–"
    return f"{figure:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def byte_size(size: float) -> str:
    """Bytes as readable text with three digits; four from 1000 of a unit to the next one."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            value = size / 2**power
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return f"{size:.0f} bytes"
