"""What all tests share: few threads, the right accelerator, sample data, what runs and in which order."""

from __future__ import annotations

import os
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from slow_results import Record

pytest_plugins = ["worker_fixtures"]

ROOT = Path(__file__).resolve().parent.parent
THREADS = int(os.environ.get("OMP_NUM_THREADS", min(2, os.cpu_count() or 1)))
if "PYTEST_XDIST_WORKER" in os.environ:  # several pytest processes share the cores
    THREADS = 1
LONGEST = (
    "kernels/test_interpreted_backward.py",
    "kernels/test_interpreted.py",
    "training/test_interruption.py",
    "training/test_ranks.py",
    "kernels/test_compiled.py",
    "benchmarks/test_bench_step.py",
    "training/test_pretrain.py",
    "training/test_checkpoint.py",
    "benchmarks/test_device_check.py",
    "comparison/test_compare_running.py",
    "training/test_gate.py",
    "training/test_bad_images_in_training.py",
)

settings.register_profile("any machine", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("any machine")
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))  # for the processes that tests start
torch.set_num_threads(THREADS)
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:  # as of a shell's background, or nohup; it would be inherited
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps the tests' manifests out of the user's cache."""
    os.environ["UNIGRAD_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _own_machine() -> Iterator[None]:
    """Keeps what else the machine does out of what runs say."""
    from unigrad_fast.runtime import processors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processors, "crowded", lambda uses, remedy: None)
        yield


@pytest.fixture(scope="session")
def cifar_subset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10,000 CIFAR-10 images as JPEG files: train/CLASS and val/CLASS. They are not ours to ship."""
    archive = Path(os.environ.get("UNIGRAD_SHARED", ROOT.parent / "shared")) / "data/cifar10-subset.tar.xz"
    if not archive.is_file():
        pytest.skip(f"no sample data at {archive}; UNIGRAD_SHARED names their folder")
    folder = tmp_path_factory.mktemp("cifar10-subset")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / "cifar10-subset"


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder with numbers of other people's implementations; its README says what they are."""
    return ROOT / "tests/golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-results", metavar="FILE", help="write results, commit and machine into FILE")
    parser.addoption("--quick", action="store_true", help="leave out what starts processes, compiles or takes long")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--slow-results", None):
        config.pluginmanager.register(Record(Path(file)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The files that take long come last, the longest ones first."""
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    order = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST, start=1)}
    items.sort(key=lambda item: order.get(item.path, 0))


@pytest.fixture(scope="session", autouse=True)
def _no_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--quick`, skips what starts a process or compiles."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--quick"):

            def refuse(*_: object, **__: object) -> None:
                pytest.skip("starts a process or compiles")

            patch.setattr(subprocess.Popen, "__init__", refuse)
            patch.setattr(BaseProcess, "start", refuse)
            patch.setattr(torch, "compile", refuse)
        yield
