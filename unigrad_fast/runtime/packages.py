"""The required packages, and the message if some are missing. Imports none of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from unigrad_fast.runtime.shell import typed

# Module and pip's name for it; setup.py has the versions.
NEEDED = {
    **{"torch": "torch", "torchvision": "torchvision", "deepspeed": "deepspeed", "numpy": "numpy", "PIL": "pillow"},
    **{"pydantic": "pydantic", "yaml": "pyyaml", "rich": "rich", "tensorboard": "tensorboard"},
    **{"matplotlib": "matplotlib", "safetensors": "safetensors"},
}


def complaint(module: str) -> str | None:
    """The message for a module that could not be imported; None if it is not a required package."""
    top = module.partition(".")[0]
    names = [name for module, name in NEEDED.items() if not _is_there(module)]
    if NEEDED.get(top) not in names:
        return None
    verb = "is" if len(names) == 1 else "are"
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "setup.py").is_file():
        install = typed(sys.executable, "-m", "pip", "install", "-e", f"{checkout}[cuda13]")
        remedy = f"type `{install}`, or `{typed('make', '-C', checkout, 'quickstart')}`"
    else:
        remedy = f"type `{typed(sys.executable, '-m', 'pip', 'install', *names)}`"
    return f"{', '.join(names)} {verb} not installed for {sys.executable}; {remedy}"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
