"""Outputs of objectives and batches are printed in a line or two, without the content of their tensors."""

import torch

from unigrad_fast.objectives import UniGrad
from unigrad_fast.pipelines import Batch, Mix


def test_an_output_shows_numbers_and_the_shapes_of_tensors():
    ones = torch.ones(4, 8)
    said = repr(UniGrad(width=8, balance=1.0)(online=[ones, ones], target=[ones, ones]))
    assert said.startswith("ObjectiveOutput(loss=-0.5, metrics={'objective': -0.5, 'positive_cosine': 1, ")
    assert "nonfinite=0, unit=float32 [8, 8], sums={}, over_ranks=False, process_group=None)" in said
    assert "tensor" not in said


def test_a_batch_shows_the_shapes_of_its_views():
    flags, views = torch.zeros(2, dtype=torch.bool), torch.zeros(2, 3, 4, 4)
    mix = Mix(torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2), torch.zeros(2, 2, 4, dtype=torch.int64))
    batch = Batch([views, views.half()], torch.arange(2), torch.arange(2), 7, flags, mix)
    assert repr(batch) == (
        "Batch(views=[float32 [2, 3, 4, 4], float16 [2, 3, 4, 4]], index=int64 [2], label=int64 [2], step=7, "
        "replaced=bool [2], mix=Mix(partner=int64 [2, 2], ratio=float32 [2, 2], box=int64 [2, 2, 4]), failures=[], "
        "lost='')"
    )


def test_scalars_without_content_show_their_dtype():
    output = UniGrad(width=8)
    with torch.device("meta"):
        nothing = torch.ones(())
    out = output(online=[torch.ones(2, 8)] * 2, target=[torch.ones(2, 8)] * 2)
    out.loss = nothing
    assert repr(out).startswith("ObjectiveOutput(loss=float32 [], ")
