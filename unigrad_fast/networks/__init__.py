"""The encoder (backbone and projector), synchronised batch norm, convolutions for tiny images."""
