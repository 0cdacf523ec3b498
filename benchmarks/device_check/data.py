"""Checks of the data path: the GPU's results against the CPU's, and their speed.

Without DALI: the photometric operations in torch. With it: every operation and every preset, the graph against the
CPU's path with the same parameters; decoding, also of single images against batches, and repeatedly; unusable files;
`Loader` with several shares for the GPU's JPEG unit and with small and full views. The images are drawn, or the user's.

On a CPU the graph's CPU backend replaces the GPU's, at small sizes.
"""

from __future__ import annotations

import io
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from unigrad_fast.benchmarks.device_check.finding import Finding, findings
from unigrad_fast.benchmarks.harness.record import append
from unigrad_fast.benchmarks.harness.turns import seconds, spread, synchronize
from unigrad_fast.pipelines import PRESETS, View, photometric, preset_views
from unigrad_fast.pipelines.manifest import Manifest
from unigrad_fast.pipelines.parameters import Parameters, sample
from unigrad_fast.pipelines.presets import DEVIATION, GLOBALS, MEAN, Growth
from unigrad_fast.runtime.torch_private import spin

DRAWN, DRAWN_SIZE = 64, (500, 375)  # images; width and height as in ImageNet
COMPARED = 32  # images per comparison
LOADS = (0.0, 0.5, 0.65, 0.8, 0.9)
TIMED = ("simsiam", "multicrop")
BLOCKS, BLOCK_SECONDS = 3, 1.0
REPEATS = 300
PLAIN = preset_views("simsiam", jitter_probability=0, gray_probability=0, blur_probability=0, flip_probability=0)[0]


@dataclass(frozen=True)
class Bound:
    """Limits of differences, in levels of 0..255: of the mean, of the 99th percentile, of the maximum."""

    mean: float
    most_of_all: float
    most: float

    def judge(self, what: str, ours: list[Tensor], theirs: list[Tensor]) -> Finding:
        """Compare tensors pair by pair."""
        apart = torch.cat(
            [(a.float().cpu() - b.float().cpu()).abs().flatten() for a, b in zip(ours, theirs, strict=True)]
        )
        rank = max(1, int(0.99 * apart.numel()))
        mean, share, most = apart.mean().item(), apart.kthvalue(rank).values.item(), apart.max().item()
        good = mean <= self.mean and share <= self.most_of_all and most <= self.most
        return Finding(what, f"mean {mean:.3f}, 99 % within {share:.2f}, max {most:.1f} levels", good)


EXACT, ANY = Bound(0.01, 0.01, 0.01), 255.0
RESIZE = Bound(0.3, 2.01, 20.01)  # each path is within half of these limits of torchvision's result
# The graph rounds to levels after each operation, the CPU's path once at the end.
ROUNDED, VIEW = Bound(0.51, 1.01, 2.01), Bound(0.8, 4.01, ANY)
DECODED, DECODED_VIEW = Bound(3.0, ANY, ANY), Bound(4.0, ANY, ANY)  # chroma is upsampled differently
TORCH = Bound(0.05, 1.01, 8.01)  # different order of sums, TF32 in the blur; the jitter amplifies differences


@dataclass(frozen=True)
class Ground:
    """The device and data of the checks.

    Attributes:
        manifest: the images; None without DALI.
        folder: folder for further files.
        rows: measurements to record.
    """

    device: torch.device
    manifest: Manifest | None
    folder: Path
    rows: list[dict] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def device_id(self) -> int | None:
        return torch.cuda.current_device() if self.on_gpu else None

    @property
    def batch_size(self) -> int:
        return min(256 if self.on_gpu else 4, len(self.manifest))

    @property
    def threads(self) -> int:
        return 8 if self.on_gpu else 1

    @property
    def index(self) -> np.ndarray:
        """Indices of the images to compare."""
        good = np.setdiff1d(np.arange(len(self.manifest)), self.manifest.unreadable())
        return good[: COMPARED if self.on_gpu else 3]

    @property
    def sizes(self) -> np.ndarray:
        return self.manifest.sizes[self.index]

    def data(self) -> list[np.ndarray]:
        return [np.frombuffer(self.manifest.read(i), np.uint8) for i in self.index.tolist()]

    def lossless(self) -> list[np.ndarray]:
        """The same images as PNG files, which every decoder turns into the same pixels."""
        from unigrad_fast.pipelines.reading.damage import as_png

        return [as_png(data) for data in self.data()]

    def views(self, name: str) -> tuple[View, ...]:
        """A preset's views; small ones on a CPU."""
        views = preset_views(name)
        return views if self.on_gpu else tuple(replace(view, size=view.size // 4) for view in views)

    def run(self, pipeline) -> tuple:
        return pipeline.run(torch.cuda.current_stream() if self.on_gpu else None)


def of_graph(ground: Ground, data: list[np.ndarray], views: tuple[View, ...], drawn: list[Parameters]) -> list[Tensor]:
    """Views made by the graph, in levels, fp32 [N, S, S, 3] each."""
    from unigrad_fast.pipelines import graph

    fed = [array for view, p in zip(views, drawn, strict=True) for array in graph.feed(view, p)]
    pipeline = graph.build(
        views, len(data), lambda info: [data, *fed], threads=ground.threads, device_id=ground.device_id, prefetch=1
    )
    *outputs, _ = ground.run(pipeline)
    return [levels(torch.from_dlpack(output.as_tensor())) for output in outputs]


def of_crops(data: list[np.ndarray], views: tuple[View, ...], drawn: list[Parameters]) -> list[Tensor]:
    """The same, made by the CPU's path."""
    from unigrad_fast.pipelines import crops, graph

    decoded, _ = graph.build_decoder(lambda info: [data], batch_size=len(data)).run()
    images, made = [torch.from_dlpack(image) for image in decoded], []
    for view, p in zip(views, drawn, strict=True):
        crop = torch.empty(len(data), view.size, view.size, 3, dtype=torch.uint8)
        crops.crop_and_resize(images, view, p, crop)
        crops.recolour(view, crop, p, out := torch.empty(crop.shape))
        made.append(levels(out))
    return made


def levels(view: Tensor) -> Tensor:
    deviation, mean = (torch.tensor(values, device=view.device) for values in (DEVIATION, MEAN))
    return 255 * (view * deviation + mean)


def draw_all(ground: Ground, views: tuple[View, ...]) -> list[Parameters]:
    return [sample(view, number, 0, 0, ground.index, ground.sizes) for number, view in enumerate(views)]


def torch_operations(ground: Ground) -> Iterator[Finding]:
    """`photometric = torch` on the device against the CPU, on the same crops; does not need DALI."""
    generator = torch.Generator().manual_seed(0)
    count, side = (64, 224) if ground.on_gpu else (4, 40)
    for name in ("simsiam", "byol", "swav"):
        ours, theirs = [], []
        for number, view in enumerate(preset_views(name, side)[:GLOBALS]):
            coarse = torch.rand(count, 3, 9, 9, generator=generator)  # smooth, as crops are
            smooth = torch.nn.functional.interpolate(coarse, size=side, mode="bilinear").permute(0, 2, 3, 1)
            crop = (255 * smooth + 8 * torch.randn(smooth.shape, generator=generator)).clamp(0, 255).to(torch.uint8)
            drawn = sample(view, number, 0, 0, np.arange(count), np.full((count, 2), side))
            ours.append(levels(photometric.apply(view, crop.to(ground.device), drawn).permute(0, 2, 3, 1)))
            theirs.append(levels(photometric.apply(view, crop, drawn).permute(0, 2, 3, 1)))
        yield TORCH.judge(f"photometric torch, {name}", ours, theirs)
    crop, repeats = crop.to(ground.device), 50 if ground.on_gpu else 1
    photometric.apply(view, crop, drawn)
    each = seconds(lambda: photometric.apply(view, crop, drawn), ground.device, repeats)
    yield Finding("photometric torch, a view", f"{count / each:,.0f} images/s in batches of {count}", True)


def operations(ground: Ground) -> Iterator[Finding]:
    """Each operation on its own; all except resizing on crops that keep their size."""
    data = ground.lossless()
    side = min(224 if ground.on_gpu else 40, int(ground.sizes.min()))
    for interpolation in ("bilinear", "bicubic"):
        view = replace(PLAIN, size=side, interpolation=interpolation)
        drawn = draw_all(ground, (view,))
        yield RESIZE.judge(f"crop, {interpolation}", *compared(ground, data, (view,), drawn))
    bounds = {"jitter": ROUNDED, "gray": ROUNDED, "blur": ROUNDED, "solarize": EXACT, "flip": EXACT}
    for operation, bound in bounds.items():
        view = replace(PLAIN, size=side, **{f"{operation}_probability": 1.0})
        start, whole = np.zeros(len(data), np.int32), np.full(len(data), side, np.int32)
        drawn = [replace(p, x=start, y=start, width=whole, height=whole) for p in draw_all(ground, (view,))]
        yield bound.judge(operation, *compared(ground, data, (view,), drawn))


def compared(ground: Ground, data: list[np.ndarray], views: tuple[View, ...], drawn: list[Parameters]) -> tuple:
    return of_graph(ground, data, views, drawn), of_crops(data, views, drawn)


def recipes(ground: Ground) -> Iterator[Finding]:
    """All operations together, on the same pixels and on each decoder's own."""
    for kind, data, bound in (("", ground.lossless(), VIEW), (", own decoder", ground.data(), DECODED_VIEW)):
        for name in PRESETS:
            views = ground.views(name)
            yield bound.judge(f"views of {name}{kind}", *compared(ground, data, views, draw_all(ground, views)))


def decoding(ground: Ground) -> Iterator[Finding]:
    from unigrad_fast.pipelines import graph

    data, png = ground.data(), ground.lossless()
    exact = decode(data)
    yield EXACT.judge("decoding of PNG", decode(png, ground), exact)
    yield DECODED.judge("decoding", together := decode(data, ground), exact)
    what, found, _ = DECODED.judge("decoding, jpeg_fancy_upsampling", decode(data, ground, fancy=True), exact)
    yield Finding(what, found, True)
    alone = [decode([one], ground)[0] for one in data]
    same = sum(map(torch.equal, alone, together))
    yield Finding("decoded alone as in a batch", f"{same} of {len(data)} bitwise equal", same == len(data))
    pipeline = graph.build_decoder(
        lambda info: [data], batch_size=len(data), threads=ground.threads, device_id=ground.device_id, prefetch=2
    )
    repeats, equal, first = REPEATS if ground.on_gpu else 3, 0, None
    for _ in range(repeats):
        images, _ = ground.run(pipeline)
        pixels = torch.cat([torch.from_dlpack(image).flatten() for image in images])
        first = pixels if first is None else first
        equal += torch.equal(pixels, first)
    yield Finding("repeated decodings", f"{equal} of {repeats} bitwise equal", equal == repeats)


def decode(data: list[np.ndarray], ground: Ground | None = None, fancy: bool = False) -> list[Tensor]:
    """uint8 [height, width, 3] each, from the ground's decoder or the CPU's."""
    from nvidia.dali import fn, pipeline_def, types

    device_id = ground.device_id if ground else None

    @pipeline_def(batch_size=len(data), num_threads=ground.threads if ground else 1, device_id=device_id)
    def define():
        return fn.decoders.image(
            fn.external_source(source=lambda: data, batch=True),
            device="cpu" if device_id is None else "mixed",
            output_type=types.RGB,
            adjust_orientation=False,
            jpeg_fancy_upsampling=fancy,
        )

    pipeline = define()
    (images,) = ground.run(pipeline) if ground else pipeline.run()
    return [torch.from_dlpack(image).clone() for image in images]


def bad_files(ground: Ground) -> Iterator[Finding]:
    """Check the decoder on damaged and unusual files, and a loader that encounters them."""
    from unigrad_fast.pipelines.reading.damage import defects

    data = draw(0, (80, 60))
    damaged, files = damaged_files(data), {**damaged_files(data), **odd_files(data)}
    said = defects([np.frombuffer(content, np.uint8) for content in files.values()], ground.device_id)
    yield judge_names("files refused", {name for name, why in zip(files, said, strict=True) if why}, set(damaged))

    folder = ground.folder / "bad"
    folder.mkdir()
    files |= {"empty": b"", **{f"good {number}": data for number in range(len(files) + 1)}}
    for name, content in files.items():
        (folder / f"{name}.jpg").write_bytes(content)
    batches = first_batches(ground, Manifest.open(folder, ground.folder), len(files) // 2, 2)
    met = {Path(failure.path).stem for batch in batches for failure in batch.failures}
    yield judge_names(f"files replaced in {len(batches)} batches", met, {*damaged, "empty"})


def judge_names(what: str, found: set[str], expected: set[str]) -> Finding:
    wrong = [f"{name} too" for name in sorted(found - expected)] + [f"not {name}" for name in sorted(expected - found)]
    return Finding(what, ", ".join(wrong) or f"{len(found)}, as expected", not wrong)


def loading(ground: Ground) -> Iterator[Finding]:
    """A loader on the device against one on the CPU, and against itself; also if the CPU decodes for the GPU."""
    from unigrad_fast.pipelines.reading.damage import as_png

    def views(stop: int, start: int = 0, device: torch.device = ground.device, **change: object) -> list[Tensor]:
        batches = first_batches(ground, ground.manifest, stop, min(16, ground.batch_size), start, device, **change)
        return [levels(view.permute(0, 2, 3, 1)) for view in batches[-1].views]

    exact, ours = views(2, device=torch.device("cpu")), views(2)
    yield DECODED_VIEW.judge("a loader", ours, exact)
    yield VIEW.judge("a loader, decoding on the CPU", views(2, prepared=lambda image, data: as_png(data)), exact)
    yield EXACT.judge("a loader that begins later", views(2, start=1), ours)
    early, late = (read_views(ground, wait) for wait in (False, True))
    yield EXACT.judge("views that are read late", late, early)


def read_views(ground: Ground, wait: bool) -> list[Tensor]:
    """Copies of several steps' views; with `wait` the device reads each long after the host has released it."""
    from unigrad_fast.pipelines import Loader

    copies = []
    loader = Loader(ground.manifest, "simsiam", ground.batch_size, device=ground.device, image_size=64)
    with closing(loader):
        for batch in loader.iterate(stop_step=8):
            if ground.on_gpu and wait:
                spin(50_000_000)  # clock cycles
            copies.append(batch.views[0].clone())
            del batch
            if not wait:
                synchronize(ground.device)
    return copies


def first_batches(
    ground: Ground,
    manifest: Manifest,
    stop: int,
    batch_size: int,
    start: int = 0,
    device: torch.device | None = None,
    prepared: Callable | None = None,
) -> list:
    """Batches of the device's loader, or of another device's, with two small views."""
    from unigrad_fast.pipelines import Loader

    loader = Loader(manifest, "simsiam", batch_size, device=device or ground.device, image_size=64)
    if prepared:
        loader.damaged.prepared = prepared
    with closing(loader):
        return list(loader.iterate(start, stop))


def damaged_files(data: bytes) -> dict[str, bytes]:
    end = data.rindex(b"\xff\xd9")
    return {
        "truncated": data[: end // 2],
        "without its end": data[:end],
        "garbage": np.random.default_rng(0).bytes(3000),
        "header only": data[:100],
        "GIF": encoded(data, "GIF"),
        "truncated PNG": encoded(data, "PNG")[:-200],
    }


def odd_files(data: bytes) -> dict[str, bytes]:
    return {
        "PNG": encoded(data, "PNG"),
        "WebP": encoded(data, "WEBP"),
        "RGBA": encoded(data, "PNG", "RGBA"),
        "gray": encoded(data, "JPEG", "L"),
        "CMYK": encoded(data, "JPEG", "CMYK"),
        "progressive": encoded(data, "JPEG", progressive=True),
        "4 4 4": encoded(data, "JPEG", subsampling=0),
    }


def encoded(data: bytes, kind: str, mode: str = "RGB", **options: object) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.open(io.BytesIO(data)).convert(mode).save(file, kind, **options)
    return file.getvalue()


def speed(ground: Ground) -> Iterator[Finding]:
    """Images/s of `Loader`, for each share of the GPU's JPEG unit."""
    for name in TIMED:
        for load in LOADS if ground.on_gpu else LOADS[2:3]:
            yield timed(ground, f"{name}, hw_decoder_load {load:g}", name, load)
    yield timed(ground, "simsiam, photometric torch", "simsiam", photometric="torch")


def growth(ground: Ground) -> Iterator[Finding]:
    """Images/s with small views and with full ones."""
    full = ground.views("simsiam")[0].size
    start, epochs = full * 4 // 7 // 16 * 16, 1_000_000
    for side, epoch in ((start, 0), (full, epochs)):
        yield timed(ground, f"simsiam, growing, at {side}", "simsiam", epoch=epoch, growth=Growth(start, epochs))


def timed(ground: Ground, what: str, name: str, load: float = LOADS[2], epoch: int = 0, **options: object) -> Finding:
    from unigrad_fast.pipelines import Loader

    loader = Loader(
        ground.manifest,
        ground.views(name),
        ground.batch_size,
        device=ground.device,
        hw_decoder_load=load,
        **options,
    )
    first, speeds = epoch * loader.steps_per_epoch, []
    with closing(loader):
        batches = loader.iterate(first)
        for _ in range(loader.prefetch + 2 if ground.on_gpu else 1):
            shape = next(batches).views[0].shape
        if not ground.on_gpu:
            return Finding(what, f"runs at {shape[-1]} pixels", True)
        for _ in range(BLOCKS):
            synchronize(ground.device)
            begin, count = time.perf_counter(), 0
            while time.perf_counter() - begin < BLOCK_SECONDS:
                next(batches)
                count += 1
            synchronize(ground.device)
            speeds.append(count * ground.batch_size / (time.perf_counter() - begin))
        free, total = torch.cuda.mem_get_info()  # of all programs; DALI never frees memory
        host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        memory = {"gpu_mib": (total - free) / 2**20, "host_mib": host_peak / 1024}
    common = {"recipe": name, "hw_decoder_load": load, "side": shape[-1], "threads": loader.threads}
    ground.rows.append({"what": what, "unit": "images/s", **spread(speeds), **memory, **common})
    used = ", ".join(f"{name.removesuffix('_mib')} {mib:,.0f} MiB" for name, mib in memory.items())
    return Finding(what, f"{ground.rows[-1]['median']:,.0f} images/s, {used}", True)


def draw(number: int, size: tuple[int, int]) -> bytes:
    """A JPEG file with smooth colours, sharp edges and a little noise, like a photograph."""
    from PIL import Image, ImageDraw

    random, (width, height) = np.random.default_rng(number), size
    across, down = np.meshgrid(np.linspace(0, 6, width), np.linspace(0, 6, height))
    waves = [np.sin(across * random.uniform(0, 2) + down * random.uniform(0, 2)) for _ in range(3)]
    pixels = 128 + 90 * np.stack(waves, axis=-1) + random.normal(0, 4, (height, width, 3))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(8):
        x, y, radius = random.uniform((0, 0, 4), (width, height, height / 4))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=tuple(random.integers(0, 256, 3).tolist()))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=92)
    return file.getvalue()


def find_images(device: torch.device, images: Path | None, folder: Path) -> tuple[Manifest, str]:
    """A manifest, and a description of its images."""
    if images is not None:
        found = Manifest.open(images, folder)
        return found, f"{len(found):,} images of {images.name}"
    size, count = (DRAWN_SIZE, DRAWN) if device.type == "cuda" else ((80, 60), 3)
    (folder / "drawn").mkdir()
    files = [draw(number, size) for number in range(count)]
    for number in range(8 * count):
        (folder / f"drawn/{number:04}.jpg").write_bytes(files[number % count])
    return Manifest.open(folder / "drawn", folder), "drawn images of {}x{} pixels".format(*size)


Check = Callable[[Ground], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (decoding, operations, recipes, loading, bad_files, speed, growth)


def photometric_in_torch(device: torch.device) -> Iterator[Finding]:
    """`photometric = torch`, which does not need DALI."""
    with TemporaryDirectory() as name:
        yield from torch_operations(Ground(device, None, Path(name)))


def check(device: torch.device, images: Path | None = None, output: Path | None = None) -> Iterator[Finding]:
    """All findings; measurements are appended to device_data.jsonl in the folder `output`, if there is one.

    Raises:
        DataError: `images` cannot be used.
    """
    import nvidia.dali

    with TemporaryDirectory() as name:
        folder = Path(name)
        manifest, what = find_images(device, images, folder)
        yield Finding("data path", f"DALI {nvidia.dali.__version__}, {what}", True)
        ground = Ground(device, manifest, folder)
        yield from findings(CHECKS, ground)
        if output and ground.rows:
            common = {"images": what, "batch_size": ground.batch_size, "dali": nvidia.dali.__version__}
            append(output, "device_data", [{**common, **row} for row in ground.rows])
