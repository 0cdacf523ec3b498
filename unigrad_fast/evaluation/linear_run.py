"""`unigrad-fast evaluate linear`: the accuracy of a linear classifier on the frozen features of an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from unigrad_fast.evaluation import linear_paper, linear_quick, linear_sweep, linear_training
from unigrad_fast.evaluation.classes import without_unused
from unigrad_fast.evaluation.crop_training import few_steps
from unigrad_fast.evaluation.linear import WAS_FITTED, Judged
from unigrad_fast.evaluation.passes import read_features
from unigrad_fast.evaluation.results import folder_of, printed, write_result
from unigrad_fast.evaluation.runs import NOTHING_KEPT, Asked, opened, print_table
from unigrad_fast.evaluation.unfinished import Unfinished
from unigrad_fast.runtime.outputs import Written
from unigrad_fast.runtime.process_group import on_first
from unigrad_fast.runtime.wording import percent

SCHEDULES = {"paper": linear_paper.SCHEDULE, "sweep": linear_sweep.SCHEDULE}


def evaluate_linear(
    run: Path | None, protocol: str, changes: dict[str, int | float], choose: str, asked: Asked
) -> Written:
    """Print the accuracy of a linear classifier on a frozen backbone.

    Write it to RUN/evaluation/linear-PROTOCOL-epochE.json, and the classifier to a .safetensors file next to it.

    Args:
        run: the run folder; None with `asked.weights`.
        protocol: "quick", "paper" or "sweep".
        changes: fields of the schedule that differ from the protocol's.
        choose: on which images the sweep chooses: "val", or "train" for a held-out tenth of the training images.
        asked: checkpoint and images that override the run's.

    Raises:
        UserError: the run has no weights, labels or validation images.
        RunStopped: a feature or the loss is not finite, or too many images cannot be used.
        Preempted: in the paper's protocol, after saving.
    """
    folder = folder_of(run, asked.output)
    with opened(run, asked, "a linear classifier", WAS_FITTED) as this:
        classes: dict[str, Any] = {"classes": this.train.classes}
        train, val, numbers = without_unused(this.train, this.val)
        if numbers is not None:
            outputs = len(this.train.classes)
            classes = {"classes": train.classes, "numbers": numbers.tolist(), "outputs": outputs}
            this.say(
                f"{len(numbers):,} of {outputs:,} class numbers have training images; the classifier has only these"
            )
            this = replace(this, train=train, val=val)
        keeper = this.keeper(folder, asked)
        stem, unfinished, kept = this.stem(f"linear-{protocol}"), None, ""
        about: dict[str, Any] = {"protocol": protocol, **this.settings}
        if protocol == "quick":
            about |= {"l2": linear_quick.L2, "most_iterations": linear_quick.MOST_ITERATIONS}
            with this.preemption.nothing_to_save(NOTHING_KEPT):
                classifier = linear_quick.quick(this, keeper)
                judge = partial(Judged.by, this, classifier, read_features(this, this.val, "validation", keeper))
            done = NOTHING_KEPT
        else:
            schedule = replace(SCHEDULES[protocol], **changes)
            about |= {**asdict(schedule), "seed": this.config.seed}
            if protocol == "sweep":
                about["choose"] = choose
            unfinished = Unfinished(folder, stem, about, this.say)
            sweep = linear_sweep.Sweep(this, choose) if protocol == "sweep" else None
            encoder, method = (this, linear_paper.METHOD) if sweep is None else (sweep.encoder, sweep.method)
            if schedule.batch_size <= len(encoder.train):  # a larger one is refused
                for line in few_steps(len(encoder.train), schedule.batch_size, schedule.epochs):
                    this.say(line)
            classifier = linear_training.train(encoder, schedule, method, unfinished, this.preemption)
            judge = partial(Judged.by, this, classifier)
            if sweep is not None:
                judge = partial(sweep.judge, classifier, schedule.base_lr)
            kept = unfinished.kept("the trained classifier is")
            done = f"{kept}; repeat the command to continue"
        with this.preemption.nothing_to_save(done):
            judged = judge()
        branch = this.settings["branch"]
        title = f"linear probe, {branch}: {described(protocol, changes)}, {judged.images:,} validation images"
        row = (f"trained encoder, {this.name}", percent(judged.accuracy), percent(judged.top5))
        print_table(this.console, title, [row])
        if judged.said:
            this.say(judged.said)
        with printed(kept):
            written = on_first(
                lambda: write_result(
                    folder,
                    stem,
                    {**about, "images": judged.images},
                    {
                        **this.paths,
                        "counts": this.counts(),
                        "accuracy": judged.accuracy,
                        "top5": judged.top5,
                        **judged.figures,
                    },
                    {"weight": judged.classifier.weight, "bias": judged.classifier.bias},
                    classes,
                )
            )
            if unfinished is not None:
                on_first(unfinished.delete)
        this.say(written.line)
        this.tell(keeper)
        return written


def described(protocol: str, changes: Mapping[str, int | float]) -> str:
    """A linear protocol with its settings, and those that differ from the paper's."""
    if protocol == "quick":
        return (
            "quick protocol (logistic regression on standardised features of centre crops, "
            f"L2 {linear_quick.L2:g}, at most {linear_quick.MOST_ITERATIONS} iterations of L-BFGS)"
        )
    usual = asdict(SCHEDULES[protocol])
    settings = "".join(f", {key} {value:g}" for key, value in {**usual, **changes}.items())
    differing = ", ".join(f"{key} {value:g}" for key, value in changes.items() if value != usual[key])
    optimizer = {"paper": "LARS", "sweep": f"{linear_sweep.COUNT} classifiers by SGD"}[protocol]
    return f"{protocol} protocol ({optimizer} on random crops{settings})" + (f", but {differing}" if differing else "")
