"""Reads, indexes, packs and verifies tar shards in the layout of WebDataset."""
