"""`unigrad-fast doctor`: what the machine has, what a run will use, what is missing, and whether each part works.

torch, DALI, DeepSpeed and what imports them are imported inside functions: one of them may be what is missing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import itertools
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unigrad_fast.config import Config, Engine, resolve
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.quiet import without_warnings
from unigrad_fast.runtime.validation import allowed_values, count

if TYPE_CHECKING:
    import torch

    from unigrad_fast.pipelines import Manifest
    from unigrad_fast.runtime.process_group import World

# Name, module, and what pip is told, which is what setup.py says.
PACKAGES = (
    ("torch", "torch", "torch>=2.11,<2.15"),
    ("torchvision", "torchvision", "torchvision>=0.26"),
    ("DeepSpeed", "deepspeed", "deepspeed==0.19.8"),
    ("NumPy", "numpy", "numpy>=1.26"),
    ("Pillow", "PIL", "pillow>=10"),
    ("safetensors", "safetensors", "safetensors>=0.4.3"),
    ("TensorBoard", "tensorboard", "tensorboard>=2.16"),
    ("Matplotlib", "matplotlib", "matplotlib>=3.8"),
)
DALI = {"12": "nvidia-dali-cuda120>=2.0,<3", "13": "nvidia-dali-cuda130>=2.0,<3"}  # by CUDA's major version
PLAIN = {name for name, *_ in PACKAGES[3:]}  # share a row when there is nothing to say
OPTIONAL = {"DALI", "DeepSpeed"}  # without them some parts can be tried all the same

IMAGES_PER_RANK = 16
STEPS = 2  # each part is run twice: the first call builds and compiles, the second shows the time it takes
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One row of a table.

    Attributes:
        name, found: of what, and what it is.
        status: "ok"; "note" for what a run can do without; "skipped"; anything else is a problem.
        remedy: what to do about it.
        times: milliseconds of the first and the second call of a part that was tried.
    """

    name: str
    found: str = ""
    status: str = "ok"
    remedy: str = ""
    times: tuple[float, ...] = ()

    @property
    def is_problem(self) -> bool:
        return self.status not in ("ok", "note", "skipped")


def run(smoke: bool = True, verbose: bool = False) -> None:
    """Print the tables, on rank 0, and try each part.

    Args:
        smoke: try the parts.
        verbose: show the tracebacks of parts that fail, and what the libraries say.

    Raises:
        UserError: something is missing or does not work; one line for each, with the remedy.
    """
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    console = Console(quiet=rank != "0")
    with contextlib.nullcontext() if verbose else without_warnings():
        found = [*packages(), *machine()]
        console.print(_table("Machine and versions", found))
        unusable = {finding.name for finding in found if finding.status in ("missing", "broken")}
        if unusable - OPTIONAL:
            refuse(found)

        from unigrad_fast.runtime import process_group

        with contextlib.ExitStack() as stack:
            launch = process_group.launch_environment(os.environ)
            if launch.size > 1:
                refuse(found)  # before the others wait for this rank
                console.print(f"Waiting for {launch.size} ranks at {launch.address}:{launch.port}", highlight=False)
            try:
                world = stack.enter_context(process_group.session())
            except Exception as error:
                if verbose:
                    traceback.print_exc()
                found.append(Finding("process group", _first_line(error), "failed", NETWORK))
                refuse(found)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unigrad-doctor-")))
            scene = prepare(world, folder)
            used = plan(scene, launch.launcher, unusable)
            console.print(_table("What a run will use", used))
            found += used
            if smoke:
                with console.status("Trying each part"):
                    tried = attempt(scene, unusable, verbose)
                console.print(_smoke_table(tried, world))
                found += tried
            refuse(found)
    tried = "and works" if smoke else "(not tried out: --smoke false)"
    console.print(f"Ready: all that pretrain needs is here {tried}.", highlight=False)


def refuse(found: Sequence[Finding]) -> None:
    """Raises UserError when there are problems among the findings, a line for each."""
    lines = [f"{each.name}: {each.found or each.status}; {each.remedy}" for each in found if each.is_problem]
    if lines:
        raise UserError("\n".join(lines))


# What the machine has.


def packages() -> list[Finding]:
    """A row for each package that a run needs."""
    found = [_package(*package) for package in PACKAGES]
    plain = [each for each in found if each.name in PLAIN and not each.is_problem]
    return [
        Finding("Python", f"{platform.python_version()}, {sys.executable}"),
        *(each for each in found if each not in plain),
        _dali(),
        Finding("Triton", _version("triton") or "not installed; nothing uses it yet"),
        Finding("others", ", ".join(f"{each.name} {each.found}" for each in plain)),
    ]


def _package(name: str, module: str, requirement: str) -> Finding:
    version, error = _version(_distribution(requirement)), _import_error(module)
    if finding := _import_problem(name, module, version, error, requirement):
        return finding
    if not _fits(version, requirement):
        wanted = requirement.removeprefix(_distribution(requirement))
        return Finding(name, f"{version}, but {wanted} is needed", "wrong", install(requirement))
    if module == "torch":
        cuda = _torch_cuda()
        version = f"{version}, built for " + (f"CUDA {cuda}" if cuda else "the CPU alone")
    return Finding(name, version)


def _dali() -> Finding:
    installed = {
        requirement: version for requirement in DALI.values() if (version := _version(_distribution(requirement)))
    }
    cuda = _torch_cuda()
    wanted = DALI.get((cuda or "13").partition(".")[0], DALI["13"])
    requirement, version = next(iter(installed.items()), (wanted, None))
    error = _import_error("nvidia.dali")
    if finding := _import_problem("DALI", "nvidia.dali", version, error, wanted):
        return finding
    shown = " and ".join(f"{version}, flavour {_distribution(each)[-7:]}" for each, version in installed.items())
    names = " ".join(_distribution(each) for each in installed)
    if len(installed) > 1:
        remedy = f"pip uninstall --yes {names}; {install(wanted)}"
        return Finding("DALI", f"{shown}, which overwrite each other", "wrong", remedy)
    if not _fits(version, requirement):
        return Finding("DALI", f"{shown}, but >=2.0,<3 is needed", "wrong", install(requirement))
    if cuda and requirement != wanted and _driver():
        remedy = f"pip uninstall --yes {names}; {install(wanted)}"
        return Finding("DALI", f"{shown}, beside a torch for CUDA {cuda}", "note", remedy)
    return Finding("DALI", shown)


def _import_problem(
    name: str, module: str, version: str | None, error: Exception | None, requirement: str
) -> Finding | None:
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return Finding(name, "not installed", "missing", install(requirement))
    if version is None and error is None:
        return Finding(name, "of unknown version, not installed by pip", "wrong", install(requirement))
    if error is None:
        return None
    remedy = install(requirement, "--force-reinstall --no-deps")
    if isinstance(error, ModuleNotFoundError) and error.name:
        needed = error.name.partition(".")[0]
        remedy = install({module: requirement for _, module, requirement in PACKAGES}.get(needed, needed))
    elif re.search(r"lib(cuda|nvidia)", str(error)):
        remedy = f"install NVIDIA's driver, or in a container start it with --gpus all; or else {remedy}"
    return Finding(name, f"{version or 'installed'}, but its import fails: {_first_line(error)}", "broken", remedy)


def _import_error(module: str) -> Exception | None:
    """What a package's import raises; it is imported for good."""
    try:
        if module == "deepspeed":
            from unigrad_fast.runtime.deepspeed_import import quiet_deepspeed

            quiet_deepspeed()
        else:
            importlib.import_module(module)
    except Exception as error:
        return error
    return None


def _torch_cuda() -> str | None:
    """The CUDA version that torch is built for."""
    torch = sys.modules.get("torch")
    return torch and torch.version.cuda


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _distribution(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0]


def _fits(version: str, requirement: str) -> bool:
    """Whether a version is within a requirement's bounds, by its numbers alone."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.match(r"\d+(?:\.\d+)*", text)[0].split("."))

    compare = {"==": tuple.__eq__, ">=": tuple.__ge__, "<": tuple.__lt__}
    return all(
        compare[sign](numbers(version), numbers(bound)) for sign, bound in re.findall(r"(==|>=|<)([\d.]+)", requirement)
    )


def install(requirement: str, options: str = "") -> str:
    """The command that installs a requirement."""
    quoted = f"'{requirement}'" if re.search(r"[<>]", requirement) else requirement
    return " ".join(f"pip install {options} {quoted}".split())


def machine() -> list[Finding]:
    """A row for each thing that the machine has, and for limits that are low."""
    cores, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    allowed = count(cores, "core") + (f" of {total}: this process may use no others" if cores < total else "")
    words = dict.fromkeys(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    units = [name for flag, name in BF16_UNITS.items() if flag in words]
    memory = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8")))
    return [
        Finding("CPU", f"{_processor()}, {allowed}; bf16 units: {', '.join(units) or 'none'}"),
        Finding("memory", f"{_gib(memory['MemTotal'], 1024)}, {_gib(memory['MemAvailable'], 1024)} available"),
        _disk(),
        *_gpus(),
        *_limits(cores),
    ]


BF16_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "Arm BF16"}


def _processor() -> str:
    match = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return match[1] if match else platform.machine()


def _gib(size: int | str, unit: int = 1) -> str:
    return f"{int(size) * unit / GIB:.3g} GiB"


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    found = f"{_gib(free)} free in {Path.cwd()}"
    if not os.access(".", os.W_OK):
        return Finding("disk", f"{found}, which is not writable", "note", "give pretrain a folder with --output")
    if free < GIB:
        return Finding("disk", found, "note", "free some, or give pretrain another folder with --output")
    return Finding("disk", found)


def _gpus() -> list[Finding]:
    torch, driver = sys.modules.get("torch"), _driver()
    if torch is None:
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        gpus = Counter(
            f"{gpu.name}, {_gib(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
            for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        )
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return [
            *(Finding("GPU", f"{number} x {gpu}") for gpu, number in gpus.items()),
            Finding("driver, NCCL", f"driver {driver or 'of unknown version'}, NCCL {nccl}"),
        ]
    if driver is None:
        return [Finding("GPU", "none")]
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return [Finding("GPU", "hidden by CUDA_VISIBLE_DEVICES", "note", "unset CUDA_VISIBLE_DEVICES")]
    if not torch.version.cuda:
        found = f"there is a driver ({driver}), but this torch is built for the CPU alone"
        return [Finding("GPU", found, "wrong", "pip install --force-reinstall torch torchvision")]
    reason = str(caught[0].message).partition("(Triggered")[0].splitlines()[0] if caught else "torch sees no GPU"
    remedy = (
        "`nvidia-smi` must list the GPUs: ask the scheduler for some (--gpus-per-node), start a container with --gpus "
        "all; CUDA 13 needs driver 580 or newer, CUDA 12 driver 525"
    )
    return [Finding("GPU", f"driver {driver}, but: {reason}", "wrong", remedy)]


def _driver() -> str | None:
    """Version of NVIDIA's kernel driver."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"Module.*?\s(\d+\.[\d.]+)", text)
    return match[1] if match else "unknown"


def _limits(cores: int) -> list[Finding]:
    """Rows for what other processes or the system may keep from a run."""
    found = []
    if (load := os.getloadavg()[0]) > cores:
        remedy = "threads that share a core slow each other down many times: end what else runs, or wait for it"
        found.append(Finding("load", f"{load:.1f} busy processes on {count(cores, 'core')}", "note", remedy))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < 1024:
        found.append(Finding("open files", f"at most {files} per process", "note", "ulimit -n 4096"))
    if os.path.isdir("/dev/shm") and (size := shutil.disk_usage("/dev/shm").total) < GIB:
        remedy = "start a container with --shm-size 1g: NCCL's ranks on one machine talk through it"
        found.append(Finding("/dev/shm", _gib(size), "note", remedy))
    return found


# What a run will use.


class Scene(NamedTuple):
    """What the parts are tried on: the quickstart's configuration with a small batch of generated images."""

    config: Config
    world: World
    manifest: Manifest


def prepare(world: World, folder: Path) -> Scene:
    """Write JPEG files, the same on all ranks, into a folder of this rank."""
    import numpy as np
    from PIL import Image

    from unigrad_fast.pipelines import Manifest

    batch = IMAGES_PER_RANK * world.size
    coarse = np.random.default_rng(0).integers(0, 256, (batch, 8, 8, 3), np.uint8)
    (folder / "images").mkdir()
    for number, colours in enumerate(coarse):
        image = Image.fromarray(colours).resize((320, 240), Image.Resampling.BICUBIC)
        image.save(folder / f"images/{number:05}.jpg", quality=90)
    tree = {
        "output": folder / "run",
        "data": {"train": folder / "images", "val": None, "batch_size": batch},
        "schedule": {"epochs": STEPS, "warmup_epochs": 0},
        "telemetry": {"tensorboard": False},
    }
    return Scene(resolve("quickstart", tree), world, Manifest.from_folder(folder / "images", cache=folder / "cache"))


def plan(scene: Scene, launcher: str, unusable: set[str]) -> list[Finding]:
    """A row for each choice that a run makes on this machine."""
    import torch
    from torch import nn

    from unigrad_fast.networks.batch_norm import convert, is_alone
    from unigrad_fast.runtime.precision import autocast_dtype

    world = scene.world
    dtype = str(autocast_dtype("auto", world.device) or torch.float32).removeprefix("torch.")
    batch_norm = type(convert(nn.BatchNorm1d(2), world.device.type)).__name__
    on_gpu = world.device.type == "cuda"
    detail = torch.cuda.get_device_name(world.device) if on_gpu else count(torch.get_num_threads(), "thread")
    stages = allowed_values(Engine, "zero_stage").removeprefix("a whole number from ")
    return [
        Finding("device", f"{world.device}, {detail}"),
        _ranks(world, "no launcher" if launcher == "single" else f"launched by {launcher}"),
        Finding("process group", "nccl, gloo for CPU tensors" if world.backend == "nccl" else world.backend),
        Finding("precision", f"{dtype} (engine.precision auto)"),
        _decoder(scene, unusable),
        _kernels(world.device),
        Finding("batch norm", f"torch's own, for one rank ({batch_norm} for more)" if is_alone() else batch_norm),
        Finding("ZeRO stages", "none without DeepSpeed" if "DeepSpeed" in unusable else stages),
    ]


def _kernels(device: torch.device) -> Finding:
    from unigrad_fast.kernels import heuristics
    from unigrad_fast.kernels.dispatch import use_triton

    try:
        found = f"Triton, tiles of sm_{heuristics.architecture_of(device)}" if use_triton(device) else "plain torch"
    except ValueError as error:
        found, _, remedy = str(error).partition("; ")
        return Finding("kernels", found, "broken", remedy)
    return Finding("kernels", found)


def _ranks(world: World, launched: str) -> Finding:
    import torch

    local = f", {world.local_size} on this machine" if world.size > 1 else ""
    found = f"{count(world.size, 'rank')}{local}; {launched}"
    gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    if gpus > world.local_size == world.size:
        remedy = f"for all {gpus} GPUs: torchrun --nproc_per_node {gpus} -m unigrad_fast pretrain ..."
        return Finding("ranks", found, "note", remedy)
    return Finding("ranks", found)


def _decoder(scene: Scene, unusable: set[str]) -> Finding:
    if "DALI" in unusable:
        return Finding("decoder", "none without DALI")
    loader = make_loader(scene)
    where = "CPU" if loader.device_id is None else "GPU"
    return Finding("decoder", f"DALI on the {where}, {count(loader.threads, 'thread')} per rank")


# The parts of a training step, each tried by itself. A part is built by its function, which returns what is called.


def make_loader(scene: Scene):
    from unigrad_fast.pipelines import Loader

    config, world, manifest = scene
    return Loader(
        manifest,
        config.data.recipe,
        config.data.batch_size,
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        image_size=config.data.image_size,
        prefetch=1,  # or the second batch would be ready before it is asked for
    )


def loading(scene: Scene) -> Callable[[], object]:
    batches = make_loader(scene).iterate()
    return lambda: check_finite(next(batches).views[0])


def model_forward(scene: Scene) -> Callable[[], object]:
    import torch

    from unigrad_fast.networks.encoder import build_encoder
    from unigrad_fast.runtime.precision import autocast_dtype

    config, world, _ = scene
    encoder, dtype = build_encoder(config.model, config.seed, world.device), autocast_dtype("auto", world.device)
    views = [_random(scene, 3, config.data.image_size, config.data.image_size) for _ in range(2)]

    def work() -> None:
        with torch.no_grad(), torch.autocast(world.device.type, dtype, enabled=dtype is not None):
            check_finite(encoder(views)[0])

    return work


def objective(scene: Scene) -> Callable[[], object]:
    from unigrad_fast.objectives import build

    settings, width = scene.config.objective, scene.config.model.projector.width
    built = build(settings.method, width=width, balance=settings.balance, decay=settings.decay).to(scene.world.device)
    online, target = ([_random(scene, width) for _ in range(2)] for _ in range(2))
    for embedding in online:
        embedding.requires_grad_()

    def work() -> None:
        built(online=online, target=target).loss.backward()
        check_finite(online[0].grad)

    return work


def batch_norm(scene: Scene) -> Callable[[], object]:
    from torch import nn

    from unigrad_fast.networks.batch_norm import convert

    layer = convert(nn.BatchNorm1d(512), scene.world.device.type).to(scene.world.device)
    x = _random(scene, 512).requires_grad_()

    def work() -> None:
        layer(x).square().mean().backward()
        check_finite(x.grad)

    return work


def all_reduce(scene: Scene) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    def work() -> None:
        numbers = torch.ones(2**20, device=scene.world.device)
        dist.all_reduce(numbers)
        if (numbers != scene.world.size).any():
            raise RuntimeError(f"the sum of {scene.world.size} ones is not {scene.world.size}")

    return work


def training_step(scene: Scene) -> Callable[[], object]:
    from unigrad_fast.training.trainer import Trainer

    trainer, steps = Trainer(*scene), itertools.count()
    batches = trainer.loader.iterate(stop_step=STEPS * trainer.accumulation)

    def work() -> None:
        trainer.step(next(steps), batches)
        check_finite(trainer.objective.correlation)

    return work


def saving(scene: Scene) -> Callable[[], object]:
    folder = "." if os.access(".", os.W_OK) else None

    def work() -> None:
        with tempfile.NamedTemporaryFile(prefix=".unigrad-doctor-", dir=folder) as file:
            file.write(os.urandom(2**20))
            file.flush()
            os.fsync(file.fileno())

    return work


def _random(scene: Scene, *shape: int) -> torch.Tensor:
    """[IMAGES_PER_RANK, *shape] on the device, images channels-last."""
    import torch

    numbers = torch.randn(IMAGES_PER_RANK, *shape, generator=torch.Generator().manual_seed(0))
    layout = torch.channels_last if len(shape) == 3 else torch.contiguous_format
    return numbers.to(scene.world.device, memory_format=layout)


def check_finite(tensor: torch.Tensor) -> None:
    if not tensor.isfinite().all():
        raise RuntimeError("the result is not finite")


TRACEBACK = "`unigrad-fast doctor --verbose true` shows where"
NETWORK = "check GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO says more"
FITTING = f"torch must be built for this GPU and driver, and the GPU be free (`nvidia-smi`); {TRACEBACK}"


class Part(NamedTuple):
    """How a part is built, the optional packages that it needs, and what to do when it fails."""

    build: Callable[[Scene], Callable[[], object]]
    needs: set[str]
    remedy: str


PARTS = {
    "decode, augment": Part(loading, {"DALI"}, f"on a GPU, --data.decode cpu may work; {TRACEBACK}"),
    "model forward": Part(model_forward, set(), FITTING),
    "objective": Part(objective, set(), FITTING),
    "batch norm": Part(batch_norm, set(), FITTING),
    "all-reduce": Part(all_reduce, set(), NETWORK),
    "training step": Part(training_step, {"DALI", "DeepSpeed"}, TRACEBACK),
    "save a file": Part(saving, set(), "free space on the disk (`df -h .`), or use another folder"),
}


def attempt(scene: Scene, unusable: set[str], verbose: bool = False) -> list[Finding]:
    """Try each part; one that fails does not keep the others from being tried.

    Among several ranks it does: the others wait for this one in a collective, and it must end to tell them.
    """
    found = []
    for name, part in PARTS.items():
        if lacking := part.needs & unusable:
            found.append(Finding(name, f"needs {' and '.join(sorted(lacking))}", "skipped"))
            continue
        try:
            found.append(Finding(name, times=_timed_twice(part.build, scene)))
        except Exception as error:
            if verbose:
                traceback.print_exc()
            found.append(Finding(name, _first_line(error), "failed", part.remedy))
            if scene.world.size > 1:
                break
    return found


def _timed_twice(build: Callable[[Scene], Callable[[], object]], scene: Scene) -> tuple[float, ...]:
    """Milliseconds of building and the first call, and of the second call."""
    times, work = [], None
    for _ in range(STEPS):
        began = time.perf_counter()
        work = work or build(scene)
        work()
        if scene.world.device.type == "cuda":
            import torch

            torch.cuda.synchronize(scene.world.device)
        times.append(1000 * (time.perf_counter() - began))
    return tuple(times)


# Output.


def _first_line(error: Exception) -> str:
    """What an error says, in one line, with its type where the words alone may say little."""
    text = str(error).partition("encountered:")[2] or str(error)  # DALI begins with where, and goes on with what
    said = next((line.strip() for line in text.splitlines() if line.strip()), "")
    said = re.sub(r"^\[[^]\s]*:\d+\]\s*", "", said)  # gloo's own source line
    named = isinstance(error, ImportError | OSError | UserError) and said
    return said if named else f"{type(error).__name__}: {said}".removesuffix(": ")


STYLES = {"ok": "green", "note": "yellow", "skipped": "yellow"}


def _status(finding: Finding) -> Text:
    return Text(finding.status, style=STYLES.get(finding.status, "bold red"))


def _text(finding: Finding) -> Text:
    return Text("\n".join(filter(None, [finding.found, finding.remedy and f"→ {finding.remedy}"])))


def _table(title: str, found: Sequence[Finding]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for each in found:
        table.add_row(each.name, _text(each), _status(each))
    return table


def _smoke_table(found: Sequence[Finding], world: World) -> Table:
    memory = f"{_gib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 1024)} of the process"
    if world.device.type == "cuda":
        import torch

        memory += f", {_gib(torch.cuda.max_memory_allocated(world.device))} of the GPU"
    table = Table(
        title=f"Each part tried, with {IMAGES_PER_RANK} images per rank",
        title_justify="left",
        caption=f"Peak memory: {memory}",
        caption_justify="left",
    )
    table.add_column("part")
    table.add_column("first, ms", justify="right")
    table.add_column("again, ms", justify="right")
    table.add_column("result")
    for each in found:
        times = [f"{value:,.1f}" for value in each.times] or ["", ""]
        table.add_row(each.name, *times, Text("\n").join([_status(each), *([_text(each)] if each.found else [])]))
    return table
