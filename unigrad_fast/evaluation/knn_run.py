"""`unigrad-fast evaluate knn`: the weighted kNN accuracy of an encoder, and of baselines."""

from __future__ import annotations

from pathlib import Path

from unigrad_fast.evaluation.baselines import BASELINES
from unigrad_fast.evaluation.knn import PROTOCOL, KNNResult, require_k
from unigrad_fast.evaluation.knn_probe import FINDS_ITSELF, KNNProbe
from unigrad_fast.evaluation.passes import read_features
from unigrad_fast.evaluation.results import folder_of, printed, write_result
from unigrad_fast.evaluation.runs import NOTHING_KEPT, Asked, opened, print_table
from unigrad_fast.networks.encoder import build_encoder
from unigrad_fast.runtime.outputs import JUDGED, Written
from unigrad_fast.runtime.process_group import on_first
from unigrad_fast.runtime.wording import count, percent


def evaluate_knn(run: Path | None, baselines: bool, asked: Asked) -> Written:
    """Print the top-1 and top-5 accuracy of kNN on a backbone and write them to knn-epochE.json in RUN/evaluation.

    Args:
        run: the run folder; None with `asked.weights`.
        baselines: also evaluate raw pixels, colour histograms and the untrained encoder.
        asked: checkpoint, images and settings that override the run's.

    Raises:
        UserError: the run has no weights, labels or validation images, or `asked.k` exceeds the training images.
        RunStopped: a feature is not finite, or too many images cannot be used.
    """
    folder = folder_of(run, asked.output)
    with opened(run, asked, "kNN", FINDS_ITSELF) as this, this.preemption.nothing_to_save(NOTHING_KEPT):
        if isinstance(asked.k, int):
            require_k(asked.k, len(this.train))
        probe = KNNProbe(this.config.data, this.config.evaluation, this.world, this.train, this.val)
        rows: dict[str, KNNResult] = {}
        if baselines:
            for name, (features, size) in BASELINES.items():
                rows[name] = probe(features, None, image_size=size, crop_fraction=1.0)
            untrained = build_encoder(this.config.model, this.config.seed, this.world.device).backbone
            rows["untrained encoder"] = probe(untrained, this.dtype)
        keeper = this.keeper(folder, asked)
        found = (read_features(this, images, kind, keeper) for kind, images in this.images().items())
        rows[JUDGED] = probe.judge(found)
        for line in dict.fromkeys(line for row in rows.values() for line in row.left_out):
            this.say(line)
        this.left_out.update(training=len(this.train) - rows[JUDGED].bank)
        this.left_out.update(validation=len(this.val) - rows[JUDGED].queries)
        if few := probe.few_images(rows[JUDGED].bank):
            this.say(few)
        result = rows[JUDGED]
        title = (
            f"{PROTOCOL}, {this.settings['branch']}: k {result.k}, T {result.temperature:g}, "
            f"{result.queries:,} validation images against {result.bank:,} training images"
        )
        table = [(name, percent(row.accuracy), percent(row.top5)) for name, row in rows.items()]
        table[-1] = (f"trained encoder, {this.name}", *table[-1][1:])
        print_table(this.console, title, table)
        this.say(f"90 % of the variance of its features is in {count(result.components, 'principal component')}")
        settings = {key: getattr(result, key) for key in ("k", "temperature", "queries", "bank")}
        with printed():
            written = on_first(
                lambda: write_result(
                    folder,
                    this.stem("knn"),
                    {"protocol": PROTOCOL, **this.settings, **settings},
                    {
                        **this.paths,
                        "counts": this.counts(),
                        "accuracy": {name: row.accuracy for name, row in rows.items()},
                        "top5": {name: row.top5 for name, row in rows.items()},
                        "principal_components": {name: row.components for name, row in rows.items()},
                    },
                )
            )
        this.say(written.line)
        this.tell(keeper)
        return written
