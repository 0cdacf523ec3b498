"""Fast self-supervised pretraining of image encoders with UniGrad."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout, `kernels/`, `pipelines/` and `benchmarks/` stand beside this folder and are subpackages all
# the same: without an installation, or with an editable one.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "kernels" / "__init__.py").is_file() and (_checkout / "setup.py").is_file():
    __path__.append(str(_checkout))
del _checkout

from unigrad_fast.runtime import run_folder  # noqa: E402, F401  tells `pipelines` what a run's folder is known by
