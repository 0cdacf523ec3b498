"""The table of tile shapes."""

import itertools
import json

import pytest
import torch

from unigrad_fast import cli
from unigrad_fast.benchmarks.measures import tiles as tune_kernels
from unigrad_fast.kernels import heuristics
from unigrad_fast.kernels.heuristics import TABLE, TRIANGLE, Tile, architecture, choose, row_tile, tiles

ARCHITECTURES = ("80", "86", "90", "100", "interpreter")
KINDS = ("half", "tf32", "tf32x3", "ieee")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_problem_has_tiles_that_fit_the_triangle(arch, kind):
    for rows, width in itertools.product((1, 256, 1024, 8192), (8, 1000, 2048, 16384, 65536)):
        update, product = (choose(kernel, arch, kind, rows, width) for kernel in ("update", "product"))
        assert update.rows == update.columns and TRIANGLE % update.rows == 0
        assert TRIANGLE % product.columns == 0 and product.columns % product.depth == 0


def test_the_last_entry_that_a_problem_reaches_is_taken(monkeypatch, tmp_path):
    entries = [{"width": w, "rows": r, "tile": [n, n, 64, 4, 3]} for w, r, n in ((0, 0, 16), (100, 0, 32), (50, 9, 64))]
    table = tmp_path / "tiles.json"
    table.write_text(json.dumps({"update": {"90": {"half": entries}}}))
    monkeypatch.setattr(heuristics, "TABLE", table)
    for cached in (tiles, choose):
        cached.cache_clear()
    try:
        chosen = [choose("update", "90", "half", rows, width).rows for rows, width in ((1, 8), (8, 100), (9, 60))]
        assert chosen == [16, 32, 64]
    finally:
        for cached in (tiles, choose):
            cached.cache_clear()


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "80"), ((8, 6), "86"), ((8, 9), "86"), ((9, 0), "90"), ((10, 0), "100"), ((12, 0), "86")],
)
def test_cards_get_the_tiles_of_their_matrix_units_and_shared_memory(capability, arch):
    assert architecture(capability) == arch


def test_a_row_is_held_whole_as_far_as_the_registers_reach():
    for width in (1, 8, 1000, 2048, 16384, 65536):
        assert row_tile(width)[0] >= width
        assert row_tile(width)[0] < 2 * max(width, 8) + 1
    assert row_tile(16384, arrays=3)[0] == 16384 and row_tile(16385, arrays=3)[0] < 16385


def test_the_tuner_tries_only_tiles_that_fit_the_triangle():
    for kernel, precision in itertools.product(("update", "product"), tune_kernels.ARITHMETICS):
        found = list(tune_kernels.candidates(kernel, precision))
        assert len(found) == len(set(found)) > 10
        for tile in found:
            assert TRIANGLE % tile.columns == 0 and tile.columns % tile.depth == 0
            assert kernel == "product" or tile.rows == tile.columns


def test_the_tuner_writes_the_table_that_is_read_one_line_per_entry(monkeypatch):
    tried = []

    def fastest(kernel: str, precision: str, rows: int, width: int, report) -> Tile:
        tried.append((rows, width))
        return Tile(64, 64, 32, 4, rows % 7)

    monkeypatch.setattr(tune_kernels, "fastest", fastest)
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    assert tune_kernels.rendered(table) == TABLE.read_text(encoding="utf-8")
    found = tune_kernels.entries("update", "bf16", lambda line: None)
    assert (found[0]["width"], found[0]["rows"]) == (0, 0) and len(found) == len(tried) == 10
    table["update"]["90"]["half"] = found
    assert json.loads(tune_kernels.rendered(table)) == table


def test_the_tuner_refuses_a_tile_that_computes_something_else_and_says_so(monkeypatch):
    right, wrong, halting = (Tile(64, 64, depth, 4, 3) for depth in (16, 32, 64))
    expected, said = torch.eye(8) + 1, []

    def launch(tile: Tile) -> list[torch.Tensor]:
        if tile == halting:
            raise RuntimeError("out of resources")
        result = expected.clone()
        if tile == wrong:
            result[3, 5:] = 0
        return [result]

    problem = tune_kernels.Problem(launch, expected, upper=False)
    monkeypatch.setattr(tune_kernels, "problem", lambda *_: problem)
    monkeypatch.setattr(tune_kernels, "candidates", lambda *_: iter([wrong, halting, right]))
    monkeypatch.setattr(tune_kernels, "seconds", lambda run, device, steps: 1.0 if run.args == (right,) else 0.1)
    assert tune_kernels.fastest("update", "bf16", 8, 8, said.append) == right
    assert len(said) == 1 and f"{wrong} is refused, its error is" in said[0]


def test_tuning_without_a_gpu_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["bench", "kernels", "--tune", "true"]) == 2
    assert "this machine has none" in capsys.readouterr().err
    assert cli.main(["bench", "kernels", "--tune", "true", "--compile_only", "true"]) == 2
