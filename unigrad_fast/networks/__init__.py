"""The encoder (backbone and projector), synchronised batch norm, convolutions of tiny images."""
