"""Decoding every image once, in processes that may die of it, and what is said of each."""
