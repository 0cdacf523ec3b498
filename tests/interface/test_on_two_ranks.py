"""Under a launcher every rank gets the run and the results, and a callback's word holds for all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from command_process import free_port
from forked import start
from tiny_run import settings_of, tiny


def work(images: Path, folder: Path) -> None:
    from unigrad_fast import StopRun, evaluate, export, pretrain

    steps = []

    def stop(step: int, metrics: object) -> None:
        steps.append(step)
        raise StopRun

    with tiny():
        stopped = pretrain(**settings_of(images), output=folder / "run", on_step=stop)
        at = stopped.summary["steps"]
        run = stopped.resume()
        judged = evaluate.knn(run, k=5)
        again = evaluate.linear(run)
        export(run) if os.environ["RANK"] == "0" else None
    told = {
        **{"run": str(run.path), "stopped at": at, "called": steps, "steps": run.metrics["step"]},
        **{"knn": [judged.accuracy, str(judged.path)], "linear": [again.accuracy, str(again.path)]},
    }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(told))


@pytest.mark.long
def test_every_rank_gets_the_run_and_the_results(images, tmp_path):
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared["TORCHELASTIC_RUN_ID"] = "none"
    ranks = [
        start(work, images, tmp_path, environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    for rank in ranks:
        rank.join(300)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first.pop("called") == [1, 2, 3] and second.pop("called") == []
    assert first == second
    assert first["stopped at"] == 3 and first["steps"] == list(range(1, 7))
    assert json.loads(Path(first["knn"][1]).read_text())["accuracy"]["trained encoder"] == first["knn"][0]
