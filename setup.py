"""Packaging: `kernels/`, `pipelines/` and `benchmarks/` are installed as subpackages of `unigrad_fast`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
SOURCE = (ROOT / "unigrad_fast/__init__.py").read_text(encoding="utf-8")
VERSION = re.search(r'^__version__ = "(.+)"$', SOURCE, re.MULTILINE)[1]

MAPPED = ("kernels", "pipelines", "benchmarks")
IN_A_CHECKOUT = ["benchmarks.micro", "benchmarks.pages"]  # what developers run; no command needs them
packages = find_packages(include=["unigrad_fast", "unigrad_fast.*"])
for folder in MAPPED:
    found = find_packages(include=[folder, f"{folder}.*"], exclude=IN_A_CHECKOUT)
    packages += [f"unigrad_fast.{name}" for name in found]

setup(
    name="unigrad-fast",
    version=VERSION,
    description="Fast self-supervised pretraining of image encoders with UniGrad",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    packages=packages,
    package_dir={f"unigrad_fast.{folder}": folder for folder in MAPPED},
    package_data={
        "unigrad_fast": ["cards.json", "py.typed"],
        "unigrad_fast.recipes": ["*.yaml"],
        "unigrad_fast.kernels": ["tiles.json"],
    },
    install_requires=[
        "torch>=2.11,<2.15",
        "torchvision>=0.26",
        "deepspeed==0.19.8",
        "numpy>=1.26",
        "pillow>=10",
        "pydantic>=2.8,<3",
        "pyyaml>=6",
        "rich>=13",
        "tensorboard>=2.16",
        "matplotlib>=3.8",
        "safetensors>=0.4.3",
    ],
    extras_require={
        # DALI is one library per CUDA major version and two of them cannot stand side by side, so the user
        # chooses; either runs on a machine without a GPU.
        "cuda12": ["nvidia-dali-cuda120>=2.0,<3"],
        "cuda13": ["nvidia-dali-cuda130>=2.0,<3"],
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-cov>=6",
            "pytest-xdist>=3.6",
            "pytest-benchmark>=5.3",
            "hypothesis>=6.100",
            "ruff>=0.9",
            "mypy>=1.13",
            "scikit-learn>=1.4",  # the nearest neighbours that ours are compared with
            "torchmetrics>=1.4",  # accuracies that ours are compared with
            "scipy>=1.11",  # the Beta distribution that CutMix is compared with
            "datasets>=3",  # writes the folders and Parquet files that the loader reads
            "lightning>=2.4",  # one of examples/pieces
            "nbclient>=0.10",  # runs the notebook of examples/
            "ipykernel>=6.29",
            "setuptools>=77",  # builds the wheel that the packaging tests look into
        ],
        "docs": [
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.6,<10",
            "mkdocstrings[python]>=0.30",
            "ruff>=0.9",  # breaks long signatures of the reference
        ],
        "parquet": ["pyarrow>=15"],  # images in `hf:` and `parquet:`, and `evaluate features --output F.parquet`
        "notebook": ["nbclient>=0.10", "ipykernel>=6.29"],
        "umap": ["umap-learn>=0.5"],  # `evaluate map --method umap`
        "lightning": ["lightning>=2.4"],  # examples/pieces/lightning_module.py
    },
    entry_points={"console_scripts": ["unigrad-fast = unigrad_fast.__main__:main"]},
)
