"""Fast self-supervised pretraining of image encoders with UniGrad."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a checkout, `kernels/`, `pipelines/` and `benchmarks/` stand beside this folder and are subpackages all
# the same: without an installation, or with an editable one.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "kernels" / "__init__.py").is_file() and (_checkout / "setup.py").is_file():
    __path__.append(str(_checkout))
del _checkout

from unigrad_fast.runtime import run_folder  # noqa: E402, F401  tells `pipelines` what a run's folder is known by
from unigrad_fast.runtime.errors import DataError, Preempted, RunStopped, StopRun, UserError  # noqa: E402

if TYPE_CHECKING:
    from unigrad_fast.interface import evaluate
    from unigrad_fast.interface.encoders import ImageEncoder, export, load_encoder
    from unigrad_fast.interface.pretraining import Run, pretrain
    from unigrad_fast.interface.results import Result

__all__ = [
    "DataError", "ImageEncoder", "Preempted", "Result", "Run", "RunStopped", "StopRun", "UserError",
    "evaluate", "export", "load_encoder", "pretrain",
]  # fmt: skip
# Where the interface is, which is imported when it is used: it takes seconds.
_PLACES = {
    "pretrain": "pretraining",
    "Run": "pretraining",
    "export": "encoders",
    "load_encoder": "encoders",
    "ImageEncoder": "encoders",
    "Result": "results",
}


def __getattr__(name: str) -> Any:
    if name == "evaluate":
        return import_module("unigrad_fast.interface.evaluate")
    if name not in _PLACES:
        raise AttributeError(f"module 'unigrad_fast' has no attribute {name!r}")
    return getattr(import_module(f"unigrad_fast.interface.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
