"""The loops of `examples/pieces`, as they stand, with every method in every form."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from unigrad_fast.objectives import build
from unigrad_fast.objectives.catalogue import FORMS as DECLARED
from unigrad_fast.objectives.catalogue import methods, name_of

PIECES = Path(__file__).resolve().parents[2] / "examples/pieces"
FORMS = [
    (method, form)
    for method in methods()
    for form in ("gradient", "original")
    if name_of({"method": method, "form": form}) in DECLARED
]


def settings_of(method: str, form: str) -> dict:
    return {"form": form, **({"bank_size": 256} if method == "moco" else {})}


def loss_of(encoder: torch.nn.Module) -> float:
    """SimCLR's, of images that the encoder has not seen."""
    images, noise = torch.randn(2, 64, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        views = [encoder(images), encoder(images + 0.1 * noise)]
        return build("simclr", width=32).eval()(online=views, target=views).loss.item()


def untrained(encoder: torch.nn.Module) -> torch.nn.Module:
    other = copy.deepcopy(encoder)
    for layer in other:
        getattr(layer, "reset_parameters", lambda: None)()
    return other


def test_the_plain_loop_trains_every_method():
    torch.manual_seed(0)
    train = runpy.run_path(str(PIECES / "objective.py"))["train"]
    encoder, _ = train("simclr", temperature=0.2)
    assert loss_of(encoder) < loss_of(untrained(encoder)) - 0.3
    for method, form in FORMS:
        encoder, objective = train(method, steps=4, **settings_of(method, form))
        assert all(torch.isfinite(p).all() for p in [*encoder.parameters(), *objective.parameters()])
        assert type(objective) is type(build(method, width=32, **settings_of(method, form)))


def test_the_lightning_module_trains_every_method_and_saves_its_state(tmp_path, monkeypatch):
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed; see the extra `lightning`")
    monkeypatch.chdir(tmp_path)  # where it writes its logs and checkpoints
    torch.manual_seed(0)
    Pretraining = runpy.run_path(str(PIECES / "lightning_module.py"))["Pretraining"]
    encoder = nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 16 * 16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32)
    )
    images = torch.randn(640, 3, 16, 16)
    pairs = [(image + 0.1 * torch.randn_like(image), image + 0.1 * torch.randn_like(image)) for image in images]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    quiet |= {"accelerator": "cpu", "logger": False}
    module, trainer = Pretraining(encoder, 32, "simclr", temperature=0.2), lightning.Trainer(max_epochs=2, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(pairs, batch_size=64))
    assert trainer.global_step == 20 and {"loss", "positive_cosine"} <= trainer.logged_metrics.keys()
    assert loss_of(module.encoder) < loss_of(untrained(module.encoder)) - 0.3
    for method, form in FORMS:
        before = Pretraining(encoder, width=32, method=method, **settings_of(method, form))
        trainer = lightning.Trainer(max_epochs=1, **quiet)
        trainer.fit(before, torch.utils.data.DataLoader(pairs[:128], batch_size=64))
        trainer.save_checkpoint(path := tmp_path / f"{method}-{form}.ckpt")
        saved = torch.load(path, weights_only=True)["state_dict"]
        after = Pretraining(encoder, width=32, method=method, **settings_of(method, form))
        after.load_state_dict(saved)
        kept = after.objective.state_dict(prefix="objective.")
        assert all(torch.equal(saved[key], value) for key, value in kept.items())
