import errno
import os
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from PIL import Image

from unigrad_fast.pipelines import DataError, Manifest
from unigrad_fast.pipelines.listing.folders import _is_folder
from unigrad_fast.pipelines.reading.damage import defects
from unigrad_fast.pipelines.storage import Ranges


def save(path, size=(8, 6), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (200, 30, 60)).save(path, **options)
    return path


def test_tree_lists_what_torchvision_lists(tree):
    from torchvision.datasets import ImageFolder

    manifest, reference = Manifest.from_folder(tree), ImageFolder(tree)
    assert manifest.classes == reference.classes
    assert [manifest.path(i) for i in range(len(manifest))] == [path for path, _ in reference.samples]
    assert manifest.labels.tolist() == reference.targets


def test_sizes_are_width_and_height(tree, manifest):
    for i in range(len(manifest)):
        with Image.open(manifest.path(i)) as image:
            assert tuple(manifest.sizes[i]) == image.size


def test_flat_folder_has_no_labels(tmp_path):
    save(tmp_path / "b.png")
    save(tmp_path / "a.jpeg")
    manifest = Manifest.from_folder(tmp_path)
    assert [os.path.basename(manifest.path(i)) for i in range(2)] == ["a.jpeg", "b.png"]
    assert not manifest.has_labels and manifest.labels is None and manifest.classes == []


def test_hidden_files_and_folders_and_other_files_are_ignored(tmp_path):
    save(tmp_path / "cat" / "a.jpg")
    save(tmp_path / "cat" / "._a.jpg")
    save(tmp_path / ".cache" / "b.jpg")
    (tmp_path / "cat" / "readme.txt").write_text("none")
    (tmp_path / "notes").mkdir()
    manifest = Manifest.from_folder(tmp_path)
    assert len(manifest) == 1 and manifest.classes == ["cat"]


def test_every_file_of_an_image_folder_of_torchvision_is_used_and_others_are_counted(tmp_path):
    from torchvision.datasets.folder import IMG_EXTENSIONS, ImageFolder

    for number, extension in enumerate([*IMG_EXTENSIONS, ".TIF"]):
        save(tmp_path / f"class{number % 3}" / f"{number:02}{extension}", (8, 6 + number))
    for name in ("class0/x.gif", "class1/y.GIF", "only/z.avif", "notes.txt", "class0/README"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"ignored 2 \.gif, 1 \.txt, 1 without an extension, 1 \.avif; images end in"):
        manifest = Manifest.from_folder(tmp_path)
    reference = ImageFolder(tmp_path, allow_empty=True)
    assert [manifest.path(i) for i in range(len(manifest))] == [path for path, _ in reference.samples]
    assert len(manifest) == len(IMG_EXTENSIONS) + 1
    decoded = defects([np.frombuffer(manifest.read(i), np.uint8) for i in range(len(manifest))], None, manifest.sizes)
    assert decoded == [None] * len(manifest)


@pytest.mark.parametrize("name", ["a.jpg", "a.JPEG", "a.png", "a.webp", "a.bmp"])
def test_extensions(tmp_path, name):
    save(tmp_path / name)
    assert Manifest.from_folder(tmp_path).sizes.tolist() == [[8, 6]]


def test_format_is_told_by_content_not_name(tmp_path):
    save(tmp_path / "a.jpg", format="PNG")
    assert Manifest.from_folder(tmp_path).sizes.tolist() == [[8, 6]]


def test_orientation_tag_does_not_swap_the_size(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    save(tmp_path / "a.jpg", exif=turned)
    save(tmp_path / "b.tif", tiffinfo={0x0112: 6})
    manifest = Manifest.from_folder(tmp_path)
    assert manifest.sizes.tolist() == [[8, 6]] * 2
    assert defects([np.frombuffer(manifest.read(i), np.uint8) for i in (0, 1)], None, manifest.sizes) == [None] * 2


def test_nested_folders_count_to_their_class(tmp_path):
    save(tmp_path / "cat" / "b" / "1.jpg")
    save(tmp_path / "cat" / "a.jpg")
    manifest = Manifest.from_folder(tmp_path)
    assert [os.path.relpath(manifest.path(i), tmp_path) for i in range(2)] == ["cat/a.jpg", "cat/b/1.jpg"]
    assert manifest.classes == ["cat"]


def test_link_that_leads_back_up_ends(tmp_path):
    save(tmp_path / "cat" / "a.jpg")
    (tmp_path / "cat" / "again").symlink_to(tmp_path / "cat", target_is_directory=True)
    assert len(Manifest.from_folder(tmp_path)) == 1


def test_pictures_of_runs_are_no_images(tmp_path):
    save(tmp_path / "cat/0.jpg")
    for run in ("run", "cat/inner"):
        save(tmp_path / run / "curves.png")
        save(tmp_path / run / "export/preview.png")
        for name in ("config.yaml", "metrics.jsonl", "log.txt"):
            (tmp_path / run / name).touch()
    for name in ("config.yaml", "log.txt"):  # another program's
        (tmp_path / "cat" / name).touch()
    with pytest.warns(UserWarning, match=r"contains 2 folders of runs among the images \(cat/inner for one\); they"):
        manifest = Manifest.open(tmp_path)
    assert manifest.classes == ["cat"] and len(manifest) == 1
    with pytest.raises(DataError, match="is the folder of a run"):
        Manifest.open(tmp_path / "run")
    with tarfile.open(tmp_path / "run/0.tar", "w") as tar:
        tar.add(tmp_path / "cat/0.jpg", "0.jpg")
    (tmp_path / "shards").mkdir()
    (tmp_path / "run").rename(tmp_path / "shards/run")
    (tmp_path / "shards/run/0.tar").rename(tmp_path / "shards/0.tar")
    assert isinstance(Manifest.open(tmp_path / "shards").storage, Ranges)


def test_images_beside_class_folders_are_announced(tmp_path):
    save(tmp_path / "cat" / "a.jpg")
    save(tmp_path / "stray.jpg")
    with pytest.warns(UserWarning, match="1 images lie directly in"):
        assert len(Manifest.from_folder(tmp_path)) == 1


def test_name_that_is_not_utf8(tmp_path):
    odd = os.path.join(os.fsencode(tmp_path), b"\xff.jpg")
    try:
        os.rename(save(tmp_path / "a.jpg"), odd)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    manifest = Manifest.from_folder(tmp_path)
    assert manifest.path_bytes(0) == odd and manifest.sizes.tolist() == [[8, 6]]


def test_one_image_is_enough(tmp_path):
    save(tmp_path / "a.jpg")
    assert len(Manifest.from_folder(tmp_path)) == 1


def test_index_from_the_end_and_past_it(tmp_path):
    save(tmp_path / "a.jpg")
    manifest = Manifest.from_folder(tmp_path)
    assert manifest.path(-1) == str(tmp_path / "a.jpg")
    with pytest.raises(IndexError):
        manifest.path(1)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        Manifest.from_folder(tmp_path / "nowhere")


def test_file_in_place_of_the_folder(tmp_path):
    with pytest.raises(DataError, match="is a file, not a folder"):
        Manifest.from_folder(save(tmp_path / "a.jpg"))


def test_empty_folder(tmp_path):
    with pytest.raises(DataError, match="holds no files"):
        Manifest.from_folder(tmp_path)


def test_folder_of_text_files(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("text")
    with pytest.raises(DataError, match=r"no images, only 3 other files \(\.txt\)"):
        Manifest.from_folder(tmp_path)


def test_class_folders_of_text_files(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.txt").write_text("text")
    with pytest.raises(DataError, match="no images, only 1 other files"):
        Manifest.from_folder(tmp_path)


def test_text_files_with_an_image_extension(tmp_path):
    (tmp_path / "a.jpg").write_text("text")
    with pytest.raises(DataError, match=r"none of the 1 images .* can be read; .*a\.jpg: its header is not one of"):
        Manifest.from_folder(tmp_path)


def refuse(monkeypatch, folder):
    """Makes a folder unlistable; root would list it whatever its permissions."""
    original = os.scandir

    def scandir(path):
        if os.fsdecode(path).rstrip("/") == str(folder):
            raise PermissionError(13, "Permission denied", path)
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)


@pytest.mark.parametrize("inner", ["", "cat"])
def test_unreadable_folder_is_named(tmp_path, monkeypatch, inner):
    save(tmp_path / "cat" / "a.jpg")
    refuse(monkeypatch, tmp_path / inner if inner else tmp_path)
    with pytest.raises(DataError, match=f"{inner or tmp_path.name} cannot be listed: permission denied"):
        Manifest.from_folder(tmp_path)


@pytest.mark.parametrize("inner", ["", "cat"])
def test_folders_in_which_storage_keeps_its_own_files_are_not_even_listed(tmp_path, monkeypatch, inner):
    save(tmp_path / "cat" / "a.jpg")
    for name in ("@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found"):
        save(tmp_path / inner / name / "a.jpg")
    refuse(monkeypatch, tmp_path / inner / "lost+found")
    manifest = Manifest.open(tmp_path)
    assert manifest.classes == ["cat"] and len(manifest) == 1


def test_unreadable_header_keeps_its_place(tmp_path):
    save(tmp_path / "a.jpg")
    (tmp_path / "b.jpg").write_bytes(b"")
    (tmp_path / "c.jpg").symlink_to(tmp_path / "gone.jpg")
    manifest = Manifest.from_folder(tmp_path)
    assert manifest.sizes.tolist() == [[8, 6], [0, 0], [0, 0]]
    assert manifest.unreadable().tolist() == [1, 2]
    assert manifest.complaint(2) == f"{tmp_path / 'c.jpg'}: no such file or directory"


@pytest.mark.parametrize("folder", ["", "cat"])
def test_link_to_itself_is_an_image_that_cannot_be_read(tmp_path, folder):
    save(tmp_path / folder / "a.jpg")
    (tmp_path / folder / "x.jpg").symlink_to("x.jpg")
    (tmp_path / folder / "loop").symlink_to("loop")
    manifest = Manifest.from_folder(tmp_path)
    assert manifest.sizes.tolist() == [[8, 6], [0, 0]]
    assert manifest.complaint(1) == f"{tmp_path / folder / 'x.jpg'}: too many levels of symbolic links"


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EACCES])
def test_link_whose_target_is_not_known(code):
    class Entry:
        def __init__(self, name):
            self.name = name

        def is_dir(self):
            raise OSError(code, os.strerror(code))

    assert not _is_folder(Entry(b"x.JPG"))
    with pytest.raises(OSError):  # it may be a class
        _is_folder(Entry(b"cat"))


def test_importing_the_package_imports_neither_torch_nor_dali():
    code = "import sys, unigrad_fast.pipelines as p; p.DataError, p.View; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "nvidia.dali", "PIL"} & set(run.stdout.split())
