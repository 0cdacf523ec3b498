"""The scripts of docs/pieces.md are those of `examples/pieces`, and do what the page says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
import torchvision
from drawn_images import draw_tree
from pages import ROOT, fences
from thin import thin

from unigrad_fast import cli
from unigrad_fast.runtime.errors import UserError

PAGE, FOLDER = ROOT / "docs/pieces.md", ROOT / "examples/pieces"


def piece(name: str) -> dict:
    """The names that a script defines, when it is imported."""
    return runpy.run_path(str(FOLDER / f"{name}.py"))


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for part in ("train", "val"):
        draw_tree(root / part, per_class=12)
    return root


@pytest.fixture(autouse=True)
def small():
    torch.manual_seed(0)
    with thin():
        yield


def test_the_page_has_the_scripts():
    names = re.findall(r"^<!-- (\w+)\.py -->\n```python$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(names) == sorted(file.stem for file in FOLDER.glob("*.py"))
    scripts = [("python", (FOLDER / f"{name}.py").read_text(encoding="utf-8")) for name in names]
    assert fences(PAGE) == scripts


def test_the_loader_feeds_a_loop_which_goes_on_where_it_was_interrupted(images, capsys):
    train = piece("data")["train"]
    train(images / "train", batch_size=8, image_size=32, stop_step=4)
    train(images / "train", batch_size=8, image_size=32, start_step=2, stop_step=4)
    steps = re.findall(r"step (\d+)  loss \d", capsys.readouterr().out)
    assert steps == ["0", "1", "2", "3", "2", "3"]


def test_our_encoder_trains_in_a_loop_of_torch(images, capsys):
    encoder = piece("encoder")["train"](images / "train", batch_size=8, steps=2)
    assert len(re.findall(r"loss \d", capsys.readouterr().out)) == 2
    features = encoder.backbone(torch.randn(2, 3, 64, 64))
    assert features.shape == (2, encoder.backbone.feature_dim)


def test_the_optimizer_trains_a_network_and_drops_a_step_that_is_not_finite(capsys):
    images, labels = torch.randn(32, 3, 16, 16), torch.randint(10, [32])
    poisoned = images.clone()
    poisoned[3, 1, 5, 5] = torch.nan
    train = piece("optimizer")["train"]
    model = train([(images, labels), (poisoned, labels), (images, labels)], steps=3)
    assert capsys.readouterr().out.endswith("\n1 steps dropped\n")
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    train([(images, labels)] * 20, steps=20, base_lr=8.0)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0]


def test_the_target_follows_the_encoder_of_a_loop():
    train = piece("target")["train"]
    *_, first = train(steps=1)
    encoder, target, last = train(steps=30)
    assert last < first
    pairs = list(zip(target.parameters(), encoder.parameters(), strict=True))
    assert not any(slow.requires_grad or torch.equal(slow, fast) for slow, fast in pairs)


def test_weights_of_a_loop_become_a_run_that_is_judged_and_read_back(images, tmp_path):
    names, model = piece("checkpoint"), torchvision.models.resnet18()
    run = names["write"](model, tmp_path / "run", images)
    read = names["read"](run)
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("fc.")}
    assert own.keys() == read.state_dict().keys()
    assert all(torch.equal(tensor, own[name]) for name, tensor in read.state_dict().items())
    assert cli.main(["evaluate", "knn", str(run)]) == 0
    assert list((run / "evaluation").glob("knn-epoch10*.json"))
    with pytest.raises(UserError, match="exists already; give a new folder"):
        names["write"](model, run, images)


def test_the_loader_feeds_a_lightning_module(images, tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="Lightning is not installed; see the extra `lightning`")
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    draw_tree(Path("data/quickstart/train"), per_class=32)
    names = runpy.run_path(str(FOLDER / "lightning_module.py"), run_name="__main__")
    assert names["trainer"].global_step == 4  # two epochs of 64 images
    assert {"loss", "positive_cosine"} <= names["trainer"].logged_metrics.keys()
