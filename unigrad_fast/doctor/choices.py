"""Reports what a run will use on this machine: device, ranks, precision, decoder, kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unigrad_fast.config import Engine
from unigrad_fast.doctor import Finding
from unigrad_fast.doctor.parts import Scene, make_loader
from unigrad_fast.runtime.validation import allowed_values
from unigrad_fast.runtime.wording import count

if TYPE_CHECKING:
    import torch

    from unigrad_fast.runtime.process_group import World

WITHOUT_TRITON = 1.3  # by the count of a step of ResNet-50 with 64 images on a T4


def findings(scene: Scene, launcher: str, unusable: set[str]) -> list[Finding]:
    """A row for each choice that a run makes on this machine."""
    import torch

    from unigrad_fast.runtime.precision import autocast_dtype

    world = scene.world
    dtype = str(autocast_dtype("auto", world.device) or torch.float32).removeprefix("torch.")
    on_gpu = world.device.type == "cuda"
    detail = torch.cuda.get_device_name(world.device) if on_gpu else count(torch.get_num_threads(), "thread")
    stages = allowed_values(Engine, "zero_stage").removeprefix("an integer from ")
    return [
        Finding("device", f"{world.device}, {detail}"),
        _ranks(world, "no launcher" if launcher == "single" else f"launched by {launcher}"),
        Finding("process group", "nccl, gloo for CPU tensors" if world.backend == "nccl" else world.backend),
        Finding("precision", f"{dtype} (engine.precision auto)" + (", TF32 off (engine.tf32)" if on_gpu else "")),
        _decoder(scene, unusable),
        *_kernels(world.device),
        Finding("ZeRO stages", "none without DeepSpeed" if "DeepSpeed" in unusable else stages),
    ]


def _kernels(device: torch.device) -> tuple[Finding, Finding]:
    """The rows for the objective's kernels and those of batch norm."""
    from unigrad_fast.kernels import dispatch, heuristics
    from unigrad_fast.networks.batch_norm import is_alone

    batch_norm = Finding("batch norm", "torch's own (one rank)" if is_alone() else "statistics over all ranks")
    try:
        fused = dispatch.use_triton(device)
    except ValueError as error:
        found, _, remedy = str(error).partition("; ")
        return Finding("kernels", found, "broken", remedy), batch_norm
    if fused:
        batch_norm = Finding("batch norm", "both views in one pass, fused with addition and ReLU")
    if fused:
        return Finding("kernels", f"Triton, tiles of sm_{heuristics.architecture_of(device)}"), batch_norm
    if device.type == "cuda" and dispatch.capability_of(device) < dispatch.LEAST_CAPABILITY:
        major, minor = dispatch.capability_of(device)
        found = (
            f"plain torch, as Triton does not support compute capability {major}.{minor}: a step is expected to take "
            f"{WITHOUT_TRITON} times as long"
        )
        return Finding(
            "kernels", found, "note", "nothing to do; GPUs from compute capability 8.0 on are faster"
        ), batch_norm
    return Finding("kernels", "plain torch"), batch_norm


def _ranks(world: World, launched: str) -> Finding:
    import torch

    local = f", {world.local_size} on this machine" if world.size > 1 else ""
    found = f"{count(world.size, 'rank')}{local}; {launched}"
    gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    if gpus > world.local_size == world.size:
        remedy = f"for all {gpus} GPUs: torchrun --nproc_per_node {gpus} -m unigrad_fast pretrain ..."
        return Finding("ranks", found, "note", remedy)
    return Finding("ranks", found)


def _decoder(scene: Scene, unusable: set[str]) -> Finding:
    if "DALI" in unusable:
        return Finding("decoder", "none without DALI")
    loader = make_loader(scene)
    where = "CPU" if loader.device_id is None else "GPU"
    return Finding("decoder", f"DALI on the {where}, {count(loader.threads, 'thread')} per rank")
