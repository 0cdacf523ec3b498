"""DINO, SwAV and TWIST, whose losses compare distributions over prototypes or classes.

A head turns embeddings into scores, of which a softmax makes distributions. It belongs to the objective and is trained
with the encoder. Products with prototypes are never computed in less than fp32, because they are divided by
temperatures down to 0.04.

Shape suffixes: V views, N images of this rank, C embedding width, K prototypes or classes, Q images of the queue.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from unigrad_fast.objectives.bank import Bank
from unigrad_fast.objectives.originals.heads import UnitPrototypes, WeightNormalised
from unigrad_fast.objectives.originals.original import OriginalLoss, Views
from unigrad_fast.objectives.predictor import standardised
from unigrad_fast.objectives.state import KeptState

LEAST_SHARE = 1e-30  # reached only if ε is below 0.029; without it, codes of a smaller one would all be 0 in fp32


class Clustering(OriginalLoss):
    """Base of the losses with a head.

    Args:
        width: C.
        head: True: the objective creates one, and its parameters must be passed to the optimizer; a module
            [·, C] → [·, K]: that module is used, never frozen; False: embeddings are scores already, K is the width.
        settings: see `OriginalLoss`.

    Attributes:
        prototypes: K.
    """

    prototypes: int
    freeze_epochs: float = 0.0

    def __init__(self, width: int, head: nn.Module | bool = True, **settings: Any):
        super().__init__(width, **settings)
        if not isinstance(head, (bool, nn.Module)):
            raise TypeError(f"head {head!r} is not a module; use True, False or an nn.Module")
        if head is False:
            self.prototypes = self.width
        self.head = head if isinstance(head, nn.Module) else self.new_head() if head else None

    def new_head(self) -> nn.Module:
        """An untrained head."""
        raise NotImplementedError

    def scores(self, rows_VNC: Tensor) -> Tensor:
        """The online scores, [V, N, K]."""
        if isinstance(self.head, (UnitPrototypes, WeightNormalised)):
            return self.head(rows_VNC, self.before(self.freeze_epochs, rows_VNC.device) if self.freeze_epochs else None)
        return rows_VNC if self.head is None else torch.stack([self.head(view_NC) for view_NC in rows_VNC])

    def before(self, epochs: float, device: torch.device) -> Tensor:
        """Whether so many epochs are not over yet, a boolean scalar."""
        return self.epoch_on(device) < epochs


class DINO(Clustering, method="dino"):
    """DINO: the student's softmax learns the teacher's, which is centred and sharpened.

        L = mean over pairs of −Σ_k p_k(teacher)·log p_k(student)

    Pairs are a global view of the teacher and another view of the student. The teacher's scores come from
    `target_head`, a moving average of the head that `after_step` updates. The centre is that of all ranks' teacher
    scores, and moves after it was used.

    Args:
        target_head: the teacher's head; None: a copy of the head.

    Attributes:
        temperature: the student's.
        centre: the moving average.
        teacher_temperature, first_teacher_temperature, teacher_warmup_epochs, centre_momentum, norm_last_layer: see
            the catalogue's settings.
    """

    temperature: float
    teacher_temperature: float
    first_teacher_temperature: float
    teacher_warmup_epochs: float
    centre_momentum: float
    norm_last_layer: bool

    def __init__(
        self, width: int, head: nn.Module | bool = True, target_head: nn.Module | None = None, **settings: Any
    ):
        super().__init__(width, head, **settings)
        if target_head is None and self.head is not None:
            target_head = self._copied(self.head)
        self.target_head = target_head
        self.centre = Centre(self.prototypes)

    def new_head(self) -> nn.Module:
        return WeightNormalised(self.width, self.prototypes, trains_length=not self.norm_last_layer)

    def loss_of(self, views: Views) -> Tensor:
        score_VNK, centre = self.scores(views.online), self.centre.ready(views.online)
        with torch.no_grad():
            teacher_2NK = views.target if self.target_head is None else self.target_head(views.target)
            softmax_2NK = ((teacher_2NK - centre.mean) / self._teacher_temperature(teacher_2NK)).softmax(-1)
            if self.training:
                self._move_centre_(centre, teacher_2NK, views.raised[1])
        return mean_over_pairs(cross_entropy(score_VNK / self.temperature, views.positives(softmax_2NK)))

    @torch.no_grad()
    def after_step(self, momentum: float | Tensor, skip: Tensor | None = None) -> list[Tensor]:
        if self.target_head is not None and self.head is not None:
            for ours, trained in zip(self.target_head.parameters(), self.head.parameters(), strict=True):
                weight = torch.as_tensor(1.0 - momentum, dtype=torch.float64, device=ours.device)
                weight = weight if skip is None else torch.where(skip != 0, 0.0, weight)
                ours.lerp_(trained.to(ours.dtype), weight.to(ours.dtype))
        return []

    def _copied(self, head: nn.Module) -> nn.Module:
        if type(head) is not WeightNormalised:
            return copy.deepcopy(head).requires_grad_(False)
        copied = self.new_head()  # tensors without content cannot be copied deeply
        copied.load_state_dict(head.state_dict())
        return copied.requires_grad_(False)

    def _teacher_temperature(self, like: Tensor) -> Tensor:
        """It rises in equal steps, from epoch to epoch."""
        epoch, last = self.epoch_on(like.device).floor(), self.teacher_temperature
        slope = (last - self.first_teacher_temperature) / max(self.teacher_warmup_epochs - 1, 1)
        rising = self.first_teacher_temperature + slope * epoch
        return torch.where(epoch < self.teacher_warmup_epochs, rising, last).to(like.dtype)

    def _move_centre_(self, centre: Centre, teacher_2NK: Tensor, raised: Tensor) -> None:
        rows_MK = teacher_2NK.flatten(0, 1)
        sums = torch.cat([rows_MK.sum(0), rows_MK.new_full((1,), len(rows_MK)), raised.to(rows_MK.dtype).view(1)])
        sums = self.summed(sums)
        mean_K = sums[:-2] / sums[-2].clamp_min(1)
        skip = (sums[-1] != 0) | (sums[-2] == 0)
        centre.mean.copy_(torch.where(skip, centre.mean, torch.lerp(mean_K, centre.mean, self.centre_momentum)))


class Centre(KeptState):
    """The moving average of the teacher's scores.

    Args:
        count: K.

    Attributes:
        mean: [K], in the dtype of the scores, zeros at first.
    """

    kept = ("mean",)
    mean: Tensor

    def __init__(self, count: int):
        super().__init__()
        with torch.inference_mode(False):
            self.mean = torch.zeros(count)


class SwAV(Clustering, method="swav"):
    """SwAV: views predict each other's codes, which assign the images of all ranks to prototypes in equal shares.

        L = mean over pairs of −Σ_k q_k·log softmax_k(u·w/τ)

    Pairs are a global view with its code q and another view. A global view's codes are balanced over its own batch and
    the queue, by Sinkhorn's algorithm. The queue holds unit embeddings of both global views, the same on all ranks.

    Attributes:
        temperature: τ.
        queue: None without one.
        sinkhorn_epsilon, sinkhorn_iterations, queue_size, queue_start_epoch: see the catalogue's settings.
    """

    temperature: float
    sinkhorn_epsilon: float
    sinkhorn_iterations: int
    queue_size: int | None
    queue_start_epoch: float

    def __init__(self, width: int, head: nn.Module | bool = True, **settings: Any):
        super().__init__(width, head, **settings)
        if self.head is None and self.queue_size is not None:
            raise ValueError(f"queue_size {self.queue_size} needs a head; use None, or head=True")
        self.queue = None if self.queue_size is None else Bank(self.queue_size, 2 * self.width)

    def new_head(self) -> nn.Module:
        return UnitPrototypes(self.width, self.prototypes)

    @property
    def updates(self) -> Tensor:
        return super().updates if self.queue is None else self.queue.updates

    def loss_of(self, views: Views) -> Tensor:
        score_VNK = self.scores(views.online)
        with torch.no_grad():
            code_2NK = self._codes(views)
        return mean_over_pairs(cross_entropy(score_VNK / self.temperature, views.positives(code_2NK)))

    def after_step(self, momentum: float | Tensor, skip: Tensor | None = None) -> list[Tensor]:
        if not isinstance(self.head, UnitPrototypes):
            return []
        self.head.normalise_(skip)
        return [self.head.weight]

    def _codes(self, views: Views) -> Tensor:
        share_2NK = self._shares(views.target)
        if self.queue is None:
            return self._balanced(share_2NK, share_2NK[:, :0])
        queue, target_2NC = self.queue.ready(views.target), views.unit_target.detach()
        queued_2QC = queue.keys.unflatten(1, (2, -1)).transpose(0, 1)
        is_full = queue.taken >= len(queue.keys)
        code_2NK = self._balanced(share_2NK, self._shares(queued_2QC) * is_full)
        if self.training:
            batch = self.gather(target_2NC.transpose(0, 1).reshape(1, -1, 2 * self.width), views.raised)
            too_early = self.before(self.queue_start_epoch, target_2NC.device)
            queue.take_(batch, batch.raised[1] | too_early)
        return code_2NK

    def _shares(self, rows_VNC: Tensor) -> Tensor:
        """exp((cosine − 1) / ε): the factor exp(−1/ε) cancels out, and prevents overflow."""
        return ((self.scores(rows_VNC) - 1) / self.sinkhorn_epsilon).exp().clamp_min(LEAST_SHARE)

    def _balanced(self, code_2NK: Tensor, queued_2QK: Tensor) -> Tensor:
        """Sinkhorn's algorithm over this rank's images, those of other ranks, and the queue: codes with sum 1."""
        for _ in range(self.sinkhorn_iterations):
            total_21K = (self.summed(code_2NK.sum(1)) + queued_2QK.sum(1)).unsqueeze(1)
            code_2NK, queued_2QK = (normal_or_zero(each / positive(total_21K)) for each in (code_2NK, queued_2QK))
        return code_2NK


class TWIST(Clustering, method="twist"):
    """TWIST: sharp, consistent and diverse distributions over classes, with gradient in both views of a pair.

        L = mean over pairs of  (KL(p‖q) + KL(q‖p))/2  +  entropy·mean H(p)  −  diversity·H(mean p)

    Pairs are a global view and any other view; the last two terms are averaged over a pair's two views. Scores are
    standardised per class over all views and ranks. The mean distribution is that of a view over all ranks. Both global
    views are online ones, and `target` is not used.

    Attributes:
        entropy, diversity: weights of the terms.
    """

    entropy: float
    diversity: float

    def new_head(self) -> nn.Module:
        return nn.Linear(self.width, self.prototypes, bias=False)  # standardising would remove a bias

    def loss_of(self, views: Views) -> Tensor:
        count = len(views.online)
        score_VNK = self.scores(views.online)
        rows_1MK = score_VNK.flatten(0, 1).unsqueeze(0)
        normal_1MK, *_, rows = standardised(rows_1MK, self.over_ranks, self.process_group)
        log_VNK = normal_1MK.view_as(score_VNK).log_softmax(-1)
        p_VNK = log_VNK.exp()
        own_V = -torch.linalg.vecdot(p_VNK, log_VNK).sum(1) / max(1, p_VNK.shape[1])
        mean_VK = self.summed(p_VNK.sum(1)) * (count / rows)
        mean_V = -torch.linalg.vecdot(mean_VK, positive(mean_VK).log())
        regular_V = self.entropy * own_V - self.diversity * mean_V
        terms = []
        for one in range(2):
            for other in range(one + 1, count):
                apart = torch.linalg.vecdot(p_VNK[one] - p_VNK[other], log_VNK[one] - log_VNK[other]).sum()
                terms.append((apart / max(1, p_VNK.shape[1]) + regular_V[one] + regular_V[other]) / 2)
        return torch.stack(terms).mean()


def cross_entropy(score_VNK: Tensor, expected_VNK: Tensor) -> Tensor:
    """−Σ_k q_k·log softmax_k(score) of distributions q, [V, N]."""
    return score_VNK.logsumexp(-1) - torch.linalg.vecdot(score_VNK, expected_VNK)


def mean_over_pairs(terms_VN: Tensor) -> Tensor:
    """The mean over pairs of a global and another view; a term of a local crop is the mean of two pairs' terms."""
    views, images = terms_VN.shape
    return (terms_VN[:2].sum() + 2 * terms_VN[2:].sum()) / max(1, images * (2 * views - 2))


def positive(tensor: Tensor) -> Tensor:
    return tensor.clamp_min(torch.finfo(tensor.dtype).tiny)


def normal_or_zero(share_2NK: Tensor) -> Tensor:
    """Divided by its sum over prototypes; zeros stay zeros."""
    return share_2NK / positive(share_2NK.sum(-1, keepdim=True))
