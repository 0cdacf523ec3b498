"""What the package uses of torch's private parts is there, and is named in one module and one of the kernels."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from unigrad_fast.runtime import torch_private

ROOT = Path(__file__).resolve().parents[2]
MODULES = tuple(ROOT / name for name in ("unigrad_fast/runtime/torch_private.py", "kernels/torch_private.py"))


def dotted(node: ast.expr) -> str:
    """`torch._C._x` of such an expression; of any other nothing."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return node.id.replace("dist", "torch.distributed") if getattr(node, "id", "") in ("torch", "dist") else ""


def private_parts(file: Path) -> Iterator[str]:
    """Dotted names below torch that a file imports or reads, which have a part with one underscore before it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [dotted(node)] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if any(part[0] == "_" != part[1] for part in name.split(".")[1:]))


def lacks(name: str) -> str:
    return f"torch {torch.__version__} has no {name}, which unigrad_fast/runtime/torch_private.py or kernels/ uses"


@pytest.mark.parametrize("name", sorted({name for file in MODULES for name in private_parts(file)}))
def test_torch_has_the_part(name):
    parts = name.split(".")
    found: object = torch
    for end in range(2, len(parts) + 1):
        try:
            found = getattr(found, parts[end - 1])
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:end]))
            except ModuleNotFoundError:
                pytest.fail(lacks(name))


@pytest.mark.parametrize("name", ["_device_types", "_get_backend", "_get_sequence_number_for_group"])
def test_process_groups_have_the_part(name):
    assert hasattr(ProcessGroup, name), lacks(f"ProcessGroup.{name}")


def test_backends_take_a_timeout():
    assert hasattr(dist.ProcessGroupGloo, "_set_default_timeout"), lacks("ProcessGroupGloo._set_default_timeout")


@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.DETAIL])
def test_collectives_of_all_groups_are_counted_and_every_backend_is_given_its_timeout(level, tmp_path):
    dist.set_debug_level(level)  # as TORCH_DISTRIBUTED_DEBUG would
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        before = torch_private.collectives_begun()
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
        assert torch_private.collectives_begun() >= before + 2
        torch_private.set_timeout(timedelta(minutes=1))
        groups = list(dist.distributed_c10d._world.pg_map)
        backends = [each._get_backend(torch.device("cpu")) for each in groups]
        assert all(hasattr(each, "wrapped_pg") for each in backends) == (level == dist.DebugLevel.DETAIL)
        backends = [getattr(each, "wrapped_pg", each) for each in backends]
        assert [each.options._timeout for each in backends] == 2 * [timedelta(minutes=1)]
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_a_backward_pass_is_noticed():
    found = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: found.append(torch_private.in_backward()))
    x.sum().backward()
    assert found == [True] and not torch_private.in_backward()


def test_a_group_without_other_ranks_can_be_made():
    torch_private.init_fake_process_group(3)
    try:
        assert dist.get_world_size() == 3
    finally:
        dist.destroy_process_group()
    assert FakeStore is not None


def test_no_other_module_names_a_private_part():
    files = [
        file
        for folder in ("unigrad_fast", "kernels", "pipelines", "benchmarks")
        for file in (ROOT / folder).rglob("*.py")
    ]
    assert not [
        f"{file.relative_to(ROOT)}: {name}" for file in files if file not in MODULES for name in private_parts(file)
    ]
