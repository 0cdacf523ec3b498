"""`pretrain` as a function, and the run that it returns."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unigrad_fast.commands.pretrain import Pretrain
from unigrad_fast.commands.requirements import require_run
from unigrad_fast.config import Config, resolve
from unigrad_fast.interface.calls import called, described, parameters
from unigrad_fast.interface.results import Displayed, Picture, Table
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.validation import absolute, shown

if TYPE_CHECKING:
    from unigrad_fast.interface.encoders import ImageEncoder
    from unigrad_fast.training.telemetry.callbacks import OnCheckpoint, OnEvaluation, OnStep

CALLBACKS = ("on_step", "on_evaluation", "on_checkpoint")


class Run(Displayed):
    """A run in its folder, finished or not; `Run("runs/a")` opens one. What it shows is read anew each time.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises UserError unless the folder holds a run."""
        self.path = absolute(Path(path))
        require_run(self.path)

    @property
    def config(self) -> Config:
        """All settings of the run."""
        return resolve(RunFolder(self.path).configuration)

    @property
    def metrics(self) -> Table:
        """The metrics of all reported steps, a row each; `run.metrics["loss"]` is a column."""
        return self._events("train")

    @property
    def evaluations(self) -> Table:
        """The kNN accuracies of the run, a row each; step 0 is the untrained encoder."""
        return self._events("knn")

    @property
    def summary(self) -> Mapping[str, Any]:
        """The final numbers; empty before the end. `stopped_by` names the callback that ended the run early."""
        path = RunFolder(self.path).summary
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The folders of the checkpoints that are kept, by step."""
        return RunFolder(self.path).checkpoints_by_step()

    def figures(self) -> Picture:
        """The curves so far, drawn anew: loss, cosine, kNN accuracy, signs of collapse, learning rate."""
        from unigrad_fast.training.telemetry.curves import draw

        return Picture(draw(self.path))

    def encoder(
        self,
        output: Literal["backbone", "embedding"] = "backbone",
        device: str = "auto",
        checkpoint: int | None = None,
    ) -> ImageEncoder:
        """The online encoder, by default of the newest checkpoint; see `load_encoder`."""
        from unigrad_fast.interface.encoders import load_encoder

        return load_encoder(self, output=output, device=device, checkpoint=checkpoint)

    def resume(self, **settings: Any) -> Run:
        """Goes on from the newest checkpoint; without one it starts over. A finished run is left as it is.

        Args:
            settings: callbacks, and settings that a resumed run may change.
        """
        return pretrain(**{"recipe": RunFolder(self.path).configuration, "output": self.path, **settings})

    def _events(self, kind: str) -> Table:
        from unigrad_fast.training.telemetry.events import read_events

        events = read_events(self.path) if RunFolder(self.path).metrics.is_file() else []
        rows = [event for event in events if event["event"] == kind]
        return Table({name: value for name, value in row.items() if name != "event"} for row in rows)

    def _rows(self) -> list[tuple[str, str]]:
        metrics, evaluations, config = self.metrics, self.evaluations, self.config
        rows: list[tuple[str, Any]] = [("path", self.path), ("recipe", config.recipe)]
        if len(metrics):
            rows.append(("epoch", f"{metrics[-1]['epoch']:.4g} of {config.schedule.epochs}"))
            rows += [(name, f"{metrics[-1][name]:.4g}") for name in ("loss", "feature_std") if metrics[-1].get(name)]
        rows += [("kNN accuracy", f"{evaluations[-1]['accuracy']:.2f} %")] if len(evaluations) else []
        if stopped := self.summary.get("stopped_by"):
            rows.append(("stopped by", stopped))
        return [(name, str(value)) for name, value in rows]


def pretrain(
    *,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    **settings: Any,
) -> Run:
    """Pretrain an encoder on images. A folder with an unfinished run is resumed, as if it had not been interrupted.

    Callbacks are called on rank 0. StopRun from one ends the run well, within two steps; any other error is raised as
    it is, and nothing more is saved.

    Args:
        on_step: called with a reported step, counted from 1, and its metrics; every `telemetry.every`-th is reported.
        on_evaluation: called with a step and its kNN accuracy; step 0 is the untrained encoder.
        on_checkpoint: called with a step and the folder of its checkpoint.
        settings: the keys of `unigrad-fast pretrain`, nested or with dots.

    Raises:
        UserError, DataError: settings or images that cannot work.
        RunStopped: the run stopped itself.
        Preempted: Ctrl-C, a notebook's stop button or SIGTERM; the run is saved, if it had begun.
    """
    from unigrad_fast.training.telemetry.callbacks import Callbacks

    if settings.get("print_config"):
        raise UserError("print_config = true: for the command line; `unigrad_fast.config.resolve` gives the settings")
    given: dict[str, Any] = dict(zip(CALLBACKS, (on_step, on_evaluation, on_checkpoint), strict=True))
    for name, callback in given.items():
        if callback is not None and not callable(callback):
            raise UserError(f"{name} = {shown(callback)}: must be a function of a step and what it brought")
    return Run(called("pretrain", settings, Callbacks(**given)))


pretrain.__doc__ = f"{inspect.getdoc(pretrain)}\n\n{described(Pretrain)}"
callbacks = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in CALLBACKS]
pretrain.__signature__ = inspect.Signature(parameters(Pretrain, callbacks))  # type: ignore[attr-defined]
