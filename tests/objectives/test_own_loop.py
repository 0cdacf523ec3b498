"""The loop of docs/own_loop.md, taken from the page as it stands."""

import importlib.util
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from drawn_images import draw_tree
from thin import thin

PAGE = Path(__file__).resolve().parents[2] / "docs/own_loop.md"
POISONED = 5  # micro-batch: the second of the third step


@pytest.fixture(scope="module")
def loop(tmp_path_factory) -> Path:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    path = tmp_path_factory.mktemp("own") / "own_loop.py"
    path.write_text(code, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return draw_tree(tmp_path_factory.mktemp("images") / "train", per_class=12)


def train(loop: Path, images: Path, checkpoint: Path) -> int:
    """The dropped steps of a run in small, one embedding of which is not finite; keeps every checkpoint."""
    spec = importlib.util.spec_from_file_location("own_loop", loop)
    own_loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own_loop)
    save, iterate = own_loop.save, own_loop.Loader.iterate

    def keep(path, step, parts):
        save(path, step, parts)
        shutil.copy(path, f"{path}.{step}")

    def poisoned(self, start, stop):
        for batch in iterate(self, start, stop):
            if batch.step == POISONED and self.rank == self.world_size - 1:
                batch.views[0][0] = torch.nan
            yield batch

    settings = own_loop.Settings(
        images=str(images),
        checkpoint=str(checkpoint),
        backbone="resnet18",
        image_size=32,
        width=16,
        batch_size=16,
        accumulation=2,
        steps=5,
        warmup=1,
        base_lr=1.0,
        momentum=0.9,
        save_every=1,
    )
    replaced = mock.patch.multiple(own_loop, save=keep), mock.patch.object(own_loop.Loader, "iterate", poisoned)
    with thin(), replaced[0], replaced[1]:
        return own_loop.train(settings)


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def equal(one: dict, other: dict, *parts: str) -> bool:
    pairs = [pair for part in parts for pair in zip(tensors(one[part]), tensors(other[part]), strict=True)]
    assert pairs
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loop_of_the_page_trains_drops_what_is_not_finite_and_goes_on_as_if_undisturbed(
    loop, images, tmp_path, workers, ranks
):
    whole, resumed = tmp_path / "whole.pt", tmp_path / "resumed.pt"
    assert workers(ranks).run(train, loop, images, whole) == [1] * ranks
    saved = [torch.load(f"{whole}.{step}", weights_only=True) for step in range(1, 6)]
    networks = ("online", "target", "optimizer")
    assert equal(saved[1], saved[2], *networks)  # the third step was dropped
    assert not any(equal(saved[step], saved[step + 1], name) for step in (0, 2, 3) for name in networks)
    assert all(tensor.isfinite().all() for tensor in tensors(saved[-1]))
    assert not equal(saved[1], saved[2], "objective")  # its first micro-batch was good
    shutil.copy(f"{whole}.2", resumed)
    assert workers(ranks).run(train, loop, images, resumed) == [1] * ranks
    assert equal(torch.load(resumed, weights_only=True), saved[-1], *networks, "objective")
