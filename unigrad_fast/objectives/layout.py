"""Checks of a batch's shape, the tensors that depend only on that shape, both done once per shape; its positives.

Shape suffixes: V views, N images of this rank, M = V·N rows, C embedding width.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from unigrad_fast.kernels.dispatch import acts_as_cuda, use_triton
from unigrad_fast.objectives.surroundings import require_no_capture


class Mix(Protocol):
    """How CutMix mixed the online branch's global views: `partner[i]` covers the share `1 − ratio[i]` of image i.

    Attributes:
        partner: int64, [2, N] or two [N]: for each global view the index of the other image in this rank's batch.
        ratio: floating, the same shape: share of the area that still shows image i, 0 to 1. The range of partners and
            ratios is checked on the CPU only: on a GPU the check would make the host wait.
    """

    partner: Tensor | Sequence[Tensor]
    ratio: Tensor | Sequence[Tensor]


class Layout:
    """Tensors that depend only on a batch's shape: each row's positive (see `embedding_gradient`), and device scalars.

    Attributes:
        images, rows: N, M.
        device, unit_dtype: of the unit embeddings.
        product_dtype: of the operands of the product u·F.
        first, second, ratio: the positive of each row, without CutMix.
        decay: ρ.
        count: number of this rank's rows that F is updated with, 2·N.
        nonfinite: one flag per row of both branches; written in every step.
        raised: two flags: whether any row, and whether any row of the target branch, is not finite; written in every
            step.
        ticket: see `embedding_gradient`; written in every step.
    """

    def __init__(
        self,
        views: int,
        images: int,
        device: torch.device,
        unit_dtype: torch.dtype,
        product_dtype: torch.dtype,
        decay: float,
    ):
        self.images, self.rows, self.device = images, views * images, device
        self.unit_dtype, self.product_dtype = unit_dtype, product_dtype
        with torch.inference_mode(False), torch.no_grad():  # it outlives the call
            exact = torch.promote_types(unit_dtype, torch.float32)
            image_N = torch.arange(images, device=device)
            globals_2N, locals_L = torch.cat([image_N + images, image_N]), image_N.repeat(views - 2)
            share_M = torch.ones(views * images, dtype=torch.float32, device=device)
            share_M[2 * images :] = 0.5
            self.first = torch.cat([globals_2N, locals_L])
            self.second = torch.cat([globals_2N, locals_L + images]) if views > 2 else None
            self.ratio = share_M if views > 2 else None
            self.decay = torch.full((), decay, dtype=exact, device=device)
            self.count = torch.full((), 2.0 * images, dtype=exact, device=device)
            self.nonfinite = torch.zeros((views + 2) * images, dtype=torch.int32, device=device)
            self.raised = torch.zeros(2, dtype=torch.int32, device=device)
            self.ticket = torch.zeros((), dtype=torch.int32, device=device)

    def positives(self, mix: Mix | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`first`, `second` and `ratio` of `embedding_gradient`."""
        if mix is None:
            return self.first, self.second, self.ratio
        # Targets come from the other global view: the image's own and its partner's.
        second_2N = torch.cat([mix.partner[0] + self.images, mix.partner[1].to(self.first.dtype)])
        ratio_2N = torch.cat([mix.ratio[0], mix.ratio[1]]).float()
        if self.second is None or self.ratio is None:
            return self.first, second_2N, ratio_2N
        rest = slice(2 * self.images, None)
        return self.first, torch.cat([second_2N, self.second[rest]]), torch.cat([ratio_2N, self.ratio[rest]])

    def units(self, views: Sequence[Tensor], kernels: Any, sent: int = 2, spare: int = 0) -> tuple[Tensor, Tensor]:
        """Unit embeddings and inverse norms of some views; also writes `nonfinite` and `raised`.

        Args:
            kernels: `functional`, or `ops` if batches like this one have been checked before.
            sent: number of views, counted from the last, that may be sent to other ranks.
            spare: extra rows to write after them for sending.
        """
        return kernels.unit_embeddings(
            views,
            self.unit_dtype,
            self.nonfinite[: len(views) * self.images],
            raised=self.raised,
            ticket=self.ticket,
            since=(len(views) - sent) * self.images,
            spare=spare,
        )


def layout_of(
    kept: dict[Any, Layout], views: int, like: Tensor, dtypes: tuple[torch.dtype, torch.dtype], decay: float
) -> Layout:
    """The layout for a number of views shaped like `like`, from the cache `kept`; 0 views means targets only."""
    key = (views, len(like), decay, like.device, *dtypes)
    if key not in kept:
        require_no_capture("a batch of this shape")
        kept[key] = Layout(max(2, views), len(like), like.device, *dtypes, decay)
    return kept[key]


def dtypes_of(
    online: Sequence[Tensor], target: Sequence[Tensor], compute_dtype: torch.dtype | None = None
) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the unit embeddings and of the operands of the product u·F; `compute_dtype` is UniGrad's."""
    exact = torch.promote_types(common_dtype([*online, *target]), torch.float32)
    if exact == torch.float64:
        return exact, exact
    device = online[0].device
    if not use_triton(device):
        return exact, compute_dtype or exact
    enabled = torch.is_autocast_enabled(device.type)
    usual = torch.get_autocast_dtype(device.type) if enabled else common_dtype(online)
    return (compute_dtype or usual,) * 2


def require_views(online: Sequence[Tensor] | None, target: Sequence[Tensor], width: int) -> None:
    """Raise ValueError unless there are two targets and, if given, two or more online views, all shaped [N, width]."""
    if online is None and len(target) != 2:
        raise ValueError(f"got {len(target)} target views; give the two global views' targets")
    if online is not None and (len(target) != 2 or len(online) < 2):
        raise ValueError(
            f"got {len(online)} online and {len(target)} target views; give two or more online views "
            "(global views first) and the two global views' targets"
        )
    expected = None
    for name, views in (("online", online or ()), ("target", target)):
        for number, view in enumerate(views):
            if not isinstance(view, Tensor):
                kind = type(view).__name__
                raise TypeError(f"{name}[{number}] is a {kind}; give a tensor [N, {width}] for each view")
            expected = expected or (view.shape[0] if view.dim() else "N", width)
            if tuple(view.shape) != expected:
                raise ValueError(
                    f"{name}[{number}] has shape {tuple(view.shape)}, expected {expected}: "
                    "all views must show the same images, in the width that the objective was built with"
                )


def require_mix(mix: Mix, images: int, device: torch.device) -> None:
    """Raise ValueError unless `mix` describes two views of `images` images."""
    for name, pair, wanted in (("partner", mix.partner, "int64"), ("ratio", mix.ratio, "floating")):
        given = [(str(each.dtype).removeprefix("torch."), list(each.shape)) for each in pair]
        fits = all(each.is_floating_point() == (name == "ratio") and each.dtype != torch.bool for each in pair)
        if len(given) != 2 or any(shape != [images] for _, shape in given) or not fits:
            raise ValueError(f"mix.{name} is {given[:3]}; give {wanted} [{images}] for each of the two global views")
        # On a GPU reading values would make the host wait.
        if images and not acts_as_cuda(device):
            low, high = min(each.min().item() for each in pair), max(each.max().item() for each in pair)
            most = 1 if name == "ratio" else images - 1
            if not 0 <= low <= high <= most:
                raise ValueError(f"mix.{name} goes from {low:g} to {high:g}; use 0 to {most}")


def positives(target_2NC: Tensor, views: int, mix: Mix | None) -> Tensor:
    """m⁺ of all views, [V, N, C].

    For a global view, the other global view's target, mixed as the view was: ratio·m[i] + (1−ratio)·m[partner]. For a
    local crop, the mean of both targets, not normalised again.
    """
    crossed = []
    for number, other_NC in enumerate((target_2NC[1], target_2NC[0])):
        if mix is not None:
            share_N1 = mix.ratio[number].to(other_NC.dtype).unsqueeze(-1)
            other_NC = torch.lerp(other_NC[mix.partner[number]], other_NC, share_N1)
        crossed.append(other_NC)
    return torch.stack(crossed + [target_2NC.mean(0)] * (views - 2))


def common_dtype(views: Sequence[Tensor]) -> torch.dtype:
    common = views[0].dtype
    for view in views:
        common = torch.promote_types(common, view.dtype)
    return common


LOOK = operator.attrgetter("__class__", "shape", "dtype", "device")


def key_of(views: list[Tensor], targets: int, *settings: Any) -> tuple | None:
    """Everything that decides whether and how a batch can be processed; None if it must be checked every time."""
    if torch.compiler.is_compiling():
        return None
    try:
        looks = tuple(map(LOOK, views))
        device = views[0].device
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    except (AttributeError, IndexError):  # not tensors
        return None
    return targets, looks, autocast, use_triton(device), *settings
