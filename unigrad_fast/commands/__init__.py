"""The sub-commands: one module per group, with an options class and a function for each.

torch, DeepSpeed and DALI are imported inside the functions that need them, so that `--help` answers at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from unigrad_fast.commands import (
    bench,
    checkpoint,
    compare,
    completion,
    data,
    doctor,
    evaluate,
    plan,
    pretrain,
    weights,
)
from unigrad_fast.config import Config, resolve
from unigrad_fast.runtime.outputs import require_whole_links
from unigrad_fast.runtime.validation import Node, validate
from unigrad_fast.runtime.variables import require_variables

COMMANDS: dict[str, tuple[type[Node], Callable[[Any], Any]]] = {
    "pretrain": (pretrain.Pretrain, pretrain.pretrain),
    "compare": (compare.Compare, compare.compare),
    "evaluate knn": (evaluate.EvaluateKNN, evaluate.evaluate_knn),
    "evaluate linear": (evaluate.EvaluateLinear, evaluate.evaluate_linear),
    "evaluate finetune": (evaluate.EvaluateFinetune, evaluate.evaluate_finetune),
    "evaluate features": (evaluate.EvaluateFeatures, evaluate.evaluate_features),
    "evaluate retrieve": (evaluate.EvaluateRetrieve, evaluate.evaluate_retrieve),
    "evaluate confusion": (evaluate.EvaluateConfusion, evaluate.evaluate_confusion),
    "evaluate map": (evaluate.EvaluateMap, evaluate.evaluate_map),
    "evaluate list": (evaluate.EvaluateList, evaluate.evaluate_list),
    "export": (weights.Export, weights.export),
    "import": (weights.Import, weights.import_weights),
    "data synth": (data.DataSynth, data.data_synth),
    "data scan": (data.DataScan, data.data_scan),
    "data shard": (data.DataShard, data.data_shard),
    "data presets": (data.DataPresets, data.data_presets),
    "data preview": (data.DataPreview, data.data_preview),
    "checkpoint show": (checkpoint.CheckpointShow, checkpoint.checkpoint_show),
    "checkpoint verify": (checkpoint.CheckpointVerify, checkpoint.checkpoint_verify),
    "plan": (plan.Plan, plan.plan),
    "bench step": (bench.BenchStep, bench.bench_step),
    "bench loader": (bench.BenchLoader, bench.bench_loader),
    "bench kernels": (bench.BenchKernels, bench.bench_kernels),
    "bench methods": (bench.BenchMethods, bench.bench_methods),
    "bench evaluate": (bench.BenchEvaluate, bench.bench_evaluate),
    "bench width": (bench.BenchWidth, bench.bench_width),
    "bench scaling": (bench.BenchScaling, bench.bench_scaling),
    "doctor": (doctor.Doctor, doctor.doctor),
    "completion": (completion.Completion, lambda options: completion.completion(options, COMMANDS)),
}
RENAMED = {"data recipes": "data presets"}  # older names, which still work


def checked(name: str, tree: Mapping[str, Any]) -> Node:
    """The options of a command. Raises UserError if they, or the environment's variables, cannot work.

    Args:
        tree: nested values, or texts as typed.
    """
    options, _ = COMMANDS[name]
    require_variables(os.environ)
    if issubclass(options, Config):
        return resolve(overrides=tree, model=options)
    given = validate(options, tree)
    require_whole_links(given)
    return given
