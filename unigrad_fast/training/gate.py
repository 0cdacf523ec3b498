"""The gate: a step with a non-finite value changes nothing, and the host need not wait to find out.

In fp16, a step that is dropped only because the loss scale was too high is not counted (see `loss_scale`).

Besides F, which the objective guards, three things hold state: the optimizer (see `sgd.SGD`), the target branch (see
`target.update_target_`) and batch norm's running buffers in both branches, which the forward pass changes immediately.
The gate copies the buffers before the step and restores them with a `torch.where`; it does the same with a predictor's
running statistics, which are not buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unigrad_fast.objectives.state import KeptState
from unigrad_fast.runtime.errors import RunStopped
from unigrad_fast.training.host_copy import HostCopy


class FlatBuffers:
    """The buffers of a module in one tensor per dtype, so that saving and restoring them is one operation each.

    The buffers and a predictor's kept state become views of the flat tensors; afterwards change them only in place.
    """

    def __init__(self, module: nn.Module):
        owners: dict[torch.dtype, list[tuple[nn.Module, str, Tensor]]] = {}
        for owner in module.modules():
            kept = ((name, getattr(owner, name)) for name in owner.kept) if isinstance(owner, KeptState) else ()
            for name, buffer in (*owner.named_buffers(recurse=False), *kept):
                owners.setdefault(buffer.dtype, []).append((owner, name, buffer))
        self.flats = []
        for group in owners.values():
            flat = torch.cat([buffer.detach().reshape(-1) for _, _, buffer in group])
            parts = flat.split([buffer.numel() for _, _, buffer in group])
            for (owner, name, buffer), part in zip(group, parts, strict=True):
                setattr(owner, name, part.view(buffer.shape))
            self.flats.append(flat)
        self.kept = [flat.clone() for flat in self.flats]

    def keep(self) -> None:
        for kept, flat in zip(self.kept, self.flats, strict=True):
            kept.copy_(flat)

    def restore_where(self, skip: Tensor) -> None:
        for kept, flat in zip(self.kept, self.flats, strict=True):
            flat.copy_(torch.where(skip != 0, kept, flat))


class StepGate:
    """Restores running buffers after a dropped step, and counts dropped steps.

    Args:
        modules: the encoders, and a predictor separately: if its kept state shared memory with the encoders' buffers,
            autograd would see changes of one as changes of the other.
        max_skipped: number of consecutive dropped steps after which the run stops.
    """

    def __init__(self, modules: list[nn.Module], max_skipped: int, device: torch.device):
        self.buffers = [FlatBuffers(module) for module in modules]
        self.max_skipped = max_skipped
        self.in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        self._counters = HostCopy()
        self._seen_total = 0

    def open(self) -> None:
        """Call before the first forward pass of a step."""
        for buffers in self.buffers:
            buffers.keep()

    def undo(self) -> None:
        """Undo the changes of forward passes since `open`."""
        for buffers in self.buffers:
            buffers.restore_where(torch.ones((), device=self.total.device))

    def close(self, skip: Tensor, answered: Tensor | None = None) -> None:
        """Call after a step: if `skip` is not 0, undo the changes of its forward passes; count the step.

        Args:
            answered: boolean scalar: a lower loss scale is the answer, so the step neither counts nor ends a row of
                dropped steps.
        """
        for buffers in self.buffers:
            buffers.restore_where(skip)
        skipped = (skip != 0).to(torch.int64)
        if answered is None:
            self.in_a_row.add_(1).mul_(skipped)
        else:
            skipped.mul_(~answered)
            self.in_a_row.copy_(torch.where(answered, self.in_a_row, (self.in_a_row + 1) * skipped))
        self.total.add_(skipped)

    def send(self, step: int) -> None:
        """Call after `close`: start copying the counters to the host."""
        self._counters.send(step, torch.stack([self.in_a_row, self.total]))

    def check(self, before: int) -> int:
        """Check the counters of the steps before `before`; this does not wait if the last of them is one step old.

        Returns:
            The number of steps dropped so far.

        Raises:
            RunStopped: `max_skipped` steps in a row were dropped.
        """
        for step, (in_a_row, total) in self._counters.receive(before):
            self._seen_total = total
            if in_a_row >= self.max_skipped:
                raise RunStopped(
                    f"step {step + 1}: {in_a_row} steps in a row had NaN or infinite values and were dropped "
                    f"(engine.max_skipped_steps is {self.max_skipped}); parameters and target are those of the last "
                    "good step. Look for damaged images, lower optimizer.base_lr, or set optimizer.clip_norm"
                )
        return self._seen_total
