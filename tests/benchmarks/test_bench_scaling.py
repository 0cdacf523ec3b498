"""Ranks on one machine: what a spy sees in the real step is what the dry run counts without any rank."""

from __future__ import annotations

import json
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import forked
import pytest
from drawn_images import draw_tree
from thin import thin

from unigrad_fast import cli
from unigrad_fast.benchmarks.harness.processes import results
from unigrad_fast.benchmarks.harness.run_config import changed
from unigrad_fast.benchmarks.harness.turns import Turns
from unigrad_fast.benchmarks.measures import scaling as bench_scaling
from unigrad_fast.benchmarks.measures.scaling import RankBlock
from unigrad_fast.config import Config, resolve
from unigrad_fast.dry_run.cards import Card
from unigrad_fast.dry_run.walked import Collective, Walk
from unigrad_fast.runtime.collectives import Sum
from unigrad_fast.runtime.errors import UserError

IMAGES, WIDTH = 4, 48


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """CIFAR's recipe with a thin encoder on small images; F comes from the target."""
    folder = draw_tree(tmp_path_factory.mktemp("drawn") / "train", per_class=16)
    return resolve(
        "cifar_subset",
        {
            "data": {"train": folder, "image_size": 16, "threads": 1},
            "model": {"projector": {"width": WIDTH}},
            "objective": {"correlation_source": "target"},
        },
    )


def thin_process() -> ProcessPoolExecutor:
    pool = forked.new_pool()
    pool.submit(make_thin).result()
    return pool


def make_thin() -> None:
    thin().start()


def run(config: Config, ranks: tuple[int, ...], output: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict]:
    """The recorded rows, by what they are of."""
    monkeypatch.setattr(bench_scaling, "new_process", thin_process)
    with thin():
        bench_scaling.main(config, ranks, IMAGES, Turns(repetitions=1, steps=1), output)
    return {row["what"]: row for row in map(json.loads, (output / "scaling.jsonl").read_text().splitlines())}


@pytest.mark.slow  # tests/training/test_counted_collectives.py compares them by default
def test_a_spy_finds_the_collectives_that_the_dry_run_counts(config, tmp_path, monkeypatch, capsys):
    rows = run(config, (2,), tmp_path, monkeypatch)
    assert list(rows) == ["2 ranks, replicated", "2 ranks, sharded"]
    for row in rows.values():
        assert row["collectives"] == row["counted"]
        assert 0 < row["least"] <= row["median"] <= row["most"] and row["peak_gib"] > 0 and row["counted_gib"] > 0
        assert row.items() >= {"ranks": 2, "images_per_rank": IMAGES, "width": WIDTH, "zero_stage": 0}.items()
    whole, shard = (row["collectives"] for row in rows.values())
    exchanged = 4 * (2 * IMAGES + 1) * WIDTH  # the product of both views in fp32, with the row that says how many
    assert shard.pop("exchange") == {"count": 1, "bytes": exchanged}
    assert shard["gather"]["count"] == whole["gather"]["count"] + 1
    assert shard["reduce"] == whole["reduce"]
    shown = capsys.readouterr().out
    assert all(what in shown for what in rows) and shown.count("the same") == 2
    assert "ranks on one machine share its cores, so this shows how bytes and memory scale, not speed" in shown


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("changes", [{}, {"optimizer": {"name": "lars"}, "engine": {"accumulation_steps": 2}}])
def test_a_spy_finds_them_on_1_to_4_ranks_where_shards_differ_in_rows(changes, config, tmp_path, monkeypatch):
    rows = run(changed(config, {"model": {"projector": {"width": 50}}, **changes}), (1, 3, 4), tmp_path, monkeypatch)
    assert len(rows) == 5
    assert all(row["collectives"] == row["counted"] for row in rows.values())


def test_a_difference_between_spy_and_count_is_shown(capsys):
    walked = Walk(Card.of("h100"), 2, each_collective=[Collective("gather", 200, "norms", bytes=100)])
    for size, same in ((100, True), (101, False)):
        blocks = [[RankBlock(0.5, 2**30, {"gather": Sum(1, size)}), RankBlock(0.7, 2**31, {"gather": Sum(1, 7)})]]
        row = bench_scaling.row_of(2, "replicated", blocks, walked)
        assert (row["median"], row["peak_gib"]) == (700, 2)  # of the slower one, and of that with most
        bench_scaling.show(bench_scaling.new_console(), "title", [row])
        shown = capsys.readouterr().out
        assert ("the same" in shown) == same
        assert ("2 ranks, replicated: the real step made {'gather': {'count': 1, 'bytes': 101}}" in shown) != same


def test_of_ranks_that_fail_together_the_one_with_a_reason_is_heard():
    futures = [Future() for _ in range(3)]
    for future, error in zip(futures, (RuntimeError("peer"), UserError("why"), RuntimeError("peer")), strict=True):
        future.set_exception(error)
    with pytest.raises(UserError, match="why"):
        results(futures)


def test_more_ranks_than_rows_of_f_are_refused_before_anything_is_made(config, tmp_path):
    with thin(), pytest.raises(UserError, match="placement = sharded: 3 ranks cannot share 2 rows"):
        narrow = changed(config, {"model": {"projector": {"width": 2}}})
        bench_scaling.main(narrow, (3,), IMAGES, Turns(), tmp_path / "results")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("command", ["scaling", "width"])
def test_a_launcher_and_images_that_are_not_there_are_refused(command, config, monkeypatch, capsys, tmp_path):
    assert cli.main(["bench", command, "--data.train", f"{tmp_path}/nowhere"]) == 2
    assert f"data.train = {tmp_path}/nowhere: no such file or folder" in capsys.readouterr().err
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert cli.main(["bench", command, "--data.train", str(config.data.train)]) == 2
    assert f"bench {command} starts its own processes; run it without torchrun" in capsys.readouterr().err
