"""The real training step on fake tensors: counts launches, memory, FLOPs and communication without a GPU.

`Trainer.step` runs on fake CPU tensors that take the code paths of GPU tensors (`kernels.dispatch.as_on_cuda`), in a
process group without other ranks. Code that reads a tensor's value ends the walk with an error, so a step that runs
through never makes the host wait for a value. Calls that wait without reading (`synchronize`, copies from pageable
memory) are recorded.

Not walked, because they are not part of a step or impossible on fake tensors: the loader, DeepSpeed's broadcast and
the self-check of `fragments`, the conversion of weights to channels-last, reading metrics. DeepSpeed's optimizer for
ZeRO stages 1 and 2 is walked unchanged, on its code paths for the CPU.

Times are expected, not measured: for each operator the larger of FLOPs / peak and bytes / bandwidth, but at least the
time of a launch, with the figures of `cards.json`; nothing overlaps. Bytes count every operand once. Memory counts what
operators return and persistent tensors, but not a kernel's own workspace.
"""
