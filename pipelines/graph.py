"""The DALI graphs: decode once and crop many times for training; resize and crop centrally for evaluation.

One builder serves both devices: only the decoder's device differs, and all later operators follow their input. On a
CPU the loader uses only the decoder, followed by `crops`, which is several times as fast there.
No operator draws a random number; they all come in through one external source.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .parameters import LUMA, Parameters
from .presets import DEVIATION, MEAN, View

if TYPE_CHECKING:
    from nvidia.dali.pipeline import Pipeline

_SHIFT, _SCALE = [255 * value for value in MEAN], [255 * value for value in DEVIATION]
_SOLARIZED = [value if value < 128 else 255 - value for value in range(256)]
HW_DECODER_LOAD = 0.65  # share of the images for the GPU's JPEG unit; the rest goes to its cores


def inputs(view: View, colours: bool = True) -> tuple[str, ...]:
    """Names of the arrays that the graph of a view reads; an operation whose probability is 0 reads none."""
    geometry = ("start", "shape", "size")
    if not colours:
        return geometry
    return (
        *geometry,
        "flip",
        *(("jitter", "matrix", "offset") if view.jitter_probability else ()),
        *(("gray",) if view.gray_probability else ()),
        *(("blur", "sigma") if view.blur_probability else ()),
        *(("solarize",) if view.solarize_probability else ()),
    )


def feed(view: View, parameters: Parameters, colours: bool = True) -> list[np.ndarray]:
    """The arrays named by `inputs`, for N images."""
    derived: dict[str, Callable[[], np.ndarray]] = {
        "start": lambda: np.stack([parameters.y, parameters.x], axis=1),
        "shape": lambda: np.stack([parameters.height, parameters.width], axis=1),
        "size": lambda: np.full((len(parameters.x), 2), view.size, np.float32),
        "flip": lambda: parameters.flip.astype(np.int32),
        "matrix": parameters.colour_matrix,
        "offset": parameters.luma_share,
    }
    return [derived[name]() if name in derived else getattr(parameters, name) for name in inputs(view, colours)]


def build(
    views: tuple[View, ...],
    batch_size: int,
    source: Callable[[Any], list],
    *,
    threads: int,
    device_id: int | None = None,
    prefetch: int = 2,
    hw_decoder_load: float = HW_DECODER_LOAD,
    colours: bool = True,
) -> "Pipeline":
    """Builds a pipeline from encoded images to augmented views.

    Args:
        views: the views to make of each image.
        batch_size: largest number of images per batch.
        source: called with DALI's batch information; returns the encoded images (list of uint8 arrays), then
            the arrays of `feed` for each view in turn.
        threads: CPU threads of the pipeline.
        device_id: the GPU that decodes and augments; None for the CPU.
        prefetch: batches made ahead.
        hw_decoder_load: share of the images for the GPU's JPEG unit.
        colours: False stops after cropping: uint8 and not flipped.

    Returns:
        A pipeline that starts on its first run. Its outputs are one per view, fp32 [N, size, size, 3], normalised
        (uint8 without colours), and the shapes that the image headers give, int64 [N, 3].
    """

    def graph(fn: Any, types: Any, data: Any, arrays: list) -> tuple:
        image = _decode(fn, types, data, device_id, hw_decoder_load, exact=not colours)
        outputs = []
        for view in views:
            parameters = {name: arrays.pop(0) for name in inputs(view, colours)}
            crop = _crop(fn, types, image, view, parameters)
            outputs.append(_recolour(fn, types, crop, parameters) if colours else crop)
        return tuple(outputs)

    count = 1 + sum(len(inputs(view, colours)) for view in views)
    return _pipeline(graph, count, batch_size, source, threads, device_id, prefetch, conditionals=colours)


def build_evaluation(
    image_size: int,
    batch_size: int,
    source: Callable[[Any], list],
    *,
    threads: int,
    device_id: int | None = None,
) -> "Pipeline":
    """Builds a pipeline from encoded images to resized central crops; outputs as in `build`.

    `source` returns the encoded images, and for each of them the region to resize (float32 y, x of its start and of its
    end, as shares of the image), the size to resize it to (float32 height, width), and the start of the crop in the
    result (int32 y, x).
    """

    def graph(fn: Any, types: Any, data: Any, arrays: list) -> tuple:
        begin, end, size, start = arrays
        image = _decode(fn, types, data, device_id)
        # The filter reads pixels around the region, as if the whole image were resized.
        region = dict(roi_start=begin, roi_end=end, roi_relative=True)
        image = fn.resize(image, size=size, interp_type=types.INTERP_LINEAR, antialias=True, **region)
        image = fn.slice(image, start=start, shape=[image_size, image_size], axes=[0, 1])
        return (_normalize(fn, types, image, 0),)

    return _pipeline(graph, 5, batch_size, source, threads, device_id)


def build_decoder(
    source: Callable[[Any], list],
    *,
    batch_size: int = 1,
    threads: int = 1,
    device_id: int | None = None,
    prefetch: int = 1,
) -> "Pipeline":
    """Builds a pipeline from encoded images to images, uint8 [height, width, 3] each, and their shapes."""

    def graph(fn: Any, types: Any, data: Any, _: list) -> tuple:
        return (_decode(fn, types, data, device_id),)

    return _pipeline(graph, 1, batch_size, source, threads, device_id, prefetch)


def _pipeline(
    graph: Callable,
    count: int,
    batch_size: int,
    source: Callable,
    threads: int,
    device_id: int | None,
    prefetch: int = 2,
    conditionals: bool = False,
) -> "Pipeline":
    """A pipeline from a graph with `count` inputs, the first of them the encoded images, whose shapes it adds.

    For conditionals DALI rewrites the source of the graph in a temporary file.
    """
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(
        batch_size=batch_size,
        num_threads=threads,
        device_id=device_id,
        prefetch_queue_depth=prefetch,
        exec_dynamic=True,
        enable_conditionals=conditionals,
    )
    def define():
        data, *arrays = fn.external_source(source=source, num_outputs=count, batch=True, batch_info=True)
        return (*graph(fn, types, data, arrays), _shape(fn, data))

    return define()


def _decode(
    fn: Any, types: Any, data: Any, device_id: int | None, load: float = HW_DECODER_LOAD, exact: bool = False
) -> Any:
    # Orientation tags are ignored, as torchvision does; the manifest's sizes are of the stored image, too.
    settings = {"output_type": types.RGB, "adjust_orientation": False}
    if device_id is None:
        return fn.decoders.image(data, device="cpu", **settings)
    # Fancy upsampling of the chroma is what the CPU and torchvision do; slower.
    return fn.decoders.image(data, device="mixed", hw_decoder_load=load, jpeg_fancy_upsampling=exact, **settings)


def _shape(fn: Any, data: Any) -> Any:
    return fn.peek_image_shape(data, adjust_orientation=False)


def _crop(fn: Any, types: Any, image: Any, view: View, p: dict) -> Any:
    # Slice, then resize: a region given to resize would blend pixels from outside the crop into its edge.
    crop = fn.slice(image, start=p["start"], shape=p["shape"], axes=[0, 1])
    interpolation = types.INTERP_LINEAR if view.interpolation == "bilinear" else types.INTERP_CUBIC
    return fn.resize(crop, size=p["size"], interp_type=interpolation, antialias=True)


def _recolour(fn: Any, types: Any, crop: Any, p: dict) -> Any:
    """DALI turns each `if` into a conditional per sample; an operation that never applies has no entry in `p`."""
    if p.get("jitter"):
        crop = _jitter(fn, types, crop, p["matrix"], p["offset"])
    if p.get("gray"):
        crop = _gray(fn, types, crop)
    if p.get("blur"):
        crop = fn.gaussian_blur(crop, sigma=p["sigma"])
    if p.get("solarize"):
        crop = fn.lookup_table(crop, keys=list(range(256)), values=_SOLARIZED, dtype=types.UINT8)
    return _normalize(fn, types, crop, p["flip"])


def _jitter(fn: Any, types: Any, crop: Any, matrix: Any, offset: Any) -> Any:
    """All four colour operations as one affine map, whose constant part is a share of the crop's mean luma."""
    mean = fn.reductions.mean(crop, axes=[0, 1], keep_dims=True)
    luma = fn.reshape(fn.coord_transform(mean, M=[*LUMA] * 3), shape=[3])
    return fn.coord_transform(crop, M=matrix, T=luma.cpu() * offset, dtype=types.UINT8)


def _gray(fn: Any, types: Any, crop: Any) -> Any:
    gray = fn.color_space_conversion(crop, image_type=types.RGB, output_type=types.GRAY)
    return fn.color_space_conversion(gray, image_type=types.GRAY, output_type=types.RGB)


def _normalize(fn: Any, types: Any, crop: Any, flip: Any) -> Any:
    return fn.crop_mirror_normalize(crop, output_layout="HWC", mirror=flip, mean=_SHIFT, std=_SCALE, dtype=types.FLOAT)
