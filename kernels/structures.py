"""What launchers and their twins in plain torch are given, each tensor by its name and none by its place.

Shape suffixes: M rows (images times views), C embedding width, K rows of targets, R rows of F.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .heuristics import blocks, working_scale

TAIL = 5  # numbers with which a rank's rows end: three digits of how many rows it has, and two flags
DIGIT = 256  # their base: bf16 holds all whole numbers up to it


def tail_rows(width: int) -> int:
    """Rows of so many channels that hold the numbers of a tail; all else in them is 0."""
    return blocks(TAIL, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlation:
    """F, or some of its rows, and its working copy; both are contiguous and change in place.

    Attributes:
        matrix: [R, C] fp32, or float64 for float64 units; [C, C] is whole F, and symmetric.
        working: bf16 or fp16 [R, C]: F times `scale`, for the product; None where the product reads F itself.
        first_row: which row of F the first of `matrix` is.
    """

    matrix: Tensor
    working: Tensor | None = None
    first_row: int = 0

    @property
    def is_whole(self) -> bool:
        return self.matrix.shape[0] == self.matrix.shape[1]

    @property
    def scale(self) -> float:
        """What F is multiplied by in the working copy; 1 without one."""
        return 1.0 if self.working is None else working_scale(self.working.dtype, self.matrix.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of the online branch and their positives.

    The positive of row i is ratio[i]·target[first[i]] + (1−ratio[i])·target[second[i]]; without `second` and `ratio`
    it is target[first[i]], without `first` target[i].

    Attributes:
        unit: [M, C] unit embeddings, floating.
        inverse_norm: [M] 1/‖z‖, floating; 0 where the row has no usable embedding.
        target: [K, C] unit embeddings of the target branch, floating.
        first, second: [M] int64 or int32, rows of `target`.
        ratio: [M] floating, 0 to 1.
    """

    unit: Tensor
    inverse_norm: Tensor
    target: Tensor
    first: Tensor | None = None
    second: Tensor | None = None
    ratio: Tensor | None = None

    def contiguous(self) -> Rows:
        """The same rows without gaps in memory, which is what launchers take."""
        tensors = (self.unit, self.inverse_norm, self.target, self.first, self.second, self.ratio)
        if _are_contiguous(tensors):
            return self
        return Rows(
            unit=self.unit.contiguous(),
            inverse_norm=self.inverse_norm.contiguous(),
            target=self.target.contiguous(),
            first=contiguous(self.first),
            second=contiguous(self.second),
            ratio=contiguous(self.ratio),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a step finds and leaves beside numbers, on the device; `updates` and `ticket` change in place.

    Attributes:
        nonfinite: int32, any shape: whether one of them is not 0 is reported with the terms.
        skip: int32, any shape: where one of them is not 0, F did not take the batch, and it is not counted.
        updates: int64 scalar, how many batches F has taken; this one is counted here.
        ticket: int32 scalar that is 0, and 0 again afterwards; None makes one, and plain torch needs none.
    """

    nonfinite: Tensor | None = None
    skip: Tensor | None = None
    updates: Tensor | None = None
    ticket: Tensor | None = None

    def contiguous(self) -> State:
        """The same with flags that have no gaps in memory, which is what launchers take."""
        if _are_contiguous((self.nonfinite, self.skip)):
            return self
        return State(
            nonfinite=contiguous(self.nonfinite),
            skip=contiguous(self.skip),
            updates=self.updates,
            ticket=self.ticket,
        )


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _are_contiguous(tensors: tuple[Tensor | None, ...]) -> bool:
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)
