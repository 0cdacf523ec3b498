"""`data preview`: boxes, views, texts and mixes on the sheet are those of training."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from drawn_images import draw_tree
from PIL import Image

from unigrad_fast import cli
from unigrad_fast.config import resolve, to_yaml
from unigrad_fast.images import preview
from unigrad_fast.images.preview_rows import Mixed, Row, collect, operations
from unigrad_fast.images.preview_sheet import (
    BADGE,
    GLOBAL_COLOURS,
    HEAD,
    LOCAL_COLOURS,
    ORIGINAL,
    Layout,
    _free_spot,
    draw,
    load_font,
    shortened,
)
from unigrad_fast.pipelines import CutMix, Loader, Manifest, View, graph, preset_views
from unigrad_fast.pipelines.order import epoch_order
from unigrad_fast.pipelines.parameters import sample
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.older_names import note

PLAIN = {"jitter_probability": 0.0, "gray_probability": 0.0, "blur_probability": 0.0}  # crop and flip are left
SMALL = preset_views("multicrop", 48, local_crops=3, local_views={"size": 24})
COUNT = 7


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn PNG files of several shapes, which every decoder reads alike."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(COUNT):
        random = np.random.default_rng(number)
        coarse = Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        size = tuple(random.integers(32, 64, 2).tolist())
        coarse.resize(size, Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def manifest(images: Path) -> Manifest:
    return Manifest.open(images)


def colour(text: str) -> tuple[int, int, int]:
    return tuple(int(text[place : place + 2], 16) for place in (1, 3, 5))


def test_a_view_on_the_sheet_is_what_the_original_shows_in_its_box(manifest):
    views = tuple(replace(view, **PLAIN) for view in SMALL)
    rows = collect(manifest, views, 4, seed=3, epoch=1)
    layout, sheet = Layout(views, mixed=False), draw(rows, views, ["plain"])
    assert layout.zoom == 5
    for number, row in enumerate(rows):
        left, top = layout.row(number)
        for view, (x, y) in enumerate(layout.places):
            size = views[view].size
            expected = row.original.crop(row.boxes[view]).resize((size, size), Image.Resampling.BILINEAR)
            if row.applied[view] == ["flip"]:
                expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            expected = expected.resize((layout.sides[view],) * 2, Image.Resampling.NEAREST)
            shown = sheet.crop((left + x, top + y, left + x + layout.sides[view], top + y + layout.sides[view]))
            difference = np.abs(np.asarray(shown, float) - np.asarray(expected, float))
            assert difference.mean() < 1
            assert difference.max() < 12


def test_boxes_and_texts_are_those_of_the_random_numbers(manifest):
    rows = collect(manifest, SMALL, 5, seed=11, epoch=2)
    index = epoch_order(11, 2, COUNT)[:5]  # what a run begins its third epoch with
    assert [row.name for row in rows] == [Path(manifest.path(image)).name for image in index]
    for number, view in enumerate(SMALL):
        drawn = sample(view, number, 11, 2, index, manifest.sizes[index])
        for place, row in enumerate(rows):
            left, top, right, bottom = row.boxes[number]
            assert (left, top) == (drawn.x[place], drawn.y[place])
            assert (right - left, bottom - top) == (drawn.width[place], drawn.height[place])
            assert row.applied[number] == operations(drawn, place)
            assert row.share(number) == pytest.approx(
                drawn.width[place] * drawn.height[place] / manifest.sizes[index][place].prod()
            )


def test_each_box_is_drawn_where_it_is_in_its_colour(manifest):
    (row, *_) = collect(manifest, SMALL, 2, seed=0, epoch=0)
    for number in range(len(SMALL)):
        # Alone, for boxes cover each other.
        views = SMALL[: number + 1]
        alone = replace(row, boxes=[row.boxes[number]] * len(views), views=row.views[: len(views)])
        layout = Layout(views, mixed=False)
        left, top = layout.row(0)
        zoom = layout.original_zoom(row.original)
        assert zoom == int(zoom) >= 2
        place = draw([alone], views, ["boxes"]).crop((left, top + HEAD, left + ORIGINAL, top + layout.height))
        painted = (np.asarray(place) == colour((*GLOBAL_COLOURS, *LOCAL_COLOURS)[number])).all(axis=-1)
        down, across = np.nonzero(painted)
        box = (across.min(), down.min(), across.max() + 1, down.max() + 1)
        assert box == tuple(zoom * side for side in row.boxes[number])


def test_texts_name_what_is_applied_in_its_order():
    view = View(solarize_probability=1.0, blur_probability=1.0, jitter_probability=1.0, gray_probability=1.0)
    drawn = sample(replace(view, flip_probability=1.0), 0, 0, 0, np.arange(2), np.full((2, 2), 40))
    assert operations(drawn, 1) == ["jitter", "gray", f"blur {drawn.sigma[1]:.1f}", "solarize", "flip"]
    nothing = {field: 0.0 for field in ("solarize_probability", "flip_probability")} | PLAIN
    assert operations(sample(replace(view, **nothing), 0, 0, 0, np.arange(2), np.full((2, 2), 40)), 1) == []


def test_mixed_views_are_those_of_the_batch(manifest):
    rows = collect(manifest, SMALL, 6, seed=5, epoch=0, cutmix=CutMix())
    batch = next(Loader(manifest, SMALL, 6, seed=5, cutmix=CutMix(group=6)).iterate(0, 1))
    assert [len(row.mixed) for row in rows] == [2] * 6
    for place, row in enumerate(rows):
        for view, mixed in enumerate(row.mixed):
            assert mixed.partner == batch.mix.partner[view, place] != place
            assert mixed.ratio == pytest.approx(batch.mix.ratio[view, place].item())
            left, top, right, bottom = mixed.box
            assert mixed.ratio == pytest.approx(1 - (right - left) * (bottom - top) / 48**2)
            expected = row.views[view].copy()
            expected[top:bottom, left:right] = rows[mixed.partner].views[view][top:bottom, left:right]
            assert np.array_equal(mixed.pixels, expected)


def test_shares_of_a_mix_count_images_from_1():
    pixels = np.zeros((4, 4, 3), np.uint8)
    assert Mixed(pixels, 2, 0.625, (0, 0, 2, 3)).shares() == ["62 % its own", "38 % of image 3"]
    assert Mixed(pixels, 2, 1.0, (1, 1, 1, 1)).shares() == ["not mixed"]


def test_the_command_writes_a_png_of_the_images_there_are(images, tmp_path, capsys):
    output = tmp_path / "sheet.png"
    arguments = ["data", "preview", str(images), "--images", "50", "--output", str(output), "--cutmix", "true"]
    arguments += ["--preset", "multicrop"]
    assert cli.main([*arguments, "--image_size", "32", "--local_crops", "1", "--local_views.size", "16"]) == 0
    assert f"views of {COUNT} images under multicrop, in {output}" in capsys.readouterr().out
    with Image.open(output) as sheet:
        sheet.load()
        assert sheet.format == "PNG"
        assert 600 < sheet.width < 1400
        assert COUNT * 300 < sheet.height < COUNT * 800
    assert [file.name for file in tmp_path.iterdir()] == ["sheet.png"]


@pytest.mark.parametrize("size", [(1, 1), (900, 3), (2, 700), (3000, 2000)])
def test_images_of_any_shape_are_drawn_within_their_place(size):
    views = (View(size=32), View(size=32))
    whole = (0, 0, *size)
    row = Row("image.jpg", Image.new("RGB", size), [whole] * 2, [np.zeros((32, 32, 3), np.uint8)] * 2, [[], []])
    layout = Layout(views, mixed=False)
    sheet = draw([row], views, ["shapes"])
    zoom = layout.original_zoom(row.original)
    assert size[0] * zoom <= ORIGINAL and size[1] * zoom <= layout.original_height
    left, top = layout.row(0)
    assert sheet.getpixel((left + ORIGINAL + 6, top + layout.height // 2)) == (255, 255, 255)


@pytest.mark.parametrize("size, zoom", [(32, 7), (48, 5), (96, 2), (160, 1), (224, 1), (256, 1), (448, 0.5)])
def test_views_are_enlarged_in_whole_multiples_and_shrunk_when_large(size, zoom):
    assert Layout((View(size=size),) * 2, mixed=False).zoom == zoom


@pytest.mark.parametrize("box", [(10, 10, 200, 150), (100, 50, 104, 52), (300, 200, 320, 220)])
def test_numbers_of_equal_boxes_do_not_cover_each_other(box):
    taken: list[list[int]] = []
    for _ in range(8):
        taken.append(_free_spot(box, taken, (0, 0, ORIGINAL, 220)))
    for one, (left, top, right, bottom) in enumerate(taken):
        assert left >= 0 and top >= 0 and right <= ORIGINAL and bottom <= 220
        for other in taken[one + 1 :]:
            assert max(abs(left - other[0]), abs(top - other[1])) >= BADGE


def test_long_names_keep_their_ends():
    short = shortened("a" * 80 + ".jpg", 200, load_font(13))
    assert short.startswith("aaa") and "…" in short and short.endswith(".jpg")
    assert load_font(13).getlength(short) <= 200
    assert shortened("cat.jpg", 200, load_font(13)) == "cat.jpg"


def refused(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """The one line of an error."""
    assert cli.main(["data", "preview", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_mistakes_end_with_one_line(images, tmp_path, capsys):
    there, output = str(images), str(tmp_path / "sheet.png")
    assert "preset 'cutout' is unknown; use one of simsiam" in refused(capsys, there, "--preset", "cutout")
    assert "recipe 'cutout' is unknown; use one of cifar_subset" in refused(capsys, there, "--recipe", "cutout")
    both = ("--recipe", "quickstart", "--preset", "byol")
    assert "preset = byol: replaces recipe = quickstart; leave one" in refused(capsys, there, *both)
    assert "does not exist" in refused(capsys, str(tmp_path / "absent"), "--output", output)
    (tmp_path / "empty").mkdir()
    assert "holds no files" in refused(capsys, str(tmp_path / "empty"), "--output", output)
    assert "does not exist; create it" in refused(capsys, there, "--output", str(tmp_path / "absent" / "sheet.png"))
    assert "ends in .png" in refused(capsys, there, "--output", str(tmp_path / "sheet.jpg"))
    (tmp_path / "folder.png").mkdir()
    assert "is a folder" in refused(capsys, there, "--output", str(tmp_path / "folder.png"))
    assert "the preset has 1" in refused(capsys, there, "--preset", "linear", "--cutmix", "true", "--output", output)
    too_long = str(tmp_path / ("x" * 300 + ".png"))
    small = ("--image_size", "32", "--local_crops", "0", "--images", "1")
    assert f"{too_long}: File name too long; give another path" in refused(capsys, there, "--output", too_long, *small)
    assert "output = /proc: /proc is not writable" in refused(capsys, there, "--output", "/proc/sheet.png", *small)
    assert not Path(output).exists()


def test_a_full_disk_ends_with_the_status_of_a_full_disk(images, tmp_path, capsys, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    output = tmp_path / "sheet.png"
    small = ("--image_size", "32", "--local_crops", "0", "--images", "1", "--output", str(output))
    assert cli.main(["data", "preview", str(images), *small]) == 3
    assert capsys.readouterr().err == f"stopped: {output} cannot be written: No space left on device; free disk space\n"
    assert list(tmp_path.iterdir()) == []


def test_a_picture_replaces_nothing_unless_told_so_and_does_not_become_an_image(images, tmp_path, capsys, monkeypatch):
    small = ("--image_size", "32", "--local_crops", "0", "--images", "1")
    output = tmp_path / "sheet.png"
    output.write_bytes(b"mine")
    for more in ((), ("--overwrite", "false")):
        assert "already exists" in refused(capsys, str(images), "--output", str(output), *small, *more)
        assert output.read_bytes() == b"mine"
    assert cli.main(["data", "preview", str(images), "--output", str(output), *small, "--overwrite", "true"]) == 0
    assert cli.main(["data", "preview", str(images), "--output", str(output), *small]) == 0  # the same again
    capsys.readouterr()
    monkeypatch.chdir(images)
    assert f"preview.png: lies in path = {images}" in refused(capsys, ".", *small)
    assert not (images / "preview.png").exists()


def test_cutmix_of_one_image_is_refused(manifest):
    with pytest.raises(UserError, match="there is 1 image"):
        collect(manifest, SMALL, 1, seed=0, epoch=0, cutmix=CutMix())


def test_views_can_be_changed_and_local_ones_are_no_larger_than_global_ones(images, tmp_path, capsys):
    arguments = ["data", "preview", str(images), "--images", "1", "--output", str(tmp_path / "sheet.png")]
    smaller = ["--preset", "multicrop", "--image_size", "32", "--local_crops", "1"]
    assert cli.main([*arguments, *smaller]) == 2
    assert "local_views.size = 96: larger than the global views (32)" in capsys.readouterr().err
    assert cli.main([*arguments, *smaller, "--local_views.size", "16", "--global_views.scale", "0.9,1"]) == 0


def previewed(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[str, list[str]]:
    """What is said, and the title and settings on the sheet."""
    titles: list[list[str]] = []

    def watch(rows, views, title):
        titles.append([*title, *(str(view.scale) for view in views), f"{len(rows[0].mixed)} mixed"])
        return draw(rows, views, title)

    with mock.patch.object(preview, "draw", watch):
        assert cli.main(["data", "preview", *map(str, arguments), "--overwrite", "true"]) == 0
    return capsys.readouterr().out, titles[0]


def test_a_run_and_a_training_recipe_show_what_they_make_of_their_images(images, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"image_size": 32, "global_views": {"scale": [0.5, 0.75]}, "train": str(images)}
    own = {"recipe": "quickstart", "seed": 7, "data": small}
    (tmp_path / "my.yaml").write_text(json.dumps(own))
    said, title = previewed(capsys, "my.yaml", "--images", 2)
    expected = ["2 × 32 px", "seed 7", "epoch 0", "(0.5, 0.75)", "(0.5, 0.75)", "0 mixed"]
    assert title == ["my (simsiam)", *expected] and "views of 2 images under my (simsiam)" in said

    mixing = {"cutmix": {"probability": 1.0}, "progressive": {"start_size": 16, "epochs": 4}}
    objective = {"correlation_source": "target"}
    run = resolve("my.yaml", {"output": tmp_path / "run", "data": mixing, "objective": objective})
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text(to_yaml(run))
    _, title = previewed(capsys, "run", "--images", 2, "--seed", 3)
    assert title == ["run (simsiam)", "2 × 16 px", "CutMix", "seed 3", *expected[2:5], "2 mixed"]
    _, title = previewed(capsys, "run", "--images", 1, "--preset", "byol", "--image_size", 24)
    assert title[:4] == ["byol", "2 × 24 px", "seed 7", "epoch 0"]

    _, title = previewed(capsys, images, "--images", 1, "--recipe", "my.yaml", "--image_size", 16)
    assert title[:2] == ["my (simsiam)", "2 × 16 px"]
    draw_tree(tmp_path / "data/quickstart/train", per_class=1)
    _, title = previewed(capsys, "quickstart", "--images", 1)
    assert title[:2] == ["quickstart (simsiam)", "2 × 48 px"] and title[4] == "(0.3, 1.0)"


def test_a_preset_may_be_given_as_the_recipe_as_in_earlier_versions(images, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    note.cache_clear()
    arguments = ["data", "preview", str(images), "--images", "1", "--recipe", "byol", "--image_size", "24"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert "views of 1 image under byol" in printed.out
    assert printed.err == "note: --recipe byol is now --preset byol\n"


def test_images_alone_are_shown_as_pretrain_would_take_them(images, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, title = previewed(capsys, images, "--images", 1)
    assert title == ["imagenet_100ep (simsiam)", "2 × 224 px", "seed 0", "epoch 0", *["(0.2, 1.0)"] * 2, "0 mixed"]
    (tmp_path / "my.yaml").write_text("data: {image_size: 32}")
    monkeypatch.setenv("HOME", str(tmp_path))
    _, title = previewed(capsys, images, "--images", 1, "--recipe=~/my.yaml")
    assert title[:2] == ["my (simsiam)", "2 × 32 px"]
    (tmp_path / "moved.yaml").write_text("data: {train: moved}")
    moved = f"its images, {tmp_path}/moved, do not exist; type `data preview IMAGES --recipe {tmp_path}/moved.yaml`"
    assert moved in refused(capsys, "moved.yaml")
    said = "my.yaml: this recipe has no data.train; type `data preview IMAGES --recipe"
    assert said in refused(capsys, "my.yaml")


def test_all_originals_are_decoded_by_one_pipeline(manifest, images):
    with mock.patch.object(graph, "build_decoder", side_effect=graph.build_decoder) as built:
        rows = collect(manifest, preset_views("simsiam", 32), COUNT, 0, 0)
    assert sum(not call.kwargs for call in built.call_args_list) == 1  # the other is the loader's
    for row in rows:
        assert np.array_equal(row.original, Image.open(images / row.name))
