"""`unigrad-fast export` and `import`: write a run's weights for other programs, read the authors' weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from unigrad_fast.commands.requirements import require_run
from unigrad_fast.runtime.outputs import Written
from unigrad_fast.runtime.validation import AbsolutePath, ImageSource, Node


class Export(Node):
    """Write a run's backbone for torchvision, with a description of it."""

    run: AbsolutePath
    """Folder of the run."""
    format: Literal["torchvision", "safetensors"] | None = None
    """torch.save or safetensors, with the same names; null follows the extension of output, else safetensors."""
    branch: Literal["online", "target"] = "online"
    """Branch of the backbone."""
    with_linear: bool = False
    """Add the linear probe of `evaluate linear` as the layer fc."""
    checkpoint: int | None = Field(default=None, ge=0)
    """Step of the checkpoint; null is the newest."""
    probe: AbsolutePath | None = None
    """File of the linear probe; null is that of these weights by the paper's protocol, else by the quick one."""
    output: AbsolutePath | None = None
    """File to write, ending in .safetensors, .pth or .pt; null is RUN/export/BACKBONE-BRANCH-epochE.ENDING."""
    overwrite: bool = False
    """Replace an existing file and its description."""


def export(options: Export) -> Written:
    require_run(options.run)
    from unigrad_fast.checkpoints import export

    return export.export(**dict(options))


class ImportData(Node):
    train: ImageSource | None = None
    """Training images for evaluating the run: a folder, list or shards."""
    val: ImageSource | None = None
    """Validation images for evaluating the run: a folder, list or shards."""


class Import(Node):
    """Turn a checkpoint of the authors' code into a run that can be evaluated and exported."""

    file: AbsolutePath
    """File that the authors' code saved, or a safetensors file with the same names."""
    run: AbsolutePath
    """New folder of the run."""
    data: ImportData = ImportData()
    """Images."""


def import_weights(options: Import) -> None:
    from unigrad_fast.checkpoints import authors

    authors.import_run(options.file, options.run, options.data.train, options.data.val)
