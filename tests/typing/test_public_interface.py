"""What `make lint` checks the types of works when it is run."""

import public_interface
from drawn_images import draw_tree
from thin import thin


def test_the_objective_the_kernels_the_optimizer_and_the_configuration_are_used_as_written():
    public_interface.use_the_objective()
    public_interface.use_the_kernels()
    public_interface.use_the_optimizer()
    public_interface.use_the_configuration()


def test_networks_targets_and_weights_are_used_as_written(tmp_path):
    public_interface.use_the_networks(tmp_path)


def test_the_loader_is_used_as_written(tmp_path):
    public_interface.use_the_loader(draw_tree(tmp_path / "images", per_class=8))


def test_the_commands_are_used_as_written(tmp_path):
    settings = {
        "recipe": "cifar_subset",
        "data": {"batch_size": 32, "image_size": 16, "threads": 1},
        **{f"data.{part}": draw_tree(tmp_path / part, per_class=16) for part in ("train", "val")},
        "model.projector.width": 32,
        "schedule": {"epochs": 1, "warmup_epochs": 0},
        "engine": {"precision": "fp32", "threads": 1},
        "telemetry.tensorboard": False,
    }
    with thin(stages=1):
        public_interface.use_the_commands(settings, tmp_path)
