"""What `make lint` checks the types of works when it is run."""

import public_interface
from drawn_images import draw_tree


def test_the_objective_the_kernels_the_optimizer_and_the_configuration_are_used_as_written():
    public_interface.use_the_objective()
    public_interface.use_the_kernels()
    public_interface.use_the_optimizer()
    public_interface.use_the_configuration()


def test_networks_targets_and_weights_are_used_as_written(tmp_path):
    public_interface.use_the_networks(tmp_path)


def test_the_loader_is_used_as_written(tmp_path):
    public_interface.use_the_loader(draw_tree(tmp_path / "images", per_class=8))
