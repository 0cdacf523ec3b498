"""The objective for a row of the table: its gradient, computed without autograd, and the loss that is reported.

    g  = scale · (−positive + balance · negative)             gradient with respect to u, of one view's mean over images
    dz = g through the normalisation, averaged over views     gradient with respect to z

Shape suffixes: V views, N images of this rank, K images of all ranks, M = V·N rows, C embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.kernels import attach_gradient, functional
from unigrad_fast.objectives import figures
from unigrad_fast.objectives.bank import Bank
from unigrad_fast.objectives.catalogue import COLLAPSES, require_target
from unigrad_fast.objectives.correlation import MovingCorrelation
from unigrad_fast.objectives.eigen_predictor import EigenPredictor
from unigrad_fast.objectives.forms import negatives, reported
from unigrad_fast.objectives.forms.negatives import Negative
from unigrad_fast.objectives.forms.normalised import Normalised, normalise, through_normalisation
from unigrad_fast.objectives.forms.rows import Row
from unigrad_fast.objectives.layout import Layout, Mix, dtypes_of, layout_of, positives, require_mix, require_views
from unigrad_fast.objectives.output import TERMS, ObjectiveOutput
from unigrad_fast.objectives.over_ranks import Gathered, OverRanks
from unigrad_fast.objectives.surroundings import require_no_recomputation, without_autocast


class GradientForm(OverRanks):
    """The objective for a row of the table.

    Its state (F, W_h, the bank) is part of the state dict, but not a buffer. In training mode all ranks must call the
    objective together; in evaluation mode the state is read but not changed, and everything returned covers this rank.

    Args:
        width: C.
        row: the row.
        target: the source of the `target` embeddings: "momentum" (a momentum encoder), or "stop_gradient" or
            "weight_sharing" (the online branch's global views; the two are the same in gradient form).
        process_group, most_images: see `OverRanks`.

    Raises:
        ValueError: shared weights with a row that would collapse; `both_terms` with a momentum target.
    """

    def __init__(
        self,
        width: int,
        row: Row,
        target: str = "momentum",
        process_group: dist.ProcessGroup | None = None,
        most_images: int | None = None,
    ):
        super().__init__(width, process_group, most_images)
        require_target(
            "gradient form with a predictor", target, COLLAPSES["refused"] if row.positive == "predictor" else {}
        )
        if row.both_terms and target == "momentum":
            raise ValueError("both_terms needs shared weights; use target='weight_sharing'")
        self.row, self.target = row, target
        self.average = MovingCorrelation(self.width) if row.negative == "moving_average" else None
        self.direct = EigenPredictor(self.width) if row.positive == "predictor" else None
        self.bank = Bank(row.bank_size, self.width) if row.samples == "bank" else None
        self._layouts: dict[Any, Layout] = {}

    def extra_repr(self) -> str:
        return f"width={self.width}, target={self.target}, row={self.row}"

    def forward(self, online: Sequence[Tensor], target: Sequence[Tensor], mix: Mix | None = None) -> ObjectiveOutput:
        """The loss of one batch; its backward gives the row's gradient.

        Args:
            online: V ≥ 2 tensors [N, C] as the projector outputs them; global views first, local crops follow.
            target: two tensors [N, C], for the global views; no gradient flows into them.
            mix: how the online global views were mixed; see `UniGrad`.

        Returns:
            `ObjectiveOutput`; metrics are `objective` (see `reported`), `positive_cosine` (of the ℓ2-normalised u and
            m⁺), `negative_term` (u·negative) and `surrogate` (u·g, what the authors' code reports).

        Raises:
            ValueError: a wrong shape; mixing if that would mix the samples; more images than agreed on.
        """
        require_views(online, target, self.width)
        layout = layout_of(self._layouts, len(online), online[0], dtypes_of(online, target), self.row.decay)
        self._require_batch(len(online), mix, layout)
        if self.training:
            require_no_recomputation()
        with torch.no_grad(), without_autocast(layout.device):
            batch = normalise(self.row, online, target, layout, partial(self.gather, raised=layout.raised))
            negative = self._negative(batch, layout, mix)
            if self.row.normalisation == "l2" and self.row.positive == "identity" and not self.row.centred:
                gradient_MC, terms = self._fused(batch, negative, layout, mix)
            else:
                gradient_MC, terms = self._composed(batch, negative, mix)
            sums = self._sums(batch, negative, online, target, mix) if self.measures else {}
            if self.training and self.bank is not None:
                self.bank.take_(self._samples(batch), batch.gathered.raised[self._flag])
        loss = attach_gradient(terms, gradient_MC, embeddings=online)
        # `data` is not a view to autograd: changing one metric in place does not invalidate the others.
        named = dict(zip(TERMS, (term.data for term in terms.unbind()), strict=True))
        nonfinite = batch.gathered.raised[0].to(terms.dtype)
        unit_MC = batch.unit_online[: 2 * layout.images]
        return ObjectiveOutput(loss, named, nonfinite, unit_MC, sums, self.over_ranks, self.process_group)

    @property
    def updates(self) -> Tensor:
        state = self.average or self.bank
        return super().updates if state is None else state.updates

    @property
    def _flag(self) -> int:
        """Index of the flag that blocks updates of the state: the flag of the branch the samples come from."""
        return 0 if self.row.source == "online" else 1

    def _positives(self, batch: Normalised, mix: Mix | None) -> Tensor:
        """m⁺, [V, N, C]; computed only if needed, because the kernel does not need it."""
        return positives(batch.target.to(batch.exact), len(batch.online), mix)

    def _negative(self, batch: Normalised, layout: Layout, mix: Mix | None) -> Negative:
        row = self.row
        if self.bank is not None:
            return negatives.softmax_of_bank(row, batch, self._positives(batch, mix), self.bank)
        if row.negative == "softmax":
            gather = partial(self.gather, raised=layout.raised)
            return negatives.softmax_of_batch(row, batch, self._samples(batch).rows, gather)
        if row.negative == "cross_batch":
            return negatives.cross_batch(row, batch)
        if self.average is not None:
            return Negative(self._moving(batch, layout, self.average))
        return negatives.own_batch(row, batch)

    def _moving(self, batch: Normalised, layout: Layout, average: MovingCorrelation) -> Tensor:
        """u·F, or with a predictor W_h·u, after F was updated with the batch."""
        row, online_MC = self.row, batch.online.flatten(0, 1)
        dtype = layout.product_dtype if self.direct is None else batch.exact
        if self.training:
            skip = batch.gathered.skip[self._flag]
            average.take(self._samples(batch), layout.decay, skip, dtype)
            average.count(skip)
        if self.direct is None:
            return average.product(online_MC, dtype).view(batch.online.shape)
        operand = average.operand(batch.online, dtype)
        matrix_CC = self.direct.follow(operand, average.updates, row.every, row.predictor, row.epsilon)
        return (online_MC.to(batch.exact) @ matrix_CC).view(batch.online.shape)

    def _fused(self, batch: Normalised, negative: Negative, layout: Layout, mix: Mix | None) -> tuple[Tensor, Tensor]:
        """The gradient and the terms by UniGrad's kernel: −f·m⁺ + λ·negative with ℓ2-normalised embeddings."""
        row, rows = self.row, max(1, layout.rows)
        factor = row.positive_factor * (2 if row.both_terms else 1)
        scale = reported.constant_scale(row)
        first, second, ratio = layout.positives(mix)
        gradient_MC, sums = functional.embedding_gradient(
            negative.gradient.flatten(0, 1),
            batch.unit_online,
            batch.inverse_norm,
            batch.unit_target,
            balance=row.weight / factor,
            scale=factor * scale / rows,
            first=first,
            second=second,
            ratio=ratio,
            ticket=layout.ticket,
        )
        _, cosine, product, surrogate, _ = sums.unbind()
        cosine, product = cosine / (factor * scale), product / (factor * scale)
        objective = reported.of_means(row, cosine * row.positive_factor, product, negative)
        return gradient_MC, torch.stack([objective, cosine, product, surrogate])

    def _composed(self, batch: Normalised, negative: Negative, mix: Mix | None) -> tuple[Tensor, Tensor]:
        row, rows = self.row, max(1, batch.online.shape[0] * batch.online.shape[1])
        online_VNC, positive_VNC = batch.online.to(batch.exact), self._positives(batch, mix)
        scale: Tensor | float = reported.constant_scale(row)
        if self.direct is not None:
            step_VNC, along_VN1, product_VN1 = self._predicted(
                self.direct, online_VNC, positive_VNC, predicted_VNC=negative.gradient
            )
            if row.scale == "predictor":
                length_VN1 = torch.linalg.vector_norm(negative.gradient, dim=-1, keepdim=True)
                scale = torch.where(length_VN1 > 0, 1 / length_VN1, 0.0)
        else:
            if negative.diagonal is None:
                towards_VNC = row.positive_factor * positive_VNC
            else:
                towards_VNC = positive_VNC * (1 - (1 - row.weight) * negative.diagonal)
            along_VN1 = (online_VNC * towards_VNC).sum(-1, keepdim=True)
            product_VN1 = (online_VNC * negative.gradient).sum(-1, keepdim=True)
            step_VNC = row.weight * negative.gradient - towards_VNC
        if negative.centred is not None and negative.variance is not None:
            term_VNC = reported.variance_term(row, batch, negative.centred, negative.variance)
            step_VNC += online_VNC - row.weight * term_VNC
        step_VNC *= scale
        gradient_MC = through_normalisation(row, step_VNC, batch, 1 / rows, self._total)
        objective = reported.of_rows(row, batch, positive_VNC, along_VN1, product_VN1, scale, negative)
        unit_2NC = batch.unit_target.to(batch.exact).view_as(batch.target)
        unit_VNC = batch.unit_online.to(batch.exact).view_as(online_VNC)
        cosine = (unit_VNC * positives(unit_2NC, len(online_VNC), mix)).sum() / rows
        surrogate = (online_VNC * step_VNC).sum() / rows
        return gradient_MC, torch.stack([objective, cosine, product_VN1.sum() / rows, surrogate])

    def _predicted(
        self, direct: EigenPredictor, online_VNC: Tensor, positive_VNC: Tensor, predicted_VNC: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For each row −W_h·m⁺ + λ·G·u, u·W_h·m⁺ and u·G·u.

        G has the eigenvectors of W_h and is a polynomial in it: G = W_h² − a·W_h + b·I. So one more matrix product is
        enough: W_h·(λ·(W_h·u − a·u) − m⁺) + λ·b·u.
        """
        twice, constant = direct.coefficients(self.row.predictor, self.row.epsilon, like=predicted_VNC)
        along_VN1 = (predicted_VNC * positive_VNC).sum(-1, keepdim=True)
        less_VNC = predicted_VNC - twice * online_VNC
        product_VN1 = (predicted_VNC * less_VNC).sum(-1, keepdim=True)
        product_VN1 += constant * online_VNC.square().sum(-1, keepdim=True)
        weight: Tensor | float = self.row.weight
        if self.row.balance == "dynamic":
            weight = torch.where(product_VN1 > 0, along_VN1 / product_VN1, 0.0)
        step_VNC = less_VNC.mul_(weight).sub_(positive_VNC) @ direct.matrix.to(predicted_VNC)
        step_VNC += weight * constant * online_VNC
        return step_VNC, along_VN1, product_VN1

    def _sums(
        self,
        batch: Normalised,
        negative: Negative,
        online: Sequence[Tensor],
        target: Sequence[Tensor],
        mix: Mix | None,
    ) -> figures.Sums:
        """What `ObjectiveOutput.figures` needs of this row."""
        row, globals_2NC = self.row, batch.online[:2].to(batch.exact)
        unit_2NC, target_2NC = (each[: 2 * globals_2NC.shape[1]] for each in (batch.unit_online, batch.unit_target))
        sums = figures.of_pairs(unit_2NC.view_as(globals_2NC), target_2NC.view_as(globals_2NC))
        if self.direct is not None:
            rows = (globals_2NC, negative.gradient[:2], self._positives(batch, mix)[:2])
            lift = self.direct.lift(row.predictor, row.epsilon, globals_2NC)
            sums |= figures.of_predictor(*rows, self.direct.matrix.to(globals_2NC), lift)
        if row.negative == "cross_batch":
            sums |= figures.of_channels(torch.stack(list(online[:2])), torch.stack(list(target)))
        if negative.centred is not None and negative.variance is not None:
            term_2NC = reported.variance_term(row, batch, negative.centred[:2], negative.variance[:2])
            sums |= figures.of_neglected(globals_2NC / row.weight - term_2NC, negative.gradient[:2])
        if row.negative == "softmax" and row.samples != "bank" and self.target != "momentum":
            samples = self._samples(batch)
            sums |= figures.of_shared_samples(samples.rows, samples.own, row.temperature, samples.is_image)
        return sums

    def _samples(self, batch: Normalised) -> Gathered:
        """Both global views on all ranks, from the branch the samples come from."""
        rows_2KC = batch.all_online[:2] if self.row.source == "online" else batch.all_target
        return replace(batch.gathered, rows=rows_2KC)

    def _total(self, tensor: Tensor) -> Tensor:
        """The sum over ranks."""
        if self.over_ranks:
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def _require_batch(self, views: int, mix: Mix | None, layout: Layout) -> None:
        row = self.row
        if row.both_terms and (views > 2 or mix is not None):
            found = f"{views} views; leave local crops out" if views > 2 else "mixed ones; leave CutMix out"
            raise ValueError(f"both_terms needs two unmixed global views, not {found}")
        if mix is None:
            return
        if row.source == "online" or row.negative == "cross_batch":
            remedy = "; use correlation_source='target'" if row.negative == "moving_average" else ""
            raise ValueError(
                f"CutMix is refused for negative {row.negative!r} here: its samples are online embeddings, which with "
                f"CutMix come from mixed images{remedy}"
            )
        require_mix(mix, layout.images, layout.device)
