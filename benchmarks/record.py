"""Rows of measurements: what was measured, on what, with which code; appended to a file and never changed."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def machine() -> dict[str, str | int]:
    """Processor, cores, card, versions, commit and time."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    flags = Path("/proc/cpuinfo").read_text()
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=RESULTS.parent,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except OSError:  # no git
        commit = ""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": names[0].partition(": ")[2] if names else platform.machine(),
        "matrix_units": "amx_bf16" if "amx_bf16" in flags else "avx512_bf16" if "avx512_bf16" in flags else "none",
        "cores": os.cpu_count() or 1,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit or "unknown",
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def append(name: str, rows: list[dict]) -> Path:
    """Append rows, with the machine in each, to results/NAME.jsonl."""
    return append_to(RESULTS / f"{name}.jsonl", rows)


def append_to(path: Path, rows: list[dict]) -> Path:
    """Append rows, with the machine in each, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    where = machine()
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**row, **where}) + "\n" for row in rows)
    return path
