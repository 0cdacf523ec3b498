"""Replayed steps are the launched ones bit for bit; `recorder` stands for a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from recorder import record
from thin import thin
from trainer_state import batches, changed, make_trainer, small_config, state

from unigrad_fast.benchmarks.device_check import graph as device_check_graph
from unigrad_fast.benchmarks.device_check.engine import build_thin_engine
from unigrad_fast.benchmarks.device_check.step import Size
from unigrad_fast.checkpoints.files import Reader, latest
from unigrad_fast.config import Config, resolve
from unigrad_fast.kernels import dispatch, multi_tensor
from unigrad_fast.objectives.originals import original
from unigrad_fast.pipelines import Batch
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training import checkpoint, step_graph
from unigrad_fast.training import trainer as trainer_module
from unigrad_fast.training.rates import Rates
from unigrad_fast.training.step_graph import COUNTERS, LAUNCHED, StepGraph
from unigrad_fast.training.telemetry.phases import PhaseClock
from unigrad_fast.training.trainer import Trainer

CPU = torch.device("cpu")
STEPS = LAUNCHED + 4
SPOILED = LAUNCHED + 2  # a step that meets a NaN
CUTMIX = {"data__cutmix": {"probability": 1.0, "group": 4}}
MULTICROP = {"data__recipe": "multicrop", "data__local_crops": 1, "data__local_views": {"size": 16}}


def with_graph(trainer: Trainer) -> Trainer:
    parts = trainer.online, trainer.objective, trainer.phases, trainer.world.device
    trainer.compute = StepGraph(trainer.on_device, *parts, record)
    return trainer


def spoiled(stream: Iterator[Batch]) -> Iterator[Batch]:
    """The batches, that of one step with a NaN."""
    for batch in stream:
        if batch.step == SPOILED:
            batch.views[0] = batch.views[0].clone()
            batch.views[0][0, 1, 5, 5] = torch.nan
        yield batch


def walked(trainer: Trainer, steps: int = STEPS) -> list:
    """Everything that can be seen of a run, after each of its steps and at its end."""
    stream, seen = spoiled(batches(trainer)), []
    for step in range(steps):
        trainer.step(step, stream)
        seen.append(state(trainer))
    metrics = [
        (step, {name: value for name, value in each.items() if not name.startswith("ms_")})
        for step, each in trainer.metrics(before=steps)
    ]
    counts = {name: getattr(trainer.online, name) for name in COUNTERS}
    return [seen, repr(metrics), counts, trainer.gate.check(before=steps), trainer.steps_done]


def unlike(launched: list, replayed: list) -> list:
    """In which steps states differ, and in what; then what else differs."""
    states = [changed(*pair) for pair in zip(launched[0], replayed[0], strict=True)]
    rest = [pair for pair in zip(launched[1:], replayed[1:], strict=True) if pair[0] != pair[1]]
    return [*((step, each) for step, each in enumerate(states) if each), *rest]


def both_ways(settings: Config, low_precision: bool = False) -> tuple[list, int, int]:
    """What differs, dropped steps, and how often the step was launched by a trainer that replays."""
    trainers = make_trainer(settings, stages=1), make_trainer(settings, stages=1)
    for trainer in trainers if low_precision else ():
        trainer.objective.compute_dtype = torch.bfloat16  # F has a copy then
    launched, replaying = trainers
    inner = replaying.on_device
    replaying.on_device = mock.Mock(side_effect=inner)
    with mock.patch.object(original, "host_may_read", lambda tensor: False):  # as on a GPU
        found = walked(launched), walked(with_graph(replaying))
    return unlike(*found), found[0][3], replaying.on_device.call_count


@pytest.mark.parametrize(
    ("ranks", "changes", "low_precision"),
    [
        (1, {}, False),
        (1, {**CUTMIX, **MULTICROP, "optimizer__bias_base_lr": 0.5}, True),
        (1, {"optimizer__name": "adamw", "optimizer__base_lr": 0.01, "optimizer__clip_norm": 1.0}, False),
        (2, {"optimizer__name": "lars", "optimizer__exclude_bias_and_norm": True, "engine__precision": "bf16"}, True),
        (1, {"engine__accumulation_steps": 2}, False),
        pytest.param(2, {"objective__placement": "sharded"}, True, marks=pytest.mark.slow),
    ],
    ids=["sgd", "CutMix and multi-crop", "adamw", "lars on two ranks", "accumulation", "F in shards"],
)
def test_replayed_steps_are_the_launched_ones_bit_for_bit(images, workers, ranks, changes, low_precision):
    """Rates change in every step, one step is dropped, and F is read in between for its effective rank."""
    settings = small_config(str(images), **changes)
    for differing, dropped, launches in workers(ranks).run(both_ways, settings, low_precision):
        assert differing == []
        assert dropped == 1 and launches == LAUNCHED + 1


CAPTURED = [
    *(pytest.param(method, "gradient", marks=pytest.mark.slow) for method in ("moco", "vicreg")),
    ("simclr", "gradient"),
    ("moco", "original"),
    ("dino", "original"),
    ("swav", "original"),
    *(
        pytest.param(method, "original", marks=pytest.mark.slow)
        for method in ("simsiam", "byol", "barlow_twins", "twist")
    ),
]


@pytest.mark.parametrize(("method", "form"), CAPTURED)
def test_other_methods_are_replayed_bit_for_bit(images, workers, method, form):
    chosen = {"objective__correlation_source": None, "objective__method": method, "objective__form": form}
    settings = small_config(str(images), **chosen)
    ((differing, _, launches),) = workers(1).run(both_ways, settings)
    assert differing == [] and launches == LAUNCHED + 1


def refusing(settings: Config) -> tuple[list, int]:
    """What differs, and how often a step was tried to be captured, where the second rank cannot."""
    tried = 0

    def fail(compute):
        nonlocal tried
        tried += 1
        recorded = record(compute)  # the recorder computes, so all ranks have to
        if dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return recorded

    launched, replaying = make_trainer(settings, stages=1), with_graph(make_trainer(settings, stages=1))
    replaying.compute.record = fail
    return unlike(walked(launched), walked(replaying)), tried


def test_a_capture_that_fails_on_one_rank_leaves_all_launching(images, workers):
    for differing, tried in workers(2).run(refusing, small_config(str(images))):
        assert differing == [] and tried == 1


def forgetting_rates(settings: Config) -> list:
    """What differs where the learning rate is a number of Python's."""

    def send(rates: Rates, learning_rate: float, peak: float, target_momentum: float, epoch: float) -> None:
        _send(rates, learning_rate, peak, target_momentum, epoch)
        for group in trainers[0].optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_share"]

    trainers = [with_graph(make_trainer(settings, stages=1))]
    with mock.patch.object(Rates, "send", send):
        replayed = walked(trainers[0])
    trainers = [make_trainer(settings, stages=1)]
    return unlike(walked(trainers[0]), replayed)


_send = Rates.send


def test_a_rate_that_the_device_does_not_read_is_found_out(images, workers):
    """That the recorder keeps what Python passed, as a graph does."""
    ((first, *_),) = workers(1).run(forgetting_rates, small_config(str(images)))
    step, parts = first
    assert step == LAUNCHED + 1 and parts["parameters"]  # what was recorded, the step before still has its own rate


def growing(settings: Config) -> tuple[list, list[int]]:
    """What differs in a run whose views grow, and how large they were when a step was recorded."""
    sizes: list[int] = []

    def noting(compute):
        sizes.append(replaying.compute._batches[0].views[0].shape[-1])
        return record(compute)

    launched, replaying = make_trainer(settings, stages=1), with_graph(make_trainer(settings, stages=1))
    replaying.compute.record = noting
    steps = 2 * launched.steps_per_epoch
    return unlike(walked(launched, steps), walked(replaying, steps)), sizes


def test_views_that_grow_are_recorded_anew(images, workers):
    changes = {"data__image_size": 32, "data__progressive": {"start_size": 16, "epochs": 1}, "data__batch_size": 16}
    settings = small_config(str(images), **changes, data__photometric="torch")
    ((differing, sizes),) = workers(1).run(growing, settings)
    assert differing == [] and sizes == [16, 32]


def continued(settings: Config) -> list[dict]:
    """What differs where a replaying run is saved and a launching one goes on with it, and the other way round."""
    differing = []
    for first, second in ((with_graph, lambda trainer: trainer), (lambda trainer: trainer, with_graph)):
        before, after = first(make_trainer(settings, stages=1)), second(make_trainer(settings, stages=1))
        middle, end = LAUNCHED + 1, 2 * (LAUNCHED + 1)
        stream = batches(before)
        for step in range(middle):
            before.step(step, stream)
        checkpoint.save(before, {})
        checkpoint.restore(after, Reader(latest(settings.output)))
        for trainer in (before, after):
            stream = batches(trainer, middle)
            for step in range(middle, end):
                trainer.step(step, stream)
        differing.append(changed(state(before), state(after)))
    return differing


def test_a_run_goes_on_bit_for_bit_with_and_without_a_graph(images, workers, tmp_path):
    settings = small_config(str(images)).model_copy(update={"output": tmp_path})
    assert workers(1).run(continued, settings) == [[{}, {}]]


def written_to(settings: Config) -> tuple[list, list[str]]:
    """What differs where somebody writes to F between two steps; and what of F's care was recorded."""
    trainers = make_trainer(settings, stages=1), with_graph(make_trainer(settings, stages=1))
    for trainer in trainers:
        trainer.objective.compute_dtype = torch.bfloat16
        stream = batches(trainer)
        for step in range(LAUNCHED + 4):
            if step == LAUNCHED + 2:
                with torch.no_grad():
                    trainer.objective.correlation.mul_(0.5)
            trainer.step(step, stream)
    recorded = [operator._schema.name for operator, *_ in trainers[1].compute._replay.__self__.calls]
    return changed(*map(state, trainers)), [name for name in recorded if name.endswith(("mirror_", "round_into_"))]


def test_a_replay_takes_f_as_it_was_left_to_it_and_leaves_its_repair_to_the_host(images, workers):
    ((differing, repairs),) = workers(1).run(written_to, small_config(str(images)))
    assert differing == {} and repairs == []


def check_on_the_cpu() -> tuple:
    """Findings of the device check; then of one in which replays compute nothing."""
    world, size = World(0, 1, 0, 1, CPU, "gloo"), Size("resnet18", 16, 4, 32)
    with thin(stages=1), mock.patch.object(device_check_graph, "RECORD", record):
        good = device_check_graph.equal(world, size), device_check_graph.timed(world, size, [])
    with thin(stages=1), mock.patch.object(device_check_graph, "RECORD", lambda compute: (compute(), lambda: None)):
        return *good, device_check_graph.equal(world, size)


def test_the_device_check_compares_and_times_both_ways_of_training(workers):
    """On the CPU, where the recorder stands for a card's graphs."""
    ((equal, timed, broken),) = workers(1).run(check_on_the_cpu)
    assert equal[1].startswith("0 of ") and equal[2] and not broken[2]
    assert timed[0].endswith("resnet18, 16 px, 4 images") and timed[1].count(" ms") == 2


@pytest.fixture(autouse=True)
def _gpu_for_triton(monkeypatch):
    """What stands for a GPU here is one that Triton supports."""
    monkeypatch.setattr(dispatch, "capability_of", lambda device: (9, 0))


def beside_deepspeed(settings: Config) -> list:
    """What differs where a thin engine takes the place of DeepSpeed's, and its counters."""
    engines = nullcontext(), mock.patch.object(trainer_module, "build_engine", build_thin_engine)
    found = []
    for engine in engines:
        with engine:
            trainer = make_trainer(settings, stages=1)
        found.append(walked(trainer))
    return unlike(*found)


def test_the_device_checks_thin_engine_trains_like_deepspeed_bit_for_bit(images, workers):
    settings = small_config(str(images), engine__accumulation_steps=2, engine__precision="bf16")
    assert workers(1).run(beside_deepspeed, settings) == [[]]


def on_a_gpu(ranks: int = 1, backend: str = "nccl") -> World:
    return World(0, ranks, 0, ranks, torch.device("cuda", 0), backend)


def asking(**engine) -> Config:
    return resolve("cifar_subset", {"data": {"train": "x"}, "engine": {"cuda_graph": True, **engine}})


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (replace(on_a_gpu(), device=CPU), "needs a GPU, and this run has none; leave it out"),
        (on_a_gpu(2, "gloo"), r"2 ranks use gloo, .* use nccl, or one rank"),
    ],
)
def test_ranks_that_cannot_record_are_refused(world, reason):
    with pytest.raises(UserError, match=rf"^engine\.cuda_graph = true: {reason}$"):
        step_graph.wanted(asking(), world)
    assert not step_graph.wanted(asking(cuda_graph="auto"), world)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": {"zero_stage": 1}}, r"engine\.zero_stage is 1, .* use 0"),
        ({"engine": {"compile": True}}, r"engine\.compile is on, .* leave one of them out"),
        ({"objective": {"method": "byol_directpred"}}, r"objective\.method is byol_directpred, .* use another"),
    ],
)
def test_a_step_that_cannot_be_recorded_is_refused_before_there_are_ranks(changes, reason):
    engine = {"cuda_graph": True, **changes.get("engine", {})}
    with pytest.raises(UserError, match=rf"(?m)^engine\.cuda_graph = true: {reason}$"):
        resolve("cifar_subset", {**changes, "engine": engine})


def test_kernels_in_plain_torch_are_refused(monkeypatch):
    monkeypatch.setenv("UNIGRAD_KERNELS", "torch")
    with pytest.raises(UserError, match="UNIGRAD_KERNELS=torch the host waits within a step; unset one of them"):
        step_graph.wanted(asking(), on_a_gpu())


@pytest.mark.parametrize("ranks", [1, 8])
def test_on_gpus_and_over_nccl_it_is_taken_if_asked_for_and_by_itself_once_a_gpu_has_tried_it(monkeypatch, ranks):
    auto = asking(cuda_graph="auto")
    assert step_graph.wanted(asking(), on_a_gpu(ranks)) and not step_graph.wanted(auto, on_a_gpu(ranks))
    monkeypatch.setattr(step_graph, "TRIED", True)
    assert step_graph.wanted(auto, on_a_gpu(ranks)) and not step_graph.wanted(asking(cuda_graph=False), on_a_gpu(ranks))
    assert not step_graph.wanted(asking(cuda_graph="auto", zero_stage=1), on_a_gpu(ranks))


def trainer_of(images: str) -> None:
    make_trainer(small_config(images, engine__cuda_graph=True), stages=1)


def test_a_run_without_a_gpu_is_refused(images, workers):
    with pytest.raises(AssertionError, match=r"UserError: engine\.cuda_graph = true: needs a GPU"):
        workers(1).run(trainer_of, str(images))


def test_the_run_has_a_stream_of_its_own_where_steps_are_recorded():
    gpu, off = on_a_gpu(), asking(cuda_graph=False)
    assert isinstance(step_graph.own_stream(asking(), replace(gpu, device=CPU)), nullcontext)
    assert isinstance(step_graph.own_stream(off, gpu), nullcontext)
    events: list[str] = []
    with (
        mock.patch.object(torch.cuda, "Stream") as stream,
        mock.patch.object(torch.cuda, "current_stream", return_value="the default one"),
        mock.patch.object(torch.cuda, "stream", side_effect=lambda each: events.append(each) or nullcontext()),
        step_graph.own_stream(asking(), gpu),
    ):
        assert events == [stream.return_value]
    stream.return_value.wait_stream.assert_called_once_with("the default one")


def test_a_card_records_on_the_current_stream_and_tables_are_written_after_it():
    events: list[object] = []

    @contextmanager
    def graph(graph, stream, capture_error_mode):
        events.append((stream, capture_error_mode))
        yield
        events.append("recorded")

    def compute() -> str:
        multi_tensor.address_table([torch.zeros(3)])
        return "output"

    with (
        mock.patch.object(torch.cuda, "CUDAGraph") as made,
        mock.patch.object(torch.cuda, "graph", graph),
        mock.patch.object(torch.cuda, "current_stream", return_value="the run's"),
        mock.patch.object(multi_tensor, "fill", lambda tables: events.append(f"{len(tables)} table is written")),
    ):
        output, replay = step_graph.record_on_cuda(compute)
    assert output == "output"
    assert events == [("the run's", "thread_local"), "recorded", "1 table is written"]
    made.return_value.replay.assert_not_called()
    replay()
    made.return_value.replay.assert_called_once_with()


def test_no_phase_is_marked_while_a_step_is_recorded():
    clock = PhaseClock(CPU)
    clock.start(0)
    clock.mark("data")
    with clock.stopped():
        clock.mark("online")
    clock.mark("step")
    found = clock.read(before=1)
    assert found["ms_online"] == 0 < found["ms_step"]


def test_it_may_be_changed_when_a_run_goes_on(tmp_path: Path):
    from unigrad_fast.training.same_run import contradictions

    assert contradictions(asking(), asking(cuda_graph=False).model_dump(mode="json"), "it") == []
