"""The wheel holds what it should, and importing the package stays light."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from unigrad_fast.objectives.catalogue import methods

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("unigrad_fast", "kernels", "pipelines", "benchmarks")
IN_A_CHECKOUT = (ROOT / "benchmarks/micro", ROOT / "benchmarks/pages")  # what developers run
HEAVY = ("torch", "deepspeed", "nvidia.dali", "torchvision", "matplotlib", "tensorboard")
HEAVIER_THAN_THE_PACKAGE = (*HEAVY, "numpy", "pydantic", "yaml", "rich", "PIL", "safetensors")


def python(*arguments: str, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """This interpreter in a folder, with one entry before everything that is installed."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the checkout, so that no build folder is left in it."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    result = python("-c", build, str(folder), cwd=copy, path=copy)
    assert result.returncode == 0, result.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `pip install` leaves it."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_holds_every_module_under_its_installed_name(wheel):
    expected = set()
    for source in SOURCES:
        prefix = "" if source == "unigrad_fast" else "unigrad_fast/"
        kinds = ("*.py", "*.yaml", "tiles.json", "cards.json", "py.typed")
        files = [file for kind in kinds for file in (ROOT / source).rglob(kind)]
        kept = [file for file in files if not any(room in file.parents for room in IN_A_CHECKOUT)]
        expected |= {prefix + str(file.relative_to(ROOT)) for file in kept}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.partition("/")[0].endswith(".dist-info")}
    assert held == expected


def test_what_is_installed_needs_nothing_that_only_a_checkout_has(site):
    sources = [file.read_text(encoding="utf-8") for file in (site / "unigrad_fast").rglob("*.py")]
    assert not [text for text in sources for room in IN_A_CHECKOUT if f"unigrad_fast.benchmarks.{room.name}" in text]


def test_installed_package_finds_kernels_pipelines_benchmarks_and_recipes(site, tmp_path):
    code = (
        "import unigrad_fast.kernels, unigrad_fast.pipelines, unigrad_fast.benchmarks;"
        "from unigrad_fast.recipes import recipe_names;"
        "print(unigrad_fast.kernels.__file__, len(unigrad_fast.__path__), *recipe_names())"
    )
    result = python("-c", code, cwd=tmp_path, path=site)
    recipes = [file.stem for file in (ROOT / "unigrad_fast/recipes").glob("*.yaml")]
    recipes += [f"{base}_{method}" for base in ("cifar_subset", "imagenet_100ep") for method in methods()[1:]]
    assert {"imagenet_100ep", "cifar_subset", "quickstart", "width_16384"} < {*recipes}
    assert result.stdout.split() == [
        f"{site}/unigrad_fast/kernels/__init__.py",
        "1",
        *sorted(recipes),
    ]


def test_top_level_names_of_others_are_not_shadowed(wheel):
    with zipfile.ZipFile(wheel) as archive:
        top = {name.partition("/")[0] for name in archive.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"unigrad_fast"}


def test_bare_checkout_runs_as_a_module(tmp_path):
    result = python("-m", "unigrad_fast", "--version", cwd=ROOT, path=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", ["unigrad_fast", "unigrad_fast.cli", "unigrad_fast.pipelines"])
def test_importing_is_light(name, tmp_path):
    code = f"import sys, {name}; print([name for name in {HEAVY} if name in sys.modules])"
    assert python("-c", code, cwd=tmp_path, path=ROOT).stdout.strip() == "[]"


def test_the_package_imports_nothing_that_is_installed(tmp_path):
    code = f"import sys, unigrad_fast; print([name for name in {HEAVIER_THAN_THE_PACKAGE} if name in sys.modules])"
    assert python("-c", code, cwd=tmp_path, path=ROOT).stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["pretrain", "--help"], ["evaluate", "knn", "--help"]])
def test_help_is_light(arguments, tmp_path):
    code = f"""
import sys
from unigrad_fast.cli import main
try:
    main({arguments})
except SystemExit:
    pass
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert python("-c", code, cwd=tmp_path, path=ROOT).stdout.splitlines()[-1] == "[]"


def test_a_bare_checkout_imports_everything_and_touches_neither_cuda_nor_deepspeed_nor_dali(tmp_path):
    code = """
import sys, torch
import unigrad_fast.objectives, unigrad_fast.kernels, unigrad_fast.pipelines, unigrad_fast.networks.encoder
from unigrad_fast.pipelines import Loader, Manifest
print(torch.cuda.is_initialized(), "deepspeed" in sys.modules, "nvidia.dali" in sys.modules)
print(unigrad_fast.pipelines.__file__)
"""
    *touched, pipelines = python("-c", code, cwd=ROOT, path=tmp_path).stdout.split()
    assert touched == ["False"] * 3 and pipelines == str(ROOT / "pipelines/__init__.py")


def test_deepspeed_is_pinned_to_the_tested_version():
    pin = re.search(r"^deepspeed==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    assert f'"{pin}"' in (ROOT / "setup.py").read_text()


def test_readme_says_what_was_not_reproduced():
    text = (ROOT / "README.md").read_text()
    assert "ImageNet accuracy has not been reproduced by us; the paper's numbers are quoted as the paper's." in text


def test_the_readme_is_finished():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "@@" not in text and "MEASURED:" not in text
    assert "ImageNet accuracy has not been reproduced by us; the paper's numbers are quoted as the paper's." in text
