"""Arrows between the rooms point downwards, and no modules import each other in a circle."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("kernels", "pipelines", "benchmarks")  # folders beside `unigrad_fast/` that are its subpackages

# From the bottom up. A room imports from rooms on lower floors and from itself; rooms that share a floor do not know
# of each other.
FLOORS = (
    ("kernels", "pipelines"),
    ("runtime",),
    ("objectives",),
    ("recipes",),
    ("config",),
    ("networks", "optimization"),
    ("checkpoints", "images"),
    ("evaluation",),
    ("training",),
    ("dry_run",),
    ("planning",),
    ("doctor", "benchmarks"),
    ("comparison",),
    ("commands",),
    ("cli", "interface"),
    ("__main__",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
THIRD_PARTIES = {"kernels": {"torch", "triton"}, "pipelines": {"numpy", "torch", "nvidia", "PIL", "pyarrow"}}


def name_of(path: Path) -> str:
    """The dotted name of a module, without `unigrad_fast.`; of the package itself it is empty."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[parts[0] == "unigrad_fast" :]
    return ".".join(part for part in parts if part != "__init__")


@pytest.fixture(scope="module")
def sources() -> dict[str, ast.Module]:
    """All modules of the package by name."""
    files = [file for folder in ("unigrad_fast", *BESIDE) for file in (ROOT / folder).rglob("*.py")]
    files = [file for file in files if not file.name.startswith("test_") and file.name != "conftest.py"]
    return {name_of(file): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def imports(module: str, source: ast.Module, is_package: bool) -> Iterator[tuple[str, str]]:
    """What a module imports anywhere in it, under TYPE_CHECKING too: dotted name and the name taken from it."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                above = f"unigrad_fast.{module}".split(".")
                above = above[: len(above) - node.level + is_package]
                origin = ".".join([*above, *filter(None, [origin])])
            yield from ((origin, alias.name) for alias in node.names)


def own_imports(sources: dict[str, ast.Module]) -> dict[str, set[str]]:
    """By module, the modules of the package that it imports."""
    packages = {name.rpartition(".")[0] for name in sources} | {""}
    found: dict[str, set[str]] = {module: set() for module in sources}
    for module, source in sources.items():
        for origin, taken in imports(module, source, module in packages):
            if origin.partition(".")[0] == "unigrad_fast":
                origin = origin.partition(".")[2]
                whole = ".".join(filter(None, [origin, taken]))
                found[module].add(whole if whole in sources else origin)
    return found


def upward(sources: dict[str, ast.Module]) -> list[str]:
    """Imports that do not point downwards."""
    wrong = []
    for module, imported in own_imports(sources).items():
        room = module.partition(".")[0]
        for other in imported - {""}:
            other_room = other.partition(".")[0]
            if module and other_room != room and FLOOR[other_room] >= FLOOR[room]:
                wrong.append(f"{module} imports {other}")
    return wrong


def circles(sources: dict[str, ast.Module]) -> list[set[str]]:
    """Modules that reach each other."""
    # The package itself, where the version is, imports the interface only when it is used.
    reached = {module: set(imported) & sources.keys() - {""} for module, imported in own_imports(sources).items()}
    while True:
        further = {module: seen.union(*(reached[other] for other in seen)) for module, seen in reached.items()}
        if further == reached:
            break
        reached = further
    found = [{other for other in seen if module in reached[other]} for module, seen in reached.items()]
    return [circle for circle in found if circle]


def foreign(sources: dict[str, ast.Module]) -> list[str]:
    """Libraries that kernels or pipelines import and are not meant to."""
    wrong = []
    for module, source in sources.items():
        if allowed := THIRD_PARTIES.get(module.partition(".")[0]):
            allowed = allowed | sys.stdlib_module_names | {"unigrad_fast"}
            names = {origin.partition(".")[0] for origin, _ in imports(module, source, False) if origin}
            wrong += [f"{module} imports {name}" for name in names - allowed]
    return wrong


def test_every_room_has_its_floor(sources):
    assert {module.partition(".")[0] for module in sources} - {""} == set(FLOOR)


def test_imports_point_downwards(sources):
    assert upward(sources) == []


def test_no_modules_import_each_other(sources):
    assert circles(sources) == []


def test_kernels_and_pipelines_stand_alone(sources):
    assert foreign(sources) == []


@pytest.mark.parametrize(
    ("module", "line", "told"),
    [
        ("evaluation.linear", "from unigrad_fast.training import engine", "evaluation.linear imports training.engine"),
        ("kernels.ops", "from unigrad_fast.config import Config", "kernels.ops imports config"),
        ("kernels.ops", "def f():\n    import unigrad_fast.pipelines.graph", "kernels.ops imports pipelines.graph"),
        ("pipelines.graph", "from ..runtime import errors", "pipelines.graph imports runtime.errors"),
        (
            "images.scan",
            "if TYPE_CHECKING:\n    from unigrad_fast.evaluation.knn import KNNResult",
            "images.scan imports evaluation.knn",
        ),
    ],
)
def test_a_planted_upward_import_is_found(sources, module, line, told):
    planted = ast.Module([*sources[module].body, *ast.parse(line).body], [])
    assert upward({**sources, module: planted}) == [told]


@pytest.mark.parametrize("line", ["from unigrad_fast.training import trainer", "from . import trainer"])
def test_a_planted_circle_is_found(sources, line):
    planted = ast.Module([*sources["training.engine"].body, *ast.parse(line).body], [])
    found = circles({**sources, "training.engine": planted})
    assert found and all({"training.engine", "training.trainer"} <= circle for circle in found)


def test_a_planted_library_is_found(sources):
    planted = ast.parse("import rich.console")
    assert foreign({**sources, "pipelines.graph": planted}) == ["pipelines.graph imports rich"]
