"""The graphs for a GPU, as far as they can be checked without one: built, checked against DALI's schemas, never run."""

import struct
from typing import NamedTuple

import pytest
import torch
from nvidia.dali import backend

from unigrad_fast.pipelines import PRESETS, graph, preset_views

ON = {"cpu": backend.RegisteredCPUOps, "gpu": backend.RegisteredGPUOps, "mixed": backend.RegisteredMixedOps}


class Built(NamedTuple):
    definition: bytes  # DALI's serialization
    outputs: list[str]  # their devices
    operators: list


def finish(pipeline):
    """What building does up to the driver's part: every operator meets its schema."""
    assert pipeline.device_id == 0
    pipeline._device_id = None  # with a device, the serialization asks for the driver
    definition = pipeline.serialize()
    assert not torch.cuda.is_initialized()
    return Built(definition, [edge.device for edge in pipeline._graph_outputs], pipeline._ops)


def build(views, **options):
    return finish(graph.build(views, 4, lambda info: None, threads=1, device_id=0, **options))


def name_of(operator):
    return operator._op.schema.Name()


def named(built, name):
    return [operator for operator in built.operators if name_of(operator) == name]


def devices_into(operator):
    """Where the regular inputs and the arguments are expected."""
    devices = [operator.spec.InputDevice(number) for number in range(operator.spec.NumInput())]
    count = operator.spec.NumRegularInput()
    return devices[:count], devices[count:]


def crossings(built):
    """Operators whose result the GPU makes and another one takes on the CPU."""
    made = {}
    for operator in built.operators:
        spec = operator.spec
        made |= {spec.OutputName(number): (operator, spec.OutputDevice(number)) for number in range(spec.NumOutput())}
    found = []
    for operator in built.operators:
        for number in range(operator.spec.NumInput()):
            source, device = made[operator.spec.InputName(number)]
            if device == "gpu" and operator.spec.InputDevice(number) == "cpu":
                found.append(name_of(source))
    return found


def check_devices(built):
    """Every operator exists for its device, and gets its images there and its arguments on the CPU."""
    for operator in built.operators:
        name, device = name_of(operator), operator._op.device
        assert name in ON[device](), f"there is no {name} for {device}"
        images, arguments = devices_into(operator)
        assert set(arguments) <= {"cpu"}
        assert device == "gpu" or "gpu" not in images


@pytest.mark.parametrize("colours", [True, False])
@pytest.mark.parametrize("name", PRESETS)
def test_graph_of_a_preset_stays_on_the_gpu_but_for_the_mean_luma(name, colours):
    views = preset_views(name)
    built = build(views, colours=colours)
    check_devices(built)
    assert built.outputs == ["gpu"] * len(views) + ["cpu"]
    jittered = sum(view.jitter_probability > 0 for view in views)
    assert crossings(built) == ["Reshape"] * (jittered if colours else 0)


def test_an_image_is_decoded_once_by_the_gpu_from_bytes_on_the_cpu():
    (decoder,) = named(built := build(preset_views("multicrop")), "decoders__Image")
    assert decoder._op.device == "mixed"
    assert devices_into(decoder)[0] == ["cpu"]
    assert len(named(built, "Slice")) == len(PRESETS["multicrop"].views)


def test_shapes_are_read_on_the_cpu():
    (peek,) = named(build(preset_views("simsiam")), "PeekImageShape")
    assert peek._op.device == "cpu"
    assert devices_into(peek)[0] == ["cpu"]


@pytest.mark.parametrize("load", [0.0, 0.25, graph.HW_DECODER_LOAD])
def test_share_of_the_jpeg_unit_reaches_the_decoder(load):
    name = b"hw_decoder_load\x12\x05float\x1d"  # a field of DALI's message: the name, the type, four bytes
    _, found, after = build(preset_views("simsiam"), hw_decoder_load=load).definition.partition(name)
    assert found
    assert struct.unpack("<f", after[:4]) == pytest.approx((load,))


def test_one_graph_makes_views_of_every_size():
    assert build(preset_views("simsiam", 128)).definition == build(preset_views("simsiam", 224)).definition
    for resize in named(build(preset_views("simsiam")), "Resize"):
        assert devices_into(resize) == (["gpu"], ["cpu"])  # the size is an argument per image


def test_operations_are_chosen_by_cpu_values_for_images_on_the_gpu():
    built = build(preset_views("byol"))
    chosen = [operator for operator in named(built, "_conditional__Split") if devices_into(operator)[0] == ["gpu"]]
    # Jitter, gray, blur in both views, solarize in the second one.
    assert len(chosen) == 7
    assert all(devices_into(operator)[1] == ["cpu"] for operator in chosen)


def test_evaluation_and_decoder_stay_on_the_gpu():
    evaluation = finish(graph.build_evaluation(224, 4, lambda info: None, threads=1, device_id=0))
    decoder = finish(graph.build_decoder(lambda info: None, device_id=0))
    for built in (evaluation, decoder):
        check_devices(built)
        assert built.outputs == ["gpu", "cpu"]
        assert not crossings(built)


def luma_left_on_the_gpu(fn, types, crop, matrix, offset):
    mean = fn.reductions.mean(crop, axes=[0, 1], keep_dims=True)
    luma = fn.reshape(fn.coord_transform(mean, M=[*graph.LUMA] * 3), shape=[3])
    return fn.coord_transform(crop, M=matrix, T=luma * offset, dtype=types.UINT8)


def boxes_sent_to_the_gpu(fn, types, image, view, p):
    return fn.slice(image, start=p["start"].gpu(), shape=p["shape"], axes=[0, 1])


def shape_read_on_the_gpu(fn, data):
    return fn.peek_image_shape(data.gpu(), adjust_orientation=False)


def misspelt(fn, types, image, view, p):
    return fn.resize(image, size=p["size"], antialais=True)


@pytest.mark.parametrize(
    "part, mistake, error",
    [
        ("_jitter", luma_left_on_the_gpu, ValueError),
        ("_crop", boxes_sent_to_the_gpu, ValueError),
        ("_shape", shape_read_on_the_gpu, AssertionError),
        ("_crop", misspelt, KeyError),
    ],
)
def test_mistakes_show_without_a_gpu(monkeypatch, part, mistake, error):
    monkeypatch.setattr(graph, part, mistake)
    with pytest.raises(error):
        check_devices(build(preset_views("simsiam")))
