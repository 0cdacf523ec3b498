"""`unigrad-fast doctor`."""

from __future__ import annotations

from unigrad_fast.runtime.validation import Node


class Doctor(Node):
    """Report what the machine has, what a run will use and what is missing, and try each part."""

    smoke: bool = True
    """Try each part of a training step and time it."""
    verbose: bool = False
    """Show tracebacks of parts that fail, and messages of the libraries."""


def doctor(options: Doctor) -> None:
    from unigrad_fast.doctor.examination import examine

    examine(options.smoke, options.verbose)
