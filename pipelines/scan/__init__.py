"""Decodes every image once, in worker processes that may crash, and records the result of each."""
