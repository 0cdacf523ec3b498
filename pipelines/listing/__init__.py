"""Lists images in folders, text files and shards, with their labels, and caches the result."""
