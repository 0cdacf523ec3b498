"""The packages that nothing runs without, and what to say where some are missing. Imports none of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from unigrad_fast.runtime.shell import typed

# Module, and the name that pip knows it by; setup.py says the versions.
NEEDED = {
    **{"torch": "torch", "torchvision": "torchvision", "deepspeed": "deepspeed", "numpy": "numpy", "PIL": "pillow"},
    **{"pydantic": "pydantic", "yaml": "pyyaml", "rich": "rich", "tensorboard": "tensorboard"},
    **{"matplotlib": "matplotlib", "safetensors": "safetensors"},
}


def missing() -> list[str]:
    """The packages that are not installed, as pip names them."""
    return [name for module, name in NEEDED.items() if not _is_there(module)]


def complaint(module: str) -> str | None:
    """What to say when the import of a module found none; None where it is no package that is needed."""
    top = module.partition(".")[0]
    names = missing()
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
