"""Formats numbers for messages; needs no library."""


def count(number: int, noun: str) -> str:
    ending = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}" + ("" if number == 1 else ending)


def byte_size(size: float) -> str:
    """Bytes as readable text with three digits."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:.3g} {unit}"
    return f"{size:.0f} bytes"
