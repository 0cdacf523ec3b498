"""Rows of measurements with their machine and commit; appended to a file and never changed."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path

from unigrad_fast.runtime.files import require_folder

OUTPUT = Path("bench-results")
"""Default folder of rows; the project's own are in benchmarks/results."""


def machine() -> dict[str, str | int]:
    """Processor, cores, GPU, versions, commit and time."""
    import torch  # here, because the help of the command line imports OUTPUT and must be fast

    cpu = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name.*?: (.*)", cpu, re.MULTILINE)
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except OSError:  # no git
        commit = ""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": name[1] if name else platform.machine(),
        "matrix_units": next((flag for flag in ("amx_bf16", "avx512_bf16") if flag in cpu), "none"),
        "cores": os.cpu_count() or 1,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit or "unknown",
    }


def make_folder(output: Path) -> None:
    """Make the folder of the rows if it does not exist; call before measuring.

    Raises:
        UserError: see `require_folder`.
    """
    require_folder(output)
    output.mkdir(parents=True, exist_ok=True)


def append(output: Path, name: str, rows: Iterable[Mapping]) -> Path:
    """Append rows, each with the machine, to OUTPUT/NAME.jsonl."""
    make_folder(output)
    path, where = output / f"{name}.jsonl", machine()
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**row, **where}) + "\n" for row in rows)
    return path
