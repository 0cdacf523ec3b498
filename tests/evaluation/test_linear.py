"""The linear probe: both protocols, any number of ranks, every image once; and the command."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchvision
from command_process import command, command_on_two_ranks
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from test_knn import judged_by_others
from thin import thin
from torch import Tensor, nn

from unigrad_fast.config import resolve
from unigrad_fast.evaluation import linear, linear_paper, linear_quick, linear_training
from unigrad_fast.evaluation.features import extract
from unigrad_fast.evaluation.linear import FrozenEncoder
from unigrad_fast.evaluation.linear_quick import fit, fold, quick, standardisation
from unigrad_fast.evaluation.linear_training import ProbeSchedule, train
from unigrad_fast.evaluation.shares import own_images
from unigrad_fast.evaluation.unfinished import Unfinished
from unigrad_fast.pipelines import Loader, Manifest
from unigrad_fast.runtime.errors import DataError, Preempted, RunStopped, UserError
from unigrad_fast.runtime.process_group import World

EPOCHS = 40


class Spectrum(nn.Module):
    """Images [N, 3, S, S] to the magnitudes of their frequencies, which tell stripes of one direction from others."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.fft.rfft2(images.mean(1)).abs().flatten(1) / 16


def probe(
    data: Path,
    backbone: nn.Module | None = None,
    images_at_once: int = 256,
    max_bad_fraction: float = 0.03,
    say: Callable[[str], None] = lambda line: None,
    stage: int = 0,
) -> FrozenEncoder:
    rank, size = dist.get_rank(), dist.get_world_size()
    config = resolve("cifar_subset", {"data": {"train": data / "train", "val": data / "val", "threads": 1}})
    parts = {
        "data": {"image_size": 16, "max_bad_fraction": max_bad_fraction},
        "evaluation": {"batch_size": images_at_once},
        "engine": {"zero_stage": stage},
    }
    config = config.model_copy(update={k: getattr(config, k).model_copy(update=v) for k, v in parts.items()})
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    train, val = (Manifest.from_folder(data / part) for part in ("train", "val"))
    return FrozenEncoder(config, world, train, val, backbone or Spectrum(), None, say)


def synthetic_features() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.arange(300) % 4
    centres = torch.randn(4, 20)
    return (centres[labels] + 1.5 * torch.randn(300, 20)) * torch.linspace(0.1, 30, 20) + 5, labels


def fit_share() -> tuple[Tensor, Tensor]:
    features, labels = synthetic_features()
    rank, size = dist.get_rank(), dist.get_world_size()
    own, own_labels = features[rank::size].clone(), labels[rank::size]
    mean, deviation = standardisation(own, len(features))
    classifier = fit((own - mean) / deviation, own_labels, 4, len(features), torch.device("cpu"))
    fold(classifier, mean, deviation)
    return classifier.weight.detach(), classifier.bias.detach()


@pytest.mark.parametrize(
    ("images", "ranks", "remedy"),
    [
        (24, 1, "only 24 training images; give --batch_size 24 or less"),
        (25, 2, "only 25 training images; give --batch_size 24 or less"),
        (3, 2, "only 3 training images; give --batch_size 2"),
        (1, 2, "only 1 training image; use at most 1 rank"),
    ],
)
def test_a_batch_of_more_images_than_there_are_is_refused_with_the_largest_that_divides_over_the_ranks(
    images, ranks, remedy
):
    encoder = SimpleNamespace(config=SimpleNamespace(data=None), world=SimpleNamespace(size=ranks), train=range(images))
    with pytest.raises(UserError) as caught:
        train(encoder, linear_paper.SCHEDULE, linear_paper.METHOD)
    assert str(caught.value) == f"batch_size = 4096: there are {remedy}"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_quick_fit_is_that_of_scikit_learn_on_any_number_of_ranks(workers, ranks):
    features, labels = synthetic_features()
    standard = (features - features.mean(0)) / features.std(0, correction=0)
    model = LogisticRegression(C=1 / (linear_quick.L2 * len(labels)), max_iter=10_000, tol=1e-8)
    expected = torch.from_numpy(model.fit(standard, labels).predict_proba(standard))
    # L-BFGS stops where fp32 no longer tells losses apart, at 1e-7 of one of about 1. With the penalty's curvature that
    # is √(2·1e-7/L2) in the weights along the flattest direction at worst, 1e-2; in a probability p(1-p), a quarter.
    for weight, bias in workers(ranks).run(fit_share):
        ours = (features @ weight.T + bias).softmax(1)
        assert (ours - expected).abs().max() < 2e-3


def judged(data: Path, protocol: str) -> tuple[float, float, int, list[str], Tensor]:
    lines: list[str] = []
    made = probe(data, say=lines.append)
    if protocol == "quick":
        classifier = quick(made)
    else:
        classifier = train(made, ProbeSchedule(epochs=EPOCHS, batch_size=48, base_lr=100.0), linear_paper.METHOD)
    return *made.judge(classifier), lines, classifier.weight.detach()


@pytest.mark.parametrize("protocol", ["quick", "paper"])
def test_a_probe_learns_and_gives_the_same_on_any_number_of_ranks(data, workers, protocol):
    (alone,) = workers(1).run(judged, data, protocol)
    accuracy, top5, images, lines, weight = alone
    assert images == 103 and accuracy > 45 and top5 > 90  # chance: 17 and 83
    if protocol == "paper":
        losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
        assert len(losses) == EPOCHS and losses[-1] < losses[0]
        right = [float(line.split("crops ")[1].split()[0]) for line in lines]
        assert 0 <= right[0] <= 100 and right[-1] > 25  # chance: 17
        assert lines[0].startswith(f"epoch 1/{EPOCHS}  loss ") and "lr" in lines[0]
    # Sums over ranks differ in their last bits: SGD's weights by few more, L-BFGS's by where it stops (see above). One
    # image of 103 lies close enough to the border of two classes, with logits 0.05 apart where all deviate by 6.
    for ranks in (2, 3):
        for other in workers(ranks).run(judged, data, protocol):
            assert other[2] == 103
            assert abs(other[0] - accuracy) <= 1.0
            assert (other[4] - weight).norm() <= (1e-4 if protocol == "paper" else 2e-2) * weight.norm()


def count_once(data: Path) -> tuple[int, int]:
    made = probe(data)
    seen: list[int] = []
    original = linear.features_of

    def watch(*arguments):
        for features, index in original(*arguments):
            seen.extend(index.tolist())
            yield features, index

    with mock.patch.object(linear, "features_of", watch):
        made.judge(nn.Linear(16 * 9, 6))
    return seen


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_validation_image_is_counted_once(data, workers, ranks):
    seen = [index for part in workers(ranks).run(count_once, data) for index in part]
    assert sorted(seen) == list(range(103))


def judged_by_random_weights(data: Path) -> tuple[float, float, int]:
    torch.manual_seed(1)
    return probe(data).judge(nn.Linear(16 * 9, 6))


def logits_of_random_weights(data: Path) -> tuple[np.ndarray, np.ndarray]:
    made = probe(data)
    loader = own_images(made.val, made.config.data, made.config.evaluation, made.world)
    features, _ = extract(made.backbone, loader, made.world.device, None, 0.0)
    torch.manual_seed(1)
    with torch.no_grad():
        return nn.Linear(16 * 9, 6)(features).numpy(), np.asarray(made.val.labels)


def test_top1_and_top5_are_those_of_torchmetrics_and_scikit_learn_on_any_number_of_ranks(data, workers):
    ((logits, truth),) = workers(1).run(logits_of_random_weights, data)
    expected = judged_by_others(logits, truth)
    assert 0 < expected[0] < expected[1] < 100
    for ranks in (1, 2, 3):
        for top1, top5, images in workers(ranks).run(judged_by_random_weights, data):
            assert ((top1, top5), images) == (pytest.approx(expected, abs=1e-4), 103)


class BrokenOnRank1(Spectrum):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * (torch.nan if dist.get_rank() == 1 else 1.0)


def stopped(data: Path, backbone: nn.Module, protocol: str, base_lr: float = 1.0, bad: float = 0.01) -> str:
    made = probe(data, backbone, max_bad_fraction=bad)
    try:
        if protocol == "quick":
            quick(made)
        elif protocol == "paper":
            train(made, ProbeSchedule(epochs=2, batch_size=48, base_lr=base_lr), linear_paper.METHOD)
        else:
            made.judge(nn.Linear(16 * 9, 6))
    except (RunStopped, DataError) as error:
        return f"{type(error).__name__} {error}"
    return "accepted"


@pytest.mark.parametrize("protocol", ["quick", "paper", "judge"])
def test_features_that_are_not_finite_on_one_rank_stop_all(data, workers, protocol):
    messages = workers(2).run(stopped, data, BrokenOnRank1(), protocol)
    assert messages[0].startswith(f"RunStopped non-finite features, first for {data}") and len(set(messages)) == 1


def test_a_loss_that_is_not_finite_stops_the_probe(data, workers):
    (message,) = workers(1).run(stopped, data, Spectrum(), "paper", 1e38)
    assert message.startswith("RunStopped the loss is not finite in epoch") and "lower base_lr = 1e+38" in message


@pytest.fixture
def damaged(data, tmp_path) -> Path:
    """The same images, of which two for training and one for validation are cut off; their headers are whole."""
    for part in ("train", "val"):
        shutil.copytree(data / part, tmp_path / "damaged" / part)
    for name in BAD:
        image = tmp_path / "damaged" / name
        content = image.read_bytes()
        image.write_bytes(content[: int(0.9 * len(content))])
    return tmp_path / "damaged"


BAD = ("train/class3/005.jpg", "train/class4/001.jpg", "val/class0/003.jpg")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_quick_protocol_is_that_of_the_images_that_can_be_used(damaged, workers, ranks):
    made = workers(ranks).run(judged, damaged, "quick")
    for name in BAD:
        (damaged / name).unlink()
    (expected,) = workers(1).run(judged, damaged, "quick")
    for accuracy, top5, images, lines, weight in made:
        assert images == expected[2] == 102
        assert abs(accuracy - expected[0]) <= 1.0 and abs(top5 - expected[1]) <= 1.0
        assert (weight - expected[4]).norm() <= 2e-2 * expected[4].norm()
        train, val = lines
        assert train.startswith("2 of 96 training images could not be used and were left out, first ")
        assert f"{damaged}/{BAD[0]}: " in train
        assert val.startswith(f"1 of 103 validation images could not be used and was left out, {damaged}/{BAD[2]}: ")


def trained(data: Path) -> list[str]:
    lines: list[str] = []
    train(probe(data, say=lines.append), ProbeSchedule(epochs=2, batch_size=96, base_lr=0.02), linear_paper.METHOD)
    return lines


def test_the_papers_protocol_replaces_images_that_cannot_be_used_and_says_so_once(damaged, workers):
    for lines in workers(2).run(trained, damaged):
        told, *epochs = lines
        start = "2 of 96 training images could not be used and were replaced by others, first "
        assert told.startswith(f"{start}{damaged}/{BAD[0]}: ")
        assert [line.partition("  ")[0] for line in epochs] == ["epoch 1/2", "epoch 2/2"]


@pytest.mark.parametrize("protocol", ["quick", "paper", "judge"])
def test_too_many_images_that_cannot_be_used_stop_all_ranks(damaged, workers, protocol):
    messages = workers(2).run(stopped, damaged, Spectrum(), protocol, 1.0, 0.0)
    assert "cannot be used, more than data.max_bad_fraction = 0 allows, first " in messages[0]
    assert messages[0].startswith("RunStopped ") and len(set(messages)) == 1


def trained_in_parts(data: Path, images_at_once: int) -> tuple[list[str], Tensor, Tensor]:
    lines: list[str] = []
    made = probe(data, images_at_once=images_at_once, say=lines.append)
    classifier = train(made, ProbeSchedule(2, 48, 10.0), linear_paper.METHOD)
    return lines, classifier.weight.detach(), classifier.bias.detach()


def test_a_batch_that_is_too_large_for_a_rank_is_worked_off_in_parts(data, workers):
    (whole,), (parts,) = (workers(1).run(trained_in_parts, data, at_once) for at_once in (48, 10))
    assert parts[0] == whole[0]
    for one, other in zip(whole[1:], parts[1:], strict=True):
        torch.testing.assert_close(one, other)


class AskedToLeave:
    """In place of what watches for signals: one comes in the third step."""

    status = 75

    def __init__(self) -> None:
        self.steps = 0

    def agreed(self) -> tuple[bool, bool]:
        self.steps += 1
        return self.steps == 3, False


def trained_in_two_calls(data: Path, folder: Path, calls: int) -> tuple[list[str], Tensor]:
    lines: list[str] = []
    made = probe(data, say=lines.append)
    unfinished = Unfinished(folder, "probe", {}, lines.append)
    if calls != 2:
        with pytest.raises(Preempted):
            train(made, ProbeSchedule(3, 48, 10.0), linear_paper.METHOD, unfinished, AskedToLeave())
    if calls > 1:
        classifier = train(made, ProbeSchedule(3, 48, 10.0), linear_paper.METHOD, unfinished)
    return lines, classifier.weight.detach() if calls > 1 else None


def test_the_papers_protocol_goes_on_in_an_epoch_on_any_number_of_ranks(data, workers, tmp_path):
    lines, weight = workers(2).run(trained_in_two_calls, data, tmp_path / "alone", 2)[0]
    both = workers(2).run(trained_in_two_calls, data, tmp_path / "two", 3)
    for again, found in both:
        assert torch.equal(found, weight) and [*again[:1], *again[2:]] == lines
        assert again[1].startswith("continuing an interrupted call after epoch 1.5 of 3")
    workers(2).run(trained_in_two_calls, data, tmp_path / "moved", 1)
    ((_, found),) = workers(1).run(trained_in_two_calls, data, tmp_path / "moved", 2)
    torch.testing.assert_close(found, weight)


@pytest.mark.parametrize(
    ("batch_size", "ranks", "most", "parts"),
    [(4096, 8, 256, 2), (4096, 1, 256, 16), (96, 2, 256, 1), (4096, 3, 256, 1)],
)
def test_parts_of_a_batch_are_equal_and_as_few_as_can_be(batch_size, ranks, most, parts):
    assert linear_training.micro_batches(batch_size, ranks, most) == parts


def test_its_training_views_are_crops_and_flips_alone(data):
    manifest = Manifest.from_folder(data / "train")
    first, again = (
        next(iter(Loader(manifest, preset="linear", batch_size=96, image_size=24, threads=1).iterate(1)))
        for _ in range(2)
    )
    (view,) = first.views
    assert view.shape == (96, 3, 24, 24) and torch.equal(view, again.views[0])
    assert torch.equal(first.label, torch.as_tensor(manifest.labels)[first.index])
    assert not torch.equal(
        view, next(iter(Loader(manifest, preset="linear", batch_size=96, image_size=24, threads=1).iterate(2))).views[0]
    )


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "run"
    given = {
        "data.train": data / "train",
        "data.val": data / "val",
        "data.batch_size": 32,
        "data.threads": 1,
        "data.image_size": 16,
    }
    given |= {"schedule.epochs": 1, "model.projector.width": 32, "evaluation.every": 0, "engine.precision": "fp32"}
    options = [word for key, value in given.items() for word in (f"--{key}", value)]
    result = command("pretrain", "--recipe", "cifar_subset", "--output", output, *options, is_thin=True)
    assert result.returncode == 0, result.stderr
    return output


def test_the_command_names_its_protocol_and_writes_what_export_takes(run, tmp_path):
    result = command("evaluate", "linear", run, is_thin=True)
    assert result.returncode == 0, result.stderr
    assert "quick protocol (logistic regression" in result.stdout and "online backbone" in result.stdout
    written = json.loads((run / "evaluation/linear-quick-epoch1.json").read_text())
    assert written["protocol"] == "quick" and written["images"] == 103
    assert (written["step"], written["epoch"]) == (3, 1.0)
    assert f"{written['accuracy']:.2f}" in result.stdout
    exported = command("export", run, "--with_linear", "true", "--output", tmp_path / "model.safetensors", is_thin=True)
    assert exported.returncode == 0, exported.stderr
    with thin():
        model = torchvision.models.resnet18(num_classes=6)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert json.loads((tmp_path / "model.safetensors.json").read_text())["linear"]["protocol"] == "quick"

    options = ("--protocol", "paper", "--epochs", "2", "--batch_size", "32")
    result = command_on_two_ranks("evaluate", "linear", run, *options, is_thin=True)
    assert result.returncode == 0, result.stderr
    assert "paper protocol" in " ".join(result.stdout.split()) and "but epochs 2" in " ".join(result.stdout.split())
    assert result.stdout.count("epoch 2/2") == 1
    assert json.loads((run / "evaluation/linear-paper-epoch1.json").read_text())["epochs"] == 2
    assert sorted(path.name for path in (run / "evaluation").glob("*.*")) == [
        f"linear-{protocol}-epoch1.{ending}" for protocol in ("paper", "quick") for ending in ("json", "safetensors")
    ]
    assert "accuracy on its crops" in result.stdout and "but epochs 2, batch_size 32" in " ".join(result.stdout.split())


def test_the_command_sweeps_and_says_what_it_chose_on_what(run, tmp_path):
    options = ("--protocol", "sweep", "--epochs", "1", "--batch_size", "32", "--output", tmp_path)
    result = command("evaluate", "linear", run, *options, "--choose", "train", is_thin=True)
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "sweep protocol (26 classifiers by SGD on random crops" in said and "but epochs 1, batch_size 32" in said
    assert "best of 26 classifiers, chosen on 6 held-out training images: features of the last" in said
    assert "these are only 2 steps; a smaller --batch_size makes more of them" in said
    written = json.loads((tmp_path / "linear-sweep-epoch1.json").read_text())
    assert written["chosen"] in written["heads"] and len(written["heads"]) == 26
    assert (written["choose"], written["chosen_on"], written["images"]) == ("train", "train", 103)
    probe = tmp_path / "linear-sweep-epoch1.safetensors"
    outputs = ("--with_linear", "true", "--probe", probe, "--output", tmp_path / "model.safetensors")
    exported = command("export", run, *outputs, is_thin=True)
    if written["chosen"]["stages"] == 1:
        assert exported.returncode == 0, exported.stderr
    else:
        assert exported.returncode == 2 and "takes the features of the last 2 stages" in exported.stderr


def test_labels_that_are_far_apart_take_a_classifier_of_those_that_occur_and_keep_their_numbers(run, data, tmp_path):
    for part in ("train", "val"):
        files = sorted((data / part).rglob("*.jpg"))
        lines = (f"{file}\t{20_000 * int(file.parent.name[-1])}\n" for file in files)
        (tmp_path / f"{part}.txt").write_text("".join(lines))
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    images = ("--data.train", tmp_path / "train.txt", "--data.val", tmp_path / "val.txt")
    result = command("evaluate", "linear", tmp_path / "run", *images, is_thin=True)
    assert result.returncode == 0, result.stderr
    assert "6 of 100,001 class numbers have training images" in result.stdout
    (written,) = (tmp_path / "run/evaluation").glob("linear-quick-epoch1*.safetensors")
    near = load_file(written)
    exported = command(
        *("export", tmp_path / "run", "--with_linear", "true", "--probe", written),
        *("--output", tmp_path / "model.safetensors"),
        is_thin=True,
    )
    assert exported.returncode == 0, exported.stderr
    assert "100001 classes" in exported.stdout and "(6 of them had training images" in exported.stdout
    far, numbers = load_file(tmp_path / "model.safetensors"), [20_000 * number for number in range(6)]
    assert near["weight"].shape[0] == 6 and torch.equal(far["fc.weight"][numbers], near["weight"])
    assert torch.equal(far["fc.bias"][numbers], near["bias"]) and (far["fc.bias"] > -1e4).sum() == 6
    about = json.loads((tmp_path / "model.safetensors.json").read_text())["linear"]
    assert about["numbers"] == numbers and about["classes"] == [str(number) for number in numbers]


def test_the_commands_tell_of_images_that_could_not_be_used(run, data, damaged, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run/config.yaml"
    kept = config.read_text()
    config.write_text(re.sub("max_bad_fraction: .*", "max_bad_fraction: 0.03", kept))
    images = ("--data.train", damaged / "train", "--data.val", damaged / "val")
    for arguments in (("knn", tmp_path / "run", "--baselines", "true"), ("linear", tmp_path / "run")):
        result = command("evaluate", *arguments, *images, is_thin=True)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count(f"2 of 96 training images could not be used and were left out, first {damaged}") == 1
        assert result.stdout.count("1 of 103 validation images could not be used and was left out, ") == 1
    written = json.loads((tmp_path / "run/evaluation/knn-epoch1.json").read_text())
    assert (written["queries"], written["bank"]) == (102, 94)
    counts = {"training": {"used": 94, "left_out": 2}, "validation": {"used": 102, "left_out": 1}}
    assert written["counts"] == counts
    newest = max((tmp_path / "run/evaluation").glob("linear-quick-epoch1*.json"), key=lambda path: path.stat().st_mtime)
    assert json.loads(newest.read_text())["counts"] == counts
    assert "102 validation images" in " ".join(result.stdout.split())
    config.write_text(re.sub("max_bad_fraction: .*", "max_bad_fraction: 0", kept))
    result = command("evaluate", "knn", tmp_path / "run", *images, is_thin=True)
    assert result.returncode == 3 and "2 of 96 images cannot be used, more than" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--epochs", "3"), "epochs = 3: applies only to --protocol paper and sweep"),
        (
            ("--protocol", "paper", "--keep_features", "false"),
            "keep_features = false: --protocol paper keeps no features",
        ),
        (
            ("--protocol", "sweep", "--keep_features", "true"),
            "keep_features = true: --protocol sweep keeps no features",
        ),
        (("--choose", "val"), "choose = val: applies only to --protocol sweep; leave it out, or add that"),
        (("--protocol", "slow"), "must be one of quick, paper, sweep"),
        (("--protocol", "paper"), "give --batch_size "),
    ],
)
def test_what_cannot_work_is_refused(run, arguments, said):
    result = command("evaluate", "linear", run, *arguments, is_thin=True)
    assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr
