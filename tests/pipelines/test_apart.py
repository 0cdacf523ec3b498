"""Reading in another process: the same steps as without it, whatever happens to files and to that process."""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import bad_files
import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from unigrad_fast.pipelines import Loader, Manifest
from unigrad_fast.pipelines.reading.apart import Apart
from unigrad_fast.pipelines.reading.damage import Damaged
from unigrad_fast.pipelines.reading.source import Source

STEPS, SIZE = 8, 12


@pytest.fixture
def reader():
    sources = []

    def make(manifest, apart=True, ahead=2, memories=4, size=1 << 20, timeout=60.0, stopped=lambda: False):
        def indices(step):
            return 0, np.arange(step * SIZE, (step + 1) * SIZE) % len(manifest)

        options = {"damaged": Damaged(manifest), "timeout": timeout, "seed": 3, "stopped": stopped}
        process = Apart(8, timeout, memories, size) if apart else None
        sources.append(Source(manifest, indices, last=STEPS, ahead=ahead, apart=process, **options))
        return sources[-1]

    yield make
    for source in sources:
        source.close()


@pytest.fixture(params=["files", "shards", "table"])
def damaged(request, tree, tmp_path) -> Manifest:
    """Files, or images of a shard or a table, of which some cannot be read."""
    folder = shutil.copytree(tree, tmp_path / "tree")
    if request.param == "files":
        manifest = Manifest.from_folder(folder)
        os.unlink(manifest.path(3))
        bad_files.Path(manifest.path(17)).write_bytes(b"")
        return manifest
    paths = sorted(folder.rglob("*.jpg"))
    if request.param == "table":
        content = pyarrow.table({"image": [path.read_bytes() for path in paths]})
        parquet.write_table(content, tmp_path / "0.parquet", compression="none")
        manifest = Manifest.open(tmp_path / "0.parquet")
    else:
        with tarfile.open(tmp_path / "0.tar", "w") as tar:
            for path in paths:
                tar.add(path, path.name)
        manifest = Manifest.from_shards(tmp_path / "0.tar")
    manifest.storage.index.length[5] = 2**30  # reaches past the end
    return manifest


def process_of(source: Source) -> subprocess.Popen:
    return source._apart._process


def take(source: Source, step: int):
    """A step in a form that can be compared, and a copy, as its memory may be used again."""
    supply = source.take(step)
    source.done(step)
    return supply.index.tolist(), [data.tobytes() for data in supply.data], supply.failures


def test_steps_are_those_that_are_read_in_this_process(reader, damaged):
    apart, here = reader(damaged), reader(damaged, apart=False)
    taken = [take(apart, step) for step in range(STEPS)]
    assert taken == [take(here, step) for step in range(STEPS)]
    assert any(failures for _, _, failures in taken)
    assert process_of(apart).poll() is None


def test_images_are_read_there(reader, manifest):
    reads = []
    object.__setattr__(manifest, "read", reads.append)
    source = reader(manifest)
    for step in range(STEPS):
        take(source, step)
    assert reads == []


def test_a_file_that_does_not_answer_is_replaced_as_in_this_process(reader, tree, tmp_path):
    manifest = Manifest.from_folder(shutil.copytree(tree, tmp_path / "tree"))
    path = manifest.path(SIZE + 1)
    os.unlink(path)
    os.mkfifo(path)
    apart, here = reader(manifest, timeout=0.5), reader(manifest, apart=False, timeout=0.5)
    taken = [take(apart, step) for step in range(3)]
    assert taken == [take(here, step) for step in range(3)]
    assert [failure.reason for failure in taken[1][2]] == ["it could not be read within 0.5 s"]
    assert len({*apart._apart._free, *apart._apart._held.values()}) == 3, "memory that may yet be written to"
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # releases this process's thread


def test_without_the_other_process_the_rest_is_read_here(reader, manifest):
    apart, here = reader(manifest), reader(manifest, apart=False)
    for step in range(STEPS):
        if step == 3:
            apart._apart._connection.poll(20)  # some of the next steps may have been read
            process_of(apart).kill()
            process_of(apart).wait()
        assert take(apart, step) == take(here, step)


def test_what_was_read_before_the_process_ended_is_used(reader, manifest):
    source = reader(manifest, ahead=3)
    taken = [take(source, 0)]
    while len(source._apart._answers) < 3:
        found, parts = source._apart._connection.recv()
        source._apart._answers[found] = parts
    process_of(source).kill()
    taken += [take(source, step) for step in range(1, STEPS)]
    assert taken == [take(here, step) for here in (reader(manifest, apart=False),) for step in range(STEPS)]


def test_what_does_not_fit_into_the_memory_is_read_here(reader, manifest):
    reads = []
    read = manifest.read
    object.__setattr__(manifest, "read", lambda image: reads.append(image) or read(image))
    source, here = reader(manifest, size=3000), reader(manifest, apart=False)
    taken = [take(source, step) for step in range(STEPS)]
    assert 0 < len(reads) < STEPS * SIZE
    assert taken == [take(here, step) for step in range(STEPS)]


def test_data_stay_as_they_are_until_a_step_is_done(reader, manifest):
    source = reader(manifest, memories=3)  # fewer than steps that are in use
    supplies = [source.take(step) for step in range(STEPS)]
    for supply in supplies:
        assert [data.tobytes() for data in supply.data] == [manifest.read(image) for image in supply.index.tolist()]


def test_a_step_can_be_taken_again_with_one_image_replaced(reader, manifest):
    source = reader(manifest)
    first = source.take(0)
    source.damaged.add(int(first.index[4]), "broken")
    again = source.take(0)
    assert [place for place in range(SIZE) if first.index[place] != again.index[place]] == [4]
    assert all(np.array_equal(first.data[place], again.data[place]) for place in range(SIZE) if place != 4)


def test_waiting_ends_when_the_iteration_is_closed(reader, manifest):
    stop = []
    source = reader(manifest, stopped=lambda: bool(stop))
    os.kill(process_of(source).pid, signal.SIGSTOP)
    stop.append(True)
    with pytest.raises(InterruptedError):
        source.take(0)


def test_the_other_process_loads_neither_torch_nor_dali_and_ends_with_the_source(reader, manifest):
    source = reader(manifest)
    take(source, 0)
    process = process_of(source)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        process.send_signal(number)  # as a terminal or a scheduler does to all processes of a run
    take(source, 1)
    with open(f"/proc/{process.pid}/maps", encoding="utf-8") as maps:
        loaded = maps.read()
    assert "numpy" in loaded and "libtorch" not in loaded and "libdali" not in loaded
    source.close()
    assert process.poll() is not None


SCRIPT = """
import os, sys
from unigrad_fast.pipelines.reading.apart import Apart
apart = Apart(1, 60.0, 1, 4096)
apart.ask(0, [os.fsencode(__file__)])
(data,) = apart.answer(0, lambda: False)
print(apart._process.pid, len(data), flush=True)
sys.stdin.read()
"""


def test_a_script_needs_no_guard_and_leaves_no_process_when_it_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, str(script)], **pipes) as process:
        pid, length = map(int, process.stdout.readline().split())
        process.kill()
        assert process.stdout.read() == "", "the script ran once"
    assert length == len(SCRIPT)
    ended = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < ended


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def on_a_gpus_path(manifest: Manifest, apart: bool, start: int = 0) -> list:
    loader = Loader(manifest, batch_size=6, image_size=32, threads=1)
    loader.apart = apart
    made = loader._on_gpu(start, 2 * STEPS)
    return [loader._batch(supply, [view.clone() for view in views]) for supply, views in made]


def test_batches_of_a_gpus_path_are_the_same_and_begin_anywhere(damaged):
    apart, here, late = (on_a_gpus_path(damaged, *how) for how in ((True, 0), (False, 0), (True, 9)))
    for batch, same in [*zip(apart, here, strict=True), *zip(apart[9:], late, strict=True)]:
        assert torch.equal(batch.index, same.index) and batch.failures == same.failures
        assert all(map(torch.equal, batch.views, same.views))


def test_there_is_memory_for_all_steps_of_a_gpus_path(manifest):
    reads = []
    object.__setattr__(manifest, "read", reads.append)
    assert len(on_a_gpus_path(manifest, True)) == 2 * STEPS
    assert reads == []


def test_a_gpus_loader_reads_apart_and_a_cpus_does_not(manifest):
    assert Loader(manifest, batch_size=6, device="cuda:0").apart
    assert not Loader(manifest, batch_size=6).apart
