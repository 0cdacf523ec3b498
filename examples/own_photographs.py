# %% [markdown]
# # An encoder of your own photographs
#
# Look at the augmentation, train for two minutes on a CPU, judge, find similar photographs, export, load elsewhere.
# `examples/own_photographs.py` has the same cells; the outputs in the notebook are of two CPU cores.

# %%
from pathlib import Path

import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms import v2

from unigrad_fast import evaluate, export, load_encoder, pretrain
from unigrad_fast.images.drawing import draw
from unigrad_fast.images.preview import preview

# %% [markdown]
# Yours are a folder with `train/CLASS/*.jpg` and `val/CLASS/*.jpg`; classes are used only to judge. Without classes,
# put the photographs into `train`, set `"val": None` below, and leave out `evaluate.knn` and `evaluate.linear`.
# Photographs have more detail than the drawn images: take `"data.image_size": 96` or more, and more epochs.

# %%
PHOTOGRAPHS = draw("data/quickstart")  # built-in images; yours: Path("photographs")
SETTINGS = {"data.batch_size": 64, "data.image_size": 48, "schedule.epochs": 3}

# %% [markdown]
# ## The augmentation
#
# Training brings together the views in a row: each photograph with its two crops, as the encoder sees them.

# %%
preview(PHOTOGRAPHS / "train", Path("preview.png"), overwrite=True, recipe="quickstart")
Image.open("preview.png").convert("RGB").reduce(2)

# %% [markdown]
# ## Train
#
# An interrupted cell is resumed by running it again. To start over, give another `output`.

# %%
data = {"train": PHOTOGRAPHS / "train", "val": PHOTOGRAPHS / "val"}
run = pretrain(recipe="quickstart", data=data, output="runs/photographs", **SETTINGS)
print(run)

# %%
Image.open(run.figures()).convert("RGB").reduce(2)

# %% [markdown]
# ## Judge
#
# Do nearest neighbours share a class? More often than by their pixels, colours, or the untrained encoder?
# After two minutes, somewhat; on the built-in images the 12 epochs of the recipe reach 64 to 70 %.

# %%
evaluate.knn(run, baselines=True)

# %%
evaluate.linear(run)

# %% [markdown]
# ## Similar photographs

# %%
photograph = min(file for file in PHOTOGRAPHS.glob("val/**/*") if file.suffix.lower() in (".jpg", ".jpeg", ".png"))
found = evaluate.retrieve(run, photograph, k=5)
Image.open(found.picture).convert("RGB").reduce(2)

# %% [markdown]
# ## Export, and load elsewhere

# %%
exported = export(run, format="safetensors", overwrite=True)

# %% [markdown]
# `load_encoder` prepares photographs itself. In torchvision the transform is that which `export` has printed.

# %%
encoder = load_encoder(exported)
feature = encoder(Image.open(photograph))
print(feature.shape)

# %%
network = torchvision.models.resnet18()
network.fc = torch.nn.Identity()
network.load_state_dict(load_file(exported.path))
size = run.config.data.image_size
transform = v2.Compose([v2.Resize(size), v2.CenterCrop(size), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])
normalise = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
with torch.no_grad():
    same = network.eval()(normalise(transform(Image.open(photograph).convert("RGB")))[None])
print("cosine of both features:", round(float(torch.cosine_similarity(feature, same)), 4))
