"""MoCo's memory bank: a ring buffer of the newest target embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from unigrad_fast.objectives.over_ranks import Gathered
from unigrad_fast.objectives.state import KeptState


class Bank(KeptState):
    """K keys of width C, the same on all ranks; it starts empty, and slots never written do not count as samples.

    Args:
        size: K.
        width: C.

    Attributes:
        keys: [K, C], in the dtype of the embeddings written to it.
        taken: int64 scalar, number of keys ever written; the next goes to slot `taken` modulo K.
        updates: int64 scalar, number of batches written.
    """

    kept = ("keys", "taken", "updates")
    keys: Tensor
    taken: Tensor
    updates: Tensor

    def __init__(self, size: int, width: int):
        super().__init__()
        with torch.inference_mode(False):
            self.keys = torch.zeros(size, width)
            self.taken, self.updates = (torch.zeros((), dtype=torch.int64) for _ in range(2))

    def bias(self, dtype: torch.dtype) -> Tensor:
        """[K]: 0 for a key, −∞ for an empty slot."""
        place_K = torch.arange(self.keys.shape[0], device=self.keys.device)
        return torch.where(place_K < self.taken, 0.0, -torch.inf).to(dtype)

    @torch.no_grad()
    def take_(self, batch: Gathered, skip: Tensor) -> None:
        """Overwrite the oldest keys with a batch's rows, view by view in the order of the global batch.

        Args:
            batch: rows of all ranks.
            skip: int32 scalar; if it is not 0, the bank stays unchanged.
        """
        rows_MC, size = batch.rows.flatten(0, 1), self.keys.shape[0]
        total, device = len(rows_MC), rows_MC.device
        goes = skip == 0
        place_M = torch.arange(total, device=device)
        count = torch.full((), total, device=device)
        if batch.is_image is not None:
            is_image_M = batch.is_image.repeat(len(batch.rows))
            rows_MC = rows_MC[torch.argsort(~is_image_M, stable=True)]  # images first, order kept
            count = is_image_M.sum()
        if total <= size:
            slot_M = (self.taken + place_M) % size
            keeps_M1 = ~(goes & (place_M < count)).unsqueeze(-1)
            self.keys.index_copy_(0, slot_M, torch.where(keeps_M1, self.keys[slot_M], rows_MC.to(self.keys.dtype)))
        else:  # for each slot, the newest row that maps to it
            first_K = (torch.arange(size, device=device) - self.taken) % size
            newest_K = first_K + (count - 1 - first_K).clamp_min(0) // size * size
            keeps_K1 = ~(goes & (first_K < count)).unsqueeze(-1)
            self.keys.copy_(torch.where(keeps_K1, self.keys, rows_MC[newest_K].to(self.keys.dtype)))
        self.taken.add_(torch.where(goes, count, 0))
        self.updates.add_(goes & (count > 0))
