"""What ours is compared with: the authors' formulation, plain torch, torchvision."""
