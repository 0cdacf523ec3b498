"""What the package uses of DeepSpeed's private parts is there, and is named in one module alone."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from test_fragments import build

from unigrad_fast.training.deepspeed_private import compute_in

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZER = (
    *("single_partition_of_fp32_groups", "bit16_groups", "averaged_gradients"),
    *("parallel_partitioned_bit16_groups", "real_dp_process_group"),
)
PARAMETER = ("_hp_mapping", "_hp_mapping.hp_fragment_address.start", "_hp_mapping.hp_fragment_address.numel")
PARAMETER = (*PARAMETER, "_hp_mapping.lp_fragment_address.start")


def missing(stage: int) -> list[str]:
    """The parts that an engine of this stage lacks."""
    engine, _ = build({"stage": stage})
    parameter = next(engine.module.parameters())
    return [
        name
        for holder, names in ((engine.optimizer, OPTIMIZER), (parameter, PARAMETER))
        for name in names
        if not has(holder, name)
    ]


def has(holder: object, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(holder, part):
            return False
        holder = getattr(holder, part)
    return True


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_has_every_part(workers, stage):
    (gone,) = workers(1).run(missing, stage)
    assert not gone, (
        f"DeepSpeed {version('deepspeed')} has no {', '.join(gone)} at ZeRO stage {stage}, which "
        "unigrad_fast/training/deepspeed_private.py uses"
    )


def dtypes_of_autocast(stage: int) -> list[torch.dtype]:
    engine, _ = build({"stage": stage})
    found = []
    for dtype in (torch.float16, torch.bfloat16):
        compute_in(engine, dtype)
        found.append(engine.torch_autocast_dtype())
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_deepspeed_takes_the_dtype_of_autocast_after_it_has_begun(workers, stage):
    assert workers(1).run(dtypes_of_autocast, stage) == [[torch.float16, torch.bfloat16]]


def test_no_other_module_names_one():
    names = re.compile("|".join({name.partition(".")[0] for name in (*OPTIMIZER, *PARAMETER, "torch_autocast_dtype")}))
    files = [file for folder in ("unigrad_fast", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    assert [file.name for file in files if names.search(file.read_text(encoding="utf-8"))] == ["deepspeed_private.py"]
