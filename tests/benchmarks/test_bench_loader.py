"""The benchmark of the data path: its torchvision variants do what ours does, and every variant is measured."""

import io
import json
import tarfile
import time
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2

from unigrad_fast import cli
from unigrad_fast.benchmarks.harness import images
from unigrad_fast.benchmarks.measures import loader as bench_loader
from unigrad_fast.benchmarks.measures import loader_blocks as loader_measure
from unigrad_fast.benchmarks.measures import loader_sources
from unigrad_fast.benchmarks.peers import loader as loader_variants
from unigrad_fast.images import drawing
from unigrad_fast.images.drawn_pictures import draw_pictures
from unigrad_fast.pipelines import Manifest
from unigrad_fast.pipelines.presets import DEVIATION, MEAN, PRESETS, View
from unigrad_fast.runtime.errors import DataError, UserError


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    return drawing.draw(folder / "drawn", train_per_class=1, val_per_class=1, size=48) / "train"


def setting(folder: Path, views: tuple[View, ...], threads: int = 1) -> loader_variants.Setting:
    return loader_variants.Setting(views, folder, folder.parent / "cache", 4, threads, "cpu")


@pytest.mark.parametrize("what", loader_variants.TORCHVISION)
def test_without_chance_torchvisions_views_are_the_resized_image(what, tmp_path):
    sure = View(
        size=16,
        scale=(1, 1),
        ratio=(1, 1),
        jitter_probability=0,
        gray_probability=1,
        blur_probability=1,
        blur_sigma=(1, 1),
        solarize_probability=1,
        flip_probability=0,
    )
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(4):
        Image.fromarray(draw_pictures(np.random.default_rng(0), "plain-star", 1, 32)[0]).save(folder / f"{number}.png")
    batches = loader_variants.VARIANTS[what](setting(folder, (sure,)))
    views = next(batches)
    batches.close()
    with Image.open(folder / "0.png") as image:
        expected = transforms.functional.pil_to_tensor(image.resize((16, 16), Image.Resampling.BILINEAR))
    expected = v2.functional.gaussian_blur(v2.functional.rgb_to_grayscale(expected, 3), 7, 1.0)
    expected = v2.functional.solarize(expected, 128)
    shown = views[0] * torch.tensor(DEVIATION)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    assert len(views) == 1 and views[0].shape == (4, 3, 16, 16) and views[0].dtype == torch.float32
    # Pillow and torch round apart by a level or two; at the threshold of solarisation that mirrors the level.
    assert (255 * shown - expected).abs().median() <= 2


@pytest.mark.parametrize("what", [loader_variants.OURS, *loader_variants.TORCHVISION])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_the_views_of_ours(what, preset, drawn):
    views = tuple(View(**{**vars(view), "size": 8 + view.size // 32}) for view in PRESETS[preset].views)
    batches = loader_variants.VARIANTS[what](setting(drawn, views))
    made = next(batches)
    batches.close()
    assert [tuple(view.shape) for view in made] == [(4, 3, view.size, view.size) for view in views]


def test_processor_time_counts_the_worker_processes(drawn):
    worker = loader_measure.LoaderWorker(lambda chosen: loader_variants.torch_batches(chosen, burn), setting(drawn, ()))
    block = worker.block(2)
    worker.close()
    assert block.cpu_ms > 10  # of the 20 that each image burns there


def burn(data: bytes) -> int:
    end = time.process_time() + 0.02
    while time.process_time() < end:
        pass
    return 0


def test_images_of_a_tar_are_used_and_damaged_ones_left_out(drawn, tmp_path):
    archive = tmp_path / "some.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(drawn, "tree/train")
        broken = tarfile.TarInfo("tree/train/broken.jpg")
        broken.size = 4
        tar.addfile(broken, io.BytesIO(b"none"))
    paths, what = images.find_images(archive, tmp_path / "found")
    assert len(paths) == 10
    assert what == "10 images of some.tar (1 ignored because they cannot be decoded)"
    linked = Manifest.open(images.link_images((paths[i] for i in images.spread_evenly(10, 25)), tmp_path / "linked"))
    assert len(linked) == 25
    assert len({Path(linked.path(i)).resolve() for i in range(25)}) == 10


def test_archive_without_images_is_refused(tmp_path):
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    with pytest.raises(DataError, match=r"empty\.tar.*give a folder of images"):
        images.find_images(tmp_path / "empty.tar", tmp_path / "found")


def test_large_manifest_is_thinned_out_evenly(drawn, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "ENTRIES", 4)
    found = Manifest.open(drawn)
    paths, _ = images.find_images(drawn, tmp_path / "found")
    assert [str(path) for path in paths] == [found.path(i) for i in (0, 3, 6, 9)]


def test_median_and_range_are_over_the_rounds_and_the_best_of_torchvision_is_named():
    blocks = {
        what: [loader_measure.Block(factor * speed, 10.0 * factor) for speed in (1.0, 4.0, 2.0)]
        for factor, what in enumerate(loader_variants.VARIANTS, start=1)
    }
    rows = {row["what"]: row for row in bench_loader.rows_of(blocks, views=8)}
    mine = rows["ours"]
    assert [mine[key] for key in ("median", "least", "most", "views_per_s")] == [2.0, 1.0, 4.0, 16.0]
    assert rows["torchvision v1"]["cpu_ms_median"] == 20.0
    assert rows["images/s, ours / torchvision v2, tensors, its best"]["median"] == 1 / 4
    assert rows["processor time, torchvision v2, tensors / ours"]["most"] == 4.0
    assert rows["DALI, decoding alone"]["views_per_s"] == 0


def test_slope_of_memory_is_per_epoch():
    row = bench_loader.memory_row([100.0, 102.0, 104.0])
    assert row["slope"] == pytest.approx(2.0)
    assert row["median"] == 102.0


def test_every_variant_is_measured_and_recorded(drawn, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_loader, "SMALL_ENTRIES", 16)
    monkeypatch.setattr(loader_measure, "new_process", forked.new_pool)
    arguments = {"photographs": drawn, "preset": "multicrop", "image_size": 32, "batch_size": 4, "threads": 2}
    arguments["output"] = tmp_path / "results"
    words = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
    assert cli.main(["bench", "loader", *words, "--rounds", "1", "--steps", "1", "--epochs", "2"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "results/loader.jsonl").read_text().splitlines()]
    variants = [row for row in rows if row["unit"] == "images/s"]
    assert [row["what"] for row in variants] == list(loader_variants.VARIANTS)
    for row in variants:
        assert 0 < row["least"] <= row["median"] <= row["most"]
        assert 0 < row["cpu_ms_least"] <= row["cpu_ms_median"] <= row["cpu_ms_most"]
    ratios = [row for row in rows if row["unit"] == "ratio"]
    assert len(ratios) == 5 and all(row["least"] > 0 for row in ratios)
    (memory,) = [row for row in rows if row["unit"] == "MiB"]
    assert len(memory["after_epochs"]) == 2 and memory["least"] > 50
    settings = {"recipe": "multicrop", "views": "2x32 + 6x96", "batch_size": 4, "threads": 2, "rounds": 1, "steps": 2}
    for row in rows:
        assert row.items() >= settings.items()
        assert row["images"] == f"10 images of {drawn.name}"
        assert row.keys() >= {"commit", "processor", "torch", "torchvision", "dali", "pillow"}
    shown = capsys.readouterr().out
    assert "CPU ms" in shown and "MiB per epoch" in shown


def test_sources_are_compared_with_files(drawn, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loader_sources, "ENTRIES", 20)
    monkeypatch.setattr(loader_measure, "new_process", forked.new_pool)
    words = f"--photographs {drawn} --image_size 16 --batch_size 4 --threads 1 --rounds 1 --steps 1".split()
    every = ",".join(loader_sources.SOURCES)
    assert cli.main(["bench", "loader", "--source", every, *words, "--output", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "loader.jsonl").read_text().splitlines()]
    assert [row["what"] for row in rows if row["unit"] == "images/s"] == list(loader_sources.SOURCES)
    ratios = {row["what"] for row in rows if row["unit"] == "ratio"}
    assert "images/s, parquet / files" in ratios and "bytes alone, time of files / hf" in ratios and len(ratios) == 8
    assert all(row["least"] > 0 and row["measure"] == "sources" and "dali" in row for row in rows)
    assert "images/s, pixels / files" in capsys.readouterr().out
    assert cli.main(["bench", "loader", "--source", "tar"]) == 2
    assert "source = tar: must be one of files, hf" in capsys.readouterr().err


def test_sources_give_the_same_images(drawn, tmp_path):
    files = images.link_images(sorted(drawn.glob("*/*.jpg")), tmp_path / "images")
    loader_sources.write_tables(files, tmp_path / "tables")
    found = {
        kind: Manifest.open(loader_sources.source_of(kind, files, tmp_path / "tables"), tmp_path / "cache")
        for kind in loader_sources.SOURCES
    }
    whole = [found["files"].read(image) for image in range(10)]
    for kind in ("hf", "parquet"):
        assert [found[kind].read(image) for image in range(10)] == whole
    assert [bytes(found["dataset"].read(i)) for i in range(10)] == [bytes(found["pixels"].read(i)) for i in range(10)]


def test_gpu_is_refused_where_there_is_none(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "loader", "--device", "gpu"]) == 2
    assert "use --device cpu" in capsys.readouterr().err


def test_batches_beyond_shared_memory_are_refused(tmp_path):
    with pytest.raises(UserError, match="--shm-size"):
        bench_loader.require_shared_memory(setting(tmp_path, (View(size=100_000),) * 8))
