"""The loops of docs/methods.md, taken from the page as they stand, with every method in every form."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch

from unigrad_fast.objectives import build
from unigrad_fast.objectives.catalogue import FORMS as DECLARED
from unigrad_fast.objectives.catalogue import methods, name_of

PAGE = Path(__file__).resolve().parents[2] / "docs/methods.md"
FORMS = [
    (method, form)
    for method in methods()
    for form in ("gradient", "original")
    if name_of({"method": method, "form": form}) in DECLARED
]


@pytest.fixture(scope="module")
def examples() -> list[str]:
    section = PAGE.read_text(encoding="utf-8").partition("\n## In your own loop")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def settings_of(method: str, form: str) -> dict:
    own = {"moco": {"bank_size": 256}, "dino": {"prototypes": 64}, "twist": {"target": "weight_sharing"}}
    return {"form": form, **own.get(method, {})}


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


def test_the_plain_loop_trains_every_method(examples):
    plain, _ = examples
    torch.manual_seed(0)
    exec(compile(plain, "docs/methods.md", "exec"), names := {"__name__": "example"})
    assert loss_of(names["encoder"]) < loss_of(untrained(names["encoder"])) - 0.3
    for method, form in FORMS:
        encoder, objective = names["train"](method, steps=4, **settings_of(method, form))
        assert all(torch.isfinite(p).all() for p in [*encoder.parameters(), *objective.parameters()])
        assert type(objective) is type(build(method, width=32, **settings_of(method, form)))


def test_the_lightning_module_trains_every_method_and_saves_its_state(examples, tmp_path, monkeypatch):
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed; see the extra `lightning`")
    monkeypatch.chdir(tmp_path)  # where it writes its logs and checkpoints
    _, with_lightning = examples
    torch.manual_seed(0)
    exec(compile(with_lightning, "docs/methods.md", "exec"), names := {"__name__": "example"})
    module, loader = names["module"], torch.utils.data.DataLoader(names["pairs"][:128], batch_size=64)
    assert names["trainer"].global_step == 20 and {"loss", "positive_cosine"} <= names["trainer"].logged_metrics.keys()
    assert loss_of(module.encoder) < loss_of(untrained(module.encoder)) - 0.3
    for method, form in FORMS:
        before = names["Pretraining"](names["encoder"], width=32, method=method, **settings_of(method, form))
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, **quiet)
        trainer.fit(before, loader)
        trainer.save_checkpoint(path := tmp_path / f"{method}-{form}.ckpt")
        saved = torch.load(path, weights_only=True)["state_dict"]
        after = names["Pretraining"](names["encoder"], width=32, method=method, **settings_of(method, form))
        after.load_state_dict(saved)
        kept = after.objective.state_dict(prefix="objective.")
        assert all(torch.equal(saved[key], value) for key, value in kept.items())
