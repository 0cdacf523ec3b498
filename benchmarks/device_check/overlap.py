"""Checks that running two branches concurrently on two CUDA streams gives the same results as in sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from unigrad_fast.benchmarks.device_check.finding import Finding

REPEATS = 20


def target_stream(device: torch.device, backbone: str = "resnet50", images: int = 32, side: int = 224) -> Finding:
    """Check that embeddings and running buffers are bitwise equal with and without `engine.target_stream`."""
    what = "the target branch on its own stream"
    try:
        import pydantic  # noqa: F401
        import torchvision  # noqa: F401
    except ModuleNotFoundError as error:
        return Finding(what, f"not checked: {error.name} is not installed", True)
    from unigrad_fast.config import resolve
    from unigrad_fast.networks.encoder import build_encoder
    from unigrad_fast.runtime.process_group import World
    from unigrad_fast.training.target import embed, make_copies, make_target
    from unigrad_fast.training.target_stream import TargetStream

    settings = {"model": {"backbone": backbone, "projector": {"width": 512}}, "engine": {"target_stream": True}}
    config = resolve("imagenet_100ep", settings)
    world = World(0, 1, 0, 1, device, "nccl")
    generator = torch.Generator().manual_seed(0)
    views = [torch.randn(images, 3, side, side, generator=generator).to(device) for _ in range(2)]
    views = [view.contiguous(memory_format=torch.channels_last) for view in views]

    def run(stream: TargetStream | None) -> list[Tensor]:
        online = build_encoder(config.model, 0, device).to(memory_format=torch.channels_last)
        target = make_target(online)
        copies, results = make_copies(target, torch.bfloat16), []
        for _ in range(REPEATS):
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
                inputs = [view + 0 for view in views]  # freed while the target may still read them
                if stream is None:
                    ours = embed(target, copies, inputs)
                else:
                    with stream.beside(inputs):
                        ours = embed(target, copies, inputs)
                inputs = [view.flip(3) for view in inputs]
                theirs = online(inputs)
                if stream is not None:
                    stream.join()
            results += [*ours, *theirs]
        return [*results, *target.buffers(), *online.buffers()]

    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        pairs = zip(run(None), run(TargetStream(config.engine, config.model, world)), strict=True)
        differing = sum(not torch.equal(expected, found) for expected, found in pairs)
    finally:
        torch.backends.cudnn.deterministic = deterministic
    return Finding(what, f"{differing} tensors differ", differing == 0)
