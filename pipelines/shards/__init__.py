"""Tar shards in the layout of WebDataset: reading, indexing, packing and verifying them."""
