"""Checkpoints: any stage and number of ranks reads what any other wrote, and a damaged one is never taken for good."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from small_disks import mounted
from torch import Tensor
from trainer_state import batches, make_trainer, small_config, smooth

from unigrad_fast.checkpoints import files
from unigrad_fast.checkpoints.files import Piece, Reader, latest, write, write_weights
from unigrad_fast.checkpoints.weights import load_backbone, load_branch, open_checkpoint
from unigrad_fast.networks import batch_norm
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.training import checkpoint

WAYS = [(stage, ranks) for stage in (0, 1, 2) for ranks in (1, 2, 3)]  # of running
# Each way writes once and reads once, what another stage and another number of ranks wrote; and one reads its own.
COVERING = [*zip(WAYS, WAYS[4:] + WAYS[:4], strict=True), ((2, 2), (2, 2))]
_trainers: dict = {}  # of a worker process, by stage: building one takes longer than a step


def trainer_at(images: str, output: Path, stage: int):
    if stage not in _trainers:
        changes = {"engine__zero_stage": stage, "data__batch_size": 24, "optimizer__base_lr": 0.4}
        _trainers[stage] = smooth(make_trainer(small_config(images, **changes), stages=1))
    trainer = _trainers[stage]
    trainer.config = trainer.config.model_copy(update={"output": output})
    return trainer


def write_two(images: str, output: Path, stage: int, start: Path) -> None:
    """Two checkpoints, one step apart, after a step from `start`, which makes momentum and F differ from zero."""
    trainer = trainer_at(images, output, stage)
    with mock.patch.object(batch_norm, "is_alone", return_value=False):
        checkpoint.restore(trainer, Reader(latest(start)))
        for step in (1, 2):
            trainer.step(step, batches(trainer, step))
            checkpoint.save(trainer, {})


def write_start(images: str, output: Path) -> None:
    trainer = trainer_at(images, output, stage=0)
    trainer.step(0, batches(trainer, 0))
    checkpoint.save(trainer, {})


def read_and_step(images: str, source: Path, stage: int) -> tuple[list[str], dict[str, float]]:
    """Tensors that differ in a bit after loading; one step later, the error of each part of the state."""
    trainer = trainer_at(images, source, stage)
    with mock.patch.object(batch_norm, "is_alone", return_value=False):
        reader = Reader(source / "checkpoints/step-00000002")
        checkpoint.restore(trainer, reader)
        differing = [name for name, ours, expected in pairs(trainer, reader) if not torch.equal(ours, expected)]
        trainer.step(2, batches(trainer, 2))
    squares: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    for name, ours, expected in pairs(trainer, Reader(source / "checkpoints/step-00000003")):
        norms = [torch.linalg.vector_norm(v, dtype=torch.float64) for v in (ours.float() - expected, expected.float())]
        squares[name.partition(".")[0]] += torch.stack(norms).square()
    return differing, {part: (d / n.clamp_min(1e-6)).sqrt().item() for part, (d, n) in squares.items()}


def pairs(trainer, reader: Reader) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name of every tensor, its elements that this rank holds, and the same in the checkpoint."""
    for f in checkpoint.state(trainer):
        ours = f.tensor.reshape(-1)
        expected = torch.empty_like(ours)
        reader.read(f.name, f.start, expected)
        yield f.name, ours, expected


@pytest.fixture(scope="module")
def sources(images, workers, tmp_path_factory) -> Callable[[int, int], Path]:
    """A run of a stage and number of ranks, with the checkpoints after steps 2 and 3."""
    start = tmp_path_factory.mktemp("start")
    workers(1).run(write_start, str(images), start)

    @cache
    def written(stage: int, ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"stage{stage}-ranks{ranks}")
        workers(ranks).run(write_two, str(images), folder, stage, start)
        return folder

    return written


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        pytest.param(*pair, marks=[] if pair in COVERING else [pytest.mark.slow])
        for pair in itertools.product(WAYS, WAYS)
    ],
    ids=lambda way: f"stage{way[0]}x{way[1]}",
)
def test_a_checkpoint_fits_every_stage_and_number_of_ranks(images, workers, sources, source, destination):
    stage, ranks = destination
    for differing, errors in workers(ranks).run(read_and_step, str(images), sources(*source), stage):
        assert differing == []
        assert errors.pop("momentum") <= 1e-5  # the gradient's error, which is rounding alone (see test_ranks.py)
        assert set(errors) == {"online", "target", "objective", "gate"}
        assert max(errors.values()) <= 1e-6, errors


def plain_run(run: Path, values: dict[str, Tensor], steps=(1, 2)) -> list[Path]:
    run.mkdir(exist_ok=True)
    return [write_weights(run, values, step, step / 2, {"seed": step}) for step in steps]


@pytest.fixture
def values() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "online.backbone.weight": torch.randn(30, 40),
        "online.backbone.bias": torch.randn(7),
        "online.projector.weight": torch.randn(5, 5, dtype=torch.float64),
        "objective.average.updates": torch.tensor(9),
    }


def test_tensors_are_read_back_bit_for_bit_whole_and_in_ranges(tmp_path, values):
    plain_run(tmp_path, values)
    reader = Reader(latest(tmp_path))
    for name, value in values.items():
        assert torch.equal(reader.tensor(name), value) and reader.tensor(name).dtype == value.dtype
    part = torch.empty(100)
    reader.read("online.backbone.weight", 333, part)
    assert torch.equal(part, values["online.backbone.weight"].view(-1)[333:433])
    assert sorted(load_branch(reader, "online.backbone")) == ["bias", "weight"]
    assert (reader.about["step"], reader.about["epoch"]) == (2, 1)


@pytest.mark.parametrize("size", [500, 4000])
def test_what_is_too_much_for_one_file_goes_on_in_the_next(tmp_path, monkeypatch, values, size):
    monkeypatch.setattr(files, "FILE_BYTES", size)
    (folder,) = plain_run(tmp_path, values, steps=(1,))
    paths = sorted(folder.glob("*.pt"), key=lambda path: (len(path.name), path.name))
    if size == 4000:
        assert [path.name for path in paths] == ["rank-00000.pt", "rank-00000-1.pt"]
        assert all(sum(t.nbytes for t in torch.load(path).values()) <= size for path in paths)
    reader = Reader(folder)
    for number in range(3):
        reader.verify(number, 3)
    assert reader.about["ranks"] == 1
    for name, value in values.items():
        assert torch.equal(reader.tensor(name), value)
    paths[-1].unlink()
    with pytest.raises(UserError, match=f"{paths[-1].name}: no such file"):
        reader.verify()


def test_every_file_is_plain_tensors_for_torch(tmp_path, values):
    (folder, _) = plain_run(tmp_path, values)
    for file in folder.glob("*.pt"):
        assert set(torch.load(file, weights_only=True)) == set(values)


def test_pieces_that_do_not_cover_a_tensor_once_are_never_a_checkpoint(tmp_path):
    for pieces in ([(0, 4)], [(0, 4), (3, 3)], [(0, 4), (5, 1)]):
        parts = [Piece("weight", (6,), start, torch.ones(numel)) for start, numel in pieces]
        with pytest.raises(AssertionError, match="weight: "):
            write(tmp_path, 1, parts, {"epoch": 1})
    assert os.listdir(tmp_path / "checkpoints") == []


def missing_file(folder: Path) -> None:
    (folder / "rank-00000.pt").unlink()


def truncated_file(folder: Path) -> None:
    file = folder / "rank-00000.pt"
    file.write_bytes(file.read_bytes()[:-100])


def flipped_bit(folder: Path) -> None:
    content = bytearray((folder / "rank-00000.pt").read_bytes())
    content[len(content) // 2] ^= 4
    (folder / "rank-00000.pt").write_bytes(content)


def flipped_bit_in_the_description(folder: Path) -> None:
    file = folder / "checkpoint.json"
    file.write_text(file.read_text().replace('"step": 2', '"step": 3'))


def half_a_description(folder: Path) -> None:
    file = folder / "checkpoint.json"
    file.write_text(file.read_text()[: file.stat().st_size // 2])


def no_description(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()


DAMAGES = {
    missing_file: ("rank-00000.pt", "no such file"),
    truncated_file: ("rank-00000.pt", "bytes instead of"),
    flipped_bit: ("rank-00000.pt", "does not match its digest"),
    flipped_bit_in_the_description: ("checkpoint.json", "does not match the digest"),
    half_a_description: ("checkpoint.json", "damaged"),
    no_description: ("checkpoint.json", "no such file"),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, values, damage):
    _, newest = plain_run(tmp_path, values)
    damage(newest)
    file, reason = DAMAGES[damage]
    with pytest.raises(UserError) as caught:
        load_branch(open_checkpoint(tmp_path), "online")
    assert str(newest / file) in str(caught.value) and reason in str(caught.value)
    assert str(caught.value).endswith("; --checkpoint 1 takes the newest intact one")


def find(output: Path, fall_back: bool) -> tuple[str, list[str]] | str:
    config = small_config("images").model_copy(update={"output": output})
    world = mock.Mock(rank=dist.get_rank(), size=dist.get_world_size())
    same = mock.patch.object(checkpoint, "contradictions", return_value=[])  # these hold no configuration to compare
    try:
        with same:
            reader, warnings = checkpoint.find(config, world, fall_back)
    except UserError as error:
        return str(error)
    return reader.folder.name, warnings


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_run_falls_back_to_an_intact_checkpoint_only_when_told_so(workers, tmp_path, values, damage):
    older, newest = plain_run(tmp_path, values)
    damage(newest)
    for refused in workers(2).run(find, tmp_path, False):
        assert str(newest / DAMAGES[damage][0]) in refused
        assert refused.endswith("; `pretrain --fall_back` resumes from the newest intact checkpoint, that of step 1")
    for name, warnings in workers(2).run(find, tmp_path, True):
        assert name == older.name
        (warning,) = warnings
        assert str(newest / DAMAGES[damage][0]) in warning and "ignored, resuming from step" in warning
    damage(older) if damage is not flipped_bit_in_the_description else missing_file(older)
    for refused in (*workers(2).run(find, tmp_path, True), *workers(2).run(find, tmp_path, False)):
        assert f"no checkpoint of {tmp_path} is intact" in refused


def test_a_lost_pointer_is_not_taken_for_a_run_without_checkpoints(workers, tmp_path, values):
    plain_run(tmp_path, values)
    (tmp_path / "checkpoints/latest").unlink()
    with pytest.raises(UserError, match=r"latest: no such file, but .*step-00000002 exists"):
        latest(tmp_path)
    (tmp_path / "checkpoints/latest").write_text("step-00000009\n")
    for refused in workers(2).run(find, tmp_path, False):
        assert "that of step 2" in refused
    for name, (warning,) in workers(2).run(find, tmp_path, True):
        assert name == "step-00000002" and "names step-00000009, which does not exist" in warning
    with pytest.raises(UserError, match="names step-00000009, which does not exist"):
        latest(tmp_path)


def fail_at(target: str, number: int) -> Callable[[], mock._patch]:
    """A patch that lets the n-th call of a function of `os` fail as a full disk does."""
    name = target.removeprefix("os.")
    original, calls = getattr(os, name), itertools.count(1)

    def failing(*args, **kwargs):
        if next(calls) == number:
            raise OSError(28, "No space left on device", str(args[0]))
        return original(*args, **kwargs)

    return mock.patch.object(os, name, failing)


FAILURES = [("os.fsync", n) for n in range(1, 6)] + [("os.rename", 1), ("os.replace", 1), ("os.replace", 2)]


@pytest.mark.parametrize(("target", "number"), FAILURES, ids=str)
def test_a_failure_at_any_moment_of_saving_leaves_the_previous_checkpoint(tmp_path, values, target, number):
    (previous,) = plain_run(tmp_path, values, steps=(1,))
    with fail_at(target, number), pytest.raises(OSError, match="No space left"):
        plain_run(tmp_path, {name: value + 1 for name, value in values.items()}, steps=(2,))
    reader = Reader(latest(tmp_path))
    reader.verify()
    assert reader.folder == previous
    assert torch.equal(reader.tensor("online.backbone.weight"), values["online.backbone.weight"])
    plain_run(tmp_path, values, steps=(2,))  # and saving works again
    assert latest(tmp_path).name == "step-00000002"
    Reader(latest(tmp_path)).verify()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 1 MiB, where the system lets us mount one."""
    with mounted(tmp_path / "disk", 1 << 20) as folder:
        yield folder


def test_a_full_disk_leaves_the_previous_checkpoint_and_no_litter(small_disk, values):
    (previous,) = plain_run(small_disk, values, steps=(1,))
    with pytest.raises(OSError, match="No space left") as caught:
        plain_run(small_disk, {"weight": torch.zeros(1 << 20)}, steps=(2,))
    assert "rank-00000.pt" in str(caught.value)
    assert latest(small_disk) == previous
    Reader(previous).verify()
    assert sorted(os.listdir(small_disk / "checkpoints")) == ["latest", "step-00000001"]
    plain_run(small_disk, values, steps=(2,))


def test_a_read_only_folder_leaves_the_previous_checkpoint(small_disk, values):
    (previous,) = plain_run(small_disk, values, steps=(1,))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    try:
        with pytest.raises(OSError, match="Read-only file system") as caught:
            plain_run(small_disk, values, steps=(2,))
        assert str(small_disk) in str(caught.value)
        assert latest(small_disk) == previous
        Reader(previous).verify()
    finally:
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)


def one_rank_fails(output: Path) -> str:
    rank = dist.get_rank()
    piece = Piece(f"weight{rank}", (4,), 0, torch.full((4,), float(rank)))
    full = fail_at("os.fsync", 1) if rank == 1 else mock.patch.object(os, "sep", os.sep)
    try:
        with full:
            write(output, 2, [piece], {"epoch": 1.0, "config": {}}, rank)
    except OSError as error:
        return f"{error.strerror}"
    return "written"


def test_ranks_fail_together(workers, tmp_path, values):
    plain_run(tmp_path, values, steps=(1,))
    assert workers(2).run(one_rank_fails, tmp_path) == ["No space left on device"] * 2
    assert latest(tmp_path).name == "step-00000001"


def test_the_newest_and_every_nth_epoch_are_kept(tmp_path, values):
    for step in range(2, 21, 2):
        (newest,) = plain_run(tmp_path, values, steps=(step,))
        checkpoint.prune(newest, keep=2, keep_every=8)
    kept = [int(folder.name.removeprefix("step-")) for folder in RunFolder(tmp_path).complete_checkpoints()]
    assert kept == [8, 16, 18, 20]


def test_a_run_that_fell_back_keeps_what_it_writes_from_there(tmp_path, values):
    """A damaged later checkpoint does not count among the newest."""
    plain_run(tmp_path, values, steps=(1, 9))
    (newest,) = plain_run(tmp_path, values, steps=(2,))
    checkpoint.prune(newest, keep=1, keep_every=0)
    assert latest(tmp_path).name == "step-00000002"
    assert [folder.name for folder in RunFolder(tmp_path).complete_checkpoints()] == ["step-00000002", "step-00000009"]


def test_a_copy_of_a_checkpoint_under_another_name_is_left_alone(tmp_path):
    for step in range(1, 4):
        write(tmp_path, step, [], {})
    shutil.copytree(latest(tmp_path), tmp_path / "checkpoints/step-00000001-best")
    checkpoint.prune(latest(tmp_path), keep=1, keep_every=0)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-00000001-best", "step-00000003"]
    (tmp_path / "checkpoints/latest").write_text("step-00000001-best\n")
    assert latest(tmp_path).name == "step-00000001-best"


def test_leftovers_of_a_killed_process_are_removed(tmp_path, values):
    plain_run(tmp_path, values)
    root = tmp_path / "checkpoints"
    (root / ".unfinished-step-00000003-abc").mkdir()
    (root / ".removed-step-00000001-def").mkdir()
    (root / ".latest.unfinished-17").touch()
    files.remove_leftovers(tmp_path)
    assert sorted(os.listdir(root)) == ["latest", "step-00000001", "step-00000002"]


def test_weights_that_are_missing_or_misfit_are_refused(tmp_path, values):
    with pytest.raises(UserError, match="no checkpoint there"):
        load_backbone(open_checkpoint(tmp_path), torch.nn.Linear(40, 30))
    plain_run(tmp_path, values)
    with pytest.raises(UserError, match="do not fit"):
        load_backbone(open_checkpoint(tmp_path), torch.nn.Linear(40, 30))


def refuse_imported(images: str, output: Path) -> str:
    trainer = trainer_at(images, output, stage=0)
    weights = {f"online.{name}": value for name, value in trainer.online.module.state_dict().items()}
    reader = Reader(write_weights(output, weights, 5, 1.0, {}))
    try:
        checkpoint.restore(trainer, reader)
    except UserError as error:
        return str(error)
    return "accepted"


def test_weights_alone_cannot_be_trained_on(images, workers, tmp_path):
    (message,) = workers(1).run(refuse_imported, str(images), tmp_path)
    assert "imported for evaluation and export only" in message


def peak() -> float:
    """GiB of memory that this process has held at most since it last wrote to `clear_refs`."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20


def rises(run: Path) -> tuple[float, float]:
    """GiB by which the peak of memory rises while a tensor of one GiB is saved, and while it is read back in place."""
    values = torch.ones(1 << 28)

    def rise(work: Callable[[], object]) -> float:
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        work()
        return peak() - before

    saving = rise(lambda: write_weights(run, {"weight": values}, 1, 1.0, {}))
    reader = Reader(latest(run))
    values.zero_()
    loading = rise(lambda: reader.read("weight", 0, values))
    assert values[0] == values[-1] == 1
    return saving, loading


@pytest.mark.long
def test_saving_and_loading_hold_less_than_half_a_gib_beside_the_tensors(workers, tmp_path):
    (found,) = workers(1).run(rises, tmp_path)
    assert max(found) < 0.5
